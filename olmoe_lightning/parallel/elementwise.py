"""How far an optimizer looks when it updates an element: at that element alone, at its tensor, or at all tensors.

A process can update a part of a parameter only with an optimizer that treats each element alone. torch's own optimizers
of that kind are known. Any other says it of itself, or copies of it are tried out on small tensors: as the optimizer of
one process, and as those of two that share the elements.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

from olmoe_lightning.errors import UserError

KNOWN = (ASGD, SGD, Adadelta, Adagrad, Adam, AdamW, Adamax, NAdam, RAdam, RMSprop, Rprop)
"""Element-wise with all their options. Not their subclasses, which may take another step."""

DECLARED = "elementwise"
"""``elementwise = True`` in the class that defines ``step``, or on the object: each element is treated alone."""

_STEPS = 12  # some do something else every few steps (slow weights, preconditioners)
_SHAPE = (56, 160)  # quantised states begin at 4096 elements, which half of it has as well
_SMALL = (5, 6)
_RATE = 0.05
_RATES = ("lr", "initial_lr")


class Scope(IntEnum):
    """What the update of an element depends on."""

    ELEMENT = 0
    TENSOR = 1
    ALL = 2


class Reach(NamedTuple):
    """What is known of an optimizer."""

    scope: Scope
    reason: str = ""
    """Why it is not element-wise."""
    random: bool = False
    """Whether it draws random numbers."""


def reach_of(optimizer: Optimizer) -> Reach:
    """How far an optimizer looks, from what it is, says or does.

    Args:
        optimizer: as the user made it. It is not changed, and no random number is used up.

    Returns:
        The same on all processes.
    """
    says = _declared(optimizer)
    if type(optimizer) in KNOWN or says:
        return Reach(Scope.ELEMENT)
    if says is False:
        return Reach(Scope.ALL, f"it says so ({DECLARED} = False)")
    device = next((p.device for group in optimizer.param_groups for p in group["params"]), torch.device("cpu"))
    accelerators = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(accelerators):
        try:
            return _try_out(optimizer, device)
        except Exception as error:
            return Reach(Scope.ALL, f"it could not be tried out on small tensors ({_said(error)})")


def refuse_reach(optimizer: Optimizer, sharded: bool, experts: bool, stages: bool, replicas: bool) -> None:
    """Stop at an optimizer that would take other steps on several processes than on one.

    Args:
        optimizer: as the user made it.
        sharded: a process is to update a part of a parameter.
        experts: a process has some experts of a tensor.
        stages: a process has some of the tensors.
        replicas: several processes make the same update.

    Raises:
        UserError: what it looks at, how that was found, and what would work.
    """
    if not (sharded or experts or stages or replicas) or type(optimizer) in KNOWN:
        return
    reach, kind = reach_of(optimizer), type(optimizer).__name__
    spread = ["expert_parallel_size=1"] if experts and reach.scope > Scope.ELEMENT else []
    spread += ["pipeline_parallel_size=1"] if stages and reach.scope > Scope.TENSOR else []
    say = f"if it does treat each element alone, say `{DECLARED} = True` in the class that defines its step"
    if reach.random:
        raise UserError(
            f"{kind} draws random numbers, and processes that hold the same weights would draw different ones. "
            f"MoEStrategy(shard_optimizer=True) can be used, where one process updates each element: {say}"
        )
    if (sharded and reach.scope > Scope.ELEMENT) or spread:
        what = ["each element alone", "each tensor alone"][bool(stages and not (sharded or experts))]
        settings = ", ".join(["shard_optimizer=False"] * sharded + spread)
        raise UserError(
            f"{kind} does not treat {what}, so that a process cannot update a part with it: {reach.reason}. Take an "
            f"element-wise optimizer (AdamW, Lion, SGD ...) or MoEStrategy({settings}); {say}"
        )


def refuse_references(optimizer: Optimizer, parameters: set[nn.Parameter]) -> None:
    """Stop at an optimizer that would go on with parameters which are no longer in its groups.

    Args:
        optimizer: as the user made it.
        parameters: in whose place others are put there.

    Raises:
        UserError: where it keeps them.
    """
    groups = optimizer.param_groups
    known = {id(groups), id(optimizer.state), *(id(each) for group in groups for each in (group, group["params"]))}
    kind = type(optimizer).__name__
    found = [f"{kind}.{name}" for name, value in vars(optimizer).items() if _mentions(value, parameters, known)]
    if found:
        raise UserError(
            f"{kind} keeps parameters in {', '.join(found)}, beside its param_groups. MoEStrategy puts the tensors "
            "that are to be updated into param_groups: let the optimizer look them up there at each step, or take "
            "Lightning's `ddp` strategy"
        )


def _mentions(value: Any, parameters: set[nn.Parameter], known: set[int]) -> bool:
    if isinstance(value, nn.Parameter):
        return value in parameters
    if id(value) in known:
        return False
    known.add(id(value))
    if isinstance(value, Optimizer):
        value = vars(value)
    if isinstance(value, Mapping):
        return any(_mentions(each, parameters, known) for pair in value.items() for each in pair)
    if isinstance(value, list | tuple | set | frozenset):
        return any(_mentions(each, parameters, known) for each in value)
    return False


def _declared(optimizer: Optimizer) -> bool | None:
    if DECLARED in vars(optimizer):
        return bool(vars(optimizer)[DECLARED])
    home = next((base for base in type(optimizer).__mro__ if "step" in vars(base)), Optimizer)
    return bool(vars(home)[DECLARED]) if DECLARED in vars(home) else None


# ---------------------------------------------------------------------------------------------------- trying it out


class _Piece(NamedTuple):
    """A small tensor, or a part of one, that a copy of the optimizer updates."""

    tensor: int
    """Its number."""
    start: Tensor
    """First values."""
    noise: Tensor
    """[steps, ...]"""


class _Path(NamedTuple):
    """What became of a piece, of each element."""

    update: Tensor
    """By all steps, [elements]."""
    moved: Tensor
    """In a step that called the closure once more, by then: [calls, elements]."""


def _try_out(optimizer: Optimizer, device: torch.device) -> Reach:
    generator = torch.Generator().manual_seed(0)
    pairs: list[tuple[_Piece, _Piece]] = []
    for shape in _shapes(optimizer):
        first = _piece(2 * len(pairs), shape, 1.0, generator, device)
        pairs.append((first, _piece(2 * len(pairs) + 1, shape[::-1], 3.0, generator, device)))
    before = _random_state(device)
    whole = _run(optimizer, pairs)
    if not torch.equal(_random_state(device), before):
        return Reach(Scope.ALL, "it draws random numbers", random=True)
    if not all(bool(path.update.isfinite().all() and path.update.any()) for path in whole.values()):
        return Reach(Scope.ALL, "tried out on small tensors, it does not move them by finite steps")

    def away(*copies: Sequence[Sequence[_Piece]]) -> float | str:
        """How far from the whole copies end that have pieces of each group; or the error of one."""
        found: dict[int, _Path] = {}
        try:
            for pieces in copies:
                for number, path in _run(optimizer, pieces).items():
                    found[number] = _joined(found[number], path) if number in found else path
        except Exception as error:
            return _said(error)
        return max(_deviation(path, found[number]) for number, path in whole.items())

    parts = [(*_halves(first), second) for first, second in pairs]
    alone = away([[lower] for lower, _, _ in parts], [[upper, second] for _, upper, second in parts])
    if alone == 0:
        return Reach(Scope.ELEMENT)
    reason = f"on half of a tensor its step fails with {alone}"
    if isinstance(alone, float):
        reason = f"on two halves of a tensor and on the whole one its steps differ by {alone:.2g} of the largest"
    apart = away([[first] for first, _ in pairs], [[second] for _, second in pairs])
    return Reach(Scope.TENSOR if apart == 0 else Scope.ALL, reason)


def _joined(lower: _Path, upper: _Path) -> _Path:
    """Of two parts of a tensor."""
    calls = min(len(lower.moved), len(upper.moved))
    return _Path(torch.cat((lower.update, upper.update)), torch.cat((lower.moved[:calls], upper.moved[:calls]), 1))


def _deviation(expected: _Path, found: _Path) -> float:
    """Largest difference relative to the largest value, but for single elements; 0 if it is that of rounding."""
    if expected.moved.shape != found.moved.shape:
        return float("inf")
    worst = 0.0
    # What is left of a small move when it is subtracted from a value has few digits.
    for left, right, tolerance in ((expected.update, found.update, 1e-4), (expected.moved, found.moved, 1e-2)):
        if left.numel():
            differences = (left - right).abs().flatten()
            few = 3 if len(differences) > 1000 else 1  # a sign may turn where a value is zero up to rounding
            away = float(differences.topk(few).values[-1] / left.abs().max().clamp_min(1e-30))
            worst = max(worst, 0.0 if away <= tolerance else away if away < float("inf") else float("inf"))
    return worst


def _shapes(optimizer: Optimizer) -> list[tuple[int, int]]:
    """Of a tensor for each group: small ones where another group has the same options."""
    seen: set[str] = set()
    shapes = []
    for group in optimizer.param_groups:
        options = repr({key: value for key, value in group.items() if key not in ("params", "name", *_RATES)})
        shapes.append(_SMALL if options in seen else _SHAPE)
        seen.add(options)
    return shapes


def _piece(
    number: int, shape: tuple[int, int], scale: float, generator: torch.Generator, device: torch.device
) -> _Piece:
    """Gradients of one half are ten times as large as those of the other, and grow and shrink a hundredfold."""
    noise = torch.randn(_STEPS, *shape, generator=generator) * scale
    noise.view(_STEPS, -1)[:, noise[0].numel() // 2 :] *= 10
    noise *= torch.tensor([0.01, 0.1, 1.0]).repeat(_STEPS // 3).view(-1, 1, 1)
    return _Piece(number, torch.randn(shape, generator=generator).to(device), noise.to(device))


def _halves(piece: _Piece) -> tuple[_Piece, _Piece]:
    """Flat, as shards are, and cut where no block of a quantised state ends."""
    start, noise = piece.start.reshape(-1), piece.noise.reshape(_STEPS, -1)
    cut = len(start) // 2 + 1
    return _Piece(piece.tensor, start[:cut], noise[:, :cut]), _Piece(piece.tensor, start[cut:], noise[:, cut:])


def _run(optimizer: Optimizer, pieces: Sequence[Sequence[_Piece]]) -> dict[int, _Path]:
    """Take some steps with a copy of an optimizer.

    Args:
        optimizer: any.
        pieces: what the copy has in each group.

    Returns:
        What became of them, by number of the tensor.
    """
    tensors = [[nn.Parameter(piece.start.clone()) for piece in inside] for inside in pieces]
    double = _copy(optimizer, tensors)
    held = [(t, p) for ts, ps in zip(tensors, pieces, strict=True) for t, p in zip(ts, ps, strict=True)]
    moved: dict[int, list[Tensor]] = {piece.tensor: [] for _, piece in held}
    take: Any = type(double).step  # typed for closures that return a float; Lightning's return a tensor
    _switch(double, "train")
    for number in range(_STEPS):
        begin: list[Tensor] = []

        def closure(number: int = number, begin: list[Tensor] = begin) -> Tensor:
            values = [tensor.detach().clone() for tensor, _ in held]
            for (_, piece), value, first in zip(held, values, begin, strict=False):
                moved[piece.tensor].append((value - first).reshape(-1))
            begin[:] = begin or values
            for (tensor, piece), value in zip(held, values, strict=True):
                tensor.grad = piece.noise[number] + 0.01 * value
            return torch.tensor(1.0)

        take(double, closure)
    _switch(double, "eval")
    return {
        piece.tensor: _Path(
            (tensor.detach() - piece.start).reshape(-1),
            torch.stack(moved[piece.tensor]) if moved[piece.tensor] else piece.start.new_zeros(0, piece.start.numel()),
        )
        for tensor, piece in held
    }


def _switch(optimizer: Optimizer, mode: str) -> None:
    """Optimizers that keep other weights for evaluation than for training have methods for that."""
    if callable(method := getattr(type(optimizer), mode, None)):
        method(optimizer)


def _copy(optimizer: Optimizer, tensors: list[list[nn.Parameter]]) -> Optimizer:
    """An optimizer of the same class, options and attributes that holds small tensors.

    The constructor is not called: its arguments are not known, and it may take another optimizer or a class.
    """
    double: Optimizer = object.__new__(type(optimizer))
    state: dict[Tensor, Any] = defaultdict(dict)
    groups: list[dict[str, Any]] = []
    memo: dict[int, Any] = {id(optimizer): double, id(optimizer.state): state, id(optimizer.param_groups): groups}
    for group, inside in zip(optimizer.param_groups, tensors, strict=True):
        small = {key: copy.deepcopy(value) for key, value in group.items() if key != "params"} | {"params": inside}
        if isinstance(small.get("lr"), Tensor):
            small["lr"] = torch.full_like(small["lr"], _RATE)
        elif "lr" in small:
            small["lr"] = _RATE  # in a warm-up it begins with 0
        groups.append(small)
        memo |= {id(group): small, id(group["params"]): inside}
        memo |= {id(parameter): inside[0] for parameter in group["params"]}
        known = [parameter for parameter in group["params"] if parameter in optimizer.state]
        for tensor in inside if known else ():
            state[tensor] = {
                key: _like(value, known[0], tensor, memo) for key, value in optimizer.state[known[0]].items()
            }
    own = set(vars(SGD([nn.Parameter(torch.zeros(1))]))) - {"defaults", "param_groups", "state"}
    for name, value in vars(optimizer).items():
        if name != "step" and name not in own:  # an lr_schedule puts a step there, which is that of the original
            vars(double)[name] = copy.deepcopy(value, memo)
    Optimizer.__setstate__(double, {})
    return double


def _like(value: Any, parameter: Tensor, tensor: Tensor, memo: dict[int, Any]) -> Any:
    """An entry of a parameter's state, for a small tensor."""
    if isinstance(value, Tensor) and value.shape == parameter.shape and value.numel():
        return value.detach().reshape(-1)[0].expand(tensor.shape).clone()
    return copy.deepcopy(value, memo)


def _random_state(device: torch.device) -> Tensor:
    state = torch.get_rng_state()
    return torch.cat([state, torch.cuda.get_rng_state(device)]) if device.type == "cuda" else state


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]
