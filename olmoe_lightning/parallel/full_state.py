"""Weights and optimizer state as one process would have them, put together on rank 0, and taken apart again.

It is one parameter at a time on every process, and everything on rank 0: right for models that one host can hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from olmoe_lightning.parallel.buffers import Bucket, Piece
from olmoe_lightning.parallel.collectives import all_gather
from olmoe_lightning.parallel.mesh import Axis, Mesh
from olmoe_lightning.parallel.sharded_optimizer import ShardedOptimizer


def gather_experts(local: Tensor, axis: Axis) -> Tensor | None:
    """Join the shards of an expert parameter along the first dimension; on the first process of the axis only.

    Args:
        local: [E_local, ...], the same shape on each process.
        axis: the ``expert`` axis.
    """
    if axis.size == 1:
        return local
    parts = [torch.empty_like(local) for _ in axis.ranks] if axis.rank == 0 else None
    dist.gather(local.contiguous(), parts, dst=axis.ranks[0], group=axis.group)
    return None if parts is None else torch.cat(parts)


def local_experts(full: Tensor, axis: Axis, experts: int) -> Tensor:
    """The shard of this process, [experts, ...], of a parameter with all experts.

    Raises:
        ValueError: ``full`` does not hold that many experts.
    """
    if full.shape[0] != experts * axis.size:
        raise ValueError(
            f"the checkpoint holds {full.shape[0]} experts, but {axis.size} expert-parallel ranks x {experts} experts "
            f"are {experts * axis.size}"
        )
    return full[axis.rank * experts : (axis.rank + 1) * experts]


def full_values(
    sharded: ShardedOptimizer, value: Callable[[Piece], Tensor | None]
) -> Iterator[tuple[str, int, Tensor | None]]:
    """Put together what each process has of every parameter; collective.

    Args:
        sharded: the optimizer whose pieces are meant.
        value: a tensor like the master of a piece, fp32; ``None`` stands for zeros.

    Yields:
        Name and number of the parameter, and on rank 0 its whole value on the CPU (``None`` on the others).
    """
    mesh = sharded.mesh
    for group in sharded.groups:
        flat: Tensor | None = None
        if isinstance(group, Bucket):
            flat = torch.zeros(group.weights.numel(), dtype=torch.float32, device=group.weights.device)
            starts = {named.number: start for named, start in zip(group.parameters, group.starts, strict=True)}
            for piece in group.pieces:
                part = value(piece)
                if part is not None:
                    begin = starts[piece.number]
                    flat[begin + piece.start : begin + piece.stop] = part.reshape(-1).to(flat)
            if group.sharded:
                all_gather(group.axis, flat).wait()
        for position, (name, parameter, index) in enumerate(group.parameters):
            if isinstance(group, Bucket):
                assert flat is not None
                start = group.starts[position]
                local = flat[start : start + parameter.numel()].view(parameter.shape)
            else:
                part = value(sharded.pieces[index])
                local = torch.zeros_like(parameter) if part is None else part.reshape(parameter.shape).to(parameter)
            whole = gather_experts(local.detach(), mesh.expert) if sharded.is_expert[parameter] else local.detach()
            # The first rank of each group has it; one of them is rank 0.
            yield name, index, whole.cpu().clone() if mesh.rank == 0 and whole is not None else None


def full_state_dict(
    module: nn.Module, mesh: Mesh, sharded: ShardedOptimizer | None, is_expert: Callable[[nn.Parameter], bool]
) -> dict[str, Any]:
    """``module.state_dict()`` with all experts, and with fp32 values of what is trained; collective.

    Returns:
        All of it on rank 0; on the others what they hold themselves.
    """
    state = module.state_dict()
    gathered: set[str] = set()
    if sharded is not None and any(parameter.dtype != torch.float32 for _, parameter, _ in sharded.parameters):
        masters = full_masters(sharded)
        first_name = {parameter: name for name, parameter, _ in sharded.parameters}
        for name, parameter in module.named_parameters(remove_duplicate=False):  # tied weights have two
            if parameter in first_name:
                gathered.add(name)
                state[name] = masters.get(first_name[parameter], state[name])
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if is_expert(parameter) and name not in gathered:
            whole = gather_experts(parameter.detach(), mesh.expert)
            if whole is not None and mesh.rank == 0:
                state[name] = whole
    return state


def local_state_dict(
    module: nn.Module, mesh: Mesh, is_expert: Callable[[nn.Parameter], bool], state: Mapping[str, Any]
) -> dict[str, Any]:
    """The part of a single process' ``state_dict`` that this process holds.

    Raises:
        ValueError: it has another number of experts than the module.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    return {
        name: local_experts(value, mesh.expert, parameters[name].shape[0])
        if name in parameters and is_expert(parameters[name])
        else value
        for name, value in state.items()
    }


def full_masters(sharded: ShardedOptimizer) -> dict[str, Tensor]:
    """fp32 values of all trained parameters by name; on rank 0, empty elsewhere; collective."""
    values = full_values(sharded, lambda piece: piece.master.detach())
    return {name: whole for name, _, whole in values if whole is not None}


def full_gradients(sharded: ShardedOptimizer) -> dict[str, Tensor]:
    """The gradients that the optimizer is about to use, by name; on rank 0, empty elsewhere; collective."""
    values = full_values(sharded, lambda piece: piece.master.grad)
    return {name: whole for name, _, whole in values if whole is not None}


