"""The smallest configurations that tests share; what a test needs besides it sets by ``.replace(...)``."""

from olmoe_lightning import ModelConfig

SMALL = ModelConfig(
    vocab_size=64,
    d_model=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    num_experts=4,
    top_k=2,
    expert_hidden=16,
    max_seq_len=16,
)
"""Two MoE layers for batches of any token ids below 64."""

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
"""One layer with the vocabulary of the byte tokenizer, as a YAML file holds it."""
