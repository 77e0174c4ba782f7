"""Small modules, their data and one function that trains them, for the tests of MoEStrategy in this folder.

Batches have one order whatever the number of processes: batch b is computed by data rank b mod D. One process that
accumulates D times as many of them takes the same optimizer steps, since all batches are of one size.
"""

import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from tiny_model import SMALL
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from olmoe_lightning import MoEStrategy, OLMoE
from olmoe_lightning.model.moe import MoE
from olmoe_lightning.parallel import Axis, buffers
from olmoe_lightning.parallel.collectives import Pending

CLOSE = {"rtol": 2e-5, "atol": 2e-7}
"""Two processes sum gradients in another order than one: a few units in the last place per step, over some steps."""

SMALL_BUCKETS = 0.001
"""Megabytes: 262 elements, so that the larger weights of even these modules have buckets of their own."""

CONFIG = SMALL.replace(selection_bias=True, bias_update_rate=0.01, balance_loss_coeff=0.02, router_z_loss_coeff=0.003)


def vectors(count: int, rows: int = 4, width: int = 8) -> list[Tensor]:
    """Batches, fp32 [rows, width]."""
    return [torch.randn(rows, width, generator=torch.Generator().manual_seed(index)) for index in range(count)]


def numbered(count: int) -> list[tuple[int, Tensor]]:
    """Batches of vectors and their numbers, the same whatever the number of processes."""
    return list(enumerate(vectors(count)))


def images(count: int) -> list[Tensor]:
    """Batches, fp32 [4, 2, 6, 6], each of another brightness: running statistics of ranks differ."""
    return [
        torch.randn(4, 2, 6, 6, generator=torch.Generator().manual_seed(index)) * (1 + index % 3) + index % 4
        for index in range(count)
    ]


def sentences(count: int) -> list[dict[str, Tensor]]:
    """Batches of token ids, int64 [2, 16]."""
    batches = []
    for index in range(count):
        tokens = torch.randint(0, 64, (2, 17), generator=torch.Generator().manual_seed(index))
        batches.append({"input_ids": tokens[:, :-1].clone(), "labels": tokens[:, 1:].clone()})
    return batches


