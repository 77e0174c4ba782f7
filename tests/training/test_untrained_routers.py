"""Routers that a fit would leave as they are: told by the configuration, told by name, and true of the gradients."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from olmoe_lightning import MoEStrategy
from olmoe_lightning.config import ModelConfig
from olmoe_lightning.model.router import Router, lacks_gradient
from olmoe_lightning.training.routers import untrained_routers
from tests.training.strategy_lab import Items, WithExperts, language_model, quiet, sentences, vectors

OPTIONS = {
    "score_function": ["softmax", "sigmoid", "topk_softmax"],
    "normalize_weights": [False, True],
    "router_mode": ["learned", "random"],
    "balance_loss_coeff": [0.0, 0.5],
    "router_z_loss_coeff": [0.0, 0.5],
    "experts": [(1, 1), (4, 1), (4, 2), (4, 4)],
}


def config_of(experts: tuple[int, int] = (4, 1), **options) -> ModelConfig:
    num_experts, top_k = experts
    return ModelConfig(
        vocab_size=8, d_model=6, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=2, num_experts=num_experts,
        top_k=top_k, expert_hidden=4, **options,
    )  # fmt: skip


def gradient_of(config: ModelConfig) -> float:
    """The largest of a router's weight, of a loss of its weights and its own losses."""
    torch.manual_seed(0)
    router = Router(config)
    nn.init.normal_(router.weight)
    routing = router(torch.randn(2, 9, config.d_model))
    ((routing.weights * torch.randn(routing.weights.shape)).sum() + routing.aux_loss).backward()
    return router.weight.grad.abs().max().item()


def test_a_configuration_lacks_a_gradient_exactly_where_the_gradient_is_zero():
    found = []
    for values in itertools.product(*OPTIONS.values()):
        config = config_of(**dict(zip(OPTIONS, values, strict=True)))
        gradient, reason = gradient_of(config), lacks_gradient(config)
        # Differences of fp32 sums of order one leave some 1e-6 of a gradient that is zero.
        assert (gradient < 1e-5) == bool(reason), (values, gradient)
        assert reason or gradient > 1e-3, (values, gradient)
        found.append(bool(reason))
    assert 20 < sum(found) < len(found) / 2


@pytest.mark.parametrize(("options", "words"), [
    ({"normalize_weights": True}, "top_k=1) is always 1 with normalize_weights=True, and balance_loss_coeff and"),
    ({"score_function": "topk_softmax"}, "score_function='topk_softmax', and balance_loss_coeff and"),
    ({"experts": (1, 1)}, "num_experts=1) is always 1"),
    ({"experts": (1, 1), "balance_loss_coeff": 0.1}, "balance loss is constant where all experts are chosen"),
    ({"router_mode": "random"}, "router_mode='random' weighs experts by noise"),
])  # fmt: skip
def test_the_reason_says_which_fields_make_it(options, words):
    assert words in lacks_gradient(config_of(**({"balance_loss_coeff": 0.0, "router_z_loss_coeff": 0.0} | options)))


def test_routers_are_named_and_a_long_list_is_cut():
    config = config_of(normalize_weights=True, balance_loss_coeff=0.0, router_z_loss_coeff=0.0)
    many = nn.ModuleList(Router(config) for _ in range(11))
    assert "0.weight, 1.weight, 2.weight, 3.weight, 4.weight, 5.weight, 6.weight, 7.weight and 3 more will" in (
        untrained_routers(many)
    )
    many[5].weight.requires_grad_(False)
    assert untrained_routers(many).endswith("5.weight will not be trained: requires_grad is False")
    assert untrained_routers(Router(config)).startswith("weight will get no gradient")
    assert untrained_routers(nn.ModuleList([Router(config_of())])) == ""


SILENT = {"top_k": 1, "normalize_weights": True, "balance_loss_coeff": 0.0, "router_z_loss_coeff": 0.0}


def told(overrides, **strategy) -> list[str]:
    """What a fit says of routers."""
    chosen = MoEStrategy(**strategy) if strategy else "auto"
    trainer = quiet(chosen, devices=None if strategy else 1, max_steps=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(language_model(overrides=overrides), DataLoader(Items(sentences(1)), batch_size=None))
    return [str(warning.message) for warning in caught if "router.weight" in str(warning.message)]


def test_a_fit_warns_once_whatever_the_strategy(workers):
    for strategy in ({}, {"bucket_megabytes": 1}):
        (message,) = told(SILENT, **strategy)
        assert "model.blocks.0.moe.router.weight, model.blocks.1.moe.router.weight will get no gradient" in message
        assert told(SILENT | {"router_z_loss_coeff": 0.1}, **strategy) == []
    first, second = workers(2).run(told, SILENT, pipeline_parallel_size=2, num_microbatches=2)
    assert [len(first), len(second)] == [1, 1]
    assert "blocks.0." in first[0]
    assert "blocks.1." in second[0]
    assert [len(found) for found in workers(2).run(told, SILENT, expert_parallel_size=2)] == [1, 0]


def test_frozen_routers_of_somebodys_own_module_are_named():
    module = WithExperts()
    module.moe.router.weight.requires_grad_(False)
    with pytest.warns(UserWarning, match=r"^moe\.router\.weight will not be trained: requires_grad is False$"):
        quiet(MoEStrategy(), devices=1, max_steps=1).fit(module, DataLoader(Items(vectors(1)), batch_size=None))
