"""The situations in which a communication plugin is compared with one process.

T tokens, K chosen experts, E experts of all processes, E_local of each, D model width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from olmoe_lightning.kernels import expert_mlp
from olmoe_lightning.plugins.comm.base import CommPlugin, CommSpec
from olmoe_lightning.plugins.comm.conformance_layer import LEAVES, MOVED, Batch, Findings, Outcome, Setting, compare

D_MODEL = 16
HIDDEN = 8


def _any(tokens: int, experts: int, local: int, k: int, generator: torch.Generator) -> Tensor:
    return torch.rand(tokens, experts, generator=generator).topk(k).indices


def _balanced(tokens: int, experts: int, local: int, k: int, generator: torch.Generator) -> Tensor:
    return (torch.arange(tokens * k) % experts).view(tokens, k)


def _even_ones(tokens: int, experts: int, local: int, k: int, generator: torch.Generator) -> Tensor:
    return 2 * _any(tokens, experts // 2, local, k, generator)


def _not_of_the_last_process(tokens: int, experts: int, local: int, k: int, generator: torch.Generator) -> Tensor:
    return _any(tokens, max(local, experts - local), local, k, generator)


def _the_last_and(tokens: int, experts: int, local: int, k: int, generator: torch.Generator) -> Tensor:
    others = _any(tokens, experts - 1, local, k - 1, generator)
    return torch.cat([torch.full((tokens, 1), experts - 1), others], 1)


def _the_first(tokens: int, experts: int, local: int, k: int, generator: torch.Generator) -> Tensor:
    return torch.arange(k).repeat(tokens, 1)


def _one_layer(plugin: CommPlugin, case: Case, setting: Setting, findings: Findings) -> None:
    _run(plugin, case.batch(setting), setting, findings)


def _run(plugin: CommPlugin, batch: Batch, setting: Setting, findings: Findings, prefix: str = "") -> Outcome:
    layer = batch.layer(*batch.part_of(setting.axis))
    outcome = layer.backward(layer.forward(plugin), batch.own_grad(setting.axis))
    compare(outcome, batch.expected(setting.axis), findings, prefix)
    return outcome


def _no_grad(plugin: CommPlugin, case: Case, setting: Setting, findings: Findings) -> None:
    batch = case.batch(setting)
    with torch.no_grad():
        outcome = batch.layer(*batch.part_of(setting.axis)).forward(plugin)
    compare(outcome, batch.expected(setting.axis, backward=False), findings)
    findings.problems += [f"{name}: requires a gradient under no_grad" for name, t in outcome.items() if _wants_grad(t)]


def _wants_grad(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.requires_grad


def _partly_used(plugin: CommPlugin, case: Case, setting: Setting, findings: Findings) -> None:
    """The loss of the first process reads one token, that of the others all."""
    batch = case.batch(setting)
    batch.grad_TD[1 : batch.starts[1]] = 0
    _run(plugin, batch, setting, findings)


def _sum_as_loss(plugin: CommPlugin, case: Case, setting: Setting, findings: Findings) -> None:
    """The gradient of a sum is one number seen as a matrix: its strides are zero."""
    batch = case.batch(setting)
    batch.grad_TD = torch.ones((), dtype=setting.dtype, device=setting.device).expand_as(batch.grad_TD)
    _run(plugin, batch, setting, findings)


def _strided_tokens(plugin: CommPlugin, case: Case, setting: Setting, findings: Findings) -> None:
    batch = case.batch(setting)
    tokens, experts = batch.part_of(setting.axis)
    layer = batch.layer(tokens, experts)
    layer.tokens = layer.tokens.detach().t().contiguous().t().requires_grad_()
    outcome = layer.backward(layer.forward(plugin), batch.own_grad(setting.axis))
    compare(outcome, batch.expected(setting.axis), findings)


def _in_flight(backwards: Callable[[list[int]], list[int]]) -> Callable[..., None]:
    def check(plugin: CommPlugin, case: Case, setting: Setting, findings: Findings) -> None:
        batches = [case.batch(setting, seed) for seed in range(3)]
        layers = [batch.layer(*batch.part_of(setting.axis)) for batch in batches]
        outcomes = [layer.forward(plugin) for layer in layers]
        for i in backwards([0, 1, 2]):
            outcomes[i] = layers[i].backward(outcomes[i], batches[i].own_grad(setting.axis))
        for i, (outcome, batch) in enumerate(zip(outcomes, batches, strict=True)):
            compare(outcome, batch.expected(setting.axis), findings, f"forward {i + 1} of 3, ")

    return check


def _dispatched_together(plugin: CommPlugin, case: Case, setting: Setting, findings: Findings) -> None:
    """Two dispatches before the first combine: the handle, not the plugin, knows what belongs together."""
    first, second = (case.batch(setting, seed) for seed in range(2))
    layers = [batch.layer(*batch.part_of(setting.axis)) for batch in (first, second)]
    sent = [plugin.dispatch(layer.tokens, layer.ids, layer.weights) for layer in layers]
    for batch, layer, each in zip((first, second), layers, sent, strict=True):
        rows = expert_mlp(each.rows_RD, layer.w_gate_up, layer.w_down, each.row_weights_R, each.offsets_E)
        outputs = {"outputs": plugin.combine(rows, each.handle)}
        wanted = batch.expected(setting.axis)
        compare(layer.backward(outputs, batch.own_grad(setting.axis)), _without(wanted, MOVED), findings)


def _without(outcome: Outcome, names: Collection[str]) -> Outcome:
    return {name: tensor for name, tensor in outcome.items() if name not in names}


def _poisoned(plugin: CommPlugin, case: Case, setting: Setting, findings: Findings) -> None:
    with _nan_in_new_memory():
        _run(plugin, case.batch(setting), setting, findings)


@contextlib.contextmanager
def _nan_in_new_memory() -> Iterator[None]:
    """``torch.empty`` gives NaN, and the largest integers, as PyTorch does for those who want to be deterministic."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _twice(plugin: CommPlugin, case: Case, setting: Setting, findings: Findings) -> None:
    batch = case.batch(setting)
    first, second = (_run(plugin, batch, setting, findings) for _ in range(2))
    for name, tensor in first.items():
        again = second[name]
        if tensor is not None and again is not None and not torch.equal(tensor, again):
            findings.problems.append(f"{name}: not the same to the bit when done again")