class Items(Dataset):
    """A list as a dataset."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


class Dense(LightningModule):
    """A network of a few layers; what makes it special is given as options.

    Args:
        optimizer: from the module to what ``configure_optimizers`` returns.
        change: applied to the module once it is built.
        step: in place of the loss of ``training_step``; gets the module, the vectors and the number of the batch.
    """

    def __init__(
        self,
        optimizer: Callable[[LightningModule], Any] | None = None,
        change: Callable[[LightningModule], Any] | None = None,
        step: Callable[[Any, Tensor, int], Any] | None = None,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 20)
        self.blocks = nn.Sequential(nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 20))
        self.last = nn.Linear(20, 1, bias=False)
        self._optimizer, self._step = optimizer, step
        if change is not None:
            change(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.blocks(torch.tanh(self.first(x))))

    def loss(self, x: Tensor) -> Tensor:
        return (self(x) - x.sum(1, keepdim=True)).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        number, x = batch if isinstance(batch, tuple | list) else (batch_idx, batch)
        return self.loss(x) if self._step is None else self._step(self, x, number)

    def configure_optimizers(self) -> Any:
        if self._optimizer is not None:
            return self._optimizer(self)
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)


class Convolutions(LightningModule):
    """A small CNN with batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.features = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU())
        self.head = nn.Linear(16, 3)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.head(self.features(batch).flatten(1)), torch.arange(4) % 3)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class WithExperts(LightningModule):
    """Somebody's own module with our MoE layer in it; it counts a batch as one and knows nothing of the strategy."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.into = nn.Linear(8, 16)
        self.moe = MoE(CONFIG)
        for parameter in self.moe.parameters():
            nn.init.normal_(parameter, std=0.2)
        self.out = nn.Linear(16, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = self.into(batch).unsqueeze(0)
        hidden = hidden + self.moe(hidden)[0]
        return (self.out(hidden.squeeze(0)) - batch.sum(1, keepdim=True)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def language_model(**options: Any) -> OLMoE:
    return OLMoE(CONFIG, **({"learning_rate": 1e-2, "schedule": "constant"} | options))


def rank_and_size() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def quiet(strategy: Any = None, devices: int | None = None, **options: Any) -> Trainer:
    """A Trainer over all processes that prints and writes nothing."""
    devices = rank_and_size()[1] if devices is None else devices
    defaults = {
        "accelerator": "cpu",
        "devices": devices,
        "strategy": MoEStrategy(bucket_megabytes=SMALL_BUCKETS) if strategy is None else strategy,
        "max_epochs": 1,
        "use_distributed_sampler": False,  # each rank has its own list
        "log_every_n_steps": 1,
        "num_sanity_val_steps": 0,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return Trainer(**(defaults | options))


def own_batches(batches: list[Any]) -> DataLoader:
    """The batches of this rank."""
    rank, size = rank_and_size()
    return DataLoader(Items(batches[rank::size]), batch_size=None)


def state_of(trainer: Trainer) -> dict[str, Tensor]:
    """Weights as a joined checkpoint would hold them; collective, complete on rank 0."""
    strategy = trainer.strategy
    if isinstance(strategy, MoEStrategy):
        strategy.state_dict_type = "full"
    return {name: value.detach().clone() for name, value in strategy.lightning_module_state_dict().items()}


def trained(
    module: LightningModule, batches: list[Any], strategy: Any = None, accumulate: int = 1, **options: Any
) -> dict[str, Tensor]:
    """Train on all processes and give the weights."""
    trainer = quiet(strategy, accumulate_grad_batches=accumulate, **options)
    trainer.fit(module, own_batches(batches))
    return state_of(trainer)


def trained_alone(module: LightningModule, batches: list[Any], ranks: int = 2, **options: Any) -> dict[str, Tensor]:
    """The same steps by Lightning's own single-device strategy."""
    accumulate = options.pop("accumulate", 1) * ranks
    return trained(module, batches, strategy="auto", devices=1, accumulate=accumulate, **options)


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    """Equal to the last bit."""
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def copy_of(module: LightningModule) -> dict[str, Tensor]:
    return copy.deepcopy(module.state_dict())


class Lion(torch.optim.Optimizer):
    """A user's own element-wise optimizer."""

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.99), wd: float = 0.1
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "wd": wd})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        for group, parameter in itertools.chain.from_iterable([(g, p) for p in g["params"]] for g in self.param_groups):
            if parameter.grad is None:
                continue
            average = self.state[parameter].setdefault("average", torch.zeros_like(parameter))
            direction = average.lerp(parameter.grad, 1 - group["betas"][0]).sign()
            parameter.mul_(1 - group["lr"] * group["wd"]).add_(direction, alpha=-group["lr"])
            average.lerp_(parameter.grad, 1 - group["betas"][1])
        return loss


class Recorder(Callback):
    """Calls ``look(trainer, module)`` at the end of each batch and keeps the answers."""

    def __init__(self, look: Callable[[Trainer, LightningModule], Any]) -> None:
        self.look, self.seen = look, []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.seen.append(self.look(trainer, pl_module))


@contextmanager
def slow_network() -> Iterator[None]:
    """Gathered weights arrive when they are waited for and not before; until then there are NaNs in their place."""
    arrive = buffers.all_gather
    under_way: set[int] = set()

    def send(axis: Axis, flat: Tensor) -> Pending:
        assert id(flat) not in under_way, "weights are sent again before the last ones have arrived"
        under_way.add(id(flat))

        for rank, part in enumerate(flat.chunk(axis.size)):
            if rank != axis.rank:
                part.fill_(float("nan"))

        def receive() -> None:
            under_way.remove(id(flat))
            arrive(axis, flat).wait()

        return Pending(finish=receive)

    buffers.all_gather = send
    try:
        yield
    finally:
        buffers.all_gather = arrive
