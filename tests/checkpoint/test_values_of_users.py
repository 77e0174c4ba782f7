"""What users keep in hyperparameters and in states of callbacks: what plain Lightning saves and loads, we do too."""

import argparse
import collections
import dataclasses
import datetime
import enum
import importlib
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from test_odd_state import Plain, data
from tiny_model import SMALL
from torch.utils.data import DataLoader

from olmoe_lightning import MoEStrategy, OLMoE
from olmoe_lightning.checkpoint import convert
from olmoe_lightning.checkpoint.trust import untrusted
from olmoe_lightning.cli import main


class Color(enum.Enum):
    RED = 1


class Word(enum.StrEnum):
    HOT = "hot"


@dataclasses.dataclass
class Options:
    depth: int = 1


UNTRUSTED = {
    "enum": Color.RED,
    "word": Word.HOT,
    "path": Path("/a/b"),
    "namespace": argparse.Namespace(a=1),
    "dataclass": Options(3),
    "numpy number": np.float64(3.0),
    "numpy array": np.arange(3),
    "numpy dtype": np.dtype("float32"),
    "function": len,
    "class": torch.nn.Linear,
    "timedelta": datetime.timedelta(1),
    "datetime": datetime.datetime(2020, 1, 1),
    "defaultdict": collections.defaultdict(int, a=1),
    "deque": collections.deque([1]),
    "range": range(3),
    "frozenset": frozenset([1]),
    "a key": {Color.RED: 1},
}
NEVER = {"defaultdict", "deque"}
"""What torch does not build without trust, whatever it is given."""
PLAIN = {
    "numbers": [1, 2.5, True, None, 1j, float("inf")],
    "text": {"a": "b", "c": b"d"},
    "places": (torch.bfloat16, torch.device("cpu"), torch.Size([1])),
    "sets": {1, 2},
    "ordered": collections.OrderedDict(a=1),
    "tensors": [torch.ones(2, dtype=torch.uint16), torch.eye(2).to_sparse()],
}


def sentences(count):
    tokens = torch.arange(17 * count).view(count, 1, 17) % 64
    return [{"input_ids": row[:, :-1], "labels": row[:, 1:]} for row in tokens]


class Remembers(Callback):
    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state_dict):
        self.value = state_dict["value"]


class Module(Plain):
    def __init__(self, value=None):
        super().__init__()
        self.save_hyperparameters()

    test_step = Plain.validation_step

    def predict_step(self, batch, batch_idx):
        return self.layer(batch)

    def on_load_checkpoint(self, checkpoint):
        self.read = checkpoint["hyper_parameters"]["value"]


STRATEGIES = {
    "plain": lambda: "auto",
    "sharded": MoEStrategy,
    "async": lambda: MoEStrategy(async_save=True),
    "full": lambda: MoEStrategy(state_dict_type="full"),
}


def trainer(kind, *callbacks, devices=1, max_epochs=1):
    return Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=STRATEGIES[kind](),
        max_epochs=max_epochs,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )


class SavesEachEpoch(Callback):
    def __init__(self, folder):
        self.folder = folder

    def on_train_epoch_end(self, trainer, pl_module):
        trainer.save_checkpoint(self.folder / f"{trainer.current_epoch}.ckpt")


def fitted(path, kind, value, devices=1):
    """Give the messages of the save."""
    run = trainer(kind, Remembers(value), devices=devices)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run.fit(Module(value), data())
        run.save_checkpoint(path)
    return [str(each.message) for each in found if "without trust" in str(each.message)]


def run_from(path, kind, phase="fit", devices=1, **options):
    """Give what the module and its callback have read."""
    module, remembers = Module(), Remembers(None)
    run = trainer(kind, remembers, devices=devices, max_epochs=2)
    getattr(run, phase)(module, data(), ckpt_path=path, **options)
    return module.read, remembers.value


@pytest.mark.parametrize("kind", STRATEGIES)
def test_plain_values_load_without_trust_and_nothing_is_said(tmp_path, kind):
    assert fitted(tmp_path / "a.ckpt", kind, PLAIN) == []
    read, remembered = run_from(tmp_path / "a.ckpt", kind)
    assert repr(read) == repr(remembered) == repr(PLAIN)


@pytest.mark.parametrize("kind", STRATEGIES)
def test_other_values_are_refused_by_default_and_read_with_trust_in_each_phase(tmp_path, kind):
    path = tmp_path / "a.ckpt"
    fitted(path, kind, UNTRUSTED)
    for phase in ("fit", "validate", "test", "predict"):
        with pytest.raises(Exception, match="weights_only"):
            run_from(path, kind, phase)
        read, remembered = run_from(path, kind, phase, weights_only=False)
        assert repr(read) == repr(UNTRUSTED)
        if phase == "fit":
            assert repr(remembered) == repr(UNTRUSTED)


def named(names):
    parts = [name.rpartition(".") for name in names]
    return [getattr(importlib.import_module(module), name) for module, _, name in parts]


