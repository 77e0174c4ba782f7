"""Checkpoints of models: formats, conversion, loading."""

from olmoe_lightning.checkpoint.foreign.huggingface import convert, load_pretrained, read, upcycle, write
from olmoe_lightning.checkpoint.foreign.sources import read_config, read_tokenizer

__all__ = ["convert", "load_pretrained", "read", "read_config", "read_tokenizer", "upcycle", "write"]
