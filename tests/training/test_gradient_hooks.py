"""Hooks of the user that look at gradients see those of one process, and what they do to them counts."""

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities import grad_norm
from strategy_lab import (
    CLOSE,
    SMALL_BUCKETS,
    Dense,
    WithExperts,
    own_batches,
    quiet,
    state_of,
    trained,
    trained_alone,
    vectors,
)
from test_pipeline import Chain, every_batch, strategy

from olmoe_lightning import MoEStrategy
from olmoe_lightning.plugins import BF16Precision


def momentum(module):
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def zero_rows(module):
    """Rows of an embedding that are not to be trained."""
    module.first.weight.grad[3:11] = 0.0


def replace(module):
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad.sign() * 0.01


def remove(module):
    """Without a gradient neither momentum nor weight decay moves a parameter."""
    module.blocks[0].weight.grad = None


def set_unused(module):
    module.extra.grad = torch.ones_like(module.extra)


def clip_itself(module):
    torch.nn.utils.clip_grad_norm_(module.parameters(), 0.02)


def clip_groups(module):
    for group in module.trainer.optimizers[0].param_groups:
        torch.nn.utils.clip_grad_norm_(group["params"], 0.02)


def keep_norms(module):
    module.norms.append({name: float(value) for name, value in grad_norm(module, 2).items()})


class Hooked(Dense):
    """Does something to gradients in one of its hooks."""

    def __init__(self, change):
        super().__init__(momentum)
        self.extra = torch.nn.Parameter(torch.ones(3))
        self.norms = []
        self.change = change


class AfterBackward(Hooked):
    def on_after_backward(self):
        self.change(self)


class BeforeStep(Hooked):
    def on_before_optimizer_step(self, optimizer):
        self.change(self)


class Clipping(Hooked):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.change(self)


class InClosure(Hooked):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        def closure():
            loss = optimizer_closure()
            self.change(self)
            return loss

        optimizer.step(closure=closure)


class Calls(Callback):
    """The same from a callback."""

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        pl_module.change(pl_module)


class ByCallback(Hooked):
    def configure_callbacks(self):
        return [Calls()]


HOOKS = {hook.__name__: hook for hook in (AfterBackward, BeforeStep, Clipping, InClosure, ByCallback)}
CHANGES = {change.__name__: change for change in (zero_rows, replace, remove, set_unused, clip_itself, clip_groups)}
MODES = {
    "one process": (1, {}),
    "sharded": (2, {}),
    "replicated": (2, {"shard_optimizer": False}),
    "no overlap": (2, {"overlap_grad_reduce": False, "overlap_param_gather": False}),
}


def train_hooked(hook, change, options, accumulate=1, **trainer_options):
    chosen = MoEStrategy(bucket_megabytes=SMALL_BUCKETS, **options)
    module = HOOKS[hook](change)
    return trained(module, vectors(8), chosen, accumulate, **trainer_options), module.norms


def compare(workers, mode, hook, change, accumulate=1, **options):
    processes, of_strategy = MODES[mode]
    if processes == 1:
        ours, norms = train_hooked(hook, change, of_strategy, accumulate, devices=1, **options)
    else:
        ours, norms = workers(processes).run(train_hooked, hook, change, of_strategy, accumulate, **options)[0]
    module = HOOKS[hook](change)
    alone = trained_alone(module, vectors(8), processes, accumulate=accumulate, **options)
    torch.testing.assert_close(ours, alone, **CLOSE)
    return norms, module.norms


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("mode", MODES)
def test_what_a_hook_does_to_gradients_counts(workers, mode, change):
    compare(workers, mode, "BeforeStep", CHANGES[change])


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_sees_the_gradients_of_the_step(workers, hook):
    compare(workers, "sharded", hook, zero_rows)
    if hook != "AfterBackward":  # one process that accumulates calls it twice as often
        compare(workers, "sharded", hook, clip_itself)


@pytest.mark.parametrize("change", [zero_rows, replace, clip_itself, keep_norms])
def test_on_after_backward_sees_what_was_accumulated_so_far(workers, change):
    norms, expected = compare(workers, "one process", "AfterBackward", change, accumulate=4)
    assert norms == [pytest.approx(each, rel=1e-4) for each in expected]


def nothing(module):
    pass


