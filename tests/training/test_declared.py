"""What a module declares is compared with what it does, once, on all processes."""

import functools
import re

import pytest
import torch
from strategy_lab import Dense, numbered, own_batches, quiet, rank_and_size, trained_alone
from test_pipeline import Chain, every_batch, strategy
from torch import nn

from olmoe_lightning import MoEStrategy
from olmoe_lightning.errors import UserError


def data(count=3, rows=8):
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(rows, 8, generator=generator), torch.randn(rows, 8, generator=generator))] * count


class Odd(Chain):
    """A chain whose stages, sums or declaration are changed by functions."""

    def __init__(self, change=lambda x, stage: x, sums=lambda sums: sums, hidden=lambda hidden: hidden):
        super().__init__()
        self.change, self.sums, self.hidden = change, sums, hidden

    def pipeline_stage(self, layers, first, last):
        parts, change = [self.layers[str(layer)] for layer in layers], self.change

        class Part(nn.Sequential):
            def forward(self, x, **_):
                x = super().forward(x)
                return x if last else change(x, layers[0])

        return Part(*parts)

    def pipeline_hidden(self, inputs):
        return self.hidden(super().pipeline_hidden(inputs))

    def pipeline_loss(self, output, inputs):
        return self.sums(super().pipeline_loss(output, inputs))

    def validation_step(self, batch, batch_idx):
        x, target = batch
        sums = self.trainer.strategy.pipeline_step(x, {"target": target})
        self.log("loss", (sums["loss"] / sums["num_tokens"]).float())


def changed(name):
    return functools.partial(_change, name)


def _change(name, value, *_):
    rank, _ = rank_and_size()
    return {
        "wider": lambda: torch.cat([value, value], dim=1),
        "bf16": lambda: value.bfloat16(),
        "two": lambda: (value, value),
        "meta": lambda: value.to("meta"),
        "vector": lambda: value | {"loss": value["loss"].expand(2)},
        "tokens of rows": lambda: value | {"num_tokens": torch.ones(3)},
        "no loss": lambda: {"sum": value["loss"]},
        "detached": lambda: value | {"loss": value["loss"].detach()},
        "integer": lambda: value | {"loss": torch.tensor(3)},
        "of this rank": lambda: value[:, : 8 - rank],
    }[name]()


WRONG = {
    "another shape": ({"change": changed("wider")}, r"stage 0 returned float32 \[2, 16\].*declares float32 \[2, 8\]"),
    "another dtype": ({"change": changed("bf16")}, r"stage 0 returned bfloat16 \[2, 8\].*declares float32"),
    "two outputs": ({"change": changed("two")}, r"stage 0 returned a tuple of 2.*declares float32"),
    "another device": ({"change": changed("meta")}, r"stage 0 returned float32 \[2, 8\] on meta.*on cpu"),
    "a declaration of each rank": ({"hidden": changed("of this rank")}, r"\[2, 8\] on pipeline rank 0 and .*\[2, 7\]"),
    "a loss of two": ({"sums": changed("vector")}, r"'loss' as a Tensor of shape \[2\].*one number"),
    "a sum of three": ({"sums": changed("tokens of rows")}, r"'num_tokens' as a Tensor of shape \[3\]"),
    "no loss": ({"sums": changed("no loss")}, r"returned \['sum'\].*with 'loss' in it"),
    "a loss without gradient": ({"sums": changed("detached")}, r"depends on nothing that is trained"),
    "a loss of integers": ({"sums": changed("integer")}, r"floating-point"),
}


def message_of(options, schedule="1f1b", evaluate=False, batches=None, **trainer_options):
    trainer = quiet(strategy(schedule), devices=2, **trainer_options)
    module = Odd(**options)
    try:
        if evaluate:
            trainer.validate(module, every_batch(batches or data()), verbose=False)
        else:
            trainer.fit(module, every_batch(batches or data()))
    except UserError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("kind", WRONG)
def test_a_stage_that_does_something_else_is_refused_on_all_ranks(workers, kind):
    options, words = WRONG[kind]
    messages = workers(2).run(message_of, options)
    assert len(set(messages)) == 1
    assert re.search(words, messages[0]), messages[0]


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble"])
def test_every_schedule_comes_to_its_end_before_all_ranks_refuse(workers, schedule):
    messages = workers(2).run(message_of, WRONG["another shape"][0], schedule)
    assert len(set(messages)) == 1
    assert "pipeline_hidden declares" in messages[0]


@pytest.mark.parametrize("kind", ["another shape", "two outputs", "a declaration of each rank", "a sum of three"])
def test_evaluation_is_compared_as_well(workers, kind):
    options, words = WRONG[kind]
    messages = workers(2).run(message_of, options, evaluate=True)
    assert len(set(messages)) == 1
    assert re.search(words, messages[0]), messages[0]


def narrow_in_small_batches(x, stage):
    return x if len(x) == 2 else x.bfloat16()


def test_a_smaller_last_batch_is_compared_as_well(workers):
    batches = [*data(2), *data(1, rows=4)]
    for evaluate in (False, True):
        messages = workers(2).run(message_of, {"change": narrow_in_small_batches}, evaluate=evaluate, batches=batches)
        assert len(set(messages)) == 1
        assert re.search(r"returned bfloat16 \[1, 8\]", messages[0]), messages[0]


def test_autocast_that_narrows_what_travels_is_seen(workers):
    """Linear layers return bf16 there, whatever the declaration says."""
    (message, other) = workers(2).run(message_of, {}, precision="bf16-mixed")
    assert message == other
    assert re.search(r"stage 0 returned bfloat16.*declares float32", message), message


def own_data():
    rank, _ = rank_and_size()
    generator = torch.Generator().manual_seed(rank)
    return [(torch.randn(8, 8, generator=generator), torch.zeros(8, 8))]


