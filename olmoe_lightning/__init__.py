"""Train mixture-of-experts language models on PyTorch Lightning, from a laptop CPU to many GPUs."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies import StrategyRegistry

if TYPE_CHECKING:
    from olmoe_lightning.checkpoint.manifest import write_manifest
    from olmoe_lightning.config import PRESETS, ModelConfig
    from olmoe_lightning.data import TokenDataModule, TokenSource
    from olmoe_lightning.model.generation import GenerationConfig
    from olmoe_lightning.module import OLMoE
    from olmoe_lightning.strategy import MoEStrategy

__version__ = "0.1.0"

__all__ = [
    "PRESETS",
    "GenerationConfig",
    "MoEStrategy",
    "ModelConfig",
    "OLMoE",
    "TokenDataModule",
    "TokenSource",
    "__version__",
    "write_manifest",
]

_HOME = {
    "PRESETS": "config",
    "ModelConfig": "config",
    "TokenDataModule": "data",
    "TokenSource": "data",
    "GenerationConfig": "model.generation",
    "write_manifest": "checkpoint.manifest",
    "OLMoE": "module",
    "MoEStrategy": "strategy",
}


def __getattr__(name: str) -> Any:
    # Names are imported on first use (PEP 562), so that a tool which needs one room does not pay for all of them.
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def _moe_strategy(**options: Any) -> MoEStrategy:
    strategy: MoEStrategy = importlib.import_module(f"{__name__}.strategy").MoEStrategy(**options)
    return strategy


# Trainer(strategy="moe") has to work after this import, and only Lightning's registry can make it so.
StrategyRegistry.register("moe", _moe_strategy, description="Expert parallelism and a sharded optimizer", override=True)