@pytest.mark.parametrize("change", CHANGES)
def test_the_changes_change_something(change):
    """Negative control: none of them leaves the weights as they are without it."""
    left, right = (trained_alone(BeforeStep(each), vectors(8)) for each in (CHANGES[change], nothing))
    assert any(not torch.allclose(left[name], right[name], **CLOSE) for name in left)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_the_trainers_clipping_comes_after_the_hooks(workers, mode, algorithm):
    compare(workers, mode, "AfterBackward", zero_rows, gradient_clip_val=0.02, gradient_clip_algorithm=algorithm)


@pytest.mark.parametrize("mode", MODES)
def test_rows_zeroed_after_each_accumulated_batch_stay(workers, mode):
    compare(workers, mode, "AfterBackward", zero_rows, accumulate=2)


@pytest.mark.parametrize("mode", MODES)
def test_lightnings_norms_are_those_of_one_process(workers, mode):
    ours, alone = compare(workers, mode, "BeforeStep", keep_norms)
    assert len(ours) == len(alone) > 0
    for mine, expected in zip(ours, alone, strict=True):
        assert mine == pytest.approx(expected, rel=1e-4)


# ---------------------------------------------------------------------------------------------- experts and stages


class OwnExperts(WithExperts):
    """Element-wise on experts and all else, a clip by Lightning's method, and norms on demand."""

    def __init__(self, norm=None):
        super().__init__()
        self.norm, self.norms = norm, []

    def on_before_optimizer_step(self, optimizer):
        for parameter in self.moe.experts.parameters():
            parameter.grad[..., :3] = 0.0
        self.into.weight.grad = self.into.weight.grad.clamp(-0.01, 0.01)
        if self.norm is not None:
            self.norm(self)

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.clip_gradients(optimizer, 0.05, "norm")


def train_own_experts(norm=None, expert_parallel_size=2):
    chosen = MoEStrategy(expert_parallel_size=expert_parallel_size, bucket_megabytes=SMALL_BUCKETS)
    try:
        return trained(OwnExperts(norm), vectors(6), chosen)
    except ValueError as error:
        return str(error)


def test_element_wise_changes_and_lightnings_clipping_are_those_of_one_process_with_spread_experts(workers):
    ours, _ = workers(2).run(train_own_experts)
    torch.testing.assert_close(ours, trained_alone(OwnExperts(), vectors(6)), **CLOSE)


def foreach_norm(module):
    torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1)


def one_norm(module):
    module.moe.experts.w_down.grad.norm()


def by_hand(module):
    sum((parameter.grad**2).sum() for parameter in module.parameters() if parameter.grad is not None)


def largest(module):
    module.moe.experts.w_down.grad.abs().max()


def of_a_copy(module):
    module.moe.experts.w_down.grad.clone().flatten().dot(torch.ones(module.moe.experts.w_down.numel()))


NORMS = (foreach_norm, one_norm, by_hand, largest, of_a_copy, keep_norms)


@pytest.mark.parametrize("norm", NORMS)
def test_a_norm_of_a_part_of_the_experts_is_refused_with_the_hook(workers, norm):
    for message in workers(2).run(train_own_experts, norm):
        assert "OwnExperts.on_before_optimizer_step makes one number of gradients" in message
        assert "strategy.grad_norm" in message
        assert "self.clip_gradients" in message


def of_dense(module):
    """Whole gradients, one expert after another, and numbers that are no norms."""
    module.norms = [float(module.into.weight.grad.norm())]
    module.norms += module.moe.experts.w_down.grad.flatten(1).norm(dim=1).tolist()
    assert torch.isfinite(module.moe.experts.w_down.grad).all()
    module.norms.append(float(module.moe.experts.w_down.grad[0, 0, 0]))
    module.norms.append(float(module.moe.experts.w_down.detach().norm()))


def test_norms_of_whole_gradients_are_not_refused(workers):
    for outcome in workers(2).run(train_own_experts, of_dense):
        assert isinstance(outcome, dict), outcome


def test_without_spread_experts_nothing_is_refused(workers):
    for outcome in workers(2).run(train_own_experts, by_hand, 1):
        assert isinstance(outcome, dict), outcome


