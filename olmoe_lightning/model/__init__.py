"""The network in plain PyTorch: it knows nothing of Lightning, of processes, or of how tokens travel."""

from olmoe_lightning.model.router import RoutingStats
from olmoe_lightning.model.transformer import KVCache, Transformer

__all__ = ["KVCache", "RoutingStats", "Transformer"]