def other_batches(kind):
    rank, _ = rank_and_size()
    batches = {
        "values": own_data,
        "rows": lambda: data(1, rows=8 - 4 * rank),
        "target": lambda: [(torch.zeros(8, 8), torch.zeros(3))],
    }[kind]()
    return message_of({}, batches=batches)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("values", "rank 1 has another batch than rank 0 (other values"),
        ("rows", "rank 1 has another batch than rank 0"),
        ("target", "tensors of one length: target has the shape [3]"),
    ],
)
def test_ranks_of_a_pipeline_with_other_batches_are_refused(workers, kind, words):
    for message in workers(2).run(other_batches, kind):
        assert words in message


def summed(x, stage):
    """The gradient of what came in is expanded in memory."""
    return (x.sum(1, keepdim=True) / 8).expand_as(x)


def transposed(x, stage):
    return x.t().contiguous().t()


def in_place_view(x, stage):
    return x.view(-1).view(x.shape)


def shaped_sums(sums):
    return {"loss": sums["loss"].view(1), "num_tokens": sums["num_tokens"].view(1, 1)}


LAYOUTS = {
    "expanded": {"change": summed},
    "transposed": {"change": transposed},
    "a view": {"change": in_place_view},
    "sums of shape [1]": {"sums": shaped_sums},
}


def weights_of(options, schedule):
    trainer = quiet(strategy(schedule) if schedule else MoEStrategy(), devices=2 if schedule else 1)
    module = Odd(**options) if schedule else InOne(**options)
    trainer.fit(module, every_batch(data()))
    return {name: value.detach().clone() for name, value in module.named_parameters()}


class InOne(Odd):
    """The four stages of two processes in one."""

    def training_step(self, batch, batch_idx):
        x, target = batch
        for layer in range(4):
            x = self.pipeline_stage([layer], layer == 0, layer == 3)(x)
        sums = self.pipeline_loss(x, {"target": target})
        return {"loss": sums["loss"] / sums["num_tokens"], "num_tokens": sums["num_tokens"]}


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_travels_may_lie_in_memory_as_it_likes(workers, layout, schedule):
    alone = weights_of(LAYOUTS[layout], None)
    together = {k: v for rank in workers(2).run(weights_of, LAYOUTS[layout], schedule) for k, v in rank.items()}
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-6)


def output(loss, tokens):
    def step(module, x, number):
        return {"loss": loss(module.loss(x)), "num_tokens": tokens(x)}

    return step


def add_in_fit_start(module):
    module.on_fit_start = lambda: module.add_module("late", nn.Linear(8, 1))


def add_in_forward(module, x, number):
    if not hasattr(module, "late"):
        module.late = nn.Linear(8, 1)
    return module.loss(x) + module.late(x).mean()


def replace_in_train_start(module):
    def replace():
        module.last = nn.Linear(20, 1, bias=False)

    module.on_train_start = replace


def remove_in_train_start(module):
    def remove():
        module.spare = None

    module.spare = nn.Linear(8, 1)
    module.on_train_start = remove


def lazy(module):
    module.late = nn.LazyLinear(2)


MODULES = {
    "tokens of each row": ({"step": output(lambda loss: loss, lambda x: torch.ones(4))}, r"num_tokens of .* \[4\]"),
    "negative tokens": ({"step": output(lambda loss: loss, lambda x: torch.tensor(-4))}, r"num_tokens -4"),
    "tokens that are no number": ({"step": output(lambda loss: loss, lambda x: float("nan"))}, r"num_tokens nan"),
    "tokens as a text": ({"step": output(lambda loss: loss, lambda x: "4")}, r"num_tokens as a str"),
    "a loss of each row": ({"step": output(lambda loss: loss.expand(4), lambda x: 4)}, r"loss of .* \[4\]"),
    "a layer added in on_fit_start": ({"change": add_in_fit_start}, r"late\.weight, late\.bias came into"),
    "a layer added in forward": ({"step": add_in_forward}, r"late\.weight, late\.bias came into"),
    "a layer replaced in on_train_start": ({"change": replace_in_train_start}, r"last\.weight came into"),
    "a layer removed in on_train_start": ({"change": remove_in_train_start}, r"spare\.bias, spare\.weight are trained"),
    "a lazy layer": ({"change": lazy}, r"late\.weight.*lazy modules have no shapes yet"),
}


def refusal(options):
    try:
        quiet().fit(Dense(**options), own_batches(numbered(4)))
    except UserError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("kind", MODULES)
def test_a_module_that_does_something_else_than_it_says_is_refused_on_all_ranks(workers, kind):
    # The functions are made in the worker: they cannot travel.
    messages = workers(2).run(refusal_of, kind)
    assert len(set(messages)) == 1
    assert re.search(MODULES[kind][1], messages[0]), messages[0]


def refusal_of(kind):
    return refusal(MODULES[kind][0])


COUNTS = {
    "shape [1]": lambda x: torch.tensor([3]),
    "a float": lambda x: 3.0,
    "an int": lambda x: 3,
    "float64": lambda x: torch.tensor(3.0, dtype=torch.float64),
}


def weights_with(kind, alone):
    module = Dense(step=output(lambda loss: loss.view(1), COUNTS[kind]))
    if alone:
        return trained_alone(Dense(), numbered(4))
    trainer = quiet()
    trainer.fit(module, own_batches(numbered(4)))
    return {name: value.detach().clone() for name, value in module.named_parameters()}


@pytest.mark.parametrize("kind", COUNTS)
def test_one_number_of_tokens_may_have_any_form(workers, kind):
    ours, _ = workers(2).run(weights_with, kind, False)
    torch.testing.assert_close(ours, weights_with(kind, True), rtol=2e-5, atol=2e-7)