class HookedChain(Chain):
    """Zeroes columns in each layer, clips by Lightning's method, and looks at the gradients of the last step."""

    def __init__(self, norm=None):
        super().__init__()
        self.norm, self.last = norm, {}

    def on_before_zero_grad(self, optimizer):
        for name, parameter in self.named_parameters():
            self.last.setdefault(name, []).append(None if parameter.grad is None else parameter.grad.tolist())

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        self.zero_grad(set_to_none=batch_idx % 2 == 0)

    def on_after_backward(self):
        for layer in self.layers.values():
            layer.weight.grad[:, 2:5] = 0.0

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        if self.norm is not None:
            self.norm(self)
        self.clip_gradients(optimizer, 0.5, "norm")


def train_hooked_chain(schedule, devices=2, norm=None, accumulate=1):
    generator = torch.Generator().manual_seed(0)
    data = [(torch.randn(8, 8, generator=generator), torch.randn(8, 8, generator=generator)) for _ in range(4)]
    chosen = strategy(schedule) if schedule else MoEStrategy()
    module = HookedChain(norm)
    try:
        quiet(chosen, devices=devices, max_steps=4, accumulate_grad_batches=accumulate).fit(module, every_batch(data))
    except ValueError as error:
        return str(error)
    return {name: value.detach().clone() for name, value in module.named_parameters()}, module.last


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("schedule", ["1f1b", "zbv_zero_bubble"])
def test_hooks_of_stages_are_those_of_one_process(workers, schedule, accumulate):
    alone, last = train_hooked_chain(None, 1, None, accumulate)
    (first, last_first), (second, last_second) = workers(2).run(train_hooked_chain, schedule, 2, None, accumulate)
    torch.testing.assert_close(first | second, alone, rtol=1e-5, atol=1e-6)
    for name, found in (last_first | last_second).items():
        assert len(found) == len(last[name]) > 1
        for ours, expected in zip(found, last[name], strict=True):
            assert (ours is None) == (expected is None)
            if ours is not None:
                torch.testing.assert_close(torch.tensor(ours), torch.tensor(expected), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("norm", [foreach_norm, by_hand])
def test_a_norm_of_a_stage_is_refused_with_the_hook(workers, norm):
    for message in workers(2).run(train_hooked_chain, "1f1b", 2, norm):
        assert "HookedChain.configure_gradient_clipping makes one number of gradients" in message


# ---------------------------------------------------------------------------------------------- narrow weights


def train_narrow(hook, change):
    chosen = MoEStrategy(bucket_megabytes=SMALL_BUCKETS)
    module = HOOKS[hook](change)
    return trained(module, vectors(8), chosen, plugins=[BF16Precision()]), module.dtypes


def zero_rows_and_look(module):
    zero_rows(module)
    module.dtypes = {parameter.grad.dtype for parameter in module.parameters() if parameter.grad is not None}


def narrow(module):
    zero_rows_and_look(module)
    module.last.weight.grad = torch.zeros_like(module.last.weight)  # in bf16


@pytest.mark.parametrize("hook", ["AfterBackward", "BeforeStep"])
def test_gradients_of_narrow_weights_are_shown_in_fp32_and_count(workers, hook):
    (ours, dtypes), (_, others) = workers(2).run(train_narrow, hook, narrow)
    assert dtypes == others == {torch.float32}
    start = Dense().state_dict()
    assert torch.equal(ours["first.weight"][3:11], start["first.weight"][3:11])
    assert torch.equal(ours["last.weight"], start["last.weight"])
    assert not torch.equal(ours["first.weight"][:3], start["first.weight"][:3])


# ---------------------------------------------------------------------------------------------- decisions and costs


def repair(module):
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad.nan_to_num_(0.0, 0.0, 0.0)


def spoil(module):
    module.first.bias.grad[0] = float("nan")


class Infinite(BeforeStep):
    """The gradient of one row is infinite in the first step, on one rank or in the first of two batches."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if self.trainer.global_step == 0 and batch_idx == 0 and self.trainer.global_rank == 0:
            self.first.bias.register_hook(Once())
        return loss


class Once:
    """A hook of one backward pass."""

    def __init__(self):
        self.called = False

    def __call__(self, gradient):
        if self.called:
            return gradient
        self.called = True
        return gradient.index_fill(0, torch.tensor([1]), float("inf"))


def train_infinite(change):
    module = Infinite(change)
    trainer = quiet()
    trainer.fit(module, own_batches(vectors(8)))
    return state_of(trainer), trainer.strategy.skipped_steps


def test_a_gradient_that_a_hook_repairs_is_used(workers):
    (ours, skipped), _ = workers(2).run(train_infinite, repair)
    assert skipped == 0
    torch.testing.assert_close(ours, trained_alone(Infinite(repair), vectors(8)), **CLOSE)


def test_a_gradient_that_is_not_repaired_is_skipped(workers):
    assert [skipped for _, skipped in workers(2).run(train_infinite, nothing)] == [1, 1]


def train_spoiled():
    chosen = MoEStrategy(bucket_megabytes=SMALL_BUCKETS)
    module = BeforeStep(spoil)
    start = {name: value.clone() for name, value in module.state_dict().items()}
    return trained(module, vectors(4), chosen), start, chosen.skipped_steps


def test_a_step_that_a_hook_spoils_is_skipped_by_all(workers):
    for state, start, skipped in workers(2).run(train_spoiled):
        assert skipped == 2
        torch.testing.assert_close(state, start, rtol=0, atol=0)


class Declared(Dense):
    """Says that it does not look."""

    reads_gradients = False

    def on_before_optimizer_step(self, optimizer):
        self.seen = [parameter.grad for parameter in self.parameters()]


def train_declared():
    module = Declared(momentum)
    trainer = quiet()
    trainer.fit(module, own_batches(vectors(4)))
    return module.seen


def test_a_class_that_says_so_is_shown_nothing(workers):
    for seen in workers(2).run(train_declared):
        assert seen == [None] * 7


class LastGradients(Callback):
    """Looks before zero_grad, when the gradients are those of the last step."""

    def __init__(self):
        self.norms = []

    def on_before_zero_grad(self, trainer, pl_module, optimizer):
        grads = [parameter.grad for parameter in pl_module.parameters()]
        self.norms.append([None if grad is None else float(grad.norm()) for grad in grads])


def norms_before_zero_grad(chosen="moe", devices=2, accumulate=1):
    look = LastGradients()
    chosen = MoEStrategy(bucket_megabytes=SMALL_BUCKETS) if chosen == "moe" else chosen
    trained(Dense(momentum), vectors(8), chosen, accumulate, devices=devices, callbacks=[look], gradient_clip_val=0.1)
    return look.norms


def test_on_before_zero_grad_sees_the_last_steps_gradients(workers):
    alone = norms_before_zero_grad("auto", 1, 2)
    for norms in workers(2).run(norms_before_zero_grad):
        assert norms[0] == alone[0] == [None] * 7
        assert norms[1:] == [pytest.approx(expected, rel=1e-4) for expected in alone[1:]]
        assert len(norms) == 4


# ---------------------------------------------------------------------------------------------- hooks of tensors


class Masks(Callback):
    """Registers hooks at parameters, before or behind the strategy's own.

    Args:
        when: hook of the callback in which it does so.
    """

    def __init__(self, when):
        setattr(self, when, self.register)

    def register(self, trainer, pl_module, *_, **__):
        def halve(parameter):
            parameter.grad.mul_(0.5)

        def forget(parameter):
            parameter.grad = None

        pl_module.first.weight.register_hook(lambda gradient: gradient * (torch.arange(20) % 2)[:, None])
        pl_module.first.bias.register_post_accumulate_grad_hook(halve)
        pl_module.last.weight.register_post_accumulate_grad_hook(forget)


def train_masked(when, options):
    chosen = MoEStrategy(bucket_megabytes=SMALL_BUCKETS, **options)
    return trained(Dense(momentum), vectors(8), chosen, callbacks=[Masks(when)])


@pytest.mark.parametrize("when", ["setup", "on_fit_start", "on_train_start"])
@pytest.mark.parametrize("mode", ["sharded", "no overlap"])
def test_hooks_of_tensors_count_whenever_they_were_registered(workers, mode, when):
    ours, _ = workers(2).run(train_masked, when, MODES[mode][1])
    batches = [torch.cat(pair) for pair in zip(vectors(8)[::2], vectors(8)[1::2], strict=True)]
    alone = trained(Dense(momentum), batches, "auto", devices=1, callbacks=[Masks(when)])
    torch.testing.assert_close(ours, alone, **CLOSE)
    assert torch.equal(alone["last.weight"], Dense().state_dict()["last.weight"])
