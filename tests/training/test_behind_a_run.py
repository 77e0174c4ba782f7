"""A module behind a run that has spread it: whole where it can be, and never a part that looks like the whole."""

import copy
import pickle
import re

import pytest
import torch
from strategy_lab import language_model, own_batches, quiet, sentences

from olmoe_lightning import MoEStrategy
from olmoe_lightning.errors import UserError

SPREAD = {
    "experts": ({"expert_parallel_size": 2}, r"holds experts \d+ to \d+ of \d+, and reaches the others only in fit"),
    "stages": ({"pipeline_parallel_size": 2}, r"holds layers \[.*\] of \d+, which alone are no model"),
    # The first process has the first layers and the last ones, so that it could go through them as if nothing lacked.
    "both ends": (
        {"pipeline_parallel_size": 2, "schedule": "zbv_zero_bubble", "num_microbatches": 4},
        r"holds layers \[.*\] of \d+, which alone are no model",
    ),
}


def refusals(options, layers):
    """What a module answers behind its fit."""
    module = language_model()
    module = type(module)(module.config.replace(num_layers=layers), learning_rate=1e-2, schedule="constant")
    trainer = quiet(MoEStrategy(**options), max_steps=1)
    trainer.fit(module, own_batches([*sentences(1) * 2]) if "expert_parallel_size" in options else sentences_twice())
    told = []
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    for call in (lambda m: m(tokens), lambda m: m.generate(tokens, 2)):
        for one in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            try:
                output = call(one)
                # Its pipeline is still there, for all ranks that ask it together: that is text of the whole model.
                works = one is module and trainer.strategy.pipeline is not None and output.shape == (1, 6)
                told.append("whole" if works else "no error")
            except (UserError, RuntimeError) as error:
                told.append(str(error))
    return told


def sentences_twice():
    batch = {name: torch.cat([value] * 4) for name, value in sentences(1)[0].items()}
    return torch.utils.data.DataLoader([batch], batch_size=None)


@pytest.mark.parametrize("spread", SPREAD)
def test_what_needs_other_processes_says_where_the_rest_is(spread, workers):
    options, sentence = SPREAD[spread]
    for told in workers(2).run(refusals, options, 4):
        assert len(told) == 6
        assert told.count("whole") == ("pipeline_parallel_size" in options)
        for each in told:
            if each == "whole":
                continue
            assert re.search(sentence, each) or "layers of this model are in several processes" in each
            assert "load_from_checkpoint" in each


def test_a_module_that_is_whole_goes_on_to_work():
    module = language_model()
    quiet(MoEStrategy(), devices=1, max_steps=1).fit(module, own_batches(sentences(1)))
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    expected = module(tokens)
    for one in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        torch.testing.assert_close(one(tokens), expected, rtol=0, atol=0)
    assert module.generate(tokens, 2).shape == (1, 6)
