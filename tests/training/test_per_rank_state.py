"""What each process has for itself comes back there; on another mesh by a rule, or a sentence says why not."""

import re

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from strategy_lab import Items, quiet, rank_and_size
from torch import nn
from torch.utils.data import DataLoader

from olmoe_lightning import MoEStrategy
from olmoe_lightning.checkpoint.directory import index_of, read_range
from olmoe_lightning.checkpoint.meta import MODEL
from olmoe_lightning.checkpoint.per_rank import equal
from olmoe_lightning.errors import UserError


class Counting(DataLoader):
    """Reads numbers of its own rank, and knows how far it has come."""

    def __init__(self, seed, count=8):
        super().__init__(Items(list(range(count))), batch_size=None)
        self.seed, self.position = seed, 0

    def __iter__(self):
        while self.position < len(self):
            self.position += 1
            yield torch.full((2, 4), float(100 * self.seed + self.position))
        self.position = 0

    def state_dict(self):
        return {"position": self.position, "seed": torch.tensor(self.seed)}

    def load_state_dict(self, state):
        self.position, self.seed = state["position"], int(state["seed"])


class Scale(nn.Module):
    """Experts of somebody else: one factor for each, buffers beside them, and a state that is no tensor."""

    def __init__(self, experts):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(experts, 4))
        self.weight.is_expert = True
        self.register_buffer("load", torch.zeros(experts))
        self.register_buffer("calls", torch.tensor(0))
        self.note = 0

    def forward(self, x):
        rank, _ = rank_and_size()
        self.load += x.detach().mean() + torch.arange(len(self.load))
        self.calls += 1 + rank
        self.note += 10 + rank
        return x * self.weight.mean(0)

    def get_extra_state(self):
        return {"note": self.note}

    def set_extra_state(self, state):
        self.note = state["note"]


class Parts(nn.Module):
    """Weights of experts are in its parts; which of its buffers are theirs, it says."""

    expert_buffers = ("load",)

    def __init__(self, experts):
        super().__init__()
        self.scale = Scale(experts)
        self.register_buffer("load", torch.zeros(experts))
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, x):
        rank, _ = rank_and_size()
        self.load = self.load + 1 + rank  # another tensor each time
        self.steps += 1 + rank
        return self.scale(x)


class Module(LightningModule):
    def __init__(self, experts=2, calls=True):
        super().__init__()
        self.parts = Parts(experts)
        if not calls:
            del self.parts.scale.calls
            self.parts.scale.register_buffer("calls", torch.zeros(experts))
        self.seen, self.read = 0, []

    def training_step(self, batch, batch_idx):
        rank, _ = rank_and_size()
        self.seen += 1 + rank
        self.read.append(float(batch[0, 0]))
        return self.parts(batch).square().mean() * 1e-3

    def get_extra_state(self):
        return {"seen": self.seen}

    def set_extra_state(self, state):
        self.seen = state["seen"]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def state_of(module):
    parts = module.parts
    return {
        "load of parts": parts.load.tolist(),
        "steps": int(parts.steps),
        "load": parts.scale.load.tolist(),
        "calls": parts.scale.calls.tolist(),
        "note": parts.scale.note,
        "seen": module.seen,
    }


def begin(path, kind, ranks=2, later=False, calls=True):
    """Three batches of an epoch of eight, a save, and the rest of the epoch."""
    rank, _ = rank_and_size()
    module = Module(calls=calls)
    strategy = MoEStrategy(expert_parallel_size=ranks, state_dict_type=kind, async_save=later)
    trainer = quiet(strategy, devices=dist.get_world_size())
    states = []

    def on_train_batch_end(outputs, batch, batch_idx):
        if batch_idx == 2:
            trainer.save_checkpoint(path)
            states.append(state_of(module))

    module.on_train_batch_end = on_train_batch_end
    trainer.fit(module, Counting(seed=rank + 1))
    return states[0], module.read


def go_on(path, ranks=2, experts=2, fit=True, calls=True):
    """The rest of the epoch."""
    module = Module(experts, calls)
    trainer = quiet(MoEStrategy(expert_parallel_size=ranks), devices=rank_and_size()[1])
    states = []
    module.on_train_start = lambda: states.append(state_of(module))
    try:
        trainer.fit(module, Counting(seed=9), ckpt_path=path)
    except (UserError, RuntimeError) as error:
        return str(error)
    return states[0], module.read


@pytest.mark.parametrize(("kind", "later"), [("sharded", False), ("sharded", True), ("full", False)])
def test_every_rank_gets_its_own_state_back(workers, tmp_path, kind, later):
    before = workers(2).run(begin, tmp_path / "saved.ckpt", kind, 2, later)
    after = workers(2).run(go_on, tmp_path / "saved.ckpt")
    assert before[0][0] != before[1][0]  # else nothing is shown
    for (saved, read), (found, further) in zip(before, after, strict=True):
        assert found == saved | {"steps": before[0][0]["steps"]}  # no buffer of experts: the first rank counts
        assert further == read[3:]


@pytest.mark.parametrize("kind", ["sharded", "full"])
def test_replicas_of_experts_get_theirs_back(workers, tmp_path, kind):
    before = workers(4).run(begin, tmp_path / "saved.ckpt", kind)
    after = workers(4).run(go_on, tmp_path / "saved.ckpt")
    for rank, ((saved, read), (found, further)) in enumerate(zip(before, after, strict=True)):
        first = before[rank % 2][0]  # of the replicas
        equalised = {name: first[name] for name in ("load of parts", "load", "calls")}
        assert found == saved | equalised | {"steps": before[0][0]["steps"]}
        assert further == read[3:]


@pytest.mark.parametrize("kind", ["sharded", "full"])
def test_on_another_mesh_what_follows_no_rule_is_refused_on_all_ranks(workers, tmp_path, kind):
    workers(2).run(begin, tmp_path / "saved.ckpt", kind)
    for message in (go_on(tmp_path / "saved.ckpt", 1, 4), *workers(4).run(go_on, tmp_path / "saved.ckpt")):
        assert re.search(r"checkpoint's 2 data ranks have states of their own.*the [14] data ranks", message), message
    # As many data ranks, but all experts on each: the loaders come back, numbers of each rank cannot.
    for message in workers(2).run(go_on, tmp_path / "saved.ckpt", 1, 4):
        assert re.search(r"parts\.scale\.calls|parts\.scale\._extra_state", message), message


def test_rows_of_experts_are_shared_out_on_another_mesh(workers, tmp_path):
    """Buffers with a row for each expert are one tensor of all, as their weights."""
    before = workers(2).run(begin, tmp_path / "saved.ckpt", "sharded", 2, False, False)
    for name, key in (("parts.load", "load of parts"), ("parts.scale.load", "load"), ("parts.scale.calls", "calls")):
        entry = index_of(tmp_path / "saved.ckpt")[MODEL + name]
        assert entry.size[0] == 4
        rows = read_range(tmp_path / "saved.ckpt", MODEL + name, 0, 4).tolist()
        assert rows == before[0][0][key] + before[1][0][key]


def test_values_of_states_are_compared_whatever_they_are_made_of():
    value = {"a": [torch.ones(2), (1, "x")], "b": None}
    assert equal(value, {"a": [torch.ones(2), (1, "x")], "b": None})
    for other in (
        {"a": [torch.zeros(2), (1, "x")], "b": None},
        {"a": [torch.ones(3), (1, "x")], "b": None},
        {"a": [torch.ones(2), (1.0, "x")], "b": None},
        {"a": [torch.ones(2)], "b": None},
        {"a": None},
    ):
        assert not equal(value, other)
