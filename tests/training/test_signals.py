"""Signals that ask a run to end: what all processes save, and where, and what the next start makes of it."""

import os
import signal
import stat
import sys

import pytest
import torch
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from strategy_lab import Dense, WithExperts, own_batches, quiet, rank_and_size, same, vectors
from test_pipeline import Chain, every_batch

from olmoe_lightning import MoEStrategy
from olmoe_lightning.checkpoint import publish
from olmoe_lightning.checkpoint.meta import read_meta
from olmoe_lightning.training.signals import next_version

REQUEUE = signal.SIGUSR2
"""In place of SIGUSR1, which the processes of these tests use themselves."""


class Sends(Callback):
    """Sends this process a signal at the beginning of a batch of the run, or of a validation."""

    reads_weights_between_steps = False

    def __init__(self, number, rank, train_batch=None, val_batch=None):
        self.number, self.rank, self.train_batch, self.val_batch = number, rank, train_batch, val_batch
        self.begun = 0
        self.validated = 0

    def _send(self):
        if self.rank in (rank_and_size()[0], None):
            os.kill(os.getpid(), self.number)

    def on_train_batch_start(self, *_):
        if self.begun == self.train_batch:
            self._send()
        self.begun += 1

    def on_validation_batch_start(self, trainer, module, batch, batch_idx, *_):
        if not trainer.sanity_checking:
            if self.validated == self.val_batch:
                self._send()
            self.validated += 1


def modules(kind):
    return {"pipeline": Chain, "experts": WithExperts}.get(kind, Dense)()


def strategies(kind, **options):
    sizes = {
        "pipeline": {"pipeline_parallel_size": 2, "num_microbatches": 4},
        "experts": {"expert_parallel_size": 2},
    }
    return MoEStrategy(**sizes.get(kind, {}), **options)


def batches(kind, count=8):
    """One batch again and again: Lightning goes on in the middle of an epoch, but not in the middle of a list."""
    if kind == "pipeline":
        generator = torch.Generator().manual_seed(0)
        return every_batch([tuple(torch.randn(2, 8, 8, generator=generator))] * count)
    return own_batches(vectors(rank_and_size()[1]) * count)


def run(kind, folder, *callbacks, ckpt_path=None, module=None, strategy=None, validation=None, **options):
    """One fit; whether SIGTERM ended it, and how far it came."""
    keep = [c for c in callbacks if isinstance(c, ModelCheckpoint | OnExceptionCheckpoint)]
    trainer = quiet(
        strategy or strategies(kind),
        devices=rank_and_size()[1],
        callbacks=list(callbacks),
        enable_checkpointing=bool(keep),
        default_root_dir=folder,
        **options,
    )
    module = module or modules(kind)
    ended = False
    try:
        trainer.fit(module, batches(kind), validation, ckpt_path=ckpt_path)
    except SIGTERMException:
        ended = True
    weights = {name: value.detach().clone() for name, value in module.named_parameters()}
    return {"ended": ended, "step": trainer.global_step, "weights": weights}


# ---------------------------------------------------------------------------------------------- SIGTERM


def ended_and_resumed(kind, folder, rank, accumulate):
    whole = run(kind, folder, accumulate_grad_batches=accumulate)
    sends = Sends(signal.SIGTERM, rank, train_batch=4)
    before = signal.getsignal(signal.SIGTERM)
    first = run(kind, folder, sends, ModelCheckpoint(folder), accumulate_grad_batches=accumulate)
    given_back = signal.getsignal(signal.SIGTERM) == before
    saved = read_meta(folder / "last.ckpt")["global_step"]
    second = run(kind, folder, ModelCheckpoint(folder), ckpt_path="last", accumulate_grad_batches=accumulate)
    assert first["step"] == saved
    return first["ended"], given_back, saved, second["ended"], second["step"], same(second["weights"], whole["weights"])


@pytest.mark.parametrize(
    ("kind", "rank"), [("data", 0), ("experts", 0), ("experts", 1), ("experts", None), ("pipeline", 0), ("pipeline", 1)]
)
def test_sigterm_is_agreed_on_saved_and_the_next_run_is_as_if_there_had_been_none(workers, tmp_path, kind, rank):
    for result in workers(2).run(ended_and_resumed, kind, tmp_path, rank, 1):
        assert result == (True, True, 5, False, 8, True)


def test_sigterm_in_an_accumulated_step_ends_the_run_behind_that_step(workers, tmp_path):
    for result in workers(2).run(ended_and_resumed, "data", tmp_path, 0, 3):
        assert result == (True, True, 2, False, 3, True)  # of 3, 3 and 2 batches; the signal came in the fifth


