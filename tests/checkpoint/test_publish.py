"""A checkpoint is there whole or not at all, wherever its process is killed.

Real processes are killed in real folders. What cannot be had here is a file system without an atomic exchange of names:
there the one function that asks for it answers that it cannot.
"""

import errno
import hashlib
import multiprocessing
import os
import random
import signal
import socket
import stat
import sys
import time

import pytest

from olmoe_lightning.checkpoint import publish as module
from olmoe_lightning.checkpoint.publish import clean, make_durable, publish, remove, temporary_beside

KILLS = 20
EARLY_STEPS = 10_000  # more than any save here has
DAY = 24 * 3600


@pytest.fixture(params=[True, False], ids=["exchange", "no-exchange"])
def exchange(request, tmp_path_factory, monkeypatch):
    """Whether names can be exchanged in one step; both ways."""
    if request.param:
        names = [tmp_path_factory.mktemp("exchange") for _ in range(2)]
        if not module._exchange(*names):
            pytest.skip(f"the file system of {names[0]} cannot exchange names")
    else:
        monkeypatch.setattr(module, "_exchange", lambda first, second: False)
    return request.param


@pytest.fixture
def quick_disk(monkeypatch):
    """No waiting for the disk: what a killed process has written is not lost. The call stays a step of its own."""
    monkeypatch.setattr(os, "fsync", os.fstat)


def fill(directory, content):
    """Three files in two directories and a file of their checksums."""
    sums = []
    for name in ("weights", "state/0", "state/1"):
        data = f"{content} {name}".encode() * 2000
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(data)
        sums.append(f"{hashlib.sha256(data).hexdigest()}:{name}")
    (directory / "checksums").write_text("\n".join([content, *sums]))


def content_of(directory):
    """What a directory was filled with; fails unless all of it is there, and nothing else."""
    content, *sums = (directory / "checksums").read_text().split("\n")
    assert sorted(line.split(":")[1] for line in sums) == ["state/0", "state/1", "weights"]
    for line in sums:
        digest, name = line.split(":")
        assert hashlib.sha256((directory / name).read_bytes()).hexdigest() == digest
    assert sorted(path.name for path in directory.rglob("*")) == ["0", "1", "checksums", "state", "weights"]
    return content


def save(target, content):
    temporary = temporary_beside(target)
    fill(temporary, content)
    publish(temporary, target)


def save_in_place(target, content):
    """What must not be done."""
    target.mkdir(exist_ok=True)
    fill(target, content)


def started(function, *args):
    """A forked child: it has torch imported already, and runs nothing but file operations."""
    child = multiprocessing.get_context("fork").Process(target=function, args=args)
    child.start()
    return child


def ended(function, *args):
    child = started(function, *args)
    child.join()
    return child.exitcode


def save_forever(function, target, ready):
    i = 0
    while True:
        function(target, f"content {i % 2}")
        ready.set()
        i += 1


def kill_at_random(function, target):
    """Kills a child within its first 30 ms of saving over a checkpoint again and again."""
    ready = multiprocessing.get_context("fork").Event()
    child = started(save_forever, function, target, ready)
    assert ready.wait(10)
    time.sleep(random.uniform(0, 0.03))
    child.kill()
    child.join()
    assert child.exitcode == -signal.SIGKILL


def killed_at_step(step, function, *args):
    """Runs a function and kills this very process before its step-th call into the operating system."""
    steps = 0

    def count(frame, event, called):
        nonlocal steps
        if event == "c_call" and called.__module__ == "posix" and called.__name__ != "fspath":
            steps += 1
            if steps > step:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(count)
    function(*args)
    sys.setprofile(None)


def number_of_dead_process():
    child = started(int)
    child.join()
    return child.pid


def left_by(folder, name, *, pid=None, host=None, start=0, kind="tmp", age=0):
    """A filled directory with the name that another process would have given it."""
    pid = number_of_dead_process() if pid is None else pid
    path = folder / f".{name}.{host or module._host()}.{pid}-{start}.0123abcd.{kind}"
    path.mkdir(parents=True)
    fill(path, "left over")
    for entry in (path, *path.rglob("*")):
        os.utime(entry, (time.time() - age,) * 2)
    return path


