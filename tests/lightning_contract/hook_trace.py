"""Records in which order Lightning calls the hooks of a strategy, a module and a callback, over a few short runs.

The strategy is recorded where Lightning's Trainer, loops and callbacks call it, whichever class defines a method; calls
between methods of the strategy are its own business. The exception are the three steps of ``setup`` that Lightning's
base class has too and that subclasses override.
"""

import sys
from contextlib import contextmanager
from functools import wraps
from pathlib import Path

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from lightning.pytorch.strategies import ParallelStrategy
from tiny_model import SMALL
from torch import distributed as dist
from torch.utils.data import DataLoader

from olmoe_lightning import MoEStrategy, OLMoE

STEPS_OF_SETUP = ("model_to_device", "setup_optimizers", "setup_precision_plugin")

STEPS_OF_MODULE = (
    "configure_callbacks",
    "configure_gradient_clipping",
    "configure_optimizers",
    "training_step",
    "validation_step",
    "backward",
    "optimizer_step",
    "optimizer_zero_grad",
    "lr_scheduler_step",
)

CONFIG = SMALL.replace(
    vocab_size=32, d_model=8, num_layers=1, head_dim=4, num_experts=2, top_k=1, expert_hidden=8, max_seq_len=8
)


def public_methods(*kinds):
    names = {name for kind in kinds for name in dir(kind) if not name.startswith("_")}
    return sorted(name for name in names if any(callable(getattr(kind, name, None)) for kind in kinds))


HOOKS = {
    "strategy": [*public_methods(ParallelStrategy), "set_world_ranks"],
    "module": [
        name
        for name in [*public_methods(ModelHooks, DataHooks, CheckpointHooks), *STEPS_OF_MODULE]
        if not name.endswith("_dataloader") and name != "configure_sharded_model"  # to define them has a meaning
    ],
    "callback": public_methods(Callback),
}


class Trace:
    """Calls of hooks, one a line, indented by the hooks in which they happen."""

    def __init__(self):
        self.lines, self.depth = [], 0

    @contextmanager
    def call(self, text):
        self.lines.append("  " * self.depth + text)
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1

    def recording(self, kind, owner):
        """A subclass of ``kind`` that records the calls of its hooks."""
        methods = {name: self._recorded(kind, owner, name) for name in HOOKS[owner] if hasattr(kind, name)}
        return type(kind.__name__, (kind,), methods)

    def _recorded(self, kind, owner, name):
        inherited = getattr(kind, name)
        if isinstance(vars(next(k for k in kind.__mro__ if name in vars(k)))[name], classmethod | staticmethod):
            return inherited

        @wraps(inherited)
        def method(this, *args, **kwargs):
            caller = sys._getframe(1).f_globals["__name__"]
            by_trainer = caller.startswith("lightning.") and ".strategies" not in caller
            if owner == "strategy" and not by_trainer and name not in STEPS_OF_SETUP:
                return inherited(this, *args, **kwargs)
            with self.call(f"{owner}.{name}" + (f" {args[0]}" if name == "barrier" and args else "")):
                return inherited(this, *args, **kwargs)

        return method


class Items(torch.utils.data.Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        tokens = torch.arange(index, index + 9) % 32
        return {"input_ids": tokens[:-1], "labels": tokens[1:]}


class FailingOLMoE(OLMoE):
    def training_step(self, batch, batch_idx):
        if batch_idx == 3 and self.global_rank == 1:
            raise ZeroDivisionError("rank 1 fails")
        return super().training_step(batch, batch_idx)


def batches(count):
    """``count`` batches for each of two processes."""
    return DataLoader(Items(count * 4), batch_size=2)


def trainer(strategy, folder, *callbacks, save_every=1, **options):
    checkpoints = ModelCheckpoint(folder, every_n_train_steps=save_every, save_on_exception=True)
    return Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        callbacks=[checkpoints, *callbacks],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **({"max_steps": 2} | options),
    )


def trace_run(run, folder, strategy_kind=MoEStrategy):
    """Write the hooks of a run, in one of two processes, to ``rank0.txt`` or ``rank1.txt``, one call a line.

    Args:
        run: ``fit``, ``validate``, ``resume`` or ``failing_rank``.
        folder: for these files and checkpoints, the same on both.
        strategy_kind: the class whose hooks are recorded.
    """
    trace, folder = Trace(), Path(folder)
    module_kind = FailingOLMoE if run == "failing_rank" else OLMoE
    try:
        module = trace.recording(module_kind, "module")(CONFIG)
        strategy = trace.recording(strategy_kind, "strategy")(expert_parallel_size=2)
        callback = trace.recording(Callback, "callback")()
        checkpoint = None
        if run == "resume":
            trainer(MoEStrategy(expert_parallel_size=2), folder, max_steps=1).fit(OLMoE(CONFIG), batches(4))
            (checkpoint,) = folder.glob("*.ckpt")
        save_every = 100 if run == "failing_rank" else 1  # a checkpoint is due when it fails
        traced_trainer = trainer(strategy, folder, callback, save_every=save_every)
        if run == "validate":
            traced_trainer.validate(module, batches(2), verbose=False)
        else:
            traced_trainer.fit(module, batches(4), batches(1), ckpt_path=checkpoint)
    finally:
        (folder / f"rank{dist.get_rank()}.txt").write_text("\n".join(trace.lines) + "\n")
