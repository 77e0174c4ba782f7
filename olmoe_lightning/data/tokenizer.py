"""Tokenizers: plain bytes, and byte-level byte-pair encoding. Both have the interface of :class:`Tokenizer`.

Letter used below: V vocabulary.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from olmoe_lightning.data.common import DataError, publish

EOS_NAMES = ("<|endoftext|>", "<|eos|>", "<eos>", "</s>", "<|end_of_text|>")
PAD_NAMES = ("<|padding|>", "<|pad|>", "<pad>", "[PAD]")


class Tokenizer(Protocol):
    """What the data room and text generation need to know about a tokenizer.

    Attributes:
        vocab_size: V, number of token ids, special ones included.
        eos_id: id that ends every document of a token stream.
        pad_id: id that fills positions without a token.
    """

    vocab_size: int
    eos_id: int
    pad_id: int

    @property
    def fingerprint(self) -> str:
        """Short name that is equal for equal tokenizers; kept in manifests and checkpoints."""

    @property
    def token_bytes(self) -> np.ndarray:
        """int32 [V]: UTF-8 bytes a token stands for, 0 for special ones; turns nats per token into nats per byte."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without any special token."""

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of several texts, one int array each."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids; special ones are left out, bytes that are not UTF-8 become U+FFFD."""