# ---- names


def test_temporary_directory_is_beside_the_target_hidden_and_told_apart(tmp_path):
    target = tmp_path / "new" / "folder" / "last-v1.ckpt"
    first, second = temporary_beside(target), temporary_beside(target)
    assert first != second
    assert first.is_dir()
    assert first.parent == target.parent
    assert first.name.startswith(".last-v1.ckpt.")
    assert first.suffix == ".tmp"
    assert f".{os.getpid()}-" in first.name
    assert socket.gethostname().split(".")[0].replace("_", "-") in first.name
    assert not [*target.parent.glob("*.ckpt"), *target.parent.glob("last*"), *target.parent.glob("*last*.ckpt")]
    assert not target.exists()


def test_temporary_names_are_recognised_whatever_the_host_is_called(tmp_path, monkeypatch):
    for host in ("node-1.cluster.example.org", "my_host", "ünï", ""):
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        assert module._HIDDEN.fullmatch(temporary_beside(tmp_path / "epoch=0-loss=1.25.ckpt").name)["name"] == (
            "epoch=0-loss=1.25.ckpt"
        )


# ---- publishing


@pytest.mark.parametrize("before", ["nothing", "directory", "file", "link"])
def test_publishing_replaces_whatever_has_the_name_and_leaves_nothing_else(tmp_path, exchange, before):
    target, elsewhere = tmp_path / "runs" / "last.ckpt", tmp_path / "elsewhere"
    target.parent.mkdir()
    elsewhere.mkdir()
    fill(elsewhere, "elsewhere")
    if before == "directory":
        save(target, "old")
    elif before == "file":
        target.write_text("old")
    elif before == "link":
        target.symlink_to(elsewhere)
    save(target, "new")
    assert content_of(target) == "new"
    assert not target.is_symlink()
    assert content_of(elsewhere) == "elsewhere"
    assert os.listdir(target.parent) == ["last.ckpt"]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems need not have the exchange")
