"""Lightning callbacks: they watch a run, say what they see, and never change what is trained."""

from olmoe_lightning.callbacks.expert_load import ExpertLoadMonitor
from olmoe_lightning.callbacks.manifest import RunManifest
from olmoe_lightning.callbacks.memory import MemoryMonitor
from olmoe_lightning.callbacks.next_steps import NextSteps
from olmoe_lightning.callbacks.predictions import WritePredictions
from olmoe_lightning.callbacks.progress import OneLineProgress
from olmoe_lightning.callbacks.sample import SampleText
from olmoe_lightning.callbacks.throughput import ThroughputMonitor

__all__ = [
    "ExpertLoadMonitor",
    "MemoryMonitor",
    "NextSteps",
    "OneLineProgress",
    "RunManifest",
    "SampleText",
    "ThroughputMonitor",
    "WritePredictions",
]
