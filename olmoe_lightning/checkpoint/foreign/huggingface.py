"""Weights in and out, streamed block by block: Hugging Face OLMoE, our own formats, and what the trainer writes.

Our directory format is ``config.json`` (the :class:`ModelConfig`, with a marker and a version) beside safetensors under
our names, or all of that in one ``.safetensors`` file. The trainer writes sharded directories and ``.ckpt`` files.
:mod:`olmoe_lightning.checkpoint.foreign.hf_layout` knows which part of ours each Hugging Face tensor is.
"""

from __future__ import annotations

import json
import math
import operator
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Literal

import torch
from torch import Tensor

from olmoe_lightning.checkpoint.foreign.hf_config import config_to_hf, functional_differences
from olmoe_lightning.checkpoint.foreign.hf_layout import hf_tensors, native_shapes, stays_fp32
from olmoe_lightning.checkpoint.foreign.safetensors_dir import (
    TensorInfo,
    TensorWriter,
    write_safetensors,
    write_safetensors_file,
)
from olmoe_lightning.checkpoint.foreign.sharded_dir import LazyRange, write_sharded
from olmoe_lightning.checkpoint.foreign.sources import (
    METADATA,
    SUFFIX,
    MemoryStore,
    Source,
    TensorSlice,
    compare,
    native_config_values,
    open_hf,
    open_native,
    open_source,
    tokenizer_of,
)
from olmoe_lightning.checkpoint.foreign.upcycle import upcycled
from olmoe_lightning.checkpoint.meta import MODEL, new_meta
from olmoe_lightning.checkpoint.publish import publish, temporary_beside
from olmoe_lightning.config import ModelConfig
from olmoe_lightning.errors import DiskSpaceError, ExistingFileError, UserError, shortened
from olmoe_lightning.files import write_atomically
from olmoe_lightning.progress import progress_bar

Target = Literal["hf", "native", "safetensors", "sharded"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_COMPANIONS = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)


def convert(
    from_hf: str | None = None,
    from_native: str | None = None,
    to_hf: str | None = None,
    to_native: str | None = None,
    to_safetensors: str | None = None,
    to_sharded: str | None = None,
    dtype: str | None = None,
    max_shard_size: str | int = "4GB",
    upcycle_experts: int = 0,
    upcycle_top_k: int = 0,
    upcycle_seed: int = 0,
    upcycle_dense_layers: int = 0,
) -> None:
    """Rewrites a checkpoint in another format, streamed, in little memory. Exactly one source and one target.

    Whatever is wrong with the source is found from its configuration and headers, before a byte is written. The target
    is built under a temporary name beside its place and renamed when it is complete; tokenizer files of the source
    come along.

    Args:
        from_hf: directory of a Hugging Face OLMoE with safetensors.
        from_native: our names: a sharded checkpoint of the trainer, a directory or ``.safetensors`` file that was
            written here, or a Lightning ``.ckpt`` file of ``OLMoE``.
        to_hf: new directory, for ``OlmoeForCausalLM.from_pretrained``.
        to_native: new directory in our format.
        to_safetensors: new file under our names, with the configuration in its metadata; it ends in ``.safetensors``.
        to_sharded: new directory as the trainer writes it, without optimizer state: for
            ``OLMoE.load_from_checkpoint``, or ``validate`` with ``ckpt_path``.
        dtype: ``float32``, ``bfloat16`` or ``float16`` to cast the weights; ``None`` keeps each as it is.
        max_shard_size: largest shard of a directory of safetensors, in bytes or like ``"500MB"``, ``"4GB"``,
            ``"2GiB"``.
        upcycle_experts: make experts of a dense model's layers, so many copies each; see :func:`upcycle`.
        upcycle_top_k: experts that are chosen for each token then.
        upcycle_seed: of the new routers.
        upcycle_dense_layers: leading layers that stay dense.

    Raises:
        UserError: not one source and one target; a configuration that cannot be read or expressed; missing,
            unexpected or misshapen tensors (one error lists them); a model that cannot be upcycled.
        MissingFileError: the source is missing or incomplete.
        ExistingFileError: the target exists and is not an empty directory.
        OSError: the disk is too small.
    """
    sources = {"from_hf": from_hf, "from_native": from_native}
    targets = {"to_hf": to_hf, "to_native": to_native, "to_safetensors": to_safetensors, "to_sharded": to_sharded}
    for what, given in (("source", sources), ("target", targets)):
        chosen = [f"{name}={value}" for name, value in given.items() if value]
        if len(chosen) != 1:
            raise UserError(
                f"convert needs exactly one {what} ({' or '.join(given)}); got {', '.join(chosen) or 'none'}"
            )
    if not upcycle_experts and (upcycle_top_k or upcycle_seed or upcycle_dense_layers):
        raise UserError("upcycle_top_k, upcycle_seed and upcycle_dense_layers need upcycle_experts")
    source = open_hf(Path(from_hf)) if from_hf else open_native(Path(from_native or ""))
    if upcycle_experts:
        source = upcycled(source, upcycle_experts, upcycle_top_k, upcycle_seed, upcycle_dense_layers)
    kinds: dict[Target, str | None] = {
        "hf": to_hf,
        "native": to_native,
        "safetensors": to_safetensors,
        "sharded": to_sharded,
    }
    for kind, target in kinds.items():
        if target:
            _write(source, Path(target), kind, dtype, max_shard_size)


