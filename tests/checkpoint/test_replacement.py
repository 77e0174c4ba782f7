"""Whatever stands under a name is replaced as a whole: directories, files, links, each by any of them."""

import errno
import multiprocessing
import os
import shutil
import signal

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from test_odd_state import Plain, data, fitted, trainer
from test_publish import ended, killed_at_step

from olmoe_lightning.checkpoint import publish
from olmoe_lightning.checkpoint.directory import CorruptCheckpoint
from olmoe_lightning.checkpoint.publish import clean, whole_file
from olmoe_lightning.training.snapshot import SaveError
from olmoe_lightning.training.whole_files import WholeFiles

KINDS = ("sharded", "full")


def weights(path):
    """Of a checkpoint of any kind, loaded as a user does."""
    module = Plain()
    trainer().validate(module, data(), ckpt_path=path, verbose=False)
    return module.layer.weight.detach().clone()


def put(kind, path):
    """Something whole under a name, of any kind."""
    if kind == "link":
        path.symlink_to(path.with_name("elsewhere"))
        path.with_name("elsewhere").write_text("stays")
    elif kind == "file":
        path.write_text("old")
    elif kind == "directory":
        path.mkdir()
        (path / "inside").write_text("old")


@pytest.mark.parametrize("old", ["nothing", "file", "directory", "link"])
@pytest.mark.parametrize("kind", KINDS)
def test_anything_is_replaced_by_anything(tmp_path, kind, old):
    path = tmp_path / "a.ckpt"
    put(old, path)
    run = fitted(path, Plain(), state_dict_type=kind)
    assert path.is_dir() == (kind == "sharded")
    assert not path.is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["a.ckpt"] + ["elsewhere"] * (old == "link")
    torch.testing.assert_close(weights(path), run.lightning_module.layer.weight.detach(), rtol=0, atol=0)


def change_kinds(path):
    """Two processes save over one name, of one kind and of the other."""
    run = trainer(2)
    module = Plain()
    run.fit(module, data())
    for kind in (*KINDS, *KINDS):
        run.strategy.state_dict_type = kind
        run.save_checkpoint(path)
        if run.global_rank == 0:
            assert os.path.isdir(path) == (kind == "sharded")
            assert len(os.listdir(os.path.dirname(path))) == 1
        run.strategy.barrier()
    return module.layer.weight.detach().clone()


def test_kinds_change_under_one_name_on_two_processes(workers, tmp_path):
    path = tmp_path / "folder" / "last.ckpt"
    expected, _ = workers(2).run(change_kinds, path)
    torch.testing.assert_close(weights(path), expected, rtol=0, atol=0)


def save_file(target, content):
    WholeFiles().save_checkpoint({"content": content, "more": torch.arange(1000)}, target)


def save_with_torch(target, content):
    """What must not be done."""
    torch.save({"content": content, "more": torch.arange(1000)}, target)


def content_of(target):
    if target.is_dir():
        return (target / "inside").read_text()
    try:
        return torch.load(target)["content"]
    except Exception:
        return "broken"


@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "no-exchange"])
@pytest.mark.parametrize("old", ["file", "directory"])
def test_a_file_is_whole_when_its_save_is_killed_at_any_step(tmp_path, monkeypatch, old, exchange):
    monkeypatch.setattr(os, "fsync", os.fstat)
    if not exchange:
        monkeypatch.setattr(publish, "_exchange", lambda first, second: False)
    target, seen = tmp_path / "last.ckpt", set()
    for step in range(100):
        publish.remove(target)
        if old == "file":
            save_file(target, "old")
        else:
            put("directory", target)
        code = ended(killed_at_step, step, save_file, target, "new")
        clean(tmp_path)
        seen.add(content_of(target))
        assert os.listdir(tmp_path) == ["last.ckpt"], step
        if code == 0:
            break
        assert code == -signal.SIGKILL
    assert code == 0
    assert content_of(target) == "new"
    assert seen == {"old", "new"}


