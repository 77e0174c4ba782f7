"""Weights and optimizer state as one process would have them, put together on rank 0, and taken apart again.

It is one parameter at a time on every process, and everything on rank 0: right for models that one host can hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from olmoe_lightning.checkpoint.groups import (
    groups_of_parameters,
    options_of_file,
    options_of_groups,
    refuse_other_class,
)
from olmoe_lightning.errors import UserError
from olmoe_lightning.parallel.buffers import Bucket, Shard
from olmoe_lightning.parallel.collectives import all_gather
from olmoe_lightning.parallel.layout import flattened
from olmoe_lightning.parallel.mesh import Axis, Mesh
from olmoe_lightning.parallel.ownership import Ownership
from olmoe_lightning.parallel.sharded_optimizer import ShardedOptimizer


def gather_experts(local: Tensor, axis: Axis) -> Tensor | None:
    """Join the shards of an expert parameter along the first dimension; on the first process of the axis only.

    Args:
        local: [E_local, ...], the same shape on each process.
        axis: the ``expert`` axis.
    """
    if axis.size == 1:
        return local
    own = flattened(local).view(torch.uint8)  # backends know half of all types
    parts = [torch.empty_like(own) for _ in axis.ranks] if axis.rank == 0 else None
    dist.gather(own, parts, dst=axis.ranks[0], group=axis.group)
    # A number of each rank: a row of them.
    return None if parts is None else torch.cat(parts).view(local.dtype).view(-1, *local.shape[1:])


def local_experts(full: Tensor, axis: Axis, experts: int) -> Tensor:
    """The shard of this process, [experts, ...], of a parameter with all experts.

    Raises:
        UserError: ``full`` does not hold that many experts.
    """
    if full.shape[0] != experts * axis.size:
        raise UserError(
            f"the checkpoint holds {full.shape[0]} experts, but {axis.size} expert-parallel ranks x {experts} experts "
            f"are {experts * axis.size}"
        )
    return full[axis.rank * experts : (axis.rank + 1) * experts]


def full_values(
    sharded: ShardedOptimizer, value: Callable[[Shard], Tensor | None]
) -> Iterator[tuple[str, int, Tensor | None]]:
    """Put together what each process has of every parameter; collective.

    Args:
        sharded: the optimizer whose shards are meant.
        value: a tensor like the master of a shard, fp32; ``None`` stands for zeros.

    Yields:
        Name and number of the parameter, and on rank 0 its whole value on the CPU (``None`` on the others).
    """
    mesh = sharded.mesh
    for group in sharded.groups:
        flat: Tensor | None = None
        if isinstance(group, Bucket):
            flat = torch.zeros(group.weights.numel(), dtype=torch.float32, device=group.weights.device)
            starts = {named.number: start for named, start in zip(group.parameters, group.starts, strict=True)}
            for shard in group.shards:
                part = value(shard)
                if part is not None:
                    begin = starts[shard.number]
                    flat[begin + shard.start : begin + shard.stop] = part.reshape(-1).to(flat)
            if group.sharded:
                all_gather(group.axis, flat).wait()
        for position, (name, parameter, index) in enumerate(group.parameters):
            if isinstance(group, Bucket):
                assert flat is not None
                start = group.starts[position]
                local = flat[start : start + parameter.numel()].view(parameter.shape)
            else:
                part = value(sharded.shards[index])
                local = torch.zeros_like(parameter) if part is None else part.reshape(parameter.shape).to(parameter)
            whole = (
                gather_experts(local.detach(), mesh.expert)
                if sharded.ownership.is_expert(parameter)
                else local.detach()
            )
            # The first data rank of each stage has it; one of them is rank 0.
            yield name, index, whole.cpu().clone() if mesh.data.rank == 0 and whole is not None else None


def full_state_dict(ownership: Ownership, sharded: ShardedOptimizer | None) -> dict[str, Any]:
    """``module.state_dict()`` with all experts, and with fp32 values of what is trained; collective.

    Returns:
        All of it on rank 0; on the others what they hold themselves.
    """
    module, mesh = ownership.module, ownership.mesh
    state = module.state_dict()
    narrow = sharded is not None and any(parameter.dtype != torch.float32 for _, parameter, _ in sharded.parameters)
    aliases: dict[str, str] = {}  # tied weights have two names
    for name, tensor in _named_tensors(module):
        if narrow and isinstance(tensor, nn.Parameter) and ownership.is_trained(tensor):
            aliases[name] = ownership.parameters[tensor]
        elif name in state and ownership.is_expert(tensor):
            whole = gather_experts(tensor.detach(), mesh.expert)
            if whole is not None and mesh.data.rank == 0:
                state[name] = whole
    if mesh.pipeline.size > 1:
        state = of_all_stages(mesh, dict(state) if mesh.data.rank == 0 else {}) or state
        aliases = of_all_stages(mesh, aliases) or aliases
    if sharded is not None and narrow:
        masters = full_masters(sharded)
        state.update({name: masters[first] for name, first in aliases.items() if first in masters})
    return state


def local_state_dict(ownership: Ownership, state: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a single process' ``state_dict`` that this process holds.

    Raises:
        UserError: it has another number of experts than the module.
    """
    module, mesh = ownership.module, ownership.mesh
    tensors = dict(_named_tensors(module))
    here = module.state_dict().keys()
    return {
        name: _local(value, tensors[name], mesh.expert)
        if name in tensors and ownership.is_expert(tensors[name])
        else value
        for name, value in state.items()
        if mesh.pipeline.size == 1 or name in here  # the others belong to other stages
    }


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _local(full: Tensor, own: Tensor, axis: Axis) -> Tensor:
    if axis.size == 1:
        return full
    return local_experts(full, axis, own.shape[0] if own.ndim else 1).view(own.shape)


