"""A checkpoint of any topology loads on any other: every bit of it, and training goes on as if nothing had happened."""

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch.utils.data import DataLoader, Dataset

from olmoe_lightning import ModelConfig, MoEStrategy, OLMoE
from olmoe_lightning.checkpoint.directory import Range, SafeReader, index_of, load
from olmoe_lightning.checkpoint.meta import KEY, read_meta
from olmoe_lightning.plugins import BF16Precision

CONFIG = ModelConfig(
    vocab_size=61,
    d_model=12,
    num_layers=5,
    num_dense_layers=1,
    dense_hidden=19,
    num_heads=2,
    num_kv_heads=1,
    head_dim=6,
    num_experts=4,
    top_k=2,
    expert_hidden=7,
    max_seq_len=16,
    selection_bias=True,
    bias_update_rate=0.01,
    balance_loss_coeff=0.02,
    balance_loss_scope="sequence",
)
"""Few of its sizes can be divided by the number of processes."""
ROWS = 8

TOPOLOGIES = {
    # (pipeline, expert_replica, expert), and what else is different
    "1x1x1": (1, 1, 1, {}),
    "1x2x1": (1, 2, 1, {}),
    "1x2x1 replicated": (1, 2, 1, {"shard_optimizer": False}),
    "1x1x2": (1, 1, 2, {}),
    "2x1x1": (2, 1, 1, {"schedule": "1f1b"}),
    "2x1x1 V": (2, 1, 1, {"schedule": "zbv_zero_bubble"}),
    "2x1x2": (2, 1, 2, {"schedule": "1f1b"}),
    "2x1x2 interleaved": (2, 1, 2, {"schedule": "interleaved_1f1b", "stages_per_rank": 2}),
    "1x2x2": (1, 2, 2, {}),
    "1x1x4": (1, 1, 4, {}),
    "2x2x1": (2, 2, 1, {"schedule": "zbv_zero_bubble"}),
    "4x1x1": (4, 1, 1, {"schedule": "gpipe"}),
}


def processes(topology):
    pipeline, replica, expert, _ = TOPOLOGIES[topology]
    return pipeline * replica * expert


class Rows(Dataset):
    """Two global batches; each data rank has its rows of them."""

    def __init__(self, rank, ranks):
        generator = torch.Generator().manual_seed(0)
        self.items = []
        for index in range(2):
            tokens = torch.randint(0, 61, (ROWS, 17), generator=generator)
            labels = tokens[:, 1:].clone()
            labels[index::3, : 5 + index] = -100
            own = slice(rank * ROWS // ranks, (rank + 1) * ROWS // ranks)
            self.items.append({"input_ids": tokens[own, :-1].clone(), "labels": labels[own].clone()})

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


class Model(OLMoE):
    def train_dataloader(self):
        data = self.trainer.strategy.mesh.data
        return DataLoader(Rows(data.rank, data.size), batch_size=None, shuffle=False)


class Watch(Callback):
    """Losses of all steps; and writes again what was just read."""

    def __init__(self, copy):
        self.copy = copy
        self.losses = []

    def on_train_start(self, trainer, pl_module):
        if self.copy:
            trainer.save_checkpoint(self.copy)

    def on_train_batch_end(self, trainer, *_):
        self.losses.append(float(trainer.callback_metrics["train/loss"]))


def train(topology, precision, epochs, path=None, ckpt_path=None, copy=None, **options):
    pipeline, _, expert, more = TOPOLOGIES[topology]
    strategy = MoEStrategy(
        pipeline_parallel_size=pipeline,
        expert_parallel_size=expert,
        bucket_megabytes=0.001,
        **({"num_microbatches": 4} if pipeline > 1 else {}),
        **more,
        **options,
    )
    watch = Watch(copy)
    trainer = Trainer(
        accelerator="cpu",
        devices=processes(topology),
        strategy=strategy,
        plugins=[BF16Precision()] if precision == "bf16" else [],
        max_epochs=epochs,
        callbacks=[watch],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        use_distributed_sampler=False,
        gradient_clip_val=0.5,
    )
    trainer.fit(Model(CONFIG, learning_rate=0.01, schedule="cosine", schedule_steps=8), ckpt_path=ckpt_path)
    if path:
        trainer.save_checkpoint(path)
    return watch.losses


def run(workers, topology, *args, **options):
    """The same losses on all ranks."""
    ranks = workers(processes(topology)).run(train, topology, *args, **options)
    assert all(losses == ranks[0] for losses in ranks)
    return ranks[0]


@pytest.fixture(scope="module")
def written(workers, tmp_path_factory):
    """Checkpoint after two steps, and the losses of all six; each topology once."""
    folder = tmp_path_factory.mktemp("written")
    made = {}

    def make(topology, precision="fp32"):
        key = topology, precision
        if key not in made:
            path = folder / f"{topology}-{precision}.ckpt"
            run(workers, topology, precision, 1, path)
            made[key] = path, run(workers, topology, precision, 3)
        return made[key]

    return make


def everything(path):
    """Each tensor of a checkpoint, and what is no tensor."""
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in index_of(path).items()}
    load(path, [Range(name, value.numel(), 0, value) for name, value in tensors.items()])
    meta = read_meta(path)
    own = {name: meta[KEY][name] for name in ("shapes", "scalars", "skipped_steps")}
    groups = sorted(meta[KEY]["param_groups"], key=lambda group: group["name"])
    return tensors, own, groups, meta["lr_schedulers"], meta["global_step"]