@pytest.mark.parametrize("kind", ["sharded", "full"])
def test_the_save_names_what_is_not_loaded_without_trust_and_its_advice_works(tmp_path, kind):
    value = {name: each for name, each in UNTRUSTED.items() if name not in NEVER}
    (message,) = fitted(tmp_path / "a.ckpt", kind, value)
    assert f"['enum'] ({__name__}.Color)" in message
    (names,) = re.findall(r"add_safe_globals\(\[(.*?)\]\)", message)
    with torch.serialization.safe_globals(named(names.split(", "))):
        read, remembered = run_from(tmp_path / "a.ckpt", kind)
    assert repr(read) == repr(remembered) == repr(value)
    (message,) = fitted(tmp_path / "a.ckpt", kind, UNTRUSTED["deque"])
    assert "hyper_parameters['value'] (collections.deque)" in message
    assert "weights_only=False" in message
    assert "add_safe_globals" not in message


@pytest.mark.parametrize("name", UNTRUSTED)
def test_a_value_is_named_with_its_place_its_class_and_what_lets_it_in(name):
    value = UNTRUSTED[name]
    (found,) = untrusted({"a": [{"b": value, "c": torch.ones(3)}]})
    if name == "a key":
        assert (found.place, found.kind) == ("a key of a[0]['b']", f"{__name__}.Color")
    else:
        assert (found.place, found.kind) == ("a[0]['b']", f"{type(value).__module__}.{type(value).__qualname__}")
    assert (found.names == []) == (name in NEVER)
    if found.names:
        with torch.serialization.safe_globals(named(found.names)):
            assert untrusted({"a": [{"b": value}]}) == []


class Changes(Remembers):
    """Keeps a number of NumPy's from the second epoch on, as a metric may be one."""

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch:
            self.value = np.float64(1.0)


@pytest.mark.parametrize("kind", ["sharded", "async", "full"])
def test_each_value_is_named_once_a_run_at_the_first_save_that_has_it(tmp_path, kind):
    saves = SavesEachEpoch(tmp_path)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        trainer(kind, Changes(1.0), saves, max_epochs=3).fit(Module(Path("/a")), data())
    first, second = [str(each.message) for each in found if "without trust" in str(each.message)]
    assert "0.ckpt" in first
    assert "hyper_parameters" in first
    assert "callbacks" not in first
    assert "1.ckpt" in second
    assert "callbacks" in second
    assert "hyper_parameters" not in second


def fit_and_resume(path, kind):
    said = fitted(path, kind, UNTRUSTED, devices=2)
    return len(said), repr(run_from(path, kind, devices=2, weights_only=False))


@pytest.mark.parametrize("kind", ["sharded", "full"])
def test_one_of_two_processes_says_it_and_both_read_with_trust(workers, tmp_path, kind):
    expected = repr((UNTRUSTED, UNTRUSTED))
    assert workers(2).run(fit_and_resume, tmp_path / "a.ckpt", kind) == [(1, expected), (0, expected)]


class Asks(Module):
    def __init__(self, path, weights_only):
        super().__init__()
        self.path, self.weights_only = path, weights_only

    def on_train_start(self):
        self.asked = self.trainer.strategy.load_checkpoint(self.path, weights_only=self.weights_only)


@pytest.mark.parametrize("kind", ["sharded", "full"])
def test_trust_in_the_checkpoint_of_a_run_is_none_in_others(tmp_path, kind):
    fitted(tmp_path / "a.ckpt", kind, Color.RED)
    fitted(tmp_path / "b.ckpt", kind, Color.RED)
    with pytest.raises(Exception, match="weights_only"):
        trainer(kind, max_epochs=2).fit(
            Asks(tmp_path / "b.ckpt", None), data(), ckpt_path=tmp_path / "a.ckpt", weights_only=False
        )
    module = Asks(tmp_path / "b.ckpt", False)
    trainer(kind).fit(module, data())
    assert module.asked["hyper_parameters"]["value"] is Color.RED


def test_the_innermost_values_are_found():
    checkpoint = {"a": [1, {"b": Color.RED, "c": torch.ones(3)}], "d": (Path("/a"), "e"), "f": {"g": 1.0}}
    found = untrusted(checkpoint)
    assert [each.place for each in found] == ["a[1]['b']", "d[0]"]
    assert found[0].names == [f"{__name__}.Color"]
    assert untrusted({"a": PLAIN}) == []


def test_what_cannot_be_written_is_no_matter_of_trust():
    assert untrusted({"a": lambda: 1}) == []


class Colored(OLMoE):
    def __init__(self, *args, color=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.save_hyperparameters({"color": color})
        self.color = color


@pytest.mark.parametrize("kind", ["sharded", "full"])
def test_modules_and_conversions_say_what_they_do_not_load_and_load_it_with_trust(tmp_path, kind, capsys):
    path = tmp_path / "a.ckpt"
    run = trainer(kind)
    run.fit(Colored(SMALL, color=Color.RED), DataLoader(sentences(1), batch_size=None))
    run.save_checkpoint(path)
    with pytest.raises(Exception, match="Color"):
        Colored.load_from_checkpoint(path)
    assert Colored.load_from_checkpoint(path, weights_only=False).color is Color.RED
    assert main(["convert", "--from-native", str(path), "--to-native", str(tmp_path / "b")]) == 2
    said = capsys.readouterr().err
    assert f"{path} holds objects that are not loaded without trust, of {__name__}.Color; give weights_only" in said
    with torch.serialization.safe_globals([Color]):
        convert(from_native=str(path), to_native=str(tmp_path / "b"))