def test_the_same_kills_break_a_file_that_is_written_in_place(tmp_path):
    """Else the test above would see nothing."""
    seen = set()
    for _ in range(2):
        save_with_torch(tmp_path / "last.ckpt", "old")
        child = multiprocessing.get_context("fork").Process(target=write_half, args=(tmp_path / "last.ckpt",))
        child.start()
        child.join()
        seen.add(content_of(tmp_path / "last.ckpt"))
    assert seen == {"broken"}


def write_half(target):
    """A process that is killed while ``torch.save`` writes."""

    class Killed:
        def __reduce__(self):
            os.kill(os.getpid(), signal.SIGKILL)

    torch.save({"content": "new", "more": Killed()}, target)


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_disk_leaves_the_old_one_and_nothing_else(tmp_path, monkeypatch, kind):
    path = tmp_path / "a.ckpt"
    run = fitted(path, Plain(), state_dict_type=kind)
    before = weights(path)
    with torch.no_grad():
        run.lightning_module.layer.weight.add_(1)

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(SaveError, match="No space left on device"):
            run.save_checkpoint(path)
    assert os.listdir(tmp_path) == ["a.ckpt"]
    torch.testing.assert_close(weights(path), before, rtol=0, atol=0)


def test_a_writer_that_fails_leaves_nothing(tmp_path):
    def write():
        with whole_file(tmp_path / "folder" / "a.ckpt") as temporary:
            temporary.write_text("half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write()
    assert os.listdir(tmp_path / "folder") == []


@pytest.mark.parametrize("kind", KINDS)
def test_values_that_are_not_finite_are_not_published(tmp_path, kind):
    path = tmp_path / "a.ckpt"
    run = fitted(path, Plain(), state_dict_type=kind)
    before = weights(path)
    with torch.no_grad():
        run.lightning_module.layer.weight[0, 0] = float("nan")
    with pytest.raises(SaveError, match=r"1 tensors have values that are not finite, .*layer\.weight"):
        run.save_checkpoint(path)
    torch.testing.assert_close(weights(path), before, rtol=0, atol=0)
    state = next(iter(run.optimizers[0].state.values()))
    run.lightning_module.layer.weight.data[0, 0] = 0
    state["exp_avg"].view(-1)[0] = float("inf")
    with pytest.raises(SaveError, match=r"not finite, optimizer\.layer\.\w+\.exp_avg"):
        run.save_checkpoint(path)


def test_lightnings_background_writer_publishes_whole_files_too(tmp_path):
    io = AsyncCheckpointIO()
    run = trainer(plugins=[io], state_dict_type="full")
    run.fit(Plain(), data())
    assert isinstance(io.checkpoint_io, WholeFiles)
    (tmp_path / "a.ckpt").mkdir()
    run.save_checkpoint(tmp_path / "a.ckpt")
    io.teardown()
    assert os.listdir(tmp_path) == ["a.ckpt"]
    weights(tmp_path / "a.ckpt")


@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "no-exchange"])
@pytest.mark.parametrize("kind", KINDS)
def test_long_names(tmp_path, monkeypatch, kind, exchange):
    if not exchange:
        monkeypatch.setattr(publish, "_exchange", lambda first, second: False)
    path = tmp_path / ("ä" * 117 + "n.ckpt")  # 240 bytes
    run = fitted(path, Plain(), state_dict_type=kind)
    weights(path)
    if exchange:
        run.save_checkpoint(path)
    else:
        with pytest.raises(SaveError, match=r"a file system that cannot exchange names needs one of \d+ bytes"):
            run.save_checkpoint(path)
    weights(path)
    assert os.listdir(tmp_path) == [path.name]


# ---------------------------------------------------------------------------------------------- what is read


def two_saved(tmp_path):
    """Checkpoints of two runs of one shape."""
    paths = tmp_path / "a.ckpt", tmp_path / "b.ckpt"
    for path, rate in zip(paths, (0.1, 0.2), strict=True):
        fitted(path, Plain(optimizer=lambda module, rate=rate: torch.optim.SGD(module.parameters(), lr=rate)))
    return paths


