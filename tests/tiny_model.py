"""The smallest model that the command line trains in tests, as a YAML holds it."""

TINY = {
    "vocab_size": 264,
    "d_model": 32,
    "num_layers": 1,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 16,
    "num_experts": 4,
    "top_k": 2,
    "expert_hidden": 32,
    "max_seq_len": 128,
}