def test_names_are_exchanged_on_this_system(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        fill(tmp_path / name, name)
    if not module._exchange(tmp_path / "a", tmp_path / "b"):
        pytest.skip(f"the file system of {tmp_path} cannot exchange names")
    assert (content_of(tmp_path / "a"), content_of(tmp_path / "b")) == ("b", "a")


@pytest.mark.parametrize("code", ["ENOSYS", "EINVAL", "ENOTSUP", "EACCES"])
def test_refused_exchange_is_told_from_a_failed_one(tmp_path, monkeypatch, code):
    monkeypatch.setattr(module.ctypes, "get_errno", lambda: getattr(errno, code))
    missing = tmp_path / "missing"
    if code == "EACCES":
        with pytest.raises(PermissionError, match="missing"):
            module._exchange(missing, missing)
    else:
        assert module._exchange(missing, missing) is False


def test_every_file_and_directory_is_durable_before_the_name_and_the_folder_before_the_old_one_goes(
    tmp_path, monkeypatch
):
    target = tmp_path / "last.ckpt"
    save(target, "old")
    temporary = temporary_beside(target)
    fill(temporary, "new")
    (temporary / "dangling").symlink_to("nowhere")
    os.mkfifo(temporary / "pipe")  # opening it would wait for ever
    expected = {p.stat().st_ino for p in (temporary, *temporary.rglob("*")) if p.is_dir() or p.is_file()}
    synced, fsync = [], os.fsync

    def recording(descriptor):
        synced.append((os.fstat(descriptor).st_ino, content_or_none(target), temporary.exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", recording)
    publish(temporary, target)
    assert len(expected) == 6
    assert {inode for inode, content, _ in synced if content == "old"} == expected
    assert synced[-1] == (tmp_path.stat().st_ino, "new", True)


def content_or_none(directory):
    return (directory / "checksums").read_text().split("\n")[0] if directory.exists() else None


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_full_disk_names_the_file_and_leaves_the_old_checkpoint(tmp_path, monkeypatch, exchange, call):
    target = tmp_path / "last.ckpt"
    save(target, "old")
    temporary = temporary_beside(target)
    fill(temporary, "new")
    if exchange and call == "rename":
        pytest.skip("an exchange does not call rename")
    real = getattr(os, call)

    def full(*args):
        if call == "rename" and args[0] != temporary:
            return real(*args)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), *map(str, args[:-1]))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(OSError, match=rf"No space left on device: .*{temporary.name}") as caught:
            publish(temporary, target)
    assert caught.value.errno == errno.ENOSPC
    assert content_of(target) == "old"
    assert content_of(temporary) == "new"
    assert sorted(os.listdir(tmp_path)) == sorted(["last.ckpt", temporary.name])
    publish(temporary, target)  # and can be tried again
    assert content_of(target) == "new"


def test_old_checkpoint_that_cannot_be_removed_is_a_warning_since_the_new_one_is_published(tmp_path, monkeypatch):
    target = tmp_path / "last.ckpt"
    save(target, "old")

    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(module.shutil, "rmtree", refuse)
    with pytest.warns(RuntimeWarning, match=r"last\.ckpt is saved; what it replaced could not be removed"):
        save(target, "new")
    assert content_of(target) == "new"


def test_impossible_folders_and_missing_sources_are_errors_with_a_file_name(tmp_path):
    (tmp_path / "file").write_text("")
    for attempt in (
        lambda: temporary_beside(tmp_path / "file" / "last.ckpt"),
        lambda: publish(tmp_path / "missing", tmp_path / "last.ckpt"),
        lambda: make_durable(tmp_path / "missing"),
        lambda: clean(tmp_path / "file"),
    ):
        with pytest.raises(OSError) as caught:
            attempt()
        assert str(tmp_path) in str(caught.value.filename)
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write into a read-only folder")
def test_read_only_folder_is_an_error_with_a_file_name_and_loses_nothing(tmp_path):
    target = tmp_path / "last.ckpt"
    save(target, "old")
    temporary = temporary_beside(target)
    fill(temporary, "new")
    tmp_path.chmod(0o555)
    try:
        for attempt in (
            lambda: temporary_beside(target),
            lambda: publish(temporary, target),
            lambda: remove(target),
        ):
            with pytest.raises(PermissionError) as caught:
                attempt()
            assert str(tmp_path) in str(caught.value.filename)
        assert content_of(target) == "old"
    finally:
        tmp_path.chmod(0o755)


# ---- killed processes


@pytest.mark.usefixtures("quick_disk")
def test_checkpoint_is_whole_when_its_save_is_killed_at_any_step(tmp_path, exchange):
    """Without an exchange it is missing for a moment, until it is cleaned: the control of the case with one."""
    target = tmp_path / "last.ckpt"
    save(target, "start")
    found = set()
    left = 0
    for step in range(EARLY_STEPS):
        before = content_of(target)
        survived = ended(killed_at_step, step, save, target, f"step {step}") == 0
        found.add({None: "none", before: "old"}.get(content_or_none(target), "new"))
        left += len(clean(tmp_path))
        assert content_of(target) in (before, f"step {step}")
        assert os.listdir(tmp_path) == ["last.ckpt"]
        if survived:
            break
    assert survived
    assert step > 20
    assert left > 10
    assert found == {"old", "new"} | (set() if exchange else {"none"})


@pytest.mark.usefixtures("quick_disk")
def test_half_deleted_old_checkpoint_never_gets_the_name(tmp_path, monkeypatch):
    """Neither that of a killed save nor that of a killed cleaning, when the new one is removed before the next one."""
    monkeypatch.setattr(module, "_exchange", lambda first, second: False)
    target = tmp_path / "last.ckpt"
    for function, args in ((save, (target, "new")), (clean, (tmp_path,))):
        found = set()
        for step in range(EARLY_STEPS):
            save(target, "old")
            if function is clean:
                left_by(tmp_path, "last.ckpt", kind="old")
            survived = ended(killed_at_step, step, function, *args) == 0
            remove(target)
            clean(tmp_path)
            found.add(content_of(target) if target.exists() else None)
            remove(target)
            if survived:
                break
        assert survived
        assert found == {None, "old" if function is save else "left over"}


def test_checkpoint_is_whole_after_kills_at_random_moments(tmp_path, exchange):
    target = tmp_path / "last.ckpt"
    left = 0
    for _ in range(KILLS):
        kill_at_random(save, target)
        if exchange:
            assert content_of(target).startswith("content")
        left += len(clean(tmp_path))
        assert content_of(target).startswith("content")
        assert os.listdir(tmp_path) == ["last.ckpt"]
    assert left > 0  # else no kill has met a save


def test_random_kills_do_damage_a_checkpoint_that_is_written_in_place(tmp_path):
    """The control of the test above."""

    def first_damage():
        for _ in range(KILLS):  # most often the first one
            kill_at_random(save_in_place, tmp_path / "last.ckpt")
            content_of(tmp_path / "last.ckpt")

    with pytest.raises(AssertionError):
        first_damage()


@pytest.mark.usefixtures("quick_disk")
def test_removal_that_is_killed_at_any_step_leaves_the_checkpoint_whole_or_none(tmp_path):
    target = tmp_path / "last.ckpt"
    found = set()
    for step in range(EARLY_STEPS):
        if not target.exists():
            save(target, "old")
        survived = ended(killed_at_step, step, remove, target) == 0
        found.add(content_of(target) if target.exists() else None)
        clean(tmp_path)
        assert os.listdir(tmp_path) in (["last.ckpt"], [])
        if survived:
            break
    assert survived
    assert step > 10
    assert found == {"old", None}


# ---- removal and cleaning


def test_removal_takes_directories_files_and_links_and_ignores_what_is_missing(tmp_path):
    fill(tmp_path, "elsewhere")
    for make in (
        lambda path: save(path, "x"),
        lambda path: path.write_text("x"),
        lambda path: path.symlink_to(tmp_path / "state"),
        lambda path: path.symlink_to("nowhere"),
        lambda path: None,
    ):
        make(tmp_path / "last.ckpt")
        remove(tmp_path / "last.ckpt")
        assert content_of(tmp_path) == "elsewhere"
    remove(tmp_path / "missing" / "last.ckpt")


def test_cleaning_takes_what_dead_processes_left_and_tells_what(tmp_path):
    left = [left_by(tmp_path, "last.ckpt"), left_by(tmp_path, "epoch=1.ckpt")]
    (tmp_path / "last.ckpt").mkdir()
    left.append(left_by(tmp_path, "last.ckpt", kind="old"))
    assert set(clean(tmp_path)) == set(left)
    assert os.listdir(tmp_path) == ["last.ckpt"]
    assert clean(tmp_path) == []
    assert clean(tmp_path / "missing") == []


def test_cleaning_leaves_what_a_live_process_uses(tmp_path):
    ours = temporary_beside(tmp_path / "last.ckpt")
    child = started(time.sleep, 60)
    try:
        theirs = left_by(tmp_path, "last.ckpt", pid=child.pid, start=module._start(child.pid), age=9 * DAY)
        stepped_aside = left_by(tmp_path, "b.ckpt", pid=child.pid, start=module._start(child.pid), kind="old")
        unknown_start = left_by(tmp_path, "c.ckpt", pid=child.pid, start=0)
        assert clean(tmp_path) == []
        assert set(tmp_path.iterdir()) == {ours, theirs, stepped_aside, unknown_start}
    finally:
        child.kill()
        child.join()
    assert set(clean(tmp_path)) == {theirs, unknown_start}
    assert content_of(tmp_path / "b.ckpt") == "left over"


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="the start of a process is read from /proc")
def test_process_number_that_is_used_again_does_not_keep_what_a_dead_process_left(tmp_path):
    """A container's first process has the same number at every start: the next run would never clean."""
    left = left_by(tmp_path, "last.ckpt", pid=os.getpid(), start=module._start(os.getpid()) - 1)
    assert clean(tmp_path) == [left]


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="the state of a process is read from /proc")
def test_killed_process_that_no_one_waited_for_is_dead(tmp_path):
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    left = left_by(tmp_path, "last.ckpt", pid=pid, start=module._start(pid))
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # it has ended, and its number is still taken
    try:
        os.kill(pid, 0)
        assert clean(tmp_path) == [left]
    finally:
        os.waitpid(pid, 0)