def test_a_part_of_another_checkpoint_is_noticed(tmp_path):
    ours, theirs = two_saved(tmp_path)
    (part,) = ours.glob("*.distcp")
    shutil.copy(theirs / part.name, part)
    with pytest.raises(CorruptCheckpoint, match=rf"{part.name} is that of another checkpoint or process"):
        weights(ours)


def save_two_parts(path):
    run = trainer(2)
    run.fit(Plain(), data())
    run.save_checkpoint(path)


def test_parts_that_have_changed_places_are_noticed(workers, tmp_path):
    path = tmp_path / "a.ckpt"
    workers(2).run(save_two_parts, path)
    first, second = sorted(path.glob("*.distcp"))
    first.rename(path / "aside")
    second.rename(first)
    (path / "aside").rename(second)
    with pytest.raises(CorruptCheckpoint, match=r"\.distcp is that of another checkpoint or process"):
        weights(path)


def test_an_empty_part_is_named(tmp_path):
    ours, _ = two_saved(tmp_path)
    (part,) = ours.glob("*.distcp")
    part.write_bytes(b"")
    with pytest.raises(CorruptCheckpoint, match=rf"{part.name} is empty"):
        weights(ours)


def test_a_checkpoint_may_be_renamed_and_moved(tmp_path):
    ours, _ = two_saved(tmp_path)
    expected = weights(ours)
    shutil.copytree(ours, tmp_path / "elsewhere" / "c")
    torch.testing.assert_close(weights(tmp_path / "elsewhere" / "c"), expected, rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_from_what_was_saved_behind_a_validation(tmp_path, kind):
    run = trainer(state_dict_type=kind)
    run.validate(Plain(), data(), verbose=False)
    run.save_checkpoint(tmp_path / "a.ckpt")
    module = Plain()
    with pytest.warns(UserWarning, match="written outside of a fit and has no state of an optimizer"):
        trainer().fit(module, data(), ckpt_path=tmp_path / "a.ckpt")
    fresh = Plain()
    trainer().fit(fresh, data())
    torch.testing.assert_close(module.layer.weight, fresh.layer.weight, rtol=0, atol=0)


# ---------------------------------------------------------------------------------------------- without the strategy


class Own(Plain):
    """Somebody's module with a hyperparameter, tied weights and a buffer."""

    def __init__(self, width=4):
        super().__init__()
        self.save_hyperparameters()
        self.wide = torch.nn.Linear(width, width)
        self.tied = torch.nn.Linear(width, width, bias=False)
        self.tied.weight = self.wide.weight
        self.register_buffer("count", torch.tensor(3))


def train_own(path):
    run = trainer(2)
    run.fit(Own(width=4), data())
    run.save_checkpoint(path)
    return {name: value.detach().clone() for name, value in run.lightning_module.state_dict().items()}


def test_modules_of_others_and_plain_trainers_load_directories(workers, tmp_path):
    path = tmp_path / "a.ckpt"
    expected, _ = workers(2).run(train_own, path)
    loaded = Own.load_from_checkpoint(path)
    torch.testing.assert_close(dict(loaded.state_dict()), expected, rtol=0, atol=0)
    assert loaded.tied.weight is loaded.wide.weight
    assert loaded.hparams.width == 4
    plain = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    fresh = Own()
    plain.validate(fresh, data(), ckpt_path=path, verbose=False)
    torch.testing.assert_close(dict(fresh.state_dict()), expected, rtol=0, atol=0)
    with pytest.raises(CorruptCheckpoint, match="is no sharded checkpoint"):
        Own.load_from_checkpoint(tmp_path)


def test_folders_and_files_that_are_not_there_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"missing\.ckpt"):
        trainer().validate(Plain(), data(), ckpt_path=tmp_path / "missing.ckpt", verbose=False)
