"""All callbacks in one run, built as the command line builds them, and with the real model."""

import json

import pytest
import torch
from jsonargparse import ArgumentParser
from lightning.pytorch import Callback
from lightning.pytorch.loggers import TensorBoardLogger

from olmoe_lightning import OLMoE, callbacks

NAMES = callbacks.__all__


@pytest.mark.parametrize("name", NAMES)
def test_callbacks_are_built_from_class_path_and_init_args_and_every_argument_is_documented(name):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(Callback, "callback")
    callback = parser.instantiate(
        parser.parse_object({"callback": {"class_path": f"olmoe_lightning.callbacks.{name}"}})
    ).callback
    assert type(callback) is getattr(callbacks, name)
    documented = ArgumentParser()
    documented.add_class_arguments(type(callback))
    assert all(action.help for action in documented._actions)


def test_yaml_values_of_wrong_type_are_refused():
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(Callback, "callback")
    value = {"class_path": "olmoe_lightning.callbacks.MemoryMonitor", "init_args": {"every_n_steps": "often"}}
    with pytest.raises(Exception, match="every_n_steps"):
        parser.parse_object({"callback": value})


def run_all(trainer_of, module, data, tmp_path, capsys):
    every = [getattr(callbacks, name)() for name in NAMES]
    trainer = trainer_of(
        *every,
        logger=TensorBoardLogger(tmp_path, name="logs"),
        enable_checkpointing=True,
        enable_progress_bar=True,
        limit_val_batches=1,
        val_check_interval=3,
        max_steps=6,
    )
    trainer.fit(module, data)
    out = capsys.readouterr().out
    by_name = dict(zip(NAMES, every, strict=True))
    assert by_name["ThroughputMonitor"].latest["throughput/mfu"] > 0
    assert by_name["ExpertLoadMonitor"].latest["load/max_over_mean"] >= 1
    assert by_name["ExpertLoadMonitor"].latest["val_load/max_over_mean"] >= 1
    assert by_name["MemoryMonitor"].peak_gib > 0
    assert by_name["SampleText"].text in out
    assert "olmoe-lightning generate --checkpoint" in out
    manifest = json.loads(by_name["RunManifest"].path.read_text())
    assert manifest["model"]["num_params"] == module.config.num_params
    return by_name


def test_all_callbacks_run_together(make_trainer, small_moe, random_tokens, tmp_path, capsys):
    found = run_all(make_trainer, small_moe(), random_tokens(), tmp_path, capsys)
    assert found["SampleText"].text
    assert found["RunManifest"].path.is_relative_to(tmp_path / "logs")


class FullBatches(torch.utils.data.Dataset):
    """The rows of the small data module, with the document and source numbers that the model takes."""

    def __init__(self, rows) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self.rows[index]
        zeros = torch.zeros_like(row["input_ids"], dtype=torch.int32)
        return row | {"document_ids": zeros, "source_ids": torch.tensor(0)}


def test_all_callbacks_run_with_the_real_model(make_trainer, small_moe, random_tokens, tmp_path, capsys):
    class FullTokens(random_tokens):
        def train_dataloader(self):
            return torch.utils.data.DataLoader(FullBatches(self._rows(16, 1)), batch_size=2)

        def val_dataloader(self):
            return torch.utils.data.DataLoader(FullBatches(self._rows(2, 2)), batch_size=2)

    module = OLMoE(small_moe().config)
    found = run_all(make_trainer, module, FullTokens(), tmp_path, capsys)
    latest = found["ExpertLoadMonitor"].latest
    # The balance loss is 1 at perfect balance, and cannot leave [0, E / K] for probabilities.
    assert 0 < latest["load/balance_loss"] < module.config.num_experts
    assert latest["load/router_entropy"] > 0
    supervised = found["ThroughputMonitor"].latest["throughput/supervised_tokens_per_second"]
    total = found["ThroughputMonitor"].latest["throughput/tokens_per_second"]
    assert supervised / total == pytest.approx(14 / 16)