def test_cleaning_waits_a_day_for_another_host(tmp_path):
    old = left_by(tmp_path, "old.ckpt", host="elsewhere", age=DAY + 60)
    young = left_by(tmp_path, "young.ckpt", host="elsewhere", age=DAY - 60)
    active = left_by(tmp_path, "active.ckpt", host="elsewhere", age=9 * DAY)
    os.utime(active / "state" / "1")  # a file grows: its directories do not change
    assert clean(tmp_path) == [old]
    assert set(tmp_path.iterdir()) == {young, active}


@pytest.mark.parametrize("host", [None, "elsewhere"], ids=["this-host", "another-host"])
def test_cleaning_gives_a_lone_old_checkpoint_its_name_back(tmp_path, host):
    lone = left_by(tmp_path, "last.ckpt", host=host, kind="old")
    assert clean(tmp_path) == []
    assert not lone.exists()
    assert content_of(tmp_path / "last.ckpt") == "left over"


def test_old_checkpoint_that_stepped_aside_last_gets_the_name(tmp_path):
    last, first = (left_by(tmp_path, "last.ckpt", kind="old") for _ in range(2))
    (last / "mark").write_text("")
    time.sleep(0.02)  # a file's times are those of the kernel's clock, which ticks every 10 ms at least
    last.rename(tmp_path / "aside")
    (tmp_path / "aside").rename(last)
    assert clean(tmp_path) == [first]
    assert (tmp_path / "last.ckpt" / "mark").exists()
    assert os.listdir(tmp_path) == ["last.ckpt"]


