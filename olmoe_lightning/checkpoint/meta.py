"""What a sharded checkpoint says of itself, and its tensors loaded into a module of one process.

Such a directory is that of :mod:`olmoe_lightning.checkpoint.directory` with :data:`META` beside the tensors, the
dictionary of a Lightning checkpoint with an entry :data:`KEY`. Tensors of the model are ``state_dict.NAME`` there, with
NAME as in the ``state_dict`` of the ``LightningModule``, flattened.
"""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from olmoe_lightning.checkpoint.directory import INDEX, CorruptCheckpoint, Range, SafeReader, differences, load
from olmoe_lightning.checkpoint.record import FORMAT
from olmoe_lightning.checkpoint.trust import refusal
from olmoe_lightning.errors import reason, shortened
from olmoe_lightning.parallel.layout import flattened, is_dense, lies_flat, write

KEY = "moe_checkpoint"
"""Entry of a checkpoint's dictionary that belongs to the strategy."""
META = "meta.pt"
MODEL = "state_dict."
"""What the names of the model's tensors begin with."""


def is_sharded(path: Path) -> bool:
    """Whether a path is a sharded checkpoint, or what is left of one."""
    return (path / META).is_file() or (path / INDEX).is_file()


def read_meta(path: Path, weights_only: bool | None = None) -> dict[str, Any]:
    """What a sharded checkpoint holds besides tensors; :data:`KEY` in it says where those are.

    Args:
        path: the directory.
        weights_only: ``False`` lets objects of the user's own classes in, and with them any code; trusted files only.

    Raises:
        CorruptCheckpoint: it is no sharded checkpoint of ours, damaged, or of a newer format.
    """
    if not (path / META).is_file() or not (path / INDEX).is_file():
        raise CorruptCheckpoint(
            f"{path} is no sharded checkpoint: it needs {META} and {INDEX}; weights in Hugging Face's or our own "
            "format are loaded with OLMoE(pretrained=...)"
        )
    try:
        meta: dict[str, Any] = torch.load(path / META, map_location="cpu", weights_only=weights_only is not False)
    except Exception as error:
        damage = f"{path / META} is damaged, or not loaded without trust ({reason(error)})"
        raise CorruptCheckpoint(refusal(path / META, path) or damage) from error
    if not isinstance(meta, dict) or not isinstance(meta.get(KEY), dict):
        raise CorruptCheckpoint(f"{path / META} has no entry {KEY!r}: it was not written by MoEStrategy")
    found = meta[KEY].get("format")
    if not isinstance(found, int) or not 1 <= found <= FORMAT:
        raise CorruptCheckpoint(
            f"{path} has checkpoint format {found!r}, this version reads up to {FORMAT}; update olmoe-lightning"
        )
    meta[KEY]["directory"] = str(path)
    return meta


def new_meta(
    hyper_parameters: Mapping[str, Any], shapes: Mapping[str, Iterable[int]], more: Mapping[str, Any]
) -> dict[str, Any]:
    """The dictionary of a checkpoint that has weights and no training state.

    Args:
        hyper_parameters: of the ``LightningModule``.
        shapes: of its tensors, by name.
        more: further entries, for hooks.
    """
    return {
        "epoch": 0,
        "global_step": 0,
        "pytorch-lightning_version": importlib.metadata.version("lightning"),
        "state_dict": {},
        "hyper_parameters": dict(hyper_parameters),
        **more,
        KEY: {
            "format": FORMAT,
            "topology": {"pipeline": 1, "expert_replica": 1, "expert": 1},
            "skipped_steps": 0,
            "aliases": {},
            "other": {},
            "scalars": {},
            "random": [],
            "param_groups": [],
            "group_of": {},
            "shapes": {name: list(shape) for name, shape in shapes.items()},
            "tensors": sorted(MODEL + name for name in shapes),
        },
    }


# -------------------------------------------------------------------------------------------------- reading


