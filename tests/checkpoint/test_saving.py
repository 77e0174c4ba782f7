"""Saves that fail say so on all ranks and leave nothing behind; saves in the background do not show in what they write.

Run as a script (``python test_saving.py FOLDER``), this file trains in two processes, of which the second one fails.
"""

import contextlib
import os
import resource
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from tiny_model import SMALL
from torch.utils.data import DataLoader

from olmoe_lightning import MoEStrategy, OLMoE
from olmoe_lightning.checkpoint.background import Copy, CopyBuffers
from olmoe_lightning.checkpoint.directory import Range, index_of, load
from olmoe_lightning.checkpoint.meta import KEY, read_meta
from olmoe_lightning.training.snapshot import SaveError

CONFIG = SMALL
MODES = pytest.mark.parametrize("background", [False, True], ids=["sync", "async"])


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        tokens = torch.randint(0, 64, (2, 17), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens[:, :-1].clone(), "labels": tokens[:, 1:].clone()}


class Each(Callback):
    """Calls ``action(trainer)`` at the end of each step."""

    def __init__(self, action):
        self.action = action

    def on_train_batch_end(self, trainer, *_):
        self.action(trainer)


class Ends(Callback):
    """The step after which an exception came."""

    step = None

    def on_exception(self, trainer, pl_module, exception):
        self.step = trainer.global_step


def saves_to(folder):
    return Each(lambda trainer: trainer.save_checkpoint(folder / f"{trainer.global_step}.ckpt"))


def trainer_of(strategy, *callbacks, steps=3, **options):
    defaults = {"max_epochs": -1, "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    if not any(isinstance(callback, ModelCheckpoint) for callback in callbacks):
        defaults["enable_checkpointing"] = False
    return Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_steps=steps,
        callbacks=list(callbacks),
        **(defaults | options),
    )


def fit(strategy, *callbacks, **options):
    """Train; what the rank has to say: the error, the step at which it came, warnings."""
    ends = Ends()
    torch.manual_seed(0)
    trainer = trainer_of(strategy, *callbacks, ends, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.fit(OLMoE(CONFIG, learning_rate=1e-2, schedule="constant"), DataLoader(Rows(), batch_size=None))
            error = None
        except SaveError as found:
            error = str(found)
    text = "\n".join(str(warning.message) for warning in caught)
    return {"error": error, "step": trainer.global_step, "ended": ends.step, "warnings": text}


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def everything(path):
    """Each tensor of a checkpoint, scalars of the optimizer, and Lightning's part."""
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in index_of(path).items()}
    load(path, [Range(name, value.numel(), 0, value) for name, value in tensors.items()])
    meta = read_meta(path)
    rest = {name: meta[name] for name in ("epoch", "global_step", "loops", "callbacks", "lr_schedulers")}
    return tensors, {name: meta[KEY][name] for name in ("scalars", "param_groups", "random")}, rest


def differences(first, second, name=""):
    """Names of what is not equal to the last bit."""
    if isinstance(first, torch.Tensor):
        return [] if torch.equal(first, second) else [name]
    if isinstance(first, dict) and first.keys() == second.keys():
        return [found for key in first for found in differences(first[key], second[key], f"{name}.{key}")]
    if isinstance(first, list | tuple) and len(first) == len(second):
        pairs = enumerate(zip(first, second, strict=True))
        return [found for key, pair in pairs for found in differences(*pair, f"{name}[{key}]")]
    return [] if first == second else [f"{name}: {first}, {second}"]


# ---------------------------------------------------------------------------------------------- saves that fail


