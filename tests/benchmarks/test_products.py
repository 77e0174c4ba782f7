"""The bare products of a step: as many FLOPs as the model's formula, attention aside, and a command that runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

products = pytest.importorskip("products")

from olmoe_lightning.config import ModelConfig  # noqa: E402


def test_products_are_those_of_the_formula() -> None:
    config = ModelConfig.preset("tiny", top_k=2, num_experts=4)
    tokens, seq_len = 8, 4
    work = sum(6 * p.x.shape[0] * p.x.shape[1] * p.w.shape[0] for p in products.step_products(config, tokens))
    attention = config.num_layers * 12 * config.attention_dim * (seq_len + 1) / 2
    router = config.num_moe_layers * 6 * config.d_model * config.num_experts
    assert work == tokens * (config.flops_per_token(seq_len) - attention - router)


def test_the_command_prints_one_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert products.main(["--rounds", "2", "--tokens", "256", "--threads", "1", "--peak-seconds", "0.02"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["share_of_peak"]["median"] > 0  # how much is a matter of the machine, and of what else it does
