"""Optimizers that are no single element-wise step: equal to plain Lightning, or refused with a remedy that works."""

import functools
import inspect
import math

import optimizer_lab as lab
import pytest
import torch
from strategy_lab import (
    CLOSE,
    CONFIG,
    SMALL_BUCKETS,
    Dense,
    Lion,
    WithExperts,
    own_batches,
    quiet,
    same,
    sentences,
    slow_network,
    state_of,
    trained,
    trained_alone,
    vectors,
)
from torch import nn
from torch.optim import SGD, Optimizer

from olmoe_lightning import MoEStrategy, OLMoE
from olmoe_lightning.parallel import elementwise
from olmoe_lightning.parallel.elementwise import Scope, reach_of
from olmoe_lightning.parallel.sharded_optimizer import ShardedOptimizer
from olmoe_lightning.plugins import BF16Precision
from olmoe_lightning.strategy import NonFiniteError


def make(kind, parameters):
    """An optimizer by its name."""
    if kind == "Lookahead":
        return lab.Lookahead(SGD(parameters, lr=0.05, momentum=0.9))
    if kind.startswith("LBFGS"):
        search = "strong_wolfe" if "search" in kind else None
        return torch.optim.LBFGS(parameters, lr=0.1, max_iter=4, line_search_fn=search)
    if kind in ("Adafactor", "AdamW"):
        return getattr(torch.optim, kind)(parameters, lr=0.05)
    return getattr(lab, kind)(parameters)


# ---------------------------------------------------------------------------------------------- what is found out


def parameters(*shapes):
    return [nn.Parameter(torch.ones(shape)) for shape in shapes or [(3, 4), (4,)]]


TORCHS = [each for each in vars(torch.optim).values() if inspect.isclass(each) and issubclass(each, Optimizer)]


@pytest.mark.parametrize("kind", [kind for kind in TORCHS if kind is not Optimizer])
def test_the_known_ones_are_those_that_would_pass(monkeypatch, kind):
    monkeypatch.setattr(elementwise, "KNOWN", ())
    reach = reach_of(kind(parameters((3, 4)), lr=0.1))
    monkeypatch.undo()
    assert (reach.scope == Scope.ELEMENT) == (kind in elementwise.KNOWN), reach


class Muon(SGD):
    """Only its name is that of an optimizer of matrices."""


FOUND = {
    "Muon": (lambda: Muon(parameters(), lr=0.0), Scope.ELEMENT),
    "Lion": (lambda: Lion(parameters()), Scope.ELEMENT),
    "a tensor as learning rate": (lambda: lab.Counting(parameters(), lr=torch.tensor(0.0)), Scope.ELEMENT),
    "Quantised": (lambda: lab.Quantised(parameters()), Scope.TENSOR),
    "the second of two groups": (
        lambda: lab.Mixed([{"params": parameters()}, {"params": parameters(), "normed": True}]),
        Scope.TENSOR,
    ),
    "groups of one kind": (lambda: lab.GlobalSum([{"params": [p], "lr": 0.1} for p in parameters()]), Scope.ALL),
    "Declared": (lambda: lab.Declared(parameters()), Scope.ELEMENT),
}
FOUND |= {
    kind: (lambda kind=kind: make(kind, parameters()), scope)
    for scope, kinds in (
        (Scope.ELEMENT, ("Extragradient", "ScheduleFree", "Counting", "Lookahead")),
        (Scope.TENSOR, ("LayerNormed", "Factored", "Orthogonal", "ClippedAdamW", "InheritsDeclaration")),
        (Scope.ALL, ("GlobalSum", "Sharpness", "Langevin")),
    )
    for kind in kinds
}


@pytest.mark.parametrize("kind", FOUND)
def test_what_an_optimizer_looks_at_is_found_out_and_nothing_changed(kind):
    build, scope = FOUND[kind]
    optimizer = build()
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    before, random, state = repr(vars(optimizer)), torch.get_rng_state(), [value.clone() for value in held]
    reach = reach_of(optimizer)
    assert reach.scope == scope, reach
    assert repr(vars(optimizer)) == before
    assert torch.equal(torch.get_rng_state(), random)
    assert all(map(torch.equal, held, state))
    assert all(parameter.grad is None for parameter in held)


def test_an_object_may_be_declared_as_well():
    optimizer = lab.LayerNormed(parameters())
    optimizer.elementwise = True
    assert reach_of(optimizer).scope == Scope.ELEMENT
    optimizer.elementwise = False
    assert reach_of(optimizer).scope == Scope.ALL


# ---------------------------------------------------------------------------------------------- data parallelism


