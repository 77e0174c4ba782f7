"""A run that goes on with batches of another size takes the steps that plain Lightning takes then."""

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from test_odd_state import Plain
from tiny_model import SMALL
from torch import nn
from torch.utils.data import DataLoader

from olmoe_lightning import MoEStrategy, OLMoE

CONFIG = SMALL.replace(num_layers=2, balance_loss_coeff=0.0)
STRATEGIES = {
    "plain": None,
    "one process": {},
    "one process, full": {"state_dict_type": "full"},
    "experts": {"expert_parallel_size": 2},
    "pipeline": {"pipeline_parallel_size": 2, "num_microbatches": 2},
}


class SavesAt(Callback):
    def __init__(self, path, step):
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if self.path is not None and trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def samples(rows, ranks):
    """Sixteen sequences, of each batch of ``rows`` x ``ranks`` those of this rank."""
    tokens = torch.randint(0, 64, (16, 17), generator=torch.Generator().manual_seed(0))
    rank = torch.distributed.get_rank() if ranks > 1 else 0
    own = tokens.view(-1, ranks, rows, 17)[:, rank].reshape(-1, 17)
    return [{"input_ids": row[:-1].clone(), "labels": row[1:].clone()} for row in own]


def run(kind, rows, save_to=None, ckpt_path=None):
    """Two epochs with batches of so many rows in all; a checkpoint in the middle of the first one."""
    options = STRATEGIES[kind]
    devices = 2 if kind in ("experts", "pipeline") else 1
    ranks = 2 if kind == "experts" else 1
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy="auto" if options is None else MoEStrategy(**options),
        max_epochs=2,
        callbacks=[SavesAt(save_to, 2)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    # With AdamW's usual eps, elements whose gradient is rounding alone would move by a whole learning rate.
    module = OLMoE(CONFIG, learning_rate=1e-2, schedule="constant", eps=1e-3)
    trainer.fit(module, DataLoader(samples(rows // ranks, ranks), batch_size=rows // ranks), ckpt_path=ckpt_path)
    if options is not None:
        trainer.strategy.state_dict_type = "full"
    state = trainer.strategy.lightning_module_state_dict()
    return trainer.global_step, {name: value.detach().clone() for name, value in state.items()}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Steps and weights of plain Lightning by the rows with which it goes on."""
    path = tmp_path_factory.mktemp("plain") / "a.ckpt"
    run("plain", 4, save_to=path)
    return {rows: run("plain", rows, ckpt_path=path) for rows in (2, 4, 8)}


@pytest.mark.parametrize(
    "kind",
    [
        "experts",
        "pipeline",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("one process", "one process, full")),
    ],
)
def test_steps_and_weights_are_those_of_plain_lightning(workers, tmp_path, plain, kind):
    def start(*args, **kwargs):
        return workers(2).run(run, *args, **kwargs) if kind in ("experts", "pipeline") else [run(*args, **kwargs)]

    start(kind, 4, save_to=tmp_path / "a.ckpt")
    for rows in (2, 8):
        steps, weights = plain[rows]
        assert steps != plain[4][0]
        ranks = start(kind, rows, ckpt_path=tmp_path / "a.ckpt")
        assert [ours for ours, _ in ranks] == [steps] * len(ranks)
        torch.testing.assert_close(ranks[0][1], weights, rtol=2e-5, atol=2e-6)  # joined on the first rank


# ---------------------------------------------------------------------------------------------- joined files


class Expanded(Plain):
    def __init__(self, value):
        super().__init__()
        self.register_buffer("rows", torch.full((1, 4), value).expand(3, 4))
        self.frozen = nn.Parameter(torch.full((3, 1), value).expand(3, 4), requires_grad=False)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()


def resumed_with_expanded_memory(path, strict, missing):
    trainers = [
        Trainer(
            accelerator="cpu", strategy=MoEStrategy(state_dict_type="full"), devices=1, max_epochs=epochs, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )
        for epochs in (1, 2)
    ]  # fmt: skip
    batches = DataLoader([torch.ones(4, 4)], batch_size=None)
    trainers[0].fit(Expanded(1.0), batches)
    trainers[0].save_checkpoint(path)
    if missing:
        checkpoint = torch.load(path)
        del checkpoint["state_dict"]["rows"]
        torch.save(checkpoint, path)
    module = Expanded(5.0)
    module.strict_loading = strict
    trainers[1].fit(module, batches, ckpt_path=path)
    return module


def test_joined_files_fill_expanded_memory_and_stay_strict(tmp_path):
    module = resumed_with_expanded_memory(tmp_path / "a.ckpt", True, False)
    assert module.rows.tolist() == module.frozen.tolist() == [[1.0] * 4] * 3
    assert module.rows.stride() == (0, 1)
    assert module.frozen.stride() == (1, 0)
    with pytest.raises(RuntimeError, match=r"Missing key.*rows"):
        resumed_with_expanded_memory(tmp_path / "b.ckpt", True, True)
    module = resumed_with_expanded_memory(tmp_path / "c.ckpt", False, True)
    assert (module.rows[0, 0], module.frozen[0, 0]) == (5.0, 1.0)