class Writing(MoEStrategy):
    """Its ``_write`` stands around that of its saver."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self._original = self._saver._write
        self._saver._write = self._write

    def _write(self, *args):
        self._original(*args)


class FullDisk(Writing):
    """One rank can write ``bytes_left`` of a file and no more, as the system answers when a disk is full."""

    rank, bytes_left = 0, 0

    def _write(self, *args):
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        if self.global_rank == self.rank:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.bytes_left, hard))
        try:
            super()._write(*args)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class LargeState(Callback):
    """Makes what rank 0 writes alone larger than all parts of tensors."""

    def state_dict(self):
        return {"large": torch.zeros(200_000)}


def spoil(trainer):
    """An expert of the second rank has a weight that is no number."""
    if trainer.global_rank == 1 and trainer.global_step == 1:
        strategy = trainer.strategy
        for _, parameter, index in strategy.sharded.parameters:
            if strategy.sharded.ownership.is_expert(parameter) and index in strategy.sharded.shards:
                strategy.sharded.shards[index].master.data.view(-1)[3] = float("nan")
                return


FAULTS = ("parent is a file", "read-only folder", "full disk of rank 1", "full disk of rank 0", "weight is nan")


def fail(folder, fault, background, on_save_error):
    strategy = FullDisk if fault.startswith("full disk") else MoEStrategy
    strategy = strategy(expert_parallel_size=2, async_save=background, on_save_error=on_save_error)
    callbacks = [saves_to(folder)]
    if fault.startswith("full disk"):
        strategy.rank = int(fault[-1])
        strategy.bytes_left = 20_000 if strategy.rank else 600_000
        callbacks.insert(0, LargeState())
    if fault == "weight is nan":
        # The skipped steps after it are those of the strategy, which is not what this is about.
        callbacks.insert(0, Each(spoil))
    return fit(strategy, *callbacks)


@pytest.fixture(params=FAULTS)
def fault(request, tmp_path):
    """What is wrong, the folder of the checkpoints, and a part of the reason that is given."""
    folder = tmp_path / "checkpoints"
    reason = {"parent is a file": "Not a directory", "read-only folder": "ermission", "weight is nan": "not finite"}
    if request.param == "parent is a file":
        folder.write_text("")
        folder = folder / "inner"
    elif request.param == "read-only folder":
        if os.geteuid() == 0:
            pytest.skip("root may write everywhere")
        folder.mkdir(mode=0o500)
    else:
        folder.mkdir()
    return request.param, folder, reason.get(request.param, "")


@MODES
def test_a_failed_save_is_one_error_on_all_ranks_or_a_warning_and_leaves_nothing(workers, fault, background):
    kind, folder, reason = fault
    both = workers(2).run(fail, folder, kind, background, "raise")
    for rank in both:
        assert rank["error"] == both[0]["error"]
        assert str(folder / "1.ckpt") in rank["error"]
        assert reason in rank["error"]
        # In the background it is known at the next step at the earliest, and on both at the same one.
        assert rank["ended"] == both[0]["ended"] >= (2 if background and kind != "weight is nan" else 1)
    assert not folder.is_dir() or names(folder) == []
    for rank in workers(2).run(fail, folder, kind, background, "warn"):
        assert rank["error"] is None
        assert rank["step"] == 3
    assert str(folder / "1.ckpt") in workers(2).run(fail, folder, kind, background, "warn")[0]["warnings"]
    assert not folder.is_dir() or names(folder) == []


# ---------------------------------------------------------------------------------------------- retention


def keep(folder, background, failing):
    class Sometimes(FullDisk):
        def _write(self, target, *rest):
            full = any(f"step={step}." in target.name or f"{step}.ckpt" == target.name for step in failing)
            self.bytes_left = 0 if full else 10**9
            super()._write(target, *rest)

    callback = ModelCheckpoint(
        folder,
        filename="step={step}",
        auto_insert_metric_name=False,
        monitor="quality",
        mode="max",
        save_top_k=2,
        save_last=True,
        every_n_train_steps=1,
    )
    quality = [0.0, 0.1, 0.9, 0.2, 0.8, 0.3]

    class Grades(Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            pl_module.log("quality", quality[trainer.global_step])

    strategy = Sometimes(expert_parallel_size=2, async_save=background, on_save_error="warn")
    fit(strategy, Grades(), callback, steps=5)
    best, last = os.path.basename(callback.best_model_path), os.path.basename(callback.last_model_path)
    return best, sorted(os.path.basename(path) for path in callback.best_k_models), last


@MODES
def test_the_best_two_and_the_last_are_kept(workers, tmp_path, background):
    assert (
        workers(2).run(keep, tmp_path, background, ())
        == [("step=2.ckpt", ["step=2.ckpt", "step=4.ckpt"], "last.ckpt")] * 2
    )
    assert names(tmp_path) == ["last.ckpt", "step=2.ckpt", "step=4.ckpt"]
    assert [everything(tmp_path / name)[2]["global_step"] for name in names(tmp_path)] == [5, 2, 4]


@MODES
def test_an_old_one_stays_when_the_one_that_was_to_replace_it_cannot_be_written(workers, tmp_path, background):
    kept = workers(2).run(keep, tmp_path, background, (4,))
    assert kept[0] == kept[1]
    best, two, last = kept[0]
    # step=4 was better than step=3, and step=5, too, is, if it is known by then that there is no step=4.
    assert two in (["step=2.ckpt", "step=3.ckpt"], ["step=2.ckpt", "step=5.ckpt"])
    assert (best, last) == ("step=2.ckpt", "last.ckpt")
    assert names(tmp_path) == [last, *two]
    assert [everything(tmp_path / name)[2]["global_step"] for name in names(tmp_path)] == [5, *(int(n[5]) for n in two)]


@MODES
@pytest.mark.parametrize(
    ("failing", "expected"),
    [
        ((2,), "step=4.ckpt"),
        ((1, 2, 3, 4, 5), ""),
        ((1, 2, 3, 4, 5, "last"), ""),
    ],
)
def test_what_was_not_written_is_not_named(workers, tmp_path, background, failing, expected):
    for best, kept, last in workers(2).run(keep, tmp_path, background, failing):
        assert best == expected
        assert set(kept) <= set(names(tmp_path))
        assert last in ("", *names(tmp_path))


# ---------------------------------------------------------------------------------------------- in the background


class Slow(Writing):
    """Saves of which the first begins when training is a step further; notes where training was as each of them began.

    However fast the machine is, training overtakes that save, and the next ones wait behind it.
    """

    begun = ()
    seconds = 0.0

    def _write(self, target, *rest):
        trainer, deadline = self.lightning_module.trainer, time.monotonic() + 100
        while not self.begun and trainer.global_step < 2 and time.monotonic() < deadline:
            time.sleep(0.005)
        self.begun = (*self.begun, (target.name, trainer.global_step))
        time.sleep(self.seconds)
        super()._write(target, *rest)


def save_every_step(folder, background, aliased=False):
    start = CopyBuffers.start
    if aliased:
        CopyBuffers.start = lambda self, tensors: (Copy([], []), [value.detach() for value in tensors])
    try:
        strategy = (Slow if background else MoEStrategy)(expert_parallel_size=2, async_save=background)
        fit(strategy, saves_to(folder), steps=5)
        return getattr(strategy, "begun", None)
    finally:
        CopyBuffers.start = start


def test_a_save_in_the_background_holds_the_moment_of_the_call_and_saves_queue_in_order(workers, tmp_path):
    workers(2).run(save_every_step, tmp_path / "sync", False)
    for begun in workers(2).run(save_every_step, tmp_path / "async", True):
        assert [name for name, _ in begun] == [f"{step}.ckpt" for step in range(1, 6)]
        assert any(training > int(name[0]) for name, training in begun)  # else nothing was overtaken
    assert names(tmp_path / "async") == names(tmp_path / "sync")
    for name in names(tmp_path / "sync"):
        assert differences(everything(tmp_path / "sync" / name), everything(tmp_path / "async" / name)) == [], name


def test_the_comparison_sees_values_that_were_not_copied(workers, tmp_path):
    """The control of the test above."""
    workers(2).run(save_every_step, tmp_path / "sync", False)
    workers(2).run(save_every_step, tmp_path / "async", True, aliased=True)
    assert any(
        differences(everything(tmp_path / "sync" / name)[0], everything(tmp_path / "async" / name)[0])
        for name in names(tmp_path / "sync")
    )


class Idle(MoEStrategy):
    """Copies for saves begin late, when the next step has been computed; ``waits``: whether the optimizer does."""

    waits = True

    def save_checkpoint(self, *args, **kwargs):
        begin = threading.Event()
        run = Copy._run

        def late(copy, sources):
            begin.wait(1.0)
            run(copy, sources)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Copy, "_run", late)
            super().save_checkpoint(*args, **kwargs)

    def finish_copy(self):
        if self.waits:
            super().finish_copy()


class Careless(Idle):
    waits = False


def save_once_in_training(folder, strategy):
    """The second step's state, twice: with a sync save, and with one that overlaps with the third step."""

    def look(trainer):
        if trainer.global_step == 2:
            trainer.strategy.async_save = False
            trainer.save_checkpoint(folder / "sync.ckpt")
            trainer.strategy.async_save = "overlap"
            trainer.save_checkpoint(folder / "overlap.ckpt")

    return fit(strategy(expert_parallel_size=2, async_save="overlap"), Each(look), steps=4)["step"]