def train(kind, steps=4, precision=None, control=False, batches=None, **options):
    """Weights after some steps, or the error; as a control, with second closures that see the weights of before."""
    strategy = MoEStrategy(**({"bucket_megabytes": SMALL_BUCKETS} | options.pop("strategy", {})))
    plugins = [BF16Precision()] if precision == "bf16" else None
    publish = ShardedOptimizer.publish
    if control:
        ShardedOptimizer.publish = lambda _: None
    try:
        module = Dense(lambda module: make(kind, module.parameters()))
        return trained(module, batches or vectors(2 * steps), strategy=strategy, plugins=plugins, **options)
    except (ValueError, NonFiniteError) as error:
        return str(error)
    finally:
        ShardedOptimizer.publish = publish


class Joined(Dense):
    """Computes the batches of two processes at once: closures that are called again see the last batch alone."""

    def training_step(self, batch, batch_idx):
        return self.loss(torch.cat(list(batch)))


def alone(kind, steps=4):
    module = Joined(lambda module: make(kind, module.parameters()))
    batches = vectors(2 * steps)
    return trained_alone(module, list(zip(batches[::2], batches[1::2], strict=True)), ranks=1)


@pytest.mark.parametrize("kind", ["Extragradient", "Lookahead", "Counting"])
def test_element_wise_ones_may_be_sharded(workers, kind):
    ours, _ = workers(2).run(train, kind)
    torch.testing.assert_close(ours, alone(kind), **CLOSE)


REPLICATED = {"shard_optimizer": False}


@pytest.mark.parametrize(
    ("kind", "precision", "strategy"),
    [
        ("Extragradient", None, {}),
        ("Extragradient", "bf16", {}),
        ("Sharpness", "bf16", REPLICATED),
    ],
)
def test_a_second_closure_sees_the_weights_that_the_optimizer_has_then(workers, kind, precision, strategy):
    wanted = alone(kind)
    bounds = CLOSE if precision is None else {"rtol": 0.05, "atol": 5e-3}
    ours, _ = workers(2).run(train, kind, 4, precision, strategy=strategy)
    torch.testing.assert_close(ours, wanted, **bounds)
    stale, _ = workers(2).run(train, kind, 4, precision, True, strategy=strategy)
    assert not all(torch.allclose(stale[name], wanted[name], **bounds) for name in wanted)


def slow(*kinds):
    return [pytest.param(kind, marks=pytest.mark.slow) for kind in kinds]


WHOLE = ("LayerNormed", "Factored", "Adafactor", "Orthogonal", "ClippedAdamW", "GlobalSum", "Sharpness")
SEARCHES = ("LBFGS", "LBFGS with line search")


@pytest.mark.parametrize(
    "kind",
    ["LayerNormed", "Sharpness", "LBFGS with line search", *slow(*WHOLE[1:-1], "LBFGS")],
)
def test_others_are_refused_with_a_remedy_that_works(workers, kind):
    for message in workers(2).run(train, kind):
        assert f"{kind.split()[0]} does not treat each element alone" in message
        assert "MoEStrategy(shard_optimizer=False)" in message
    # LBFGS divides by small differences of gradients: it makes a hundred times of a deviation in each step.
    steps, bounds = (2, {"rtol": 1e-3, "atol": 1e-4}) if kind in SEARCHES else (4, CLOSE | {"atol": 2e-6})
    ours, _ = workers(2).run(train, kind, steps, strategy=REPLICATED)
    torch.testing.assert_close(ours, alone(kind, steps), **bounds)
    assert max(float((ours[name] - value).abs().max()) for name, value in Dense().state_dict().items()) > 1e-4


def test_with_a_declaration_that_is_wrong_the_numbers_are_others(workers):
    ours, _ = workers(2).run(train, "Declared")
    wanted = alone("Declared")
    assert not torch.allclose(ours["first.weight"], wanted["first.weight"], rtol=1e-3)


@pytest.mark.parametrize("strategy", [{}, REPLICATED])
def test_noise_is_refused_unless_one_process_draws_it_for_each_element(workers, strategy):
    for message in workers(2).run(train, "Langevin", strategy=strategy):
        assert "Langevin draws random numbers" in message
        assert "shard_optimizer=True" in message
    left, right = workers(2).run(train_declared_noise)
    assert same(left, right)


def train_declared_noise():
    def optimizer(module):
        made = lab.Langevin(module.parameters())
        made.elementwise = True
        return made

    torch.manual_seed(torch.distributed.get_rank())
    module = Dense(optimizer)
    trained(module, vectors(8))
    return module.state_dict()


@pytest.mark.parametrize("strategy", [{}, REPLICATED])
def test_lists_of_an_optimizers_own_are_refused_by_name(workers, strategy):
    for message in workers(2).run(train, "OwnLists", strategy=strategy):
        assert "OwnLists keeps parameters in OwnLists.everything, beside its param_groups" in message


