"""Parameter groups of an optimizer, in checkpoints: a group is known by its place, on every process and topology.

Names say nothing: two groups may have the same one, or none. A process may have no parameter of a group (another stage
of the pipeline has them), and has the group all the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from olmoe_lightning.errors import UserError
from olmoe_lightning.parallel.sharded_optimizer import ShardedOptimizer

Options = dict[str, Any]
_CONFIGURE = "the optimizer must be configured as it was when the checkpoint was written"

_SAME = "make the same groups in the same order on all of them, also where one has no parameters"


def options_of_groups(optimizer: Optimizer) -> list[Options]:
    """All but the parameters, by place."""
    return [{key: item for key, item in group.items() if key != "params"} for group in optimizer.param_groups]


def groups_of_parameters(sharded: ShardedOptimizer) -> dict[str, int]:
    """The place of the group of each trained parameter of this process."""
    numbers = sharded.numbering()
    place_of = {number: place for place, ids in enumerate(numbers.groups) for number in ids}
    return {name: place_of[numbers.of_parameter[index]] for name, _, index in sharded.parameters}


def refuse_other_class(optimizer: Optimizer, saved: str) -> None:
    """Stop before one optimizer reads the state of another.

    Args:
        optimizer: of this run.
        saved: class of that which wrote the checkpoint; empty if it does not say.

    Raises:
        UserError: they differ.
    """
    here = type(optimizer).__name__
    if saved and saved != here:
        raise UserError(
            f"the checkpoint holds the state of the optimizer {saved}, which says nothing to {here}; go on with "
            f"{saved}, or start anew from the checkpoint's weights: OLMoE(pretrained=...) (--model.pretrained), or "
            "load_from_checkpoint of your module, in place of ckpt_path"
        )


def refuse_groups_of_processes(sharded: ShardedOptimizer) -> None:
    """Stop if processes made different groups; collective.

    Raises:
        UserError: says which first.
    """
    own = [{key: _plain(item) for key, item in group.items()} for group in options_of_groups(sharded.optimizer)]
    first, *others = sharded.mesh.world.all_gather_objects(own)
    for rank, options in enumerate(others, start=1):
        if len(options) != len(first):
            raise UserError(
                f"configure_optimizers made {len(first)} parameter groups on rank 0 and {len(options)} on rank "
                f"{rank}; {_SAME}"
            )
        for place, (one, other) in enumerate(zip(first, options, strict=True)):
            for key in sorted(key for key in one.keys() | other.keys() if one.get(key) != other.get(key)):
                raise UserError(
                    f"parameter group {place} has {key}={one.get(key)!r} on rank 0 and {other.get(key)!r} on rank "
                    f"{rank}; {_SAME}"
                )


def _plain(item: Any) -> Any:
    """As something that compares and travels."""
    return item.tolist() if isinstance(item, Tensor) else item if isinstance(item, int | float | bool) else repr(item)


def options_of_directory(
    sharded: ShardedOptimizer, saved: Sequence[Options], group_of: Mapping[str, int | str]
) -> list[Options]:
    """The options of each group of this process, of a directory.

    Args:
        sharded: the optimizer here.
        saved: the options there.
        group_of: group of each parameter: its place; of older checkpoints its name, or the place if it had none.

    Raises:
        UserError: they do not fit.
    """
    names = {str(group.get("name", place)): place for place, group in enumerate(saved)}
    places = {name: names.get(group, -1) if isinstance(group, str) else group for name, group in group_of.items()}
    if len(names) < len(saved) and any(isinstance(group, str) for group in group_of.values()):
        raise UserError(
            "the checkpoint was written by an older version, which took parameter groups of one name for one; its "
            "options are lost: start anew from its weights"
        )
    return _aligned(sharded, saved, places)


def options_of_file(sharded: ShardedOptimizer, saved: Sequence[Options], names: Mapping[int, str]) -> list[Options]:
    """The same of a joined file.

    Args:
        sharded: the optimizer here.
        saved: the groups there, with ``params``: numbers, or names.
        names: of numbers.

    Raises:
        UserError: they do not fit.
    """
    members = {member: place for place, group in enumerate(saved) for member in group.get("params", ())}
    if not names and not any(isinstance(member, str) for member in members):
        return _of_plain_file(sharded, saved)
    return _aligned(sharded, saved, {str(names.get(member, member)): place for member, place in members.items()})


def _of_plain_file(sharded: ShardedOptimizer, saved: Sequence[Options]) -> list[Options]:
    """Of a file that knows numbers alone, as other strategies write them: groups must be of the same sizes."""
    here = [len(ids) for ids in sharded.numbering().groups]
    there = [len(group["params"]) for group in saved]
    if here == there:
        return list(saved)
    if [size for size in here if size] != [size for size in there if size]:
        raise UserError(
            f"the checkpoint's optimizer has parameter groups of {there} parameters, this one of {here}; {_CONFIGURE}"
        )
    filled = iter(group for group in saved if group["params"])
    own = options_of_groups(sharded.optimizer)
    return [next(filled) if size else options for size, options in zip(here, own, strict=True)]


def _aligned(sharded: ShardedOptimizer, saved: Sequence[Options], places: Mapping[str, int]) -> list[Options]:
    """The saved options of each group here; where their numbers differ, groups without parameters are left out.

    Args:
        sharded: the optimizer here.
        saved: the options there.
        places: of the group there, by parameter.
    """
    own = options_of_groups(sharded.optimizer)
    here = {name: place for name, place in groups_of_parameters(sharded).items() if name in places}
    if len(own) == len(saved):
        moved = [name for name, place in here.items() if places[name] != place]
        if moved:
            raise UserError(
                f"{len(moved)} parameters are in other parameter groups than when the checkpoint was written, for "
                f"example {moved[0]} in group {_shown(own, here[moved[0]])} instead of "
                f"{_shown(saved, places[moved[0]])}; {_CONFIGURE}"
            )
        return list(saved)
    there = {(here[name], places[name]) for name in here}
    one_to_one = len({place for place, _ in there}) == len({place for _, place in there}) == len(there)
    if not one_to_one or len(set(places.values())) > len(own):
        raise UserError(
            f"the checkpoint's optimizer has {len(saved)} parameter groups, of which {len(set(places.values()))} have "
            f"parameters, and this one has {len(own)}; {_CONFIGURE}"
        )
    place_there = dict(there)
    return [saved[place_there[place]] if place in place_there else options for place, options in enumerate(own)]


def _shown(groups: Sequence[Options], place: int) -> str:
    name = groups[place].get("name") if 0 <= place < len(groups) else None
    return f"{place} ({name!r})" if name is not None else str(place)