def full_masters(sharded: ShardedOptimizer) -> dict[str, Tensor]:
    """fp32 values of all trained parameters by name; on rank 0, empty elsewhere; collective."""
    values = full_values(sharded, sharded.values)
    return of_all_stages(sharded.mesh, {name: whole for name, _, whole in values if whole is not None})


def full_gradients(sharded: ShardedOptimizer) -> dict[str, Tensor]:
    """The gradients that the optimizer is about to use, by name; on rank 0, empty elsewhere; collective."""
    values = full_values(sharded, lambda shard: shard.master.grad)
    return of_all_stages(sharded.mesh, {name: whole for name, _, whole in values if whole is not None})


def of_all_stages(mesh: Mesh, own: dict[str, Any]) -> dict[str, Any]:
    """Join what the stages of a pipeline have by name, on rank 0; empty elsewhere; collective.

    What several stages hold is the first one's.
    """
    if mesh.pipeline.size == 1:
        return own
    joined: dict[str, Any] = {}
    for part in mesh.pipeline.gather_objects(own):
        joined = {**joined, **{name: item for name, item in part.items() if name not in joined}}
    return joined if mesh.rank == 0 else {}


def full_optimizer_state(sharded: ShardedOptimizer) -> dict[str, Any]:
    """``optimizer.state_dict()`` of a single process; on rank 0, empty elsewhere; collective.

    Of a pipeline, no process knows how a single one would number the parameters: they are known by their names.
    """
    by_name = full_state_by_name(sharded)
    here = groups_of_parameters(sharded) if sharded.mesh.data.rank == 0 else {}
    group_of = of_all_stages(sharded.mesh, here)
    if sharded.mesh.rank != 0:
        return {}
    options, kind = options_of_groups(sharded.optimizer), type(sharded.optimizer).__name__
    if sharded.mesh.pipeline.size > 1:
        members = [[name for name, group in group_of.items() if group == place] for place in range(len(options))]
        groups = [{**group, "params": names} for group, names in zip(options, members, strict=True)]
        return {"state": by_name, "param_groups": groups, "optimizer": kind}
    numbers = sharded.numbering()
    names = {number: sharded.parameters[index].name for index, number in numbers.of_parameter.items()}
    number_of = {name: number for number, name in names.items()}
    return {
        "state": {number_of[name]: state for name, state in by_name.items()},
        "param_groups": [{**group, "params": ids} for group, ids in zip(options, numbers.groups, strict=True)],
        "names": names,  # so that a pipeline can find its own
        "optimizer": kind,
    }