@pytest.mark.parametrize("kind", ["Sharpness", "OwnLists", "Langevin", *slow(*WHOLE[:-1], "LBFGS")])
def test_one_process_refuses_none(kind):
    module = Dense(lambda module: make(kind, module.parameters()))
    ours = trained(module, vectors(4), strategy=MoEStrategy(), devices=1)
    wanted = trained_alone(Dense(lambda module: make(kind, module.parameters())), vectors(4), ranks=1)
    torch.testing.assert_close(ours, wanted, **(CLOSE | {"atol": 1e-5}))


class Hooked(Joined):
    """Changes gradients in hooks, of each closure."""

    def training_step(self, batch, batch_idx):
        return self.loss(torch.cat(list(batch)) if isinstance(batch, tuple | list) else batch)

    def on_after_backward(self):
        self.first.weight.grad[:3] = 0

    def on_before_optimizer_step(self, optimizer):
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.5)


def train_hooked(kind, strategy):
    module = Hooked(lambda module: make(kind, module.parameters()))
    return trained(module, vectors(8), strategy=MoEStrategy(bucket_megabytes=SMALL_BUCKETS, **strategy))


@pytest.mark.parametrize(("kind", "strategy"), [("Extragradient", {}), ("Sharpness", REPLICATED)])
def test_hooks_see_and_change_the_gradients_of_every_closure(workers, kind, strategy):
    ours, _ = workers(2).run(train_hooked, kind, strategy)
    module = Hooked(lambda module: make(kind, module.parameters()))
    batches = list(zip(vectors(8)[::2], vectors(8)[1::2], strict=True))
    wanted = trained_alone(module, batches, ranks=1)
    torch.testing.assert_close(ours, wanted, **(CLOSE | {"atol": 2e-6}))
    torch.testing.assert_close(ours["first.weight"][:3], Dense().first.weight[:3].detach())


def test_second_closures_and_accumulated_batches_are_refused(workers):
    for message in workers(2).run(train, "Sharpness", strategy=REPLICATED, accumulate=2):
        assert "of the 2 batches that are accumulated only the last one can be computed again" in message


# ---------------------------------------------------------------------------------------------- steps that are skipped

SPOILT = torch.full((4, 8), math.nan)


@pytest.mark.parametrize("kind", ["ScheduleFreeDense", "Sharpness", "GlobalSum"])
def test_a_skipped_step_leaves_numbers_in_groups_as_well(workers, kind):
    """A step without gradients would count, or fail."""
    good = vectors(8)
    ours, _ = workers(2).run(train, kind, batches=[*good[:4], good[4], SPOILT, *good[4:]], strategy=REPLICATED)
    wanted, _ = workers(2).run(train, kind, batches=good, strategy=REPLICATED)
    assert same(ours, wanted)


def train_bad_second():
    calls = []

    def step(module, x, number):
        calls.append(number)
        return module.loss(x) * (math.nan if len(calls) == 4 else 1.0)

    module = Dense(lambda module: make("Extragradient", module.parameters()), step=step)
    try:
        trained(module, vectors(8))
    except NonFiniteError as error:
        return str(error)
    return "nothing"


def test_what_is_not_finite_in_a_second_closure_ends_the_run(workers):
    for message in workers(2).run(train_bad_second):
        assert "optimizer step 1" in message
        assert "call 2 of the closure" in message


# ---------------------------------------------------------------------------------------------- swapped weights


class Swapping(Dense):
    """Validates the averaged weights of a schedule-free optimizer."""

    def __init__(self):
        super().__init__(lambda module: lab.ScheduleFree(module.parameters()))
        self.seen = []

    def on_train_epoch_start(self):
        self.optimizers().train()

    def on_validation_model_eval(self):
        super().on_validation_model_eval()
        if not self.trainer.sanity_checking:
            self.optimizers().eval()

    def on_validation_model_train(self):
        super().on_validation_model_train()
        self.optimizers().optimizer.train()

    def validation_step(self, batch, batch_idx):
        self.seen.append(float(self.loss(batch.to(self.first.weight.dtype))))


