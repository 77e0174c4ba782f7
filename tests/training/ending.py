"""A script of a third party that ends right behind its ``fit``: ``python ending.py SCHEDULE [HOLD [control]]``.

HOLD is CPython's switch interval: the longer the main thread keeps the interpreter's lock, the more likely is a thread
of torch's still to want it when the interpreter shuts down. ``control``: without what MoEStrategy does about that.
"""

import atexit
import sys

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader

from olmoe_lightning import MoEStrategy
from olmoe_lightning.parallel.at_exit import settle

LAYERS = 4


class Chain(LightningModule):
    """Layers in a row, as stages."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict()

    @property
    def pipeline_layers(self):
        return LAYERS

    def configure_model(self):
        stages, mesh = self.trainer.strategy.stage_map, self.trainer.strategy.mesh
        for layer in range(LAYERS) if stages is None else stages.layers_of(mesh.pipeline.rank):
            self.layers[str(layer)] = nn.Linear(8, 8)

    def pipeline_stage(self, layers, first, last):
        return Stage(self.layers[str(layer)] for layer in layers)

    def pipeline_hidden(self, inputs):
        return torch.empty(*inputs["target"].shape, device="meta")

    def pipeline_loss(self, output, inputs):
        return {"loss": (output - inputs["target"]).square().sum(), "num_tokens": torch.tensor(len(output))}

    def training_step(self, batch, batch_idx):
        x, target = batch, batch.flip(1)
        if self.trainer.strategy.stage_map is not None:
            sums = self.trainer.strategy.pipeline_step(x, {"target": target})
        else:
            for layer in self.layers.values():
                x = layer(x)
            sums = self.pipeline_loss(x, {"target": target})
        return {"loss": sums["loss"] / sums["num_tokens"], "num_tokens": sums["num_tokens"]}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Stage(nn.Sequential):
    def __init__(self, layers):
        super().__init__(*layers)

    def forward(self, x, **_):
        return super().forward(x)


schedule, *rest = sys.argv[1:]
if rest:
    sys.setswitchinterval(float(rest[0]))
pipeline = {} if schedule == "none" else {"pipeline_parallel_size": 2, "schedule": schedule, "num_microbatches": 4}
trainer = Trainer(
    accelerator="cpu",
    devices=2,
    strategy=MoEStrategy(**pipeline),
    max_steps=2,
    use_distributed_sampler=False,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Chain(), DataLoader([torch.ones(8, 8)] * 2, batch_size=None))
if "control" in rest:
    atexit.unregister(settle)