def load_sharded(module: nn.Module, meta: Mapping[str, Any], strict: bool = True) -> None:
    """Load the tensors of a checkpoint into a module that has all its experts and layers, in place.

    Each stored chunk is read once; beyond the module's own memory there is one of them at a time.

    Args:
        module: on any device, in any type.
        meta: from :func:`read_meta`.
        strict: whether the module and the checkpoint must have the same tensors. Shapes must always agree.

    Raises:
        CorruptCheckpoint: they do not, or the checkpoint is damaged.
    """
    directory = Path(meta[KEY]["directory"])
    shapes, _ = read_contents(meta)
    wanted: dict[int, tuple[str, Tensor]] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor) and is_dense(value) and value.numel():  # nothing is stored of what has no elements
            wanted.setdefault(id(value), (name, value))  # tied tensors have several names and one place
    tensors = dict(wanted.values())
    if found := differences({name: list(value.shape) for name, value in tensors.items()}, shapes, strict):
        raise CorruptCheckpoint(f"{directory} does not fit the model: {shortened(found)}")
    there = {name: value.detach() for name, value in tensors.items() if name in shapes}
    # What has gaps or repeats elements is read beside its place.
    dense = {name: flattened(value) for name, value in there.items()}
    load(directory, [Range(MODEL + name, value.numel(), 0, value) for name, value in dense.items()])
    for name, value in there.items():
        if not lies_flat(value):
            write(value, dense[name].view(value.shape))
    if other := meta[KEY].get("other"):
        module.load_state_dict(other, strict=False)


def read_whole(path: Path, weights_only: bool | None = None) -> dict[str, Any]:
    """A directory as Lightning's dictionary of a file, with all weights and without the optimizer's state.

    Args:
        path: the directory.
        weights_only: as of :func:`read_meta`.

    Raises:
        CorruptCheckpoint: it is no sharded checkpoint, or damaged.
    """
    meta = read_meta(path, weights_only)
    shapes, index = read_contents(meta)
    entries: Mapping[str, Any] = index.state_dict_metadata
    state: dict[str, Any] = {}
    for name, shape in shapes.items():
        entry = entries.get(MODEL + name)  # nothing is stored of what has no elements
        state[name] = torch.empty(shape, dtype=entry.properties.dtype if entry is not None else torch.float32)
    stored = {name: value for name, value in state.items() if MODEL + name in entries}
    load(path, [Range(MODEL + name, value.numel(), 0, value.view(-1)) for name, value in stored.items()])
    record = meta[KEY]
    state |= {second: state[first] for second, first in record.get("aliases", {}).items() if first in state}
    meta.pop("optimizer_states", None)
    return meta | {"state_dict": state | dict(record.get("other") or {})}


def read_contents(meta: Mapping[str, Any]) -> tuple[dict[str, list[int]], Metadata]:
    """Shapes of the model's tensors, and the index, which has every element of them in a file that is long enough.

    Raises:
        CorruptCheckpoint: files are missing or cut off, or the index and the dictionary disagree.
    """
    directory = Path(meta[KEY]["directory"])
    shapes = meta[KEY].get("shapes")
    if not isinstance(shapes, dict) or not all(
        isinstance(name, str) and isinstance(shape, list | tuple) and all(isinstance(n, int) and n >= 0 for n in shape)
        for name, shape in shapes.items()
    ):
        raise CorruptCheckpoint(f"{directory / META} does not say what shapes the tensors have")
    metadata = SafeReader(directory).read_metadata()
    problems = []
    sizes = {path.name: path.stat().st_size for path in directory.iterdir() if path.is_file()}
    for name, shape in shapes.items():
        if not math.prod(shape):
            continue  # nothing of it is stored
        entry = metadata.state_dict_metadata.get(MODEL + name)
        if not isinstance(entry, TensorStorageMetadata):
            problems.append(f"{name} is not in {INDEX}")
            continue
        end = 0
        for begin, chunk in sorted((int(chunk.offsets[0]), int(chunk.sizes[0])) for chunk in entry.chunks):
            if begin != end or chunk < 0:
                break
            end += chunk
            info = metadata.storage_data.get(MetadataIndex(MODEL + name, torch.Size([begin])))
            if info is None or sizes.get(str(info.relative_path), -1) < info.offset + info.length:
                where = "no file" if info is None else info.relative_path
                problems.append(f"{name} is in {where}, which is missing or cut off")
        if end != entry.size[0] or end != math.prod(shape):
            problems.append(f"{name} has {end} elements in a row, its shape {list(shape)} {math.prod(shape)}")
    if problems:
        raise CorruptCheckpoint(f"{directory} is damaged or incomplete: {shortened(problems, 5)}")
    return {name: list(shape) for name, shape in shapes.items()}, metadata
