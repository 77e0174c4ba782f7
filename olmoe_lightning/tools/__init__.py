"""Commands that explain or check a run: plans of pipelines, parity with one process."""