def _set_up_again(plugin: CommPlugin, case: Case, setting: Setting, findings: Findings) -> None:
    _one_layer(plugin, case, setting, findings)
    for seed, d_model in ((1, 2 * D_MODEL), (0, D_MODEL)):
        plugin.teardown()
        plugin.teardown()
        batch = case.batch(setting, seed, d_model)
        plugin.setup(setting.axis, batch.spec)
        _run(plugin, batch, setting, findings, f"after setup with d_model {d_model}, ")


def _indivisible(plugin: CommPlugin, case: Case, setting: Setting, findings: Findings) -> None:
    plugin.teardown()
    size = setting.axis.size
    experts = size * case.experts_local + 1
    try:
        plugin.setup(setting.axis, CommSpec(experts, 2, D_MODEL, setting.dtype, setting.device))
    except ValueError as error:
        if str(experts) not in str(error) or str(size) not in str(error):
            findings.problems.append(f"setup: the error names neither {experts} experts nor {size} processes: {error}")
    else:
        if size > 1:
            findings.problems.append(f"setup: accepts {experts} experts on {size} processes")


@dataclass(frozen=True)
class Case:
    """One situation.

    Args:
        name: says what is special.
        choose: (tokens, E, E_local, K, generator) -> expert ids [tokens, K].
        tokens: number of tokens of a process, from its rank.
        top_k: K.
        experts_local: E_local.
        equal_weights: all weights are 1/K, as a router gives them when all scores are equal.
        trained: leaves that want a gradient.
        first_ignores_weights: the experts of the first process do not multiply with the rows' weights.
        check: what is done; by default one layer, forward and backward.
    """

    name: str
    choose: Callable[[int, int, int, int, torch.Generator], Tensor] = _any
    tokens: Callable[[int], int] = lambda rank: 12
    top_k: int = 2
    experts_local: int = 4
    equal_weights: bool = False
    trained: Collection[str] = LEAVES
    first_ignores_weights: bool = False
    check: Callable[[CommPlugin, Case, Setting, Findings], None] = _one_layer

    def batch(self, setting: Setting, seed: int = 0, d_model: int = D_MODEL) -> Batch:
        """The tokens of all processes; another seed gives others, and ``seed`` more of them."""
        size, k = setting.axis.size, self.top_k
        experts = size * self.experts_local
        counts = [self.tokens(rank) + seed for rank in range(size)]
        total = sum(counts)
        generator = torch.Generator().manual_seed(seed)
        weights = torch.rand(total, k, generator=generator) + 0.1

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(setting.device, setting.dtype)

        tensors = {
            "tokens": normal(total, d_model),
            "ids": self.choose(total, experts, self.experts_local, k, generator).to(setting.device),
            "weights": (torch.full_like(weights, 1 / k) if self.equal_weights else weights).to(setting.device),
            "w_gate_up": normal(experts, 2 * HIDDEN, d_model),
            "w_down": normal(experts, d_model, HIDDEN),
        }
        spec = CommSpec(experts, k, d_model, setting.dtype, setting.device, max(counts))
        starts = [sum(counts[:rank]) for rank in range(size + 1)]
        ignoring = self.experts_local if self.first_ignores_weights else 0
        return Batch(tensors, normal(total, d_model), starts, spec, self.trained, ignoring)


CASES = (
    Case("balanced", _balanced),
    Case("one local expert", top_k=1, experts_local=1),
    Case("top-1", top_k=1),
    Case("top-3", top_k=3),
    Case("experts without rows", _even_ones),
    Case("a process whose experts get nothing", _not_of_the_last_process),
    Case("a process without tokens", tokens=lambda rank: 9 * min(rank, 1)),
    Case("no tokens anywhere", tokens=lambda rank: 0),
    Case("one hot expert", _the_last_and),
    Case("one expert takes all", _the_last_and, top_k=1),
    Case("ties", _the_first, equal_weights=True),
    Case("token counts differ", tokens=lambda rank: 3 + 7 * rank),
    Case("no_grad", check=_no_grad),
    Case("tokens without gradient", trained=("weights", "w_gate_up", "w_down")),
    Case("weights without gradient", trained=("tokens", "w_gate_up", "w_down")),
    Case("only experts learn", trained=("w_gate_up", "w_down")),
    Case("a process that ignores the weights", first_ignores_weights=True),
    Case("a loss that reads one token", check=_partly_used),
    Case("a sum as loss", check=_sum_as_loss),
    Case("tokens with strides", check=_strided_tokens),
    Case("two dispatches before a combine", check=_dispatched_together),
    Case("three forwards, then backwards", check=_in_flight(lambda order: order)),
    Case("three forwards, then backwards in reverse", check=_in_flight(lambda order: order[::-1])),
    Case("NaN in new memory", tokens=lambda rank: 5 * rank, check=_poisoned),
    Case("the same twice", check=_twice),
    Case("set up again", check=_set_up_again),
    Case("experts that cannot be shared out", check=_indivisible),
)