def swap(shard=None, precision=None, devices=2, accumulate=1, module=None):
    strategy = "auto" if shard is None else MoEStrategy(shard_optimizer=shard, bucket_megabytes=SMALL_BUCKETS)
    module = module or Swapping()
    options = {"devices": devices, "accumulate_grad_batches": accumulate, "val_check_interval": 2 * accumulate}
    plugins = [BF16Precision()] if precision == "bf16" else None
    trainer = quiet(strategy, plugins=plugins, max_epochs=2, **options)
    trainer.fit(module, own_batches(vectors(8)), own_batches([vectors(9)[-1]] * 2))
    return module.seen, state_of(trainer)


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("shard", [True, False])
def test_validation_sees_swapped_weights(workers, shard, precision):
    (ours, state), (others, _) = workers(2).run(swap, shard, precision)
    seen, wanted = swap(devices=1, accumulate=2)
    assert ours == others
    assert ours == pytest.approx(seen[::2], rel=1e-5 if precision is None else 0.05)
    bounds = CLOSE if precision is None else {"rtol": 0.05, "atol": 0.02}
    torch.testing.assert_close(state, wanted, **bounds)


class SwappingEarly(Swapping):
    """Says that it waits for no weights."""

    reads_weights_between_steps = False


def swap_early():
    with slow_network():
        return swap(True, module=SwappingEarly())


def test_weights_have_arrived_before_they_are_swapped(workers):
    (ours, _), _ = workers(2).run(swap_early)
    seen, _ = swap(devices=1, accumulate=2)
    assert ours == pytest.approx(seen[::2], rel=1e-5)


# ---------------------------------------------------------------------------------------------- experts and stages


class Sentences(OLMoE):
    def __init__(self, kind):
        super().__init__(CONFIG.replace(balance_loss_scope="sequence"))  # the same function, however a batch is cut
        self._kind = kind

    def configure_optimizers(self):
        return make(self._kind, self.parameters())


class Experts(WithExperts):
    def __init__(self, kind):
        super().__init__()
        self._kind = kind

    def configure_optimizers(self):
        return make(self._kind, self.parameters())


def train_parts(kind, module, batches, strategy):
    trainer = quiet(MoEStrategy(**strategy))
    try:
        trainer.fit(module(kind), own_batches(batches))
    except ValueError as error:
        return str(error)
    return state_of(trainer)


def test_experts_of_one_tensor_on_several_processes_are_refused(workers):
    run = functools.partial(workers(2).run, train_parts, "LayerNormed", Experts, vectors(8))
    spread = {"expert_parallel_size": 2}
    for message in run(spread):
        assert "MoEStrategy(shard_optimizer=False, expert_parallel_size=1)" in message
    for message in run(spread | REPLICATED):
        assert "MoEStrategy(expert_parallel_size=1)" in message
    ours, _ = run(REPLICATED)
    torch.testing.assert_close(ours, trained_alone(Experts("LayerNormed"), vectors(8)), **(CLOSE | {"atol": 2e-6}))


STAGES = {"pipeline_parallel_size": 2, "num_microbatches": 2}


@pytest.mark.parametrize("kind", ["LayerNormed", "Extragradient", *slow("Factored")])
def test_whole_tensors_are_there_in_stages(workers, kind):
    twice = [batch for batch in sentences(4) for _ in range(2)]
    ours, _ = workers(2).run(train_parts, kind, Sentences, twice, STAGES)
    torch.testing.assert_close(ours, trained_alone(Sentences(kind), sentences(4), ranks=1), rtol=1e-4, atol=5e-6)


@pytest.mark.parametrize("kind", ["Sharpness", *slow("GlobalSum", "LBFGS")])
def test_sums_over_all_tensors_are_refused_in_stages(workers, kind):
    for message in workers(2).run(train_parts, kind, Sentences, sentences(4), STAGES):
        assert f"{kind} does not treat each tensor alone" in message
        assert "MoEStrategy(pipeline_parallel_size=1)" in message


# ---------------------------------------------------------------------------------------------- resumed


def resume(kind, folder, strategy):
    def optimizer(module):
        return make(kind, module.parameters())

    batches = vectors(8)
    whole = trained(Dense(optimizer), batches, strategy=MoEStrategy(**strategy))
    first = quiet(MoEStrategy(**strategy))
    first.fit(Dense(optimizer), own_batches(batches[:4]))
    first.save_checkpoint(folder / kind)
    second = quiet(MoEStrategy(**strategy), max_epochs=2)
    second.fit(Dense(optimizer), own_batches(batches[4:]), ckpt_path=folder / kind)
    return whole, state_of(second)


@pytest.mark.parametrize("kind", ["Factored", "LBFGS", "ScheduleFreeDense", *slow("Sharpness", "GlobalSum")])
def test_a_resumed_run_goes_on(workers, tmp_path, kind):
    strategy = {"bucket_megabytes": SMALL_BUCKETS} if kind == "ScheduleFreeDense" else REPLICATED
    whole, resumed = workers(2).run(resume, kind, tmp_path, strategy)[0]
    torch.testing.assert_close(resumed, whole, rtol=0, atol=0)
