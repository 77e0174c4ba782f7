"""One module of a third party, its data, and trainers of every column of the contract.

Rows of the table use nothing else: what they do with a :class:`Lab` is done once by plain Lightning in one process and
once by MoEStrategy in each column. All see the same global batches of 8 rows, in one order: processes that read
different samples take 4 rows each. The loaders have a sampler, in whose place Lightning would put one that shuffles.
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from tiny_model import SMALL
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from olmoe_lightning import MoEStrategy
from olmoe_lightning.model.moe import MoE
from olmoe_lightning.plugins import BF16Precision

LAYERS, WIDTH, ROWS = 4, 16, 8
EXPERTS = SMALL.replace(top_k=4, expert_hidden=8, balance_loss_coeff=0.0, router_z_loss_coeff=0.0)
"""Every token goes to every expert, so that no column differs from another by a choice at a near tie."""

OURS = ("grad_norm", "skipped_steps")
"""Metrics that MoEStrategy adds to those of the module."""


@dataclass(frozen=True)
class Column:
    """A column of the table.

    Args:
        processes: how many there are.
        options: of MoEStrategy; ``None`` is plain Lightning.
        narrow: whether weights are bf16; plain Lightning then runs under autocast.
        rtol: relative tolerance of numbers against plain Lightning.
        atol: absolute tolerance.
    """

    processes: int
    options: Mapping[str, int] | None
    narrow: bool = False
    rtol: float = 1e-4
    atol: float = 2e-6

    @property
    def reference(self) -> str:
        """The column of plain Lightning with which it is compared."""
        return "plain bf16" if self.narrow else "plain"


COLUMNS = {
    "one process": Column(1, {}),
    "DP 2": Column(2, {}),  # sums of two processes have another order than one sum: some units in the last place
    "EP 2": Column(2, {"expert_parallel_size": 2}),
    "PP 2": Column(2, {"pipeline_parallel_size": 2, "num_microbatches": 2}),
    # Autocast rounds weights and inputs of products as bf16 weights do, but keeps what is between them in fp32.
    "bf16": Column(2, {"expert_parallel_size": 2}, narrow=True, rtol=0.06, atol=0.015),
}
SEVERAL = tuple(name for name, column in COLUMNS.items() if column.processes > 1)
PLAIN = {"plain": Column(1, None), "plain bf16": Column(1, None, narrow=True)}


class Points(Dataset):
    """Pairs of a vector [8] and its target [1]."""

    def __init__(self, count: int, first: int = 0) -> None:
        generator = torch.Generator().manual_seed(7 + first)
        self.x = torch.randn(count, 8, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.x[index].sum().sin()[None]


class Block(nn.Module):
    """A residual layer around our MoE layer."""

    def __init__(self) -> None:
        super().__init__()
        self.moe = MoE(EXPERTS)
        for parameter in self.moe.parameters():
            nn.init.normal_(parameter, std=0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(x.unsqueeze(0))[0].squeeze(0)


class Stage(nn.Sequential):
    """Layers in a row; what else a batch holds does not matter to them."""

    def forward(self, x: Tensor, **_: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)


def layer_of(number: int) -> nn.Module:
    """A layer with the weights that it always starts from."""
    torch.manual_seed(number)
    return (
        nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh()),
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()),
        Block(),
        nn.Linear(WIDTH, 1),
    )[number]


class Ordinary(LightningModule):
    """A regression with experts in it, as somebody writes it who wants to run on one process and on many."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.lr = lr
        self.layers = nn.ModuleDict()

    # What a pipeline needs.
    @property
    def pipeline_layers(self) -> int:
        return LAYERS

    def configure_model(self) -> None:
        if self.layers:
            return
        stages = self.stages
        for layer in range(LAYERS) if stages is None else stages.layers_of(self.trainer.strategy.mesh.pipeline.rank):
            self.layers[str(layer)] = layer_of(layer)

    def pipeline_stage(self, layers: Any, first: bool, last: bool) -> nn.Module:
        return Stage(*(self.layers[str(layer)] for layer in layers))

    def pipeline_hidden(self, inputs: Mapping[str, Tensor]) -> Tensor:
        return torch.empty(len(inputs["target"]), WIDTH, device="meta", dtype=next(self.parameters()).dtype)

    def pipeline_loss(self, output: Tensor, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        loss = (output.float() - inputs["target"].float()).square().sum()
        return {"loss": loss, "num_tokens": torch.tensor(len(output))}

    @property
    def stages(self) -> Any:
        return getattr(self.trainer.strategy, "stage_map", None)

    # What any module has.
    def forward(self, x: Tensor) -> Tensor:
        if self.stages is not None:
            return self.trainer.strategy.pipeline_forward(x, {"target": x[:, :1]})
        x = x.to(next(self.parameters()).dtype)
        for layer in self.layers.values():
            x = layer(x)
        return x

    def sums(self, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        x, target = batch
        if self.stages is not None:
            return self.trainer.strategy.pipeline_step(x, {"target": target})
        return self.pipeline_loss(self(x), {"target": target})

    def mean(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        sums = self.sums(batch)
        return sums["loss"] / sums["num_tokens"]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        sums = self.sums(batch)
        loss = sums["loss"] / sums["num_tokens"]
        self.log("train_loss", loss, sync_dist=True)
        return {"loss": loss, "num_tokens": sums["num_tokens"]}

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.mean(batch).float(), sync_dist=True, batch_size=ROWS)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("test_loss", self.mean(batch).float(), sync_dist=True, batch_size=ROWS)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Early(Ordinary):
    """All layers in ``__init__``, as most modules have them."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.layers.update({str(layer): layer_of(layer) for layer in range(LAYERS)})


class Lab:
    """What a row works with, in one process of one column.

    Args:
        column: where it is.
        folder: for files, the same on all processes.
    """

    def __init__(self, column: Column, folder: Path) -> None:
        self.column, self.folder = column, folder
        self.rank = dist.get_rank() if column.processes > 1 else 0

    @property
    def plain(self) -> bool:
        """Whether this is plain Lightning."""
        return self.column.options is None

    @property
    def readers(self) -> int:
        """Processes that read different samples."""
        return 1 if self.column.options and "pipeline_parallel_size" in self.column.options else self.column.processes

    def trainer(self, *callbacks: Any, **options: Any) -> Trainer:
        """A trainer of this column that prints and writes nothing."""
        defaults: dict[str, Any] = {
            "accelerator": "cpu",
            "devices": self.column.processes,
            "strategy": self.strategy(**options.pop("moe", {})),
            "max_epochs": 1,
            "log_every_n_steps": 1,
            "num_sanity_val_steps": 0,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": self.folder,
            "callbacks": list(callbacks),
        }
        if not {"precision", "plugins"} & options.keys():
            defaults["plugins"] = self.plugins()
        if self.plain and self.column.narrow and "precision" not in options:
            defaults["precision"] = "bf16-mixed"
        return Trainer(**(defaults | options))

    def plugins(self) -> list[Any]:
        """The precision of the column."""
        return [BF16Precision()] if self.column.narrow and not self.plain else []

    def strategy(self, **options: Any) -> Any:
        return "auto" if self.column.options is None else MoEStrategy(**{**self.column.options, **options})

    def loader(self, batches: int = 4, first: int = 0, **options: Any) -> DataLoader:
        """Global batches of 8 rows."""
        data = Points(batches * ROWS, first)
        if self.column.processes > 1 and "shuffle" not in options:
            options["sampler"] = self.sampler(data)
        return DataLoader(data, batch_size=ROWS // self.readers, **options)

    def sampler(self, data: Points) -> DistributedSampler:
        """The samples of this process, in their order."""
        return DistributedSampler(data, self.readers, self.rank % self.readers, shuffle=False)

    def mine(self, batches: int = 4, first: int = 0) -> list[tuple[Tensor, Tensor]]:
        """The batches of this process, for loaders in which Lightning can put no sampler."""
        data, reader = Points(batches * ROWS, first), self.rank % self.readers
        pairs = [data[index] for index in range(reader, len(data), self.readers)]
        size = ROWS // self.readers
        return [tuple(map(torch.stack, zip(*pairs[at : at + size], strict=True))) for at in range(0, len(pairs), size)]

    def fit(self, module: LightningModule | None = None, *callbacks: Any, **options: Any) -> dict[str, Any]:
        """Train and look at everything that should be that of plain Lightning.

        Args:
            module: an :class:`Ordinary` if there is none.
            *callbacks: of the trainer.
            **options: of the trainer; besides ``train``, ``val`` (loaders) and ``ckpt_path``.
        """
        module = Ordinary() if module is None else module
        train, val, path = options.pop("train", None), options.pop("val", None), options.pop("ckpt_path", None)
        trainer = self.trainer(*callbacks, **options)
        trainer.fit(module, self.loader() if train is None else train, val, ckpt_path=path)
        return self.seen(trainer)

    def seen(self, trainer: Trainer) -> dict[str, Any]:
        """Weights, metrics and progress of a trainer behind its run."""
        return {
            "metrics": metrics(trainer),
            "steps": trainer.global_step,
            "epochs": trainer.current_epoch,
            "stopped": trainer.should_stop,
            "weights": self.weights(trainer),
        }

    def weights(self, trainer: Trainer) -> dict[str, Tensor] | None:
        """All weights, on the first process."""
        strategy: Any = trainer.strategy
        if isinstance(strategy, MoEStrategy):
            before, strategy.state_dict_type = strategy.state_dict_type, "full"
            state = strategy.lightning_module_state_dict()
            strategy.state_dict_type = before
        else:
            state = strategy.lightning_module_state_dict()
        return self.first({name: value.detach().clone().float() for name, value in state.items()})

    def first(self, value: Any) -> Any:
        """What only the first process can say."""
        return value if self.rank == 0 else None

    def agreed(self, value: Any) -> bool:
        """Whether all processes of the column have this value; collective."""
        if self.column.processes == 1:
            return True
        values: list[Any] = [None] * self.column.processes
        dist.all_gather_object(values, value)
        return all(other == value for other in values)

    def everywhere(self, value: Tensor) -> Tensor:
        """Rows of a global batch from the rows of all readers, in the order of the samples."""
        if self.readers == 1:
            return value
        parts = [torch.empty_like(value) for _ in range(self.readers)]
        dist.all_gather(parts, value.contiguous())
        return torch.stack(parts, 1).flatten(0, 1)


def metrics(trainer: Trainer) -> dict[str, float]:
    return {name: float(value) for name, value in trainer.callback_metrics.items() if name not in OURS}


def clean(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