def upcycle(
    source: str,
    target: str,
    num_experts: int,
    top_k: int,
    seed: int = 0,
    dense_layers: int = 0,
    overrides: dict[str, Any] | None = None,
) -> None:
    """Makes a mixture of experts of a dense model: each expert is a copy of its layer's MLP (arXiv 2212.05055).

    The router is new, and the weights of the chosen experts sum to one, so the logits are the dense model's until the
    first step of training.

    Args:
        source: a checkpoint of a dense model (``num_dense_layers == num_layers``), in any of our formats.
        target: new directory in our format.
        num_experts: experts of each layer.
        top_k: experts chosen per token.
        seed: of the routers' small initial weights.
        dense_layers: leading layers that stay dense.
        overrides: further fields of the new :class:`ModelConfig`, for example ``{"score_function": "sigmoid"}``: those
            of the router, and those that only concern training.

    Raises:
        UserError: the model has experts already, or a field would keep the mixture from computing the same.
        MissingFileError: as :func:`convert`.
        ExistingFileError: as :func:`convert`.
    """
    mixture = upcycled(open_source(Path(source)), num_experts, top_k, seed, dense_layers, overrides)
    _write(mixture, Path(target), "native", None, "4GB")


def read(directory: str) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Configuration and all weights, in memory, under our names, from any format that :func:`convert` reads."""
    source = open_source(Path(directory))
    state = {}
    for name, shape in native_shapes(source.config).items():
        blocks = [block.reshape(-1) for box in source.native_slices(name) for block in source.blocks(box)]
        state[name] = torch.cat(blocks).view(shape)
    return source.config, state


def write(
    state: Mapping[str, Tensor],
    config: ModelConfig,
    directory: str,
    hf: bool = False,
    dtype: str | None = None,
    max_shard_size: str | int = "4GB",
    token_ids: dict[str, int | None] | None = None,
) -> None:
    """Writes weights that are in memory, for example ``model.state_dict()`` of a ``Transformer``.

    Args:
        state: our names to tensors, on any device.
        config: the model's configuration.
        directory: new directory.
        hf: write Hugging Face's format instead of ours.
        dtype: as in :func:`convert`.
        max_shard_size: as in :func:`convert`.
        token_ids: ``bos_token_id``, ``eos_token_id``, ``pad_token_id`` as Hugging Face's configuration keeps them.

    Raises:
        UserError: as :func:`convert`.
        ExistingFileError: as :func:`convert`.
    """
    store = MemoryStore(state)
    compare(store.tensors, native_shapes(config), "the given weights")
    source = Source(config, store, token_ids=token_ids or {})
    _write(source, Path(directory), "hf" if hf else "native", dtype, max_shard_size)


@torch.no_grad()
def load_pretrained(model: torch.nn.Module, directory: str, first_expert: int = 0, all_layers: bool = True) -> None:
    """Loads a checkpoint of any format that :func:`convert` reads into a built model, in place.

    Checkpoint and model must have the same weights with the same shapes; of a model with some of the layers or experts
    only those are read. Each block is looked up through the model again after it was written and compared with what was
    read, so that a write which went to a copy is an error and not a model that stays random.

    Args:
        model: a ``Transformer`` on any device, in any floating type; values are cast to its own.
        directory: the checkpoint.
        first_expert: global index of the first expert that the model holds of each layer.
        all_layers: whether the model has all layers; otherwise it is a stage of a pipeline.

    Raises:
        UserError: tensors are missing, unexpected or misshapen; or the model's configuration describes another
            function than the checkpoint's.
        RuntimeError: a weight of the model does not hold the value that was written to it.
    """
    source = open_source(Path(directory))
    config = getattr(model, "config", None)
    if isinstance(config, ModelConfig) and (differences := functional_differences(config, source.config)):
        raise UserError(
            f"{directory} was made for another model; build yours with read_config({directory!r}):\n"
            + "\n".join(f"  - {difference}" for difference in differences)
        )
    state = model.state_dict(keep_vars=True)
    shapes = native_shapes(source.config)
    if not all_layers:
        shapes = {name: shape for name, shape in shapes.items() if name in state}
    experts: dict[str, range] = {}  # of the tensors that have some of them
    for name, shape in shapes.items():
        if len(shape) == 3 and name in state and len(state[name]) < shape[0]:
            experts[name] = range(first_expert, first_expert + len(state[name]))
            shapes[name] = (len(state[name]), *shape[1:])
    compare({name: TensorInfo.of(tensor) for name, tensor in state.items()}, shapes, "the model")
    if unready := [name for name, tensor in state.items() if tensor.is_meta or not tensor.is_contiguous()]:
        raise UserError(f"the model's weights have no storage yet, or not a contiguous one: {shortened(unready)}")
    with progress_bar("loading", sum(tensor.nbytes for tensor in state.values()), "B") as bar:
        for name in shapes:
            offset = 0
            for box in source.native_slices(name, experts.get(name)):
                for block in source.blocks(box):
                    end = offset + block.numel()
                    value = block.reshape(-1).to(state[name].device, state[name].dtype)
                    state[name].detach().view(-1)[offset:end].copy_(value)
                    live = operator.attrgetter(name)(model).detach().view(-1)[offset:end]
                    if not torch.equal(live.view(torch.uint8), value.view(torch.uint8)):  # bits: NaN must compare too
                        raise RuntimeError(f"{name}: the model does not hold what was written to it")
                    offset = end
                    bar.update(value.nbytes)
            if offset != state[name].numel():
                raise RuntimeError(f"{name}: {offset} of {state[name].numel()} values were written")


def _write(source: Source, target: Path, kind: Target, dtype: str | None, max_shard_size: str | int) -> None:
    cast = _parse_dtype(dtype)
    file_bytes = _parse_bytes(max_shard_size)
    tokenizer = tokenizer_of(source)
    if kind == "sharded":
        _write_sharded(source, target, cast, tokenizer)
        return
    if kind == "hf":
        config = config_to_hf(source.config, token_ids=source.token_ids)
        writers = [
            _writer(source, tensor.name, tensor.shape, [source.hf_slice(tensor)], cast)
            for tensors in hf_tensors(source.config).values()
            for tensor in tensors
        ]
        sizes: Counter[torch.dtype] = Counter()
        for writer in writers:
            sizes[writer.dtype] += writer.num_bytes
        config["torch_dtype"] = str(sizes.most_common(1)[0][0]).removeprefix("torch.")
    else:
        config = native_config_values(source)
        writers = [
            _writer(source, name, shape, source.native_slices(name), None if stays_fp32(name) else cast)
            for name, shape in native_shapes(source.config).items()
        ]
    total = sum(writer.num_bytes for writer in writers)
    if kind == "safetensors":
        if target.suffix != SUFFIX:
            raise UserError(f"to_safetensors ({target}) is one file and must end in {SUFFIX}")
        values = {METADATA: json.dumps(config | ({"tokenizer": tokenizer} if tokenizer else {}))}
        with _new_file(target, total) as file, progress_bar("writing", total, "B") as bar:
            write_safetensors_file(file, writers, values, bar.update)
        return
    with _new_directory(target, total) as directory, progress_bar("writing", total, "B") as bar:
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        write_safetensors(directory, writers, file_bytes, bar.update)
        if source.directory is not None:
            for name in _COMPANIONS:
                if (source.directory / name).is_file():
                    shutil.copyfile(source.directory / name, directory / name)
        elif tokenizer is not None and tokenizer != "byte":
            (directory / "tokenizer.json").write_text(tokenizer, encoding="utf-8")


def _write_sharded(source: Source, target: Path, cast: torch.dtype | None, tokenizer: str | None) -> None:
    shapes = native_shapes(source.config)
    ranges = []
    for name, shape in shapes.items():
        slices = source.native_slices(name)
        dtype = source.dtype(slices) if cast is None or stays_fp32(name) else cast
        start = 0
        for box, length in (cut for whole in slices for cut in source.cuts(whole)):
            read = partial(source.read, box)
            full = f"{MODEL}model.{name}"
            ranges.append(LazyRange(full, math.prod(shape), start, length, dtype, read))
            start += length
    more = {"token_ids": {name: value for name, value in source.token_ids.items() if value is not None}}
    meta = new_meta(
        source.hyper_parameters or {"config": source.config.to_dict()},
        {f"model.{name}": shape for name, shape in shapes.items()},
        more | ({"tokenizer": tokenizer} if tokenizer else {}),
    )
    total = sum(wanted.length * wanted.dtype.itemsize for wanted in ranges)
    with _new_directory(target, total) as directory, progress_bar("writing", total, "B") as bar:
        write_sharded(directory, ranges, meta, bar.update)


def _writer(
    source: Source, name: str, shape: tuple[int, ...], slices: list[TensorSlice], cast: torch.dtype | None
) -> TensorWriter:
    def blocks() -> Iterator[Tensor]:
        for box in slices:
            yield from source.blocks(box)

    return TensorWriter(name, shape, cast or source.dtype(slices), blocks)


@contextmanager
def _new_directory(target: Path, num_bytes: int) -> Iterator[Path]:
    """A temporary directory that takes the target's place when the body ends well, and vanishes when it does not."""
    target = target.resolve()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ExistingFileError(f"{target} exists and is not an empty directory; choose a new one")
    _refuse_full_disk(target, num_bytes)
    temporary = temporary_beside(target)
    try:
        yield temporary
        publish(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


@contextmanager
def _new_file(target: Path, num_bytes: int) -> Iterator[BinaryIO]:
    """The same for a file."""
    target = target.resolve()
    if target.exists():
        raise ExistingFileError(f"{target} exists; choose a new name")
    _refuse_full_disk(target, num_bytes)
    with write_atomically(target) as file:
        yield file


def _refuse_full_disk(target: Path, num_bytes: int) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(target.parent).free
    if free < num_bytes:
        raise DiskSpaceError(
            f"{target} needs {num_bytes / 1e9:.2f} GB, but only {free / 1e9:.2f} GB are free on that disk"
        )


def _parse_dtype(name: str | None) -> torch.dtype | None:
    if name is not None and name not in _DTYPES:
        raise UserError(f"dtype {name!r} must be one of {', '.join(_DTYPES)}")
    return _DTYPES[name] if name is not None else None


def _parse_bytes(size: str | int) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *(?:([KMGT]?)(i?)B)?", str(size).strip(), re.IGNORECASE)
    if match is None or float(match[1]) == 0:
        raise UserError(f"max_shard_size {size!r} must be a number of bytes, or like '500MB', '4GB', '2GiB'")
    exponent = " KMGT".index((match[2] or " ").upper())
    return int(float(match[1]) * (1024 if match[3] else 1000) ** exponent)
