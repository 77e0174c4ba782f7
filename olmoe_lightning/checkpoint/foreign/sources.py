"""Opens a checkpoint, whichever format it has, checks it against its configuration, and finds every weight in it.

Formats: Hugging Face OLMoE (safetensors); our directory (``config.json`` with a marker beside safetensors under our
names); the same in one ``.safetensors`` file; a sharded checkpoint of ``MoEStrategy``; a Lightning ``.ckpt`` of the
``OLMoE`` module. Everything here reads configuration and headers only; values come in blocks of a few megabytes
when they are asked for.
"""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from olmoe_lightning.checkpoint.foreign.hf_config import TOKEN_IDS, config_from_hf
from olmoe_lightning.checkpoint.foreign.hf_layout import HFTensor, Shape, hf_fused_name, hf_tensors, native_shapes
from olmoe_lightning.checkpoint.foreign.safetensors_dir import SafetensorsReader, TensorInfo
from olmoe_lightning.checkpoint.foreign.sharded_dir import ShardedStore
from olmoe_lightning.checkpoint.meta import is_sharded, read_meta
from olmoe_lightning.checkpoint.trust import refusal
from olmoe_lightning.config import ModelConfig
from olmoe_lightning.errors import MissingFileError, UserError, reason, shortened

FORMAT = "olmoe-lightning"
VERSION = 1

SUFFIX = ".safetensors"
"""What the name of a single file ends with."""
METADATA = "olmoe_lightning"
"""Where such a file has what ``config.json`` has elsewhere."""

_BLOCK_BYTES = 32 * 2**20


class TensorStore(Protocol):
    """Tensors by name: what their headers say, and parts of them on demand."""

    tensors: dict[str, TensorInfo]

    def read(self, name: str, index: tuple[slice, ...] = ()) -> Tensor:
        """A part of a tensor, on the CPU."""
        ...


