"""Data: tokenizers, token files, packing, sampling, and the LightningDataModule that joins them."""

from olmoe_lightning.data.common import DataError
from olmoe_lightning.data.datamodule import TokenDataModule, TokenSource
from olmoe_lightning.data.tokenize_files import tokenize_files
from olmoe_lightning.data.tokenizer import BPETokenizer, ByteTokenizer, load_tokenizer

__all__ = [
    "BPETokenizer",
    "ByteTokenizer",
    "DataError",
    "TokenDataModule",
    "TokenSource",
    "load_tokenizer",
    "tokenize_files",
]
