"""Training with router scores that fp32 rounds to zero: the same on several processes as on one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from olmoe_lightning import MoEStrategy, OLMoE
from tests.training.strategy_lab import language_model, sentences, trained, trained_alone

STEPS = 3


def extreme() -> OLMoE:
    """Routers whose logits are all below -100: each sigmoid is zero, or as good as zero.

    The balance loss of a sequence does not depend on the process that has it.
    """
    module = language_model(
        overrides={
            "score_function": "sigmoid",
            "normalize_weights": True,
            "balance_loss_scope": "sequence",
            "balance_loss_coeff": 0.5,
            "router_z_loss_coeff": 0.0,
            "selection_bias": False,
            "bias_update_rate": 0.0,
        }
    )
    logits = []
    for block in module.built().blocks:
        router = block.moe.router
        with torch.no_grad():
            router.weight.mul_(20.0)
        # As a layer that leads to the router would have it: all of its inputs are moved.
        router.register_forward_pre_hook(lambda router, args: (args[0] - offset(router.weight), *args[1:]))
        router.register_forward_hook(lambda router, args, out: logits.append((args[0] @ router.weight.T).detach()))
    module.logits_seen = logits
    return module


def offset(weight: Tensor) -> Tensor:
    """The least vector that every row of the router takes to 200."""
    fixed = weight.detach()
    return torch.linalg.pinv(fixed) @ torch.full((len(fixed),), 200.0)


def run(strategy: str) -> tuple[dict[str, Tensor], dict[str, Tensor], float, float]:
    module = extreme()
    start = {name: value.detach().clone() for name, value in module.named_parameters()}
    if strategy == "alone":
        weights = trained_alone(module, sentences(2 * STEPS))
    else:
        weights = trained(module, sentences(2 * STEPS), MoEStrategy(expert_parallel_size=2 if strategy == "ep" else 1))
    seen = torch.cat([each.reshape(-1) for each in module.logits_seen])
    return weights, start, seen.min().item(), seen.max().item()


@pytest.mark.parametrize("strategy", ["data", "ep"])
def test_routers_learn_alike_on_one_process_and_on_two_where_all_sigmoids_vanish(workers, strategy):
    alone, start, low, high = run("alone")
    assert -1000 < low < high < -100
    ours, *_ = workers(2).run(run, strategy)[0]
    for name, expected in alone.items():
        torch.testing.assert_close(ours[name], expected, atol=2e-5, rtol=1e-4, msg=lambda text, n=name: f"{n}: {text}")
    for name, before in start.items():
        if "router" in name:
            assert (alone[name] - before).abs().max() > 1e-3, name
