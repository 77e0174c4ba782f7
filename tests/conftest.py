"""What every test gets: one thread, a process that is left as it was, and the smallest model, data and trainer."""

import logging
import os

# The Triton kernels are tested in Triton's interpreter. Triton decides that when it decorates a function, those of its
# library too, and Lightning imports it along with torch's compiler: the variable must be there before.
os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from tiny_model import TINY

from olmoe_lightning import ModelConfig, TokenDataModule, TokenSource
from olmoe_lightning.tools.processes import PRELOAD, Workers

EOS = 256
LIGHTNING = logging.getLogger("lightning.pytorch")


@pytest.fixture(scope="session", autouse=True)
def _one_thread_from_the_start():
    """Fixtures of a whole module are made before the one below: their numbers must not be those of more threads.

    Lightning's launcher sets the number of threads too, unless it is in the environment.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    return dict(os.environ)


@pytest.fixture(autouse=True)
def _one_thread_and_a_process_left_as_it_was(_one_thread_from_the_start):
    """The environment is that of the session, before and after: a launcher's ranks in it would reach other processes.

    Fixtures of a module may have trained before this one is called, so it does not keep what it finds.
    """
    level = LIGHTNING.level
    _restore(_one_thread_from_the_start)
    yield
    _restore(_one_thread_from_the_start)
    LIGHTNING.setLevel(level)


def _restore(environment):
    torch.set_num_threads(1)
    os.environ.clear()
    os.environ.update(environment)


@pytest.fixture(scope="session")
def workers():
    """``workers(2).run(function, *args)`` runs a function in 2 processes of one process group."""
    pools: dict[int, Workers] = {}
    yield lambda size: pools.setdefault(size, Workers(size, preload=[*PRELOAD, "pytest"]))
    for pool in pools.values():
        pool.close()


@pytest.fixture(scope="session")
def small_config():
    """Two MoE layers, 4 experts, every loss switched on; vocabulary of the byte tokenizer."""
    return ModelConfig(**TINY).replace(
        num_layers=2,
        qk_norm="head",
        normalize_weights=True,
        balance_loss_coeff=0.02,
        router_z_loss_coeff=0.003,
        lm_z_loss_coeff=0.001,
    )


@pytest.fixture(scope="session")
def token_files(tmp_path_factory):
    """Two token files of letters that follow a pattern, in documents of 9 to 40 tokens."""
    folder = tmp_path_factory.mktemp("tokens")
    random = np.random.default_rng(0)
    for name, first in (("upper", 65), ("lower", 97)):
        documents = [
            np.append((first + (np.arange(length) * step) % 26), EOS)
            for length, step in random.integers((8, 1), (40, 4), (200, 2))
        ]
        np.save(folder / f"{name}.npy", np.concatenate(documents).astype(np.uint16))
    return folder


@pytest.fixture
def small_data(token_files):
    """A data module over both files, [4, 32] tokens a batch."""

    def make(**options):
        sources = [TokenSource(str(token_files / f"{name}.npy"), name=name) for name in ("upper", "lower")]
        return TokenDataModule(**({"train": sources, "val": sources, "seq_len": 32, "batch_size": 4} | options))

    return make


@pytest.fixture
def quiet_trainer(tmp_path):
    """A real trainer on the CPU that prints nothing and writes nothing unless asked to."""

    def make(*callbacks, **options):
        defaults = {
            "accelerator": "cpu",
            "devices": 1,
            "max_steps": 4,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "log_every_n_steps": 1,
            "limit_val_batches": 2,
            "num_sanity_val_steps": 0,
            "default_root_dir": tmp_path,
        }
        return Trainer(callbacks=list(callbacks), **(defaults | options))

    return make