def full_state_by_name(sharded: ShardedOptimizer) -> dict[str, dict[str, Any]]:
    """The optimizer's state of each parameter by its name; on rank 0, empty elsewhere; collective."""
    optimizer = sharded.optimizer
    mine: dict[int, dict[str, Any]] = {
        index: optimizer.state[shard.master]
        for index, shard in sharded.shards.items()
        if shard.master in optimizer.state
    }
    kinds: dict[str, str] = {}
    for index, state in mine.items():
        for key, item in state.items():
            if kinds.get(key) != "tensor":
                kinds[key] = _kind(item, sharded.shards[index])
    everyones = sharded.mesh.world.all_gather_objects(kinds)
    kinds = dict(sorted((pair for each in everyones for pair in each.items()), key=lambda pair: pair[1] == "tensor"))

    count = len(sharded.parameters)
    present = torch.zeros(count, dtype=torch.float64)
    present[list(mine)] = 1
    states: dict[int, dict[str, Any]] = {}
    _reduce_max(present, sharded.mesh)  # the numbers of parameters are those of one stage
    for index in present.nonzero().flatten().tolist():
        states[index] = {}
    for key in sorted(kinds):
        if kinds[key] == "tensor":

            def entry(shard: Shard, key: str = key) -> Tensor | None:
                return mine.get(shard.number, {}).get(key)

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
    own = {sharded.parameters[index].name: state for index, state in states.items()}
    return of_all_stages(sharded.mesh, own if sharded.mesh.data.rank == 0 else {})


def load_full_optimizer_state(sharded: ShardedOptimizer, saved: Mapping[str, Any]) -> None:
    """Give the optimizer its part of a single process' ``state_dict``.

    Raises:
        UserError: it is another optimizer's, or has other parameter groups.
    """
    refuse_other_class(sharded.optimizer, saved.get("optimizer", ""))
    names = saved.get("names", {})
    state_by_name: dict[str, dict[str, Any]] = {}
    for key, entries in saved["state"].items():
        name = key if isinstance(key, str) else names[key] if key in names else _name_of(sharded, int(key))
        state_by_name[name] = entries
    options = options_of_file(sharded, saved["param_groups"], names)
    state: dict[nn.Parameter, dict[str, Any]] = {}
    for name, parameter, index in sharded.parameters:
        shard = sharded.shards.get(index)
        if shard is not None and name in state_by_name:
            entries = state_by_name[name]
            state[shard.master] = {key: _slice(item, parameter, shard, sharded) for key, item in entries.items()}
    sharded.load_state(state, options)


def _name_of(sharded: ShardedOptimizer, number: int) -> str:
    """The name of a parameter in a checkpoint that knows numbers alone."""
    if sharded.mesh.pipeline.size > 1:
        raise UserError(
            "the checkpoint's optimizer state was written without MoEStrategy and has no parameter names, so that a "
            "pipeline cannot tell which of it belongs to which stage; write it again under MoEStrategy in one process"
        )
    index_of = {other: index for index, other in sharded.numbering().of_parameter.items()}
    return sharded.parameters[index_of[number]].name if number in index_of else ""


def load_masters(sharded: ShardedOptimizer, values: Mapping[str, Tensor]) -> None:
    """Set the fp32 masters from local fp32 values by parameter name; the weights are not touched."""
    for name, parameter, index in sharded.parameters:
        shard = sharded.shards.get(index)
        if shard is not None and name in values and parameter.dtype != torch.float32:
            flat = values[name].reshape(-1)[shard.start : shard.stop]
            shard.master.data.copy_(flat.view(shard.master.shape))


def _kind(item: Any, shard: Shard) -> str:
    if not isinstance(item, Tensor):
        return "number"
    # What belongs to a parameter without dimensions looks like a step counter; a larger parameter tells them apart.
    return "tensor" if item.ndim and item.shape == shard.master.shape else "scalar"


def _reduce_max(values: Tensor, mesh: Mesh) -> None:
    device = torch.device("cuda", torch.cuda.current_device()) if _on_cuda(mesh) else values.device
    moved = values.to(device)
    values.copy_(mesh.data.all_reduce(moved, dist.ReduceOp.MAX))


def _on_cuda(mesh: Mesh) -> bool:
    return mesh.world.size > 1 and dist.get_backend(mesh.world.group) == "nccl"


def _slice(item: Any, parameter: nn.Parameter, shard: Shard, sharded: ShardedOptimizer) -> Any:
    if (
        not isinstance(item, Tensor)
        or not item.ndim
        or item.ndim != parameter.ndim
        or item.shape[1:] != parameter.shape[1:]
    ):
        return item
    if sharded.ownership.is_expert(parameter):
        item = local_experts(item, sharded.mesh.expert, parameter.shape[0])
    return item.reshape(-1)[shard.start : shard.stop].view(shard.master.shape).clone()