def test_temporary_directory_of_a_save_that_was_given_up_can_be_removed_with_a_long_name(tmp_path):
    temporary = temporary_beside(tmp_path / f"{'x' * 120}.ckpt")
    fill(temporary, "x")
    remove(temporary)
    assert os.listdir(tmp_path) == []


def test_cleaning_leaves_other_peoples_files(tmp_path):
    dead, host = number_of_dead_process(), module._host()
    names = [
        "last.ckpt",
        ".last.ckpt.0123abcd.tmp",
        ".nfs000000001234",
        ".cache.tmp",
        ".old",
        f"last.ckpt.{host}.{dead}-0.0123abcd.tmp",
        f".last.ckpt.{host}.{dead}-0.0123abcd.tmp.bak",
        f".last.ckpt.{host}.{dead}-0.0123abc.tmp",
        f".last.ckpt.{host}.{dead}.0123abcd.tmp",
        f".{host}.{dead}-0.0123abcd.tmp",
    ]
    for name in names:
        (tmp_path / name).write_text("")
        os.utime(tmp_path / name, (0, 0))
    (tmp_path / "below").mkdir()
    left_by(tmp_path / "below", "last.ckpt", age=9 * DAY)
    assert clean(tmp_path) == []
    assert sorted(os.listdir(tmp_path)) == sorted([*names, "below"])
    assert len(os.listdir(tmp_path / "below")) == 1


def test_cleaning_does_not_follow_a_link(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    fill(tmp_path / "elsewhere", "elsewhere")
    link = left_by(tmp_path, "last.ckpt")
    module._delete(link)
    link.symlink_to(tmp_path / "elsewhere")
    assert clean(tmp_path) == [link]
    assert content_of(tmp_path / "elsewhere") == "elsewhere"


def test_published_directory_has_the_permissions_of_any_new_one(tmp_path):
    save(tmp_path / "last.ckpt", "x")
    (tmp_path / "plain").mkdir()
    assert stat.S_IMODE((tmp_path / "last.ckpt").stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)