class MemoryStore:
    """A state dictionary as a store; the tensors of a ``.ckpt`` are mapped from its file."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self._state = state
        self.tensors = {name: TensorInfo.of(tensor) for name, tensor in state.items()}

    def read(self, name: str, index: tuple[slice, ...] = ()) -> Tensor:
        """A part of a tensor, on the CPU."""
        return self._state[name].detach()[index or (slice(None),)].cpu()


@dataclass(frozen=True)
class TensorSlice:
    """A box of a stored tensor: its name and one slice per leading dimension (none: all of it)."""

    tensor: str
    index: tuple[slice, ...] = ()


@dataclass
class Source:
    """A checked checkpoint: where each of our tensors, and each of Hugging Face's, lies in its store.

    Attributes:
        config: the model.
        store: the tensors; their names and shapes fit ``config``.
        hf: whether the store has Hugging Face's names.
        token_ids: special tokens as Hugging Face's configuration keeps them.
        directory: where tokenizer files may be; ``None`` for nowhere.
        hyper_parameters: of the ``OLMoE`` that was trained; ``None`` where they are not kept.
        tokenizer: ``byte``, or the text of a ``tokenizer.json``, where the checkpoint itself holds it.
    """

    config: ModelConfig
    store: TensorStore
    hf: bool = False
    token_ids: dict[str, int | None] = field(default_factory=dict)
    directory: Path | None = None
    hyper_parameters: dict[str, Any] | None = None
    tokenizer: str | None = None

    def __post_init__(self) -> None:
        self._hf_tensors = hf_tensors(self.config) if self.hf else {}

    def native_slices(self, name: str, experts: range | None = None) -> list[TensorSlice]:
        """The slices that make up one of our tensors, in row-major order.

        Args:
            name: of the tensor.
            experts: which of those that it stacks; ``None``: all of it.
        """
        rows = () if experts is None else (slice(experts.start, experts.stop),)
        if not self.hf:
            return [TensorSlice(name, rows)]
        fused = hf_fused_name(name)
        if fused in self.store.tensors:
            return [TensorSlice(fused, rows)]
        tensors = self._hf_tensors[name]
        return [TensorSlice(tensor.name) for tensor in tensors if experts is None or tensor.index[0].start in experts]

    def hf_slice(self, tensor: HFTensor) -> TensorSlice:
        """Where one of Hugging Face's tensors lies."""
        if not self.hf:
            return TensorSlice(tensor.native, tensor.index)
        fused = hf_fused_name(tensor.native)
        return TensorSlice(fused, tensor.index) if fused in self.store.tensors else TensorSlice(tensor.name)

    def dtype(self, slices: Iterable[TensorSlice]) -> torch.dtype:
        """The type that some slices have.

        Raises:
            UserError: they have several.
        """
        slices = list(slices)
        found = {self.store.tensors[box.tensor].dtype for box in slices}
        if len(found) > 1:
            raise UserError(
                f"these tensors belong into one but differ in type ({', '.join(sorted(map(str, found)))}); choose one "
                f"with dtype: {shortened([box.tensor for box in slices], 6)}"
            )
        (dtype,) = found
        assert dtype is not None  # compare() lets no other types in
        return dtype

    def blocks(self, box: TensorSlice) -> Iterator[Tensor]:
        """A slice's values in row-major order, in blocks of a few megabytes."""
        for cut, _ in self.cuts(box):
            yield self.read(cut)

    def read(self, box: TensorSlice) -> Tensor:
        """A slice's values."""
        return self.store.read(box.tensor, box.index)

    def cuts(self, box: TensorSlice) -> Iterator[tuple[TensorSlice, int]]:
        """A slice cut along one dimension into smaller ones, a block each, and the number of elements of each."""
        info = self.store.tensors[box.tensor]
        index = box.index + (slice(None),) * (len(info.shape) - len(box.index))
        bounds = [range(*s.indices(n)) for s, n in zip(index, info.shape, strict=True)]
        axis = next((i for i, rows in enumerate(bounds) if len(rows) > 1), len(bounds) - 1)
        # Dimensions before `axis` have one row, so successive rows are successive in row-major order.
        row_bytes = math.prod(map(len, bounds[axis + 1 :])) * info.itemsize
        step = max(1, _BLOCK_BYTES // row_bytes)
        for start in range(bounds[axis].start, bounds[axis].stop, step):
            cut = [slice(rows.start, rows.stop) for rows in bounds]
            cut[axis] = slice(start, min(start + step, bounds[axis].stop))
            yield TensorSlice(box.tensor, tuple(cut)), math.prod(s.stop - s.start for s in cut)


def open_source(path: Path) -> Source:
    """Opens a checkpoint in any of the formats.

    Raises:
        MissingFileError: there is no checkpoint, or a part of it is missing.
        UserError: configuration or tensors cannot be read, or do not fit each other.
    """
    if path.is_file() or is_sharded(path):
        return open_native(path)
    return open_native(path) if _is_native(_read_json(path)) else open_hf(path)


def read_config(directory: str) -> ModelConfig:
    """The configuration of a checkpoint in any format that ``convert`` reads.

    Raises:
        MissingFileError: there is none.
        UserError: it cannot be read.
    """
    path = Path(directory)
    if path.is_file():
        return open_native(path).config
    if is_sharded(path):
        return _trained_config(path, read_meta(path))
    values = _read_json(path)
    return _native_config(path, values) if _is_native(values) else _hf_config(path, values)


def read_tokenizer(path: Path) -> str | None:
    """The tokenizer of a checkpoint in any format: ``byte``, or the text of a ``tokenizer.json``; None if it has none.

    Raises:
        MissingFileError: there is no checkpoint.
        UserError: it cannot be read.
    """
    return tokenizer_of(open_source(path))


def tokenizer_of(source: Source) -> str | None:
    """The same of one that is open."""
    if source.tokenizer is None and source.directory is not None:
        file = source.directory / "tokenizer.json"
        return file.read_text(encoding="utf-8") if file.is_file() else None
    return source.tokenizer


def open_hf(path: Path) -> Source:
    """Opens a Hugging Face OLMoE directory, with one tensor per expert or (transformers 5) one per layer."""
    if is_sharded(path):
        raise UserError(f"{path} is a sharded checkpoint of the trainer, not Hugging Face's; pass it as from_native")
    values = _read_json(path)
    if _is_native(values):
        raise UserError(f"{path} is in our own format, not Hugging Face's; pass it as from_native")
    config = _hf_config(path, values)
    store = SafetensorsReader(path)
    expected: dict[str, Shape] = {}
    for native, parts in hf_tensors(config).items():
        fused = hf_fused_name(native)
        if fused is not None and fused in store.tensors:
            expected[fused] = native_shapes(config)[native]
        else:
            expected |= {tensor.name: tensor.shape for tensor in parts}
    token_ids = {name: values.get(name, default) for name, default in TOKEN_IDS.items()}
    source = Source(config, store, hf=True, token_ids=token_ids, directory=path)
    head = store.tensors.get("lm_head.weight")
    if config.tie_embeddings and head is not None and head == store.tensors.get("model.embed_tokens.weight"):
        _require_tied(source)  # some writers store the shared matrix twice
    compare(store.tensors, expected, str(path))
    return source


def open_native(path: Path) -> Source:
    """Opens what holds our names: a directory in our format, a sharded checkpoint, a .safetensors or .ckpt file."""
    if is_sharded(path):
        return _open_sharded(path)
    if path.is_file():
        return _open_safetensors(path) if path.suffix == SUFFIX else _open_ckpt(path)
    values = _read_json(path)
    if not _is_native(values):
        hint = "; it looks like Hugging Face's: pass it as from_hf" if "model_type" in values else ""
        raise UserError(f'{path / "config.json"} lacks "format": "{FORMAT}"{hint}')
    config = _native_config(path, values)
    store = SafetensorsReader(path)
    compare(store.tensors, native_shapes(config), str(path))
    return Source(config, store, token_ids=values.get("token_ids", {}), directory=path)


def native_config_values(source: Source) -> dict[str, Any]:
    """The ``config.json`` of our format."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "model": source.config.to_dict(),
        "token_ids": {name: source.token_ids.get(name) for name in TOKEN_IDS},
    }


def compare(found: Mapping[str, TensorInfo], expected: Mapping[str, Shape], what: str) -> None:
    """Checks names, shapes and types of tensors.

    Raises:
        UserError: some are missing, unexpected, misshapen or not floating-point numbers. All kinds are listed.
    """
    both = [name for name in expected if name in found]
    problems = {
        "missing": [name for name in expected if name not in found],
        "unexpected": [name for name in found if name not in expected],
        "misshapen": [
            f"{name} {list(found[name].shape)} instead of {list(expected[name])}"
            for name in both
            if found[name].shape != expected[name]
        ],
        "of a type that is not read": [f"{n} ({found[n].type_name})" for n in both if found[n].dtype is None],
    }
    lines = [f"  - {len(names)} {kind}: {shortened(names)}" for kind, names in problems.items() if names]
    if lines:
        raise UserError(f"{what}: the tensors do not fit the configuration:\n" + "\n".join(lines))


def _open_sharded(path: Path) -> Source:
    meta = read_meta(path)
    config = _trained_config(path, meta)
    store = ShardedStore(meta)
    compare(store.tensors, native_shapes(config), str(path))
    return Source(config, store, token_ids=meta.get("token_ids") or {}, **_trained(meta))


def _open_safetensors(path: Path) -> Source:
    store = SafetensorsReader(path)
    try:
        values = json.loads(store.metadata.get(METADATA, "null"))
    except ValueError as error:
        raise UserError(f"{path}: the configuration in its metadata is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise UserError(
            f"{path} has no configuration in its metadata, so it was not written by convert; name the directory that "
            "has a config.json beside it"
        )
    config = _native_config(path, values)
    compare(store.tensors, native_shapes(config), str(path))
    return Source(config, store, token_ids=values.get("token_ids", {}), tokenizer=values.get("tokenizer"))


def _open_ckpt(path: Path) -> Source:
    try:
        # Mapped: optimizer states and all else that is not asked for stay on the disk.
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        damage = f"{path} is not a checkpoint of Lightning's that can be read safely: {reason(error)}"
        raise UserError(refusal(path, path) or damage) from error
    if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get("state_dict"), dict):
        raise UserError(f"{path} is not a checkpoint of OLMoE: it lacks state_dict or hyper_parameters['config']")
    config = _trained_config(path, checkpoint)
    prefix = "model."
    state = {name.removeprefix(prefix): t for name, t in checkpoint["state_dict"].items() if name.startswith(prefix)}
    store = MemoryStore(state)
    compare(store.tensors, native_shapes(config), str(path))
    return Source(config, store, **_trained(checkpoint))


def _trained_config(path: Path, checkpoint: Mapping[str, Any]) -> ModelConfig:
    """The configuration in a checkpoint of Lightning's."""
    hyper_parameters = checkpoint.get("hyper_parameters")
    config = hyper_parameters.get("config") if isinstance(hyper_parameters, dict) else None
    if not isinstance(config, dict):
        raise UserError(f"{path} is not a checkpoint of OLMoE: it lacks state_dict or hyper_parameters['config']")
    return _parse(path, ModelConfig.from_dict, config)


def _trained(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint of Lightning's has for conversions to keep."""
    tokenizer = checkpoint.get("tokenizer")
    return {
        "hyper_parameters": dict(checkpoint["hyper_parameters"]),
        "tokenizer": tokenizer if isinstance(tokenizer, str) else None,
    }


def _require_tied(source: Source) -> None:
    embed, head = TensorSlice("model.embed_tokens.weight"), TensorSlice("lm_head.weight")
    for a, b in zip(source.blocks(embed), source.blocks(head), strict=True):
        if not torch.equal(a, b):
            raise UserError(f"{source.directory}: tie_word_embeddings is true, but lm_head.weight is not the embedding")
    del source.store.tensors["lm_head.weight"]


def _read_json(directory: Path) -> dict[str, Any]:
    path = directory / "config.json"
    if not path.is_file():
        if not directory.exists():
            hint = ""
            if len(directory.parts) == 2 and not directory.is_absolute():
                hint = f". To download a model of that name: hf download {directory} --local-dir DIRECTORY"
            raise MissingFileError(f"{directory} does not exist{hint}")
        raise MissingFileError(f"{path} is missing: {directory} is not a checkpoint")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise UserError(f"{path} must hold an object, not a {type(values).__name__}")
    return values


def _is_native(values: dict[str, Any]) -> bool:
    return values.get("format") == FORMAT


def _native_config(path: Path, values: dict[str, Any]) -> ModelConfig:
    file = path / "config.json" if path.is_dir() else path
    if values.get("version") != VERSION:
        raise UserError(f"{file} has format version {values.get('version')}; this release reads version {VERSION}")
    return _parse(file, ModelConfig.from_dict, values.get("model", {}))


def _hf_config(directory: Path, values: dict[str, Any]) -> ModelConfig:
    return _parse(directory / "config.json", config_from_hf, values)


def _parse(path: Path, parse: Callable[[dict[str, Any]], ModelConfig], values: dict[str, Any]) -> ModelConfig:
    try:
        return parse(values)
    except (ValueError, TypeError) as error:  # TypeError: a field has a value of the wrong kind
        raise UserError(f"{path}: {error}") from error