@pytest.mark.parametrize("strategy", [Idle, Careless])
def test_copies_that_overlap_with_a_step_are_of_what_was_before_it(workers, tmp_path, strategy):
    assert workers(2).run(save_once_in_training, tmp_path, strategy) == [4, 4]
    sync, overlap = (everything(tmp_path / f"{name}.ckpt") for name in ("sync", "overlap"))
    changed = differences(sync[0], overlap[0])
    assert bool(changed) == (strategy is Careless)  # the control: an optimizer that does not wait
    assert differences(sync[1:], overlap[1:]) == []


def copy_fails_on_one_rank(folder):
    """The first of two saves cannot be copied on the second rank."""

    def look(trainer):
        run = Copy._run

        def fail(copy, sources):
            copy._error = MemoryError("no memory for a copy")

        if trainer.global_step <= 2:
            if trainer.global_rank == 1 and trainer.global_step == 1:
                Copy._run = fail
            try:
                trainer.save_checkpoint(folder / f"{trainer.global_step}.ckpt")
            finally:
                Copy._run = run

    return fit(MoEStrategy(expert_parallel_size=2, async_save=True, on_save_error="warn"), Each(look), steps=6)


def test_a_copy_that_fails_on_one_rank_fails_the_save_of_all_and_no_other(workers, tmp_path):
    first, second = workers(2).run(copy_fails_on_one_rank, tmp_path)
    assert first["error"] is second["error"] is None
    assert "1.ckpt: rank 1: MemoryError: no memory for a copy" in first["warnings"]
    assert names(tmp_path) == ["2.ckpt"]
    assert everything(tmp_path / "2.ckpt")[2]["global_step"] == 2


