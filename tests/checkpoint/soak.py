"""Kills training at random moments of its saves, again and again on the same folder, and looks at what is left.

    python tests/checkpoint/soak.py --kills 50    # what `make soak` does

Two processes train and save at every step: `last.ckpt` over itself, and numbered checkpoints of which three are kept.
Each writes down a checksum of every range of every tensor before it is saved, and rank 0 what has been published. Then
one of them, or both, get SIGKILL, the next run resumes from what is there, and is killed in turn. After each kill:

- whatever had been published, and not yet been replaced or removed, loads, and every bit is what was written down;
- so is everything else that has the name of a checkpoint;
- the next run starts from there, finds no left-overs once it has started, and repeats lost steps bit for bit.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from olmoe_lightning import ModelConfig, MoEStrategy, OLMoE, TokenDataModule
from olmoe_lightning.checkpoint.directory import Range, index_of, load
from olmoe_lightning.checkpoint.meta import read_meta
from olmoe_lightning.tools.processes import WorkerError, Workers
from olmoe_lightning.training import saver, snapshot

CONFIG = ModelConfig(
    vocab_size=264,
    d_model=48,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=24,
    num_experts=4,
    top_k=2,
    expert_hidden=48,
    max_seq_len=32,
    selection_bias=True,
    bias_update_rate=0.01,
)
PROCESSES = 2
LAST = "last.ckpt"
FIRST_SAVES = 6
"""A kill comes at a random moment of one of the first saves of a run, as long as such a save has just taken."""

Sums = dict[str, str]


# ---------------------------------------------------------------------------------------------- in the processes


class Ledger:
    """What a process of a run says; its lines survive a SIGKILL, which leaves the system's buffers alone.

    Args:
        folder: of the whole test.
        run: number of the run.
        rank: of the process.
    """

    def __init__(self, folder: Path, run: int, rank: int) -> None:
        self._file = os.open(Ledger.path(folder, run, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    @staticmethod
    def path(folder: Path, run: int, rank: int) -> Path:
        return folder / "ledger" / f"{run:04d}-{rank}.jsonl"

    @staticmethod
    def read(folder: Path, run: int, rank: int) -> list[dict[str, Any]]:
        """All complete lines, in order."""
        path = Ledger.path(folder, run, rank)
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in lines]

    def write(self, event: str, **values: Any) -> None:
        os.write(self._file, (json.dumps({"event": event} | values) + "\n").encode())

    def close(self) -> None:
        os.close(self._file)


def checksum(values: torch.Tensor) -> str:
    return hashlib.blake2b(values.detach().contiguous().view(torch.uint8).numpy().tobytes(), digest_size=8).hexdigest()


class Recorded(MoEStrategy):
    """Writes down what it is about to save."""

    ledger: Ledger

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        self._synchronise()
        state = self.training_state()
        parts = state.model_to_write() + state.optimizer_to_write()[0]
        sums = {f"{part.name}:{part.start}:{part.values.numel()}": checksum(part.values) for part in parts}
        self.ledger.write("saving", name=Path(filepath).name, step=checkpoint["global_step"], sums=sums)
        super().save_checkpoint(checkpoint, filepath, storage_options)


class Start(Callback):
    """Writes down where a run starts, and what no live process has left in the folder."""

    def __init__(self, folder: Path, ledger: Ledger) -> None:
        self.folder, self.ledger = folder, ledger

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        if trainer.is_global_zero:
            self.ledger.write("start", step=trainer.global_step, leftovers=leftovers(self.folder))


def leftovers(folder: Path) -> list[str]:
    """Names of unfinished saves."""
    return sorted(path.name for path in folder.glob(".*")) if folder.exists() else []


def told(ledger: Ledger, publish: Callable[..., None], temporary: Path, target: Path) -> None:
    publish(temporary, target)
    ledger.write("published", name=target.name)


def told_before(ledger: Ledger, remove: Callable[..., None], path: Path) -> None:
    ledger.write("removing", name=path.name)
    remove(path)


def beginning_in_place(target: Path) -> Path:
    target.mkdir(parents=True, exist_ok=True)
    return target


def train(
    folder: Path,
    run: int,
    background: bool,
    ckpt_path: str | None,
    steps: int = -1,
    every: int = 1,
    in_place: bool = False,
) -> None:
    """One run, in each of the processes, until it is killed or has made its steps.

    Args:
        folder: of the whole test.
        run: its number.
        background: whether saves are asynchronous.
        ckpt_path: of ``Trainer.fit``.
        steps: the last step; -1 is none.
        every: steps from save to save.
        in_place: do what must not be done: write under the final name.
    """
    rank = torch.distributed.get_rank()
    ledger = Ledger(folder, run, rank)
    terminal = quiet(folder / "output.txt")
    real = {
        (module, name): getattr(module, name)
        for module, name in (
            (snapshot, "temporary_beside"),
            (saver, "remove"),
            (snapshot, "shutil"),
            (snapshot, "publish"),
        )
    }
    if in_place:
        snapshot.temporary_beside = beginning_in_place
        snapshot.publish = functools.partial(told, ledger, lambda temporary, target: None)
        snapshot.shutil = SimpleNamespace(rmtree=lambda path, ignore_errors: None)  # it is the target here
    else:
        snapshot.publish = functools.partial(told, ledger, real[snapshot, "publish"])
    saver.remove = functools.partial(told_before, ledger, real[saver, "remove"])
    try:
        strategy = Recorded(expert_parallel_size=2, async_save=background, bucket_megabytes=0.05)
        strategy.ledger = ledger
        keep = ModelCheckpoint(
            folder / "checkpoints",
            filename="step={step}",
            auto_insert_metric_name=False,
            monitor="step",
            mode="max",
            save_top_k=3,
            save_last=True,
            every_n_train_steps=every,
            enable_version_counter=False,
        )
        trainer = Trainer(
            accelerator="cpu",
            devices=PROCESSES,
            strategy=strategy,
            max_epochs=-1,
            max_steps=steps,
            callbacks=[keep, Start(folder / "checkpoints", ledger)],
            default_root_dir=folder,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        module = OLMoE(CONFIG, learning_rate=1e-3, schedule="cosine", schedule_steps=10_000)
        data = TokenDataModule(train=str(folder / "tokens.npy"), seq_len=32, batch_size=1, cache_dir=str(folder))
        trainer.fit(module, data, ckpt_path=ckpt_path)
    finally:
        for (module, name), function in real.items():
            setattr(module, name, function)
        ledger.close()
        for number, copy in terminal.items():
            os.dup2(copy, number)
            os.close(copy)


def quiet(path: Path) -> dict[int, int]:
    """Let everything that is printed go into a file; gives where it went before."""
    kept = {number: os.dup(number) for number in (1, 2)}
    with path.open("ab") as file:
        for number in kept:
            os.dup2(file.fileno(), number)
    return kept


def nothing() -> None:
    """Starts the processes."""


# ---------------------------------------------------------------------------------------------- what was promised


@dataclass
class Content:
    """What a save was asked to write."""

    step: int
    sums: Sums


@dataclass
class Promises:
    """What each name may stand for, from the ledgers of all runs."""

    allowed: dict[str, list[Content]] = field(default_factory=dict)
    published: set[str] = field(default_factory=set)
    """Names that must be there."""
    by_step: dict[int, Sums] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    in_a_save: bool = False
    """Whether the last run ended between the beginning of a save and its publication."""

    def read(self, folder: Path, run: int, resumed: str) -> None:
        """Add what a run has said before it ended.

        Args:
            folder: of the whole test.
            run: its number.
            resumed: name of the checkpoint that it was to go on from, if there is one.
        """
        others = [Ledger.read(folder, run, rank) for rank in range(1, PROCESSES)]
        theirs = [deque(line for line in lines if line["event"] == "saving") for lines in others]
        pending: dict[str, deque[Content]] = {}
        for line in Ledger.read(folder, run, 0):
            name = line.get("name", "")
            if line["event"] == "start":
                self._check_start(run, resumed, line)
            elif line["event"] == "saving":
                sums = dict(line["sums"])
                for queue in theirs:
                    sums |= queue.popleft()["sums"] if queue else {}
                content = Content(line["step"], sums)
                known = self.by_step.setdefault(content.step, {})
                if any(known.get(part, value) != value for part, value in sums.items()):
                    self.problems.append(f"run {run} came to other values at step {content.step} than the one before")
                known |= sums
                pending.setdefault(name, deque()).append(content)
                self.allowed.setdefault(name, []).append(content)
            elif line["event"] == "published":
                now = pending[name].popleft()
                self.allowed[name] = [now, *pending[name]]
                self.published.add(name)
            else:
                self.published.discard(name)
        self.in_a_save = any(pending.values())

    def _check_start(self, run: int, resumed: str, line: dict[str, Any]) -> None:
        if line["leftovers"]:
            self.problems.append(f"run {run} found left-overs and did not remove them: {line['leftovers']}")
        steps = [content.step for content in self.allowed.get(resumed, ())] + [0] * (resumed not in self.published)
        if line["step"] not in steps:
            self.problems.append(f"run {run} was to go on from {resumed}, step {steps}, and began at {line['step']}")

    def lost(self, folder: Path) -> list[str]:
        """What is not there, or not as it was promised."""
        found = []
        for name in sorted(self.published):
            if not (folder / name).is_dir():
                found.append(f"{name} was published and is not there")
        for path in sorted(folder.glob("*.ckpt")) if folder.exists() else ():
            try:
                content, step = read_everything(path)
            except Exception as error:
                found.append(f"{path.name} cannot be read: {type(error).__name__}: {error}")
                continue
            if not any(matches(content, step, each) for each in self.allowed.get(path.name, ())):
                steps = [each.step for each in self.allowed.get(path.name, ())]
                found.append(f"{path.name} claims step {step} and is none of the saves of steps {steps}")
        return found


def read_everything(path: Path) -> tuple[dict[str, torch.Tensor], int]:
    """Every tensor of a checkpoint, and its step."""
    step = read_meta(path)["global_step"]
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in index_of(path).items()}
    load(path, [Range(name, value.numel(), 0, value) for name, value in tensors.items()])
    return tensors, step


def matches(tensors: dict[str, torch.Tensor], step: int, content: Content) -> bool:
    """Whether each range of each tensor is what was written down, and nothing was left out."""
    seen = dict.fromkeys(tensors, 0)
    for key, expected in content.sums.items():
        name, start, count = key.rsplit(":", 2)
        part = tensors[name][int(start) : int(start) + int(count)] if name in tensors else torch.empty(0)
        if part.numel() != int(count) or checksum(part) != expected:
            return False
        seen[name] += int(count)
    return step == content.step and all(seen[name] == value.numel() for name, value in tensors.items())


# ---------------------------------------------------------------------------------------------- the test


@dataclass
class Kill:
    """One run that was killed, and what was wrong after it."""

    number: int
    victims: list[int]
    background: bool
    resumed: str
    started: int
    """The step at which it started, -1 if it did not."""
    in_a_save: bool
    leftovers: int
    problems: list[str]

    def __str__(self) -> str:
        who = "all ranks" if len(self.victims) == PROCESSES else f"rank {self.victims[0]}"
        how = "async" if self.background else "sync "
        where = "during a save" if self.in_a_save else "between saves"
        state = "; ".join(self.problems) or "nothing lost"
        return (
            f"kill {self.number + 1:3d}: {how} run from {self.resumed:12s} (step {self.started:4d}), {who:9s} "
            f"{where}, {self.leftovers} left over: {state}"
        )


def kills(workers: Workers, folder: Path, count: int, seed: int, in_place: bool = False) -> Iterator[Kill]:
    """Runs that are killed, one after the other.

    Args:
        workers: two processes, which are started again after each kill.
        folder: empty.
        count: of kills.
        seed: of their moments.
        in_place: the negative control.
    """
    dice = random.Random(seed)
    promises = prepare(folder)
    checkpoints = folder / "checkpoints"
    for number in range(count):
        numbered = sorted((name for name in promises.published if name != LAST), key=lambda n: int(n[5:-5]))
        explicit = str(checkpoints / numbered[-1]) if numbered and number % 3 == 2 else None
        background = bool(number % 2)
        victims = dice.choice([[0], [1], [0, 1]])
        job = (folder, number, background, explicit or "last", -1, 1, in_place)
        problems = killed(workers, folder, number, job, victims, dice.uniform(1, FIRST_SAVES))
        before = len(promises.problems)
        promises.read(folder, number, Path(explicit).name if explicit else LAST)
        started = [line["step"] for line in Ledger.read(folder, number, 0) if line["event"] == "start"]
        yield Kill(
            number,
            victims,
            background,
            Path(explicit).name if explicit else LAST,
            started[0] if started else -1,
            promises.in_a_save,
            len(leftovers(checkpoints)),
            problems + promises.problems[before:] + promises.lost(checkpoints),
        )


def prepare(folder: Path) -> Promises:
    (folder / "ledger").mkdir(parents=True)
    tokens = np.random.default_rng(0).integers(0, 256, 200_000, dtype=np.uint16)
    tokens[100::100] = 256
    np.save(folder / "tokens.npy", tokens)
    return Promises()


def killed(
    workers: Workers, folder: Path, run: int, job: tuple[Any, ...], victims: list[int], moment: float
) -> list[str]:
    """Start a run, and kill ``victims`` of it; 1.5 is in the middle of the second save."""
    workers.run(nothing)
    pids = [workers.pids[rank] for rank in victims]
    over, done = threading.Event(), threading.Event()

    def kill() -> None:
        seen, last, length = 0, time.monotonic(), 0.0
        while seen <= int(moment):
            if over.wait(0.002):
                return
            lines = sum(line["event"] == "saving" for line in Ledger.read(folder, run, 0))
            if lines > seen:
                seen, last, length = lines, time.monotonic(), time.monotonic() - last
        time.sleep((moment % 1) * length)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        done.set()

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        workers.run(train, *job)
    except WorkerError as error:
        text = str(error)
    else:
        text = "it ended by itself"
    finally:
        over.set()
        thread.join()
    return [] if done.is_set() else [f"the run failed before it was killed: {text}"]


def finish(workers: Workers, folder: Path, run: int) -> list[str]:
    """Go on for a few steps without a kill, and train as many in one go elsewhere: the same to the last bit?"""
    steps = 2 + max(line["step"] for past in range(run) for line in Ledger.read(folder, past, 0) if "step" in line)
    workers.run(train, folder, run, False, "last", steps)
    ends = [steps_saved(folder, run)[steps]]
    prepare(folder / "uninterrupted")
    workers.run(train, folder / "uninterrupted", 0, False, None, steps, steps)
    ends.append(steps_saved(folder / "uninterrupted", 0)[steps])
    return [] if ends[0] == ends[1] else [f"step {steps} is other than that of a run which nobody killed"]


def steps_saved(folder: Path, run: int) -> dict[int, Sums]:
    """Checksums by step."""
    lines = [line for rank in range(PROCESSES) for line in Ledger.read(folder, run, rank) if line["event"] == "saving"]
    found: dict[int, Sums] = {}
    for line in lines:
        found.setdefault(line["step"], {}).update(line["sums"])
    return found


def main(arguments: list[str] | None = None) -> int:
    """Kill, and count what survived."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=None, help="of the moments of the kills; another one each time")
    args = parser.parse_args(arguments)
    if args.kills < 1:
        parser.error(f"--kills ({args.kills}) must be at least 1")
    seed = random.randrange(10**6) if args.seed is None else args.seed
    survivors = hits = left = 0
    workers = Workers(PROCESSES)
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        try:
            for kill in kills(workers, Path(folder), args.kills, seed):
                print(kill, flush=True)
                survivors += not kill.problems
                hits += kill.in_a_save
                left += kill.leftovers > 0
            problems = finish(workers, Path(folder), args.kills)
        finally:
            workers.close()
    for problem in problems:
        print(problem)
    print(f"{hits} kills came during a save, {left} left something over; seed {seed}")
    print("the run that was killed so often ended like one that was never killed" if not problems else "FAILED")
    print(f"survivors: {survivors} of {args.kills}")
    return int(survivors < args.kills or bool(problems))


if __name__ == "__main__":
    sys.exit(main())