def full_optimizer_state(sharded: ShardedOptimizer) -> dict[str, Any]:
    """``optimizer.state_dict()`` of a single process; on rank 0, empty elsewhere; collective."""
    optimizer = sharded.optimizer
    mine: dict[int, dict[str, Any]] = {
        index: optimizer.state[piece.master]
        for index, piece in sharded.pieces.items()
        if piece.master in optimizer.state
    }
    kinds: dict[str, str] = {}
    for index, state in mine.items():
        for key, item in state.items():
            if kinds.get(key) != "tensor":
                kinds[key] = _kind(item, sharded.pieces[index])
    everyones: list[dict[str, str]] = [kinds]
    if sharded.mesh.world.size > 1:
        everyones = [{} for _ in range(sharded.mesh.world.size)]
        dist.all_gather_object(everyones, kinds)
    kinds = dict(sorted((pair for each in everyones for pair in each.items()), key=lambda pair: pair[1] == "tensor"))

    count = len(sharded.parameters)
    present = torch.zeros(count, dtype=torch.float64)
    present[list(mine)] = 1
    states: dict[int, dict[str, Any]] = {}
    _reduce_max(present, sharded.mesh)
    for index in present.nonzero().flatten().tolist():
        states[index] = {}
    for key in sorted(kinds):
        if kinds[key] == "tensor":

            def entry(piece: Piece, key: str = key) -> Tensor | None:
                return mine.get(piece.number, {}).get(key)

            for _, index, whole in full_values(sharded, entry):
                if whole is not None and index in states:
                    states[index][key] = whole
            continue
        values = torch.full((count,), float("-inf"), dtype=torch.float64)
        for index, state in mine.items():
            if state.get(key) is not None:
                values[index] = float(state[key])
        _reduce_max(values, sharded.mesh)
        for index, state in states.items():
            number = values[index].item()
            if number == float("-inf"):
                state[key] = None
            else:
                state[key] = torch.tensor(number, dtype=torch.float32) if kinds[key] == "scalar" else number
    if sharded.mesh.rank != 0:
        return {}
    numbers = sharded.numbering()
    groups = [
        {**{key: item for key, item in group.items() if key != "params"}, "params": list(ids)}
        for group, ids in zip(optimizer.param_groups, numbers.groups, strict=True)
    ]
    return {"state": {numbers.of_parameter[i]: state for i, state in states.items()}, "param_groups": groups}


def load_full_optimizer_state(sharded: ShardedOptimizer, saved: Mapping[str, Any]) -> None:
    """Give the optimizer its part of a single process' ``state_dict``.

    Raises:
        ValueError: it has other parameter groups than the optimizer.
    """
    numbers = sharded.numbering()
    here = [len(ids) for ids in numbers.groups]
    there = [len(group["params"]) for group in saved["param_groups"]]
    if here != there:
        raise ValueError(
            f"the checkpoint's optimizer has parameter groups of {there} parameters, this one of {here}; "
            "the optimizer must be configured as it was when the checkpoint was written"
        )
    index_of = {number: index for index, number in numbers.of_parameter.items()}
    local_ids: dict[nn.Parameter, int] = {}
    for group in sharded.optimizer.param_groups:
        for master in group["params"]:
            local_ids[master] = len(local_ids)
    state: dict[int, dict[str, Any]] = {}
    for number, entries in saved["state"].items():
        index = index_of.get(int(number))
        piece = None if index is None else sharded.pieces.get(index)
        if index is None or piece is None:
            continue
        parameter = sharded.parameters[index].parameter
        state[local_ids[piece.master]] = {key: _slice(item, parameter, piece, sharded) for key, item in entries.items()}
    groups = []
    for saved_group, group in zip(saved["param_groups"], sharded.optimizer.param_groups, strict=True):
        groups.append({**saved_group, "params": [local_ids[master] for master in group["params"]]})
    sharded.optimizer.load_state_dict({"state": state, "param_groups": groups})


def load_masters(sharded: ShardedOptimizer, values: Mapping[str, Tensor]) -> None:
    """Set the fp32 masters from local fp32 values by parameter name; the weights are not touched."""
    for name, parameter, index in sharded.parameters:
        piece = sharded.pieces.get(index)
        if piece is not None and name in values and parameter.dtype != torch.float32:
            flat = values[name].reshape(-1)[piece.start : piece.stop]
            piece.master.data.copy_(flat.view(piece.master.shape))


def _kind(item: Any, piece: Piece) -> str:
    if not isinstance(item, Tensor):
        return "number"
    # What belongs to a parameter without dimensions looks like a step counter; a larger parameter tells them apart.
    return "tensor" if item.ndim and item.shape == piece.master.shape else "scalar"


def _reduce_max(values: Tensor, mesh: Mesh) -> None:
    device = torch.device("cuda", torch.cuda.current_device()) if _on_cuda(mesh) else values.device
    moved = values.to(device)
    values.copy_(mesh.world.all_reduce(moved, dist.ReduceOp.MAX))


def _on_cuda(mesh: Mesh) -> bool:
    return mesh.world.size > 1 and dist.get_backend(mesh.world.group) == "nccl"


def _slice(item: Any, parameter: nn.Parameter, piece: Piece, sharded: ShardedOptimizer) -> Any:
    if (
        not isinstance(item, Tensor)
        or not item.ndim
        or item.ndim != parameter.ndim
        or item.shape[1:] != parameter.shape[1:]
    ):
        return item
    if sharded.is_expert[parameter]:
        item = local_experts(item, sharded.mesh.expert, parameter.shape[0])
    return item.reshape(-1)[piece.start : piece.stop].view(piece.master.shape).clone()
