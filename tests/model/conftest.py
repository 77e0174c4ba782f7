"""What the network's tests share: a choice of kernels, and routers whose input is the logits."""

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch

from olmoe_lightning.config import ModelConfig
from olmoe_lightning.kernels import reference_kernels
from olmoe_lightning.model.router import Router


@pytest.fixture(params=["native", "reference"])
def kernels(request) -> Iterator[None]:
    """A test that uses this runs on the compiled kernels and on the PyTorch reference."""
    with reference_kernels() if request.param == "reference" else contextlib.nullcontext():
        yield


@pytest.fixture(scope="session")
def router_config() -> Callable[..., ModelConfig]:
    """``router_config(experts, top_k, **changes)``: the smallest configuration with a router of that size."""

    def build(experts: int = 8, top_k: int = 3, **changes) -> ModelConfig:
        values = {
            "vocab_size": 8,
            "d_model": experts,
            "num_layers": 1,
            "num_heads": 1,
            "num_kv_heads": 1,
            "head_dim": 2,
            "num_experts": experts,
            "top_k": top_k,
            "expert_hidden": 4,
        }
        return ModelConfig(**(values | changes))

    return build


@pytest.fixture(scope="session")
def identity_router(router_config: Callable[..., ModelConfig]) -> Callable[..., Router]:
    """``identity_router(experts, top_k, **changes)`` has an identity weight: its input is the logits, exactly."""

    def build(*sizes: int, **changes) -> Router:
        router = Router(router_config(*sizes, **changes))
        with torch.no_grad():
            router.weight.copy_(torch.eye(router.config.num_experts))
        return router

    return build
