import os
import shlex
import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from olmoe_lightning.callbacks import NextSteps, RunManifest, SampleText
from olmoe_lightning.callbacks.next_steps import _program


def test_sample_is_printed_repeats_with_its_seed_and_goes_to_tensorboard(
    make_trainer, small_moe, random_tokens, tmp_path, capsys
):
    torch.manual_seed(0)
    module = small_moe()
    texts = []
    for seed in (3, 3, 4):
        # With a learning rate of zero the three runs end with the same weights.
        module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.0)
        sample = SampleText(prompt="ab ", max_new_tokens=20, seed=seed)
        logger = TensorBoardLogger(tmp_path, name=f"seed{seed}{len(texts)}")
        make_trainer(sample, logger=logger).fit(module, random_tokens())
        assert sample.text in capsys.readouterr().out
        texts.append(sample.text)
    assert texts[0] == texts[1] != texts[2]
    assert all(text.startswith("ab ") for text in texts)
    found = EventAccumulator(logger.log_dir)
    found.Reload()
    (event,) = found.Tensors("sample/text_summary")
    assert event.tensor_proto.string_val[0].decode().strip() == texts[2].strip()


def test_sample_leaves_random_state_and_training_mode_alone(make_trainer, small_moe, random_tokens):
    module, sample = small_moe(), SampleText(prompt="", max_new_tokens=5)
    trainer = make_trainer(sample)
    trainer.fit(module, random_tokens())
    state = torch.get_rng_state()
    module.train()
    first = sample.text
    sample.on_train_end(trainer, module)
    assert sample.text == first
    assert torch.equal(torch.get_rng_state(), state)
    assert module.training


def test_sample_leaves_out_ids_beyond_the_tokenizer_and_stops_at_the_documents_end(
    make_trainer, small_moe, random_tokens
):
    class Fixed(small_moe):
        def generate(self, prompt_ids, **options):
            return torch.cat([prompt_ids, torch.tensor([[0, 500, 1, 31, 2]])], 1)

    sample = SampleText(prompt="x")
    make_trainer(sample).fit(Fixed(), random_tokens())
    assert sample.text == "xab"


def test_sample_says_what_it_lacks(make_trainer, small_moe, random_tokens):
    data = random_tokens()
    with pytest.warns(UserWarning, match="SampleText writes nothing: it needs a data module with a `tokenizer`"):
        make_trainer(SampleText()).fit(small_moe(), data.train_dataloader())


@pytest.mark.parametrize("options", [{"max_new_tokens": 0}, {"temperature": -1.0}, {"top_p": 0.0}])
def test_wrong_sampling_numbers_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        SampleText(**options)


def test_next_steps_name_the_best_loss_the_files_and_the_commands(
    make_trainer, small_moe, random_tokens, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)  # an activated environment
    saver = ModelCheckpoint(tmp_path / "my run", monitor="val/loss", save_last=True)
    manifest, steps = RunManifest(), NextSteps(prompt="it's")
    logger = TensorBoardLogger(tmp_path, name="logs")
    trainer = make_trainer(
        saver,
        manifest,
        steps,
        logger=logger,
        enable_checkpointing=True,
        limit_val_batches=2,
        val_check_interval=2,
        max_steps=6,
    )
    trainer.fit(small_moe(), random_tokens())
    out = capsys.readouterr().out
    best = float(saver.best_model_score)
    assert f"{best:.4f} at step" in out
    assert f"({best / 2:.4f} nats per byte)" in out
    for path in (saver.best_model_path, logger.log_dir, str(manifest.path)):
        assert path in out
    commands = {line.split(":")[0]: shlex.split(line.split(":", 1)[1]) for line in out.splitlines() if ":" in line}
    assert commands["see the curves"] == ["tensorboard", "--logdir", logger.log_dir]
    assert commands["let it write"] == [
        *("olmoe-lightning", "generate", "--checkpoint", saver.best_model_path, "--prompt", "it's")
    ]
    assert commands["train on"] == [
        *("olmoe-lightning", "fit", "--trainer.max_steps", "12", "--ckpt_path", saver.last_model_path)
    ]


def test_commands_have_their_path_where_the_environment_is_not_activated(tmp_path, monkeypatch):
    for name in ("python", "tensorboard"):
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.chdir(tmp_path.parent)
    monkeypatch.setenv("PATH", "/nowhere")
    assert _program("tensorboard") == f"{tmp_path.name}/tensorboard"
    assert _program("olmoe-lightning") == "olmoe-lightning"  # it is not there either
    monkeypatch.setenv("PATH", str(tmp_path))
    assert _program("tensorboard") == "tensorboard"


def test_next_steps_name_nothing_that_does_not_exist(make_trainer, small_moe, random_tokens, capsys):
    make_trainer(NextSteps()).fit(small_moe(), random_tokens())
    assert capsys.readouterr().out.strip() == ""


def test_best_loss_is_the_lowest_and_ignores_nan_and_the_sanity_check(make_trainer, small_moe, random_tokens, capsys):
    class Scripted(small_moe):
        losses = iter([0.1, 0.7, 0.5, float("nan"), 0.6])  # the first is the sanity check's

        def validation_step(self, batch, batch_idx) -> None:
            self.log("val/loss", next(self.losses), batch_size=1)

    make_trainer(NextSteps(), limit_val_batches=1, val_check_interval=1, max_steps=4).fit(Scripted(), random_tokens())
    assert "best validation loss: 0.5000 at step 2\n" in capsys.readouterr().out
