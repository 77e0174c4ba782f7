"""A process can be killed at any moment of a save: what was published stays, what was not goes. See soak.py."""

import multiprocessing
from pathlib import Path

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from soak import finish, kills, leftovers
from torch.utils.data import DataLoader

from olmoe_lightning import MoEStrategy
from olmoe_lightning.checkpoint.publish import temporary_beside

KILLS = 3


def test_nothing_that_was_published_is_lost_by_kills(workers, tmp_path):
    done = list(kills(workers(2), tmp_path, KILLS, seed=0))
    for kill in done:
        assert not kill.problems, str(kill)
    assert any(kill.in_a_save for kill in done)  # else there was nothing to survive
    assert done[-1].started > 0
    assert finish(workers(2), tmp_path, KILLS) == []


def test_the_same_kills_lose_checkpoints_that_are_written_in_place(workers, tmp_path):
    """The control of the test above. A kill between two saves loses nothing; most come during one."""
    lost = next((kill for kill in kills(workers(2), tmp_path, 3 * KILLS, seed=0, in_place=True) if kill.problems), None)
    assert lost is not None
    assert lost.in_a_save


# ---------------------------------------------------------------------------------------------- left-overs


def leave(target):
    (temporary_beside(Path(target)) / "part").write_text("half")


def left_by_a_dead_process(target):
    """What a save that was killed leaves: under the name of a process that is no more."""
    child = multiprocessing.get_context("fork").Process(target=leave, args=(target,))
    child.start()
    child.join()
    assert child.exitcode == 0


def fit_and_save(folder):
    seen = {}

    class Model(BoringModel):
        def on_train_start(self):
            seen["at the start"] = {name: leftovers(folder / name) for name in ("callback", "other")}

        def on_train_batch_end(self, *_):
            self.trainer.save_checkpoint(folder / "other" / "by-hand.ckpt")

    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=MoEStrategy(),
        max_steps=2,
        limit_val_batches=0,
        callbacks=[ModelCheckpoint(folder / "callback", every_n_train_steps=1)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), DataLoader(torch.randn(8, 32), batch_size=1))
    seen["at the end"] = {name: leftovers(folder / name) for name in ("callback", "other")}
    return seen


def test_a_run_removes_what_dead_processes_left_and_nothing_else(workers, tmp_path):
    for name in ("callback", "other"):
        left_by_a_dead_process(tmp_path / name / "step=1.ckpt")
    alive = temporary_beside(tmp_path / "callback" / "alive.ckpt")  # of this process
    (tmp_path / "callback" / ".mine").write_text("a hidden file that is no left-over")
    for seen in workers(2).run(fit_and_save, tmp_path):
        kept = sorted([alive.name, ".mine"])
        assert seen["at the start"]["callback"] == kept  # known from ModelCheckpoint
        assert len(seen["at the start"]["other"]) == 1
        assert seen["at the end"] == {"callback": kept, "other": []}  # known from the first save
    assert sorted(path.name for path in (tmp_path / "other").iterdir()) == ["by-hand.ckpt"]
