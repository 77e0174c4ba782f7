"""What the command needs besides Lightning's own: its parser, the repetition of a run, and the smaller tools."""