class ByteTokenizer:
    """One token per UTF-8 byte (0-255), then end of document (256) and padding (257)."""

    vocab_size = 258
    eos_id = 256
    pad_id = 257
    fingerprint = "byte"

    @property
    def token_bytes(self) -> np.ndarray:
        """int32 [V]: 1 for each byte, 0 for the two special tokens."""
        return (np.arange(self.vocab_size) < 256).astype(np.int32)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without any special token."""
        return list(_utf8(text))

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of several texts, one uint8 array each."""
        return [np.frombuffer(_utf8(text), dtype=np.uint8) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids; special ones are left out, bytes that are not UTF-8 become U+FFFD."""
        return bytes(i for i in map(int, ids) if 0 <= i < 256).decode("utf-8", errors="replace")


class BPETokenizer:
    """Byte-level byte-pair encoding on the ``tokenizers`` library; every text can be encoded, nothing is unknown.

    Make one with :meth:`train` or :meth:`load`. The file is the library's own ``tokenizer.json``, so a tokenizer of
    a released model loads too, if it is byte-level.

    Args:
        backend: the library's tokenizer, with a byte-level decoder and an end-of-document token.
        origin: what to call it in error messages.

    Raises:
        DataError: it is not byte-level, or no end-of-document token is among its added tokens.
    """

    def __init__(self, backend: HFTokenizer, origin: str = "tokenizer") -> None:
        backend.encode_special_tokens = True  # a text that spells out a special token must not end its document
        self._backend = backend
        self._state: dict[str, Any] = json.loads(backend.to_str())
        decoder = self._state.get("decoder") or {}
        if self._state["model"]["type"] != "BPE" or decoder.get("type") != "ByteLevel":
            raise DataError(
                f"{origin}: is {self._state['model']['type']} with decoder {decoder.get('type')}, not a "
                "byte-level BPE; "
                "train one with `olmoe-lightning tokenize --tokenizer bpe:SIZE`"
            )
        self._added = {token["content"]: int(token["id"]) for token in self._state["added_tokens"]}
        self._special_ids = {int(token["id"]) for token in self._state["added_tokens"] if token["special"]}
        eos = [name for name in EOS_NAMES if name in self._added]
        if not eos:
            raise DataError(
                f"{origin}: has no end-of-document token (one of {', '.join(EOS_NAMES)}) among its added tokens "
                f"{sorted(self._added)}; add one to its added_tokens"
            )
        self.eos_id = self._added[eos[0]]
        self.pad_id = next((self._added[name] for name in PAD_NAMES if name in self._added), self.eos_id)
        # not get_vocab_size(): released files may leave gaps between the merges and the added tokens
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values()) + 1

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> BPETokenizer:
        """Learn the merges from texts.

        Args:
            texts: the texts to learn from; read once.
            vocab_size: V, at least 258 (256 bytes and two special tokens). Less comes out if the texts are too short.

        Raises:
            DataError: ``vocab_size`` is below 258.
        """
        if vocab_size < 258:
            raise DataError(f"BPE vocabulary ({vocab_size}) must be at least 258: 256 bytes and two special tokens")
        backend = HFTokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[EOS_NAMES[0], PAD_NAMES[0]],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        backend.train_from_iterator(map(_clean, texts), trainer)
        return cls(backend)

    @classmethod
    def load(cls, path: str | Path) -> BPETokenizer:
        """Read a ``tokenizer.json``.

        Raises:
            DataError: the file is missing, not a tokenizer file, or not a byte-level BPE.
        """
        path = Path(path)
        if path.is_dir():
            path = path / "tokenizer.json"
        if not path.is_file():
            raise DataError(f"{path}: no such tokenizer file; give `byte` or the path of a tokenizer.json")
        try:
            backend = HFTokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for every kind of fault
            raise DataError(f"{path}: is not a tokenizer file of the `tokenizers` library ({error})") from error
        return cls(backend, origin=str(path))

    @classmethod
    def from_json(cls, text: str) -> BPETokenizer:
        """The inverse of :meth:`to_json`."""
        return cls(HFTokenizer.from_str(text))

    def to_json(self) -> str:
        """What ``tokenizer.json`` holds, for places that keep the tokenizer with other things."""
        text: str = self._backend.to_str()
        return text

    def save(self, path: str | Path) -> None:
        """Write ``tokenizer.json``; the file appears complete or not at all."""
        with publish(Path(path)) as file:
            file.write(self._backend.to_str(pretty=True).encode())

    @cached_property
    def fingerprint(self) -> str:
        """``bpe:`` and 16 hexadecimal digits over everything that changes what a text is encoded to."""
        model = self._state["model"]
        merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]  # the file format knows both
        parts = [
            sorted(model["vocab"].items()),
            merges,
            sorted(self._added.items()),
            self._state["normalizer"],
            self._state["pre_tokenizer"],
        ]
        return "bpe:" + hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]

    @cached_property
    def token_bytes(self) -> np.ndarray:
        """int32 [V]: UTF-8 bytes of each token, 0 for special ones and for ids that no token has."""
        sizes = np.zeros(self.vocab_size, dtype=np.int32)
        for token, i in self._state["model"]["vocab"].items():
            sizes[i] = len(token)  # the byte-level alphabet writes each byte as exactly one character
        for token, i in self._added.items():
            sizes[i] = 0 if i in self._special_ids else len(token.encode())
        return sizes

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without any special token."""
        ids: list[int] = self._backend.encode(_clean(text), add_special_tokens=False).ids
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of several texts, one int64 array each; the library uses all cores."""
        encodings = self._backend.encode_batch_fast([_clean(text) for text in texts], add_special_tokens=False)
        return [np.asarray(encoding.ids, dtype=np.int64) for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids; special ones are left out, bytes that are not UTF-8 become U+FFFD."""
        text: str = self._backend.decode(
            [i for i in map(int, ids) if 0 <= i < self.vocab_size], skip_special_tokens=True
        )
        return text

    def __reduce__(self) -> tuple[Any, ...]:
        return BPETokenizer.from_json, (self.to_json(),)


def load_tokenizer(spec: str) -> Tokenizer:
    """The tokenizer that ``spec`` names.

    Args:
        spec: ``"byte"``, or the path of a ``tokenizer.json`` (or of the folder that holds one).

    Raises:
        DataError: ``spec`` is neither.
    """
    if spec == "byte":
        return ByteTokenizer()
    if spec.startswith("bpe:"):
        raise DataError(
            f"tokenizer {spec!r} has to be trained on text first: use it with the default corpus (train: stdlib) "
            "or with `olmoe-lightning tokenize`, which writes a tokenizer.json; then give that path"
        )
    return BPETokenizer.load(spec)


def parse_bpe_size(spec: str) -> int | None:
    """The vocabulary of ``"bpe:SIZE"``; ``None`` when ``spec`` is something else.

    Raises:
        DataError: SIZE is not a number.
    """
    if not spec.startswith("bpe:"):
        return None
    size = spec.removeprefix("bpe:")
    if not size.isdecimal():
        raise DataError(f"tokenizer {spec!r}: the vocabulary after `bpe:` must be a number, for example bpe:4096")
    return int(size)


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", errors="replace")  # only lone surrogates (JSON can hold them) are replaced


def _clean(text: str) -> str:
    return text if text.isascii() else _utf8(text).decode("utf-8")