def assert_the_same(first, second):
    tensors, own, groups, *rest = everything(first)
    other_tensors, other_own, other_groups, *other_rest = everything(second)
    assert tensors.keys() == other_tensors.keys()
    for name, value in tensors.items():
        assert value.dtype == other_tensors[name].dtype, name
        assert torch.equal(value, other_tensors[name]), name
    assert own == other_own
    assert groups == other_groups
    assert rest == other_rest


FEW = [
    ("2x1x2", "1x1x1", "fp32"),
    ("2x1x2", "2x1x2", "bf16"),
    ("1x1x1", "2x1x2 interleaved", "fp32"),
    ("1x1x2", "2x1x1 V", "fp32"),
]
HUB = "2x1x2"
MANY = [
    ("1x2x1", "1x1x2", "bf16"),
    ("1x2x1 replicated", "2x1x1 V", "fp32"),
    ("4x1x1", "1x2x2", "fp32"),
] + [
    (*pair, precision)
    for other in TOPOLOGIES
    for pair in {(HUB, other), (other, HUB), (other, other)}
    for precision in ("fp32", "bf16")
]
CROSSINGS = FEW + [pytest.param(*case, marks=pytest.mark.parity) for case in sorted(set(MANY)) if case not in FEW]


@pytest.mark.parametrize(("writer", "reader", "precision"), CROSSINGS)
def test_a_run_goes_on_anywhere_bit_for_bit(workers, written, tmp_path, writer, reader, precision):
    path, whole = written(writer, precision)
    copy = tmp_path / "copy.ckpt"
    losses = run(workers, reader, precision, 3, ckpt_path=path, copy=copy)
    assert_the_same(path, copy)
    assert len(losses) == 4
    if writer == reader:
        assert losses == whole[2:]
    else:
        # Sums over ranks in another order; bf16 products of other microbatches round otherwise.
        assert losses == pytest.approx(whole[2:], rel=2e-5 if precision == "fp32" else 2e-2)


def test_the_comparison_sees_moments_that_were_lost(workers, written, tmp_path):
    """The control of the test above: the same weights with moments of zero."""
    path, whole = written("1x1x2")
    lost = run(workers, "1x1x2", "fp32", 3, ckpt_path=path, copy=tmp_path / "copy.ckpt")
    assert lost == whole[2:]
    forgetful = workers(2).run(train_without_moments, path, tmp_path / "forgetful.ckpt")
    assert forgetful[0] != pytest.approx(whole[2:], rel=2e-5)
    with pytest.raises(AssertionError, match=r"optimizer\..*exp_avg"):
        assert_the_same(path, tmp_path / "forgetful.ckpt")


def train_without_moments(path, copy):
    original = MoEStrategy.load_optimizer_state_dict

    def load(self, checkpoint):
        original(self, checkpoint)
        for state in self.optimizers[0].state.values():
            state["exp_avg"].zero_()

    MoEStrategy.load_optimizer_state_dict = load
    try:
        return train("1x1x2", "fp32", 3, ckpt_path=path, copy=copy)
    finally:
        MoEStrategy.load_optimizer_state_dict = original


@pytest.mark.parity
def test_a_bf16_run_goes_on_in_fp32_with_its_masters(workers, written, tmp_path):
    path, _ = written("1x1x2", "bf16")
    run(workers, "1x2x1", "fp32", 2, ckpt_path=path, copy=tmp_path / "copy.ckpt")
    assert_the_same(path, tmp_path / "copy.ckpt")


@pytest.mark.parametrize("topology", [pytest.param("1x2x1", marks=pytest.mark.parity), "1x2x1 replicated"])
def test_processes_that_hold_the_same_share_the_writing(written, topology):
    path, _ = written(topology)
    written_by = [0, 0]
    for info in SafeReader(path).read_metadata().storage_data.values():
        written_by[int(info.relative_path.split("_")[2])] += info.length
    assert min(written_by) > 0.5 * max(written_by)  # tiny buckets: a rank's share of one can be all of it but its end


def test_the_weights_alone_are_a_third_of_the_bytes(written):
    path, _ = written("2x1x2")
    sizes = {name: entry.size[0] * entry.properties.dtype.itemsize for name, entry in index_of(path).items()}
    trained = sum(size for name, size in sizes.items() if name.startswith("optimizer."))
    assert trained == 8 * CONFIG.num_params
    on_disk = sum(file.stat().st_size for file in path.glob("*.distcp"))
    assert sum(sizes.values()) < on_disk