class Held(Writing):
    """Saves that wait until training lets them go."""

    def _write(self, *args):
        assert self.go.wait(30)
        super()._write(*args)


def save_and_hold(folder):
    """Two saves are asked for before the first one may begin; training goes on meanwhile."""
    strategy = Held(expert_parallel_size=2, async_save=True)
    strategy.go = threading.Event()
    seen = {}

    def look(trainer):
        if trainer.global_step <= 2:
            trainer.save_checkpoint(folder / f"{trainer.global_step}.ckpt")
        if trainer.global_step == 5:
            seen["held"] = list(folder.glob("*"))
            strategy.go.set()

    class AtTheEnd(Callback):
        def on_fit_end(self, *_):  # comes after the strategy's end of training
            seen["at the end"] = names(folder)

    fit(strategy, Each(look), AtTheEnd(), steps=5)
    trainer = strategy.lightning_module.trainer
    trainer.save_checkpoint(folder / "after.ckpt")  # nothing would wait for it in the background
    seen["after"] = (folder / "after.ckpt").is_dir()
    return seen


def test_training_goes_on_during_saves_and_its_end_waits_for_them(workers, tmp_path):
    for seen in workers(2).run(save_and_hold, tmp_path):
        assert seen == {"held": [], "at the end": ["1.ckpt", "2.ckpt"], "after": True}


LATE = ("on_train_end", "on_fit_end", "teardown")


def save_late(folder, hook):
    """A save in the background is asked for in a hook behind which little or nothing comes."""

    class Late(Callback):
        pass

    def save(_, trainer, *__, **___):
        trainer.save_checkpoint(folder / f"{hook}.ckpt")

    setattr(Late, hook, save)
    strategy = MoEStrategy(async_save=True)
    fit(strategy, Late(), steps=2)
    path = folder / f"{hook}.ckpt" / "meta.pt"
    threads = [thread.name for thread in threading.enumerate() if thread.name == "checkpoints"]
    return path.exists(), threads


@pytest.mark.parametrize("hook", LATE)
def test_a_save_in_the_background_is_complete_in_late_hooks(workers, tmp_path, hook):
    for seen in workers(2).run(save_late, tmp_path, hook):
        assert seen == (True, [])
    everything(tmp_path / f"{hook}.ckpt")


def fail_on_one_rank_late(folder):
    """Both learn that the first save has failed, the second rank half a second after the first."""

    class Late(Writing):
        def _write(self, *args):
            try:
                super()._write(*args)
            finally:
                time.sleep(0.5 * self.global_rank)

    def save_once(trainer):
        if trainer.global_step == 1:
            trainer.save_checkpoint(folder / "file" / "1.ckpt")
        time.sleep(0.02)

    return fit(Late(expert_parallel_size=2, async_save=True), Each(save_once), steps=200)


def test_ranks_stop_at_the_same_step_although_they_learn_of_a_failure_at_different_moments(workers, tmp_path):
    (tmp_path / "file").write_text("")
    first, second = workers(2).run(fail_on_one_rank_late, tmp_path)
    assert first["error"] == second["error"]
    assert str(tmp_path / "file" / "1.ckpt") in first["error"]
    assert 1 < first["ended"] == second["ended"] < 200


# ---------------------------------------------------------------------------------------------- an exception


def main(folder):
    class Fails(OLMoE):
        def training_step(self, batch, batch_idx):
            if self.trainer.global_step == 2 and self.global_rank == 1:
                print(f"raised at {time.time()}", flush=True)
                raise ZeroDivisionError("rank 1 has had enough")
            return super().training_step(batch, batch_idx)

    strategy = Slow(expert_parallel_size=2, async_save=True)
    strategy.seconds = 1.0
    trainer = trainer_of(strategy, saves_to(Path(folder)))
    trainer.fit(Fails(CONFIG), DataLoader(Rows(), batch_size=None))


@pytest.mark.slow
def test_an_exception_with_a_save_in_flight_ends_the_run_soon_and_leaves_whole_checkpoints(tmp_path):
    command = [sys.executable, __file__, str(tmp_path)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=120)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
    assert process.returncode != 0
    raised = [float(line.split()[-1]) for line in output.splitlines() if line.startswith("raised at")]
    assert raised, output  # that it ended at all is "soon": a collective would have waited for half an hour
    assert "rank 1 has had enough" in output
    for path in tmp_path.glob("*.ckpt"):
        everything(path)


if __name__ == "__main__":
    main(sys.argv[1])
