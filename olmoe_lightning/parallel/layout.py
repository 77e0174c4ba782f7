"""How tensors lie in memory: expanded ones, slices, transposed ones, several views of one storage.

Collectives and copies want each element of memory once, one after the other. Parameters move into buckets; what looked
at their memory before must look at it afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from olmoe_lightning.errors import UserError


def distinct(tensor: Tensor) -> Tensor:
    """The part of a tensor in which no expanded dimension repeats an element: a view."""
    return _narrowed(tensor, tensor)


def write(target: Tensor, values: Tensor) -> None:
    """Copy ``values`` into ``target``, whatever its layout; what several of its elements share is written once.

    Args:
        target: expanded, strided, or anything else.
        values: of its shape.
    """
    distinct(target).copy_(_narrowed(values, target))


def repeats(tensor: Tensor) -> bool:
    """Whether several elements of a tensor are one in memory, as in an expanded one."""
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor is its elements and nothing else: not sparse, quantised or nested."""
    return tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_nested


def kind(tensor: Tensor) -> str:
    """What a tensor that is not dense is called."""
    if tensor.is_nested:
        return "nested"
    return "quantised" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")


def flattened(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor in row-major order: the tensor's own memory where they lie there like this."""
    dense = tensor.resolve_conj().resolve_neg().contiguous()
    return dense.as_strided((dense.numel(),), (1,))  # a single element may have any stride


def lies_flat(tensor: Tensor) -> bool:
    """Whether the memory of a tensor is its elements in row-major order, so that they can be read into it."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


@contextmanager
def unexpanded(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Within this, ``copy_`` into expanded tensors works; what several elements share takes the value of the first."""
    found = [(tensor, tensor.data) for tensor in tensors if is_dense(tensor) and repeats(tensor)]
    for tensor, memory in found:
        tensor.data = memory.contiguous()
    try:
        yield
    finally:
        for tensor, memory in found:
            write(memory, tensor.data)
            tensor.data = memory


def _narrowed(tensor: Tensor, like: Tensor) -> Tensor:
    for dimension, (size, stride) in enumerate(zip(like.shape, like.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


class Views:
    """Tensors that look at the memory of others, which is about to move.

    Args:
        moved: what moves, by tensor its name.
        others: what may look at it, likewise; what looks at nothing that moves is left alone.

    Raises:
        UserError: one of ``moved`` repeats elements, two of them overlap, or one of ``others`` looks at a part of one
            of them and at more.
    """

    def __init__(self, moved: Mapping[Tensor, str], others: Mapping[Tensor, str]) -> None:
        self._views: list[tuple[Tensor, Tensor, int]] = []
        by_storage: dict[int, list[Tensor]] = {}
        for tensor, name in moved.items():
            if repeats(tensor):
                raise UserError(
                    f"{name} is an expanded tensor, of which several elements are one in memory, and cannot be "
                    "trained; give nn.Parameter the tensor before expand, or its .contiguous()"
                )
            if _has_memory(tensor):
                by_storage.setdefault(_storage(tensor), []).append(tensor)
        for found in by_storage.values():
            reaching: list[Tensor] = []  # those of before that end behind the one at hand
            for tensor in sorted(found, key=lambda each: _bytes(each)[0]):
                reaching = [each for each in reaching if _bytes(each)[1] > _bytes(tensor)[0]]
                for other in reaching:
                    if _overlap(other, tensor):
                        raise UserError(
                            f"{moved[other]} and {moved[tensor]} are two parameters with elements in common, which "
                            "processes cannot update together; make them one parameter under two names, or clone one"
                        )
                reaching.append(tensor)
        for tensor, name in others.items():
            for source in by_storage.get(_storage(tensor), ()) if _has_memory(tensor) else ():
                if not _overlap(tensor, source):
                    continue
                start = int(tensor.storage_offset()) - int(source.storage_offset())
                if not source.is_contiguous() or start < 0 or start + _span(tensor) > source.numel():
                    raise UserError(
                        f"{name} shares a part of its memory with the parameter {moved[source]}, which moves when "
                        "training begins; clone it, or let it be a view of that parameter alone"
                    )
                self._views.append((tensor, source, start))

    def follow(self) -> None:
        """Look at the same elements where they are now; what moved is contiguous there."""
        for tensor, source, start in self._views:
            flat = source.detach().view(-1)
            tensor.data = flat.as_strided(tensor.shape, tensor.stride(), flat.storage_offset() + start)


def _has_memory(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_meta and tensor.numel() > 0


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if _has_memory(tensor) else 0


def _span(tensor: Tensor) -> int:
    """From the first element in memory to the last one."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _bytes(tensor: Tensor) -> tuple[int, int]:
    """Where in its storage the memory of a tensor begins and ends."""
    begin = int(tensor.storage_offset()) * tensor.element_size()
    return begin, begin + _span(tensor) * tensor.element_size()


def _overlap(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors of one storage have an element in common."""
    begins, ends = zip(_bytes(first), _bytes(second), strict=True)
    low = min(begins)
    if max(begins) >= min(ends):
        return False
    if first.element_size() != second.element_size():
        return True
    size = first.element_size()
    taken = torch.zeros((max(ends) - low) // size, dtype=torch.bool)
    marks = [
        taken.as_strided(tensor.shape, tensor.stride(), (begin - low) // size)
        for tensor, begin in zip((first, second), begins, strict=True)
    ]
    write(marks[0], torch.ones(first.shape, dtype=torch.bool))
    return bool(marks[1].any())