def test_sigterm_in_one_process(tmp_path):
    assert ended_and_resumed("data", tmp_path, 0, 1) == (True, True, 5, False, 8, True)


def exceptions_saved(folder):
    found = []
    for keep in (OnExceptionCheckpoint(folder, "kept"), ModelCheckpoint(folder, "kept", save_on_exception=True)):
        ended = run("data", folder, Sends(signal.SIGTERM, 1, train_batch=2), keep)["ended"]
        found.append(
            (ended, sorted(path.name for path in folder.iterdir()), read_meta(folder / "kept.ckpt")["global_step"])
        )
        torch.distributed.barrier()
        if rank_and_size()[0] == 0:
            (folder / "kept.ckpt").rename(folder.parent / f"moved{len(found)}")
        torch.distributed.barrier()
    return found


def test_callbacks_that_save_on_exceptions_do_it_when_all_processes_end_together(workers, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    for found in workers(2).run(exceptions_saved, tmp_path / "checkpoints"):
        assert found == [(True, ["kept.ckpt"], 3)] * 2


def last_ones_of_others(folder):
    """A run that starts from nothing in the folder of another one."""
    for _ in range(2):
        run("data", folder, Sends(signal.SIGTERM, 0, train_batch=1), ModelCheckpoint(folder))
    return {path.name: read_meta(path)["global_step"] for path in folder.iterdir()}


def test_the_last_checkpoint_of_another_run_stays(workers, tmp_path):
    for found in workers(2).run(last_ones_of_others, tmp_path):
        assert found == {"last.ckpt": 2, "last-v1.ckpt": 2}


def without_checkpoints(folder):
    handled = []
    signal.signal(signal.SIGTERM, lambda *_: handled.append("the user's own"))
    try:
        result = run("data", folder, Sends(signal.SIGTERM, None, train_batch=1))
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return result["ended"], result["step"], list(folder.iterdir()), handled


def test_a_run_without_checkpoints_ends_without_one_and_handlers_of_the_user_are_called(workers, tmp_path):
    for result in workers(2).run(without_checkpoints, tmp_path):
        assert result == (True, 2, [], ["the user's own"])


# ---------------------------------------------------------------------------------------------- validation


class Validates(Dense):
    """Its metric is a sum over the batches, so that one too few or too many is seen."""

    def __init__(self):
        super().__init__()
        self.sums = []

    def on_validation_epoch_start(self):
        self.sums.append(0.0)

    def validation_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.sums[-1] += float(loss)
        self.log("val", loss, sync_dist=True)


def ended_while_validating(folder, lengths):
    rank, _ = rank_and_size()
    validation = own_batches(vectors(16))
    validation.dataset.items = validation.dataset.items[: lengths[rank]]
    options = {"val_check_interval": 4, "validation": validation}
    whole, first, second = Validates(), Validates(), Validates()
    run("data", folder, module=whole, **options)
    sends = Sends(signal.SIGTERM, 1, val_batch=2)
    ended = run("data", folder, sends, ModelCheckpoint(folder), module=first, **options)["ended"]
    step = read_meta(folder / "last.ckpt")["global_step"]
    run("data", folder, ModelCheckpoint(folder), module=second, ckpt_path="last", **options)
    return ended, step, sends.validated, second.sums == whole.sums[-len(second.sums) :], len(second.sums)


@pytest.mark.parametrize(
    ("lengths", "validated"), [((6, 6), (3, 3)), ((6, 4), (3, 3)), ((2, 4), (2, 4))], ids=["even", "uneven", "too late"]
)
def test_sigterm_ends_a_validation_and_the_next_run_repeats_all_of_it(workers, tmp_path, lengths, validated):
    """Processes with batches that others do not have go on to the end of the validation, and then one more step."""
    results = workers(2).run(ended_while_validating, tmp_path, lengths)
    for rank, (ended, step, count, equal, validations) in enumerate(results):
        assert (ended, step, count) == (True, 5 if lengths == (2, 4) else 4, validated[rank])
        assert equal
        assert validations == (1 if lengths == (2, 4) else 2)


# ---------------------------------------------------------------------------------------------- SLURM


SCONTROL = """#!{python}
import pathlib, sys
folder = pathlib.Path({folder!r})
names = sorted(path.name for path in folder.iterdir() if "hpc" in path.name)
with open(folder / "scontrol.txt", "a") as file:
    print(*sys.argv[1:], *names, file=file)
sys.exit({status})
"""


def requeued(folder, rank, asynchronous, status):
    """Two signals in one run, and the start of the next one."""
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2"}
    os.environ.update(job | {"PATH": f"{folder}:{os.environ['PATH']}"})
    if rank_and_size()[0] == 0:
        (folder / "scontrol").write_text(SCONTROL.format(python=sys.executable, folder=str(folder), status=status))
        (folder / "scontrol").chmod(stat.S_IRWXU)
        (folder / "my_ckpt_final.ckpt").touch()  # no version, and nothing that may be taken for one
    torch.distributed.barrier()
    before = signal.getsignal(REQUEUE)
    environment = {"plugins": [Environment(requeue_signal=REQUEUE)]}
    sends = [Sends(REQUEUE, rank, train_batch=batch) for batch in (1, 3)]
    strategy = strategies("data", async_save=asynchronous)
    first = run("data", folder, *sends, strategy=strategy, **environment)
    assert signal.getsignal(REQUEUE) == before
    second = run("data", folder, Sends(signal.SIGTERM, 0, train_batch=0), **environment)  # ckpt_path is None
    third = run("data", folder, ckpt_path="hpc", **environment)
    steps = {path.name: read_meta(path)["global_step"] for path in folder.glob("hpc*")}
    return first["ended"], first["step"], second["step"], third["step"], steps, (folder / "scontrol.txt").read_text()


class Environment(SLURMEnvironment):
    """SLURM's, with the ranks of these processes."""

    def global_rank(self):
        return rank_and_size()[0]

    def local_rank(self):
        return rank_and_size()[0]

    def world_size(self):
        return rank_and_size()[1]

    def node_rank(self):
        return 0

    def validate_settings(self, num_devices, num_nodes):
        pass


@pytest.mark.parametrize(("rank", "asynchronous"), [(0, False), (1, True), (None, True)])
def test_slurms_signal_saves_all_of_a_checkpoint_and_then_requeues_once(workers, tmp_path, rank, asynchronous):
    for ended, first, second, third, steps, asked in workers(2).run(requeued, tmp_path, rank, asynchronous, 0):
        assert not ended
        assert first == 8  # it trains until SLURM ends it
        assert second == 3  # goes on from there by itself, and SIGTERM saves a newer one
        assert third == 8
        assert steps == {"hpc_ckpt_1.ckpt": 2, "hpc_ckpt_2.ckpt": 3}
        assert asked == "requeue 7 hpc_ckpt_1.ckpt\n"


def test_a_job_that_cannot_be_requeued_is_tried_again(workers, tmp_path):
    for _, _, _, _, steps, asked in workers(2).run(requeued, tmp_path, 1, False, 1):
        assert steps == {"hpc_ckpt_1.ckpt": 2, "hpc_ckpt_2.ckpt": 4, "hpc_ckpt_3.ckpt": 5}
        assert len(asked.splitlines()) == 2


def test_what_is_half_written_is_no_version_to_lightning(tmp_path):
    trainer = quiet("auto", devices=1, default_root_dir=tmp_path)
    temporary = publish.temporary_beside(tmp_path / "hpc_ckpt_3.ckpt")
    assert trainer._checkpoint_connector._hpc_resume_path is None
    os.rename(temporary, tmp_path / ".hpc_ckpt_3.ckpt.host.12-34.5.tmp")  # the control: a name that does not hide
    assert "hpc_ckpt_312" in trainer._checkpoint_connector._hpc_resume_path


def test_an_old_checkpoint_gets_its_underscores_back(tmp_path):
    target = tmp_path / "hpc_ckpt~3_.ckpt"
    publish._hidden(target, "old").mkdir()
    (hidden,) = tmp_path.iterdir()
    hidden.rename(tmp_path / hidden.name.replace(f".{os.getpid()}-", ".9999999-"))  # of a process that is gone
    publish.clean(tmp_path)
    assert list(tmp_path.iterdir()) == [target]


def test_versions_are_whole_names_alone(tmp_path):
    assert next_version(str(tmp_path / "missing")).endswith("hpc_ckpt_1.ckpt")
    for name in ("hpc_ckpt_2.ckpt", ".hpc_ckpt_9.ckpt.host.1-2.00000000.tmp", "ckpt_77.ckpt", "my_ckpt_.ckpt"):
        (tmp_path / name).touch()
    assert next_version(str(tmp_path)) == str(tmp_path / "hpc_ckpt_3.ckpt")
