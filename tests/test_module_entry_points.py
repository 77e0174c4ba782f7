"""OLMoE through the Trainer's other doors: fit twice, load, predict, generate, and data that does not fit."""

import json

import pytest
import torch

from olmoe_lightning import GenerationConfig, OLMoE
from olmoe_lightning.callbacks import WritePredictions
from olmoe_lightning.model.generation import split_prompts


@pytest.fixture
def checkpoint(small_config, small_data, quiet_trainer, tmp_path):
    """A trained module and its checkpoint."""
    module, trainer = OLMoE(small_config, learning_rate=1e-2, betas=(0.8, 0.9)), quiet_trainer()
    trainer.fit(module, small_data())
    trainer.save_checkpoint(tmp_path / "some.ckpt")
    return module.eval(), tmp_path / "some.ckpt"


def test_a_checkpoint_loads_with_weights_only_and_gives_equal_logits(checkpoint, small_config):
    module, path = checkpoint
    loaded = OLMoE.load_from_checkpoint(path, weights_only=True).eval()
    assert loaded.config == small_config
    assert loaded.betas == (0.8, 0.9)
    tokens = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(loaded(tokens), module(tokens))
        assert not torch.equal(OLMoE(small_config).eval()(tokens), module(tokens))  # training did change something


def test_weights_of_another_network_are_refused_with_the_difference(
    checkpoint, small_config, small_data, quiet_trainer
):
    other = OLMoE(small_config.replace(num_experts=8))
    with pytest.raises(ValueError, match=r"num_experts: the model has 8, the checkpoint 4"):
        quiet_trainer().validate(other, small_data(), ckpt_path=checkpoint[1])


def test_loss_coefficients_may_change_on_a_resume(checkpoint, small_config, small_data, quiet_trainer):
    other = OLMoE(small_config.replace(balance_loss_coeff=0.5, recompute="block"), learning_rate=1e-2, betas=(0.8, 0.9))
    quiet_trainer(max_steps=6).fit(other, small_data(), ckpt_path=checkpoint[1])
    assert other.config.balance_loss_coeff == 0.5


def test_fitting_twice_equals_fitting_two_modules_with_the_same_start(small_config, small_data, quiet_trainer):
    twice = OLMoE(small_config, schedule="constant")
    quiet_trainer().fit(twice, small_data())
    between = {name: value.clone() for name, value in twice.state_dict().items()}
    quiet_trainer().fit(twice, small_data())

    other = OLMoE(small_config, schedule="constant")
    other.built()
    other.load_state_dict(between)
    quiet_trainer().fit(other, small_data())
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in twice.state_dict().items())


def test_a_second_fit_on_other_sources_logs_theirs(small_config, small_data, quiet_trainer, token_files):
    module = OLMoE(small_config)
    quiet_trainer(val_check_interval=4).fit(module, small_data())
    trainer = quiet_trainer(val_check_interval=4)
    trainer.fit(module, small_data(val=str(token_files / "lower.npy")))
    assert {name for name in trainer.callback_metrics if name.startswith("val/loss/")} == {"val/loss/lower"}


def test_the_trainer_leaves_the_module_in_training_mode_after_validation(small_config, small_data, quiet_trainer):
    module = OLMoE(small_config)
    quiet_trainer(val_check_interval=2).fit(module, small_data())
    assert module.model.training


def test_generation_continues_greedily_what_the_logits_say_and_keeps_the_mode(checkpoint):
    module, _ = checkpoint
    module.train()
    prompt = torch.tensor([[65, 66, 67], [97, 98, 99]])
    written = module.generate(prompt, 5, temperature=0)
    assert module.model.training
    module.eval()
    for _ in range(5):
        with torch.no_grad():
            prompt = torch.cat([prompt, module(prompt)[:, -1].argmax(-1, keepdim=True)], 1)
    assert torch.equal(written, prompt)


def test_predict_continues_one_document_per_row_and_writes_it_beside_the_truth(
    checkpoint, small_data, quiet_trainer, tmp_path
):
    path = checkpoint[1]
    module = OLMoE.load_from_checkpoint(
        path, weights_only=True, generation=GenerationConfig(prompt_tokens=20, max_new_tokens=6, temperature=0)
    )
    writer, data = WritePredictions(), small_data(packing="documents")
    predictions = quiet_trainer(writer, limit_predict_batches=2).predict(module, data)
    lines = [json.loads(line) for line in (tmp_path / "predictions.jsonl").read_text().splitlines()]
    flat = [continuation for batch in predictions for continuation in batch]
    assert 0 < len(lines) == len(flat) <= 8
    for line, continuation in zip(lines, flat, strict=True):
        assert line["prompt"] == data.tokenizer.decode(continuation.prompt.tolist())
        assert line["actual"] == data.tokenizer.decode(continuation.actual.tolist())
        assert 256 not in continuation.prompt[:-1].tolist()  # no other document in front
        assert len(continuation.written) <= 6
        assert 256 not in continuation.written[:-1].tolist()
        alone = module.generate(continuation.prompt[None], 6, temperature=0)[0, len(continuation.prompt) :]
        assert torch.equal(alone[: len(continuation.written)], continuation.written)


def test_prompts_are_cut_inside_their_document_and_rows_of_padding_have_none():
    ids = torch.arange(24).view(3, 8)
    documents = torch.tensor([[0, 0, 1, 1, 1, 1, 2, 2], [0, 0, -1, -1, -1, -1, -1, -1], [0] * 8])
    found = split_prompts(ids, documents, GenerationConfig(prompt_tokens=4, max_new_tokens=3))
    assert [(prompt.tolist(), after.tolist()) for prompt, after in found] == [
        ([2, 3], [4, 5]),
        ([16, 17, 18, 19], [20, 21, 22]),
    ]
    assert [p.tolist() for p, _ in split_prompts(ids[:1], None, GenerationConfig())] == [[0, 1, 2, 3]]


def test_predictions_repeat_with_the_seed_and_differ_between_batches(checkpoint, small_data, quiet_trainer):
    runs = []
    for seed in (0, 0, 1):
        module = OLMoE.load_from_checkpoint(
            checkpoint[1], weights_only=True, generation=GenerationConfig(max_new_tokens=8, seed=seed)
        )
        batches = quiet_trainer(limit_predict_batches=1).predict(module, small_data())
        runs.append([row.written.tolist() for row in batches[0]])
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize(
    ("model", "data", "message"),
    [
        ({"vocab_size": 200}, {}, "vocab_size is 200"),
        ({"max_seq_len": 16}, {}, r"seq_len \(32\) exceeds the model's max_seq_len \(16\)"),
    ],
)
def test_data_that_does_not_fit_the_model_stops_before_training(
    small_config, small_data, quiet_trainer, model, data, message
):
    with pytest.raises(ValueError, match=message):
        quiet_trainer().fit(OLMoE(small_config, overrides=model), small_data(**data))


def test_the_size_of_the_model_is_said_in_one_line(small_config, small_data, quiet_trainer, caplog):
    quiet_trainer(max_steps=1).fit(OLMoE(small_config), small_data())
    (line,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("Model:")]
    assert line == (
        f"Model: {small_config.num_params:,} parameters, {small_config.num_active_params:,} active per token, "
        f"{small_config.flops_per_token(32) / 1e6:,.1f} MFLOP per token of training (sequences of 32)"
    )
