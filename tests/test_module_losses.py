"""What OLMoE trains on and what it logs: each loss apart, means over tokens, gradients of the layers' losses."""

import math

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader
from torchmetrics.text import Perplexity as LogitsPerplexity

from olmoe_lightning import OLMoE, TokenSource
from olmoe_lightning.model import Transformer


class Record(Callback):
    """Keeps batches, outputs, logged values, and the gradients before each optimizer step."""

    def __init__(self):
        self.batches, self.outputs, self.logged, self.gradients = [], [], [], []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.batches.append({name: field.clone() for name, field in batch.items()})

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.outputs.append(outputs)
        self.logged.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.gradients.append({name: p.grad.clone() for name, p in pl_module.model.named_parameters()})


def explicit_losses(config, model, batch):
    """Everything by hand, from the full logits and the router's probabilities; sums over the tokens that count."""
    counted = batch["labels"] != -100
    captured = []
    hooks = [
        block.moe.router.register_forward_hook(lambda router, args, out: captured.append((args[0], router, out)))
        for block in model.blocks
    ]
    hidden, _ = model(batch["input_ids"], batch["document_ids"], counted)
    for hook in hooks:
        hook.remove()
    logits = model.logits(hidden)[counted]
    cross_entropy = torch.nn.functional.cross_entropy(logits, batch["labels"][counted], reduction="sum")
    lm_z = torch.logsumexp(logits, -1).square().sum()
    balance = router_z = 0.0
    for x, router, out in captured:
        scores = torch.nn.functional.linear(x[counted], router.weight)
        share = torch.nn.functional.one_hot(out.expert_ids.view(*counted.shape, -1)[counted], config.num_experts)
        load = share.sum(1).float().mean(0)
        tokens = counted.sum()
        balance = balance + tokens * config.num_experts / config.top_k * (load * scores.softmax(-1).mean(0)).sum()
        router_z = router_z + torch.logsumexp(scores, -1).square().sum()
    return {"cross_entropy": cross_entropy, "lm_z": lm_z, "balance": balance, "router_z": router_z}, counted.sum()


@pytest.fixture
def trained(small_config, small_data, quiet_trainer):
    """Two steps; the second batch has padding, so that token counts differ."""

    def run(config=small_config, packing="documents", **options):
        record = Record()
        module = OLMoE(config, learning_rate=1e-2)
        quiet_trainer(record, **({"max_steps": 2, "limit_val_batches": 0} | options)).fit(
            module, small_data(packing=packing)
        )
        return module, record

    return run


def test_training_step_returns_the_mean_loss_and_the_number_of_labels_that_count(trained, small_config):
    _, record = trained(max_steps=1)
    batch, output = record.batches[0], record.outputs[0]
    model = Transformer(small_config)
    model.init_weights(0)
    sums, tokens = explicit_losses(small_config, model, batch)
    assert (batch["labels"] == -100).any()  # else the mean over tokens and the one over positions are the same
    assert output["num_tokens"] == tokens
    assert output["num_tokens"].ndim == 0
    expected = (sums["cross_entropy"] + small_config.lm_z_loss_coeff * sums["lm_z"]) / tokens
    torch.testing.assert_close(output["loss"], expected.detach())


def test_each_loss_is_logged_apart_with_its_coefficient(trained, small_config):
    _, record = trained(max_steps=1)
    model = Transformer(small_config)
    model.init_weights(0)
    sums, tokens = explicit_losses(small_config, model, record.batches[0])
    layers = small_config.num_moe_layers
    expected = {
        "train/loss": sums["cross_entropy"] / tokens,
        "train/perplexity": (sums["cross_entropy"] / tokens).exp(),
        "train/lm_z_loss": small_config.lm_z_loss_coeff * sums["lm_z"] / tokens,
        "train/balance_loss": small_config.balance_loss_coeff * sums["balance"] / tokens / layers,
        "train/router_z_loss": small_config.router_z_loss_coeff * sums["router_z"] / tokens / layers,
    }
    assert record.logged[0] == pytest.approx({name: value.item() for name, value in expected.items()}, rel=1e-5)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_gradients_under_a_stock_strategy_are_those_of_the_explicit_sum_of_all_losses(
    trained, small_config, accumulate
):
    _, record = trained(max_steps=1, accumulate_grad_batches=accumulate)
    model = Transformer(small_config)
    model.init_weights(0)
    assert len(record.batches) == accumulate
    for batch in record.batches:
        sums, tokens = explicit_losses(small_config, model, batch)
        total = (
            sums["cross_entropy"]
            + small_config.lm_z_loss_coeff * sums["lm_z"]
            + small_config.balance_loss_coeff * sums["balance"]
            + small_config.router_z_loss_coeff * sums["router_z"]
        )
        (total / tokens / accumulate).backward()
    for name, parameter in model.named_parameters():
        # fp32 sums of a few hundred terms in another order
        torch.testing.assert_close(record.gradients[0][name], parameter.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_gradient_scaling_of_fp16_reaches_the_losses_of_the_layers(small_config, small_data, quiet_trainer):
    """Before unscaling, gradients of router and head grow by the same factor; so the auxiliary ones were scaled too."""
    gradients = []
    for scale in (1.0, 256.0):
        record = Record()
        module = OLMoE(small_config)
        trainer = quiet_trainer(record, max_steps=1, limit_val_batches=0)

        class Plugin(type(trainer.precision_plugin)):
            scaler = torch.amp.GradScaler("cpu", init_scale=scale)

            def pre_backward(self, tensor, module):
                return super().pre_backward(self.scaler.scale(tensor), module)

        trainer.strategy.precision_plugin = Plugin()
        trainer.fit(module, small_data())
        gradients.append(record.gradients[0]["blocks.0.moe.router.weight"])
    torch.testing.assert_close(gradients[1], gradients[0] * 256, rtol=1e-4, atol=1e-5)


def test_loss_falls_when_training(small_config, small_data, quiet_trainer):
    record = Record()
    quiet_trainer(record, max_steps=30, limit_val_batches=0).fit(OLMoE(small_config, learning_rate=1e-2), small_data())
    assert record.logged[-1]["train/loss"] < record.logged[0]["train/loss"] - 1.0


def test_perplexity_equals_torchmetrics_on_the_full_logits(small_config, small_data, quiet_trainer):
    module, data = OLMoE(small_config), small_data(packing="documents")
    trainer = quiet_trainer(limit_val_batches=3)
    (logged,) = trainer.validate(module, data, verbose=False)
    theirs = LogitsPerplexity(ignore_index=-100)
    total = count = bytes_ = 0
    with torch.no_grad():
        for _, batch in zip(range(3), data.val_dataloader(), strict=False):
            logits = module(batch["input_ids"], batch["document_ids"])
            theirs.update(logits, batch["labels"])
            counted = batch["labels"] != -100
            total += float(
                torch.nn.functional.cross_entropy(logits[counted], batch["labels"][counted], reduction="sum")
            )
            count += int(counted.sum())
            bytes_ += int((counted & (batch["labels"] < 256)).sum())
    assert bytes_ < count  # the end of a document is predicted, but is no byte of text
    assert logged["val/perplexity"] == pytest.approx(float(theirs.compute()), rel=1e-5)
    assert logged["val/loss"] == pytest.approx(total / count, rel=1e-5)
    assert logged["val/nats_per_byte"] == pytest.approx(total / bytes_, rel=1e-5)


def test_validation_loss_is_logged_for_every_source_and_their_mean_is_the_whole(
    small_config, small_data, quiet_trainer
):
    module, data = OLMoE(small_config), small_data()
    (logged,) = quiet_trainer(limit_val_batches=1.0).validate(module, data, verbose=False)
    sums = {"upper": [0.0, 0], "lower": [0.0, 0]}
    with torch.no_grad():
        for batch in data.val_dataloader():
            losses = torch.nn.functional.cross_entropy(
                module(batch["input_ids"], batch["document_ids"]).transpose(1, 2), batch["labels"], reduction="none"
            )
            for index, name in enumerate(sums):
                rows = batch["source_ids"] == index
                sums[name][0] += float(losses[rows].sum())
                sums[name][1] += int((batch["labels"][rows] != -100).sum())
    for name, (total, count) in sums.items():
        assert logged[f"val/loss/{name}"] == pytest.approx(total / count, rel=1e-5)
    whole = sum(total for total, _ in sums.values()) / sum(count for _, count in sums.values())
    assert logged["val/loss"] == pytest.approx(whole, rel=1e-5)


def test_validation_sources_are_those_of_the_validation_data(small_config, small_data, quiet_trainer, token_files):
    (logged,) = quiet_trainer().validate(
        OLMoE(small_config), small_data(val=str(token_files / "lower.npy")), verbose=False
    )
    assert {name for name in logged if name.startswith("val/loss/")} == {"val/loss/lower"}


def test_a_source_may_have_any_name_and_two_the_same(small_config, small_data, quiet_trainer, token_files):
    sources = [TokenSource(str(token_files / "lower.npy"), name=name) for name in ("train", "a.b", "same", "same")]
    (logged,) = quiet_trainer().validate(OLMoE(small_config), small_data(val=sources), verbose=False)
    assert {"val/loss/train", "val/loss/a.b", "val/loss/same-2", "val/loss/same-3"} <= set(logged)


def test_test_logs_the_same_values_under_its_own_name(small_config, small_data, quiet_trainer):
    module, data = OLMoE(small_config), small_data()
    (validated,) = quiet_trainer().validate(module, data, verbose=False)
    (tested,) = quiet_trainer(limit_test_batches=2).test(module, data, verbose=False)
    assert {name.removeprefix("val/"): value for name, value in validated.items()} == {
        name.removeprefix("test/"): value for name, value in tested.items()
    }


def test_sanity_check_leaves_no_trace_in_the_validation_that_follows(small_config, small_data, quiet_trainer):
    values = []
    for sanity in (0, 2):
        trainer = quiet_trainer(max_steps=2, val_check_interval=2, num_sanity_val_steps=sanity)
        trainer.fit(OLMoE(small_config), small_data())
        values.append({name: float(v) for name, v in trainer.callback_metrics.items() if name.startswith("val/")})
    assert values[0] == values[1]


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_low_precision_trains_to_finite_losses_near_those_of_fp32(small_config, small_data, quiet_trainer, precision):
    losses = {}
    for name in ("32-true", precision):
        module = OLMoE(small_config, learning_rate=1e-2)
        trainer = quiet_trainer(precision=name, max_steps=6, gradient_clip_val=1.0, val_check_interval=6)
        trainer.fit(module, small_data())
        losses[name] = float(trainer.callback_metrics["val/loss"])
        assert module.metrics.loss.total.dtype == torch.float64
    assert math.isfinite(losses[precision])
    assert losses[precision] == pytest.approx(losses["32-true"], rel=0.05)  # bf16 has 8 bits


def test_losses_are_logged_to_the_logger_during_training(small_config, small_data, quiet_trainer, tmp_path):
    logger = CSVLogger(tmp_path)
    quiet_trainer(logger=logger, val_check_interval=2).fit(OLMoE(small_config), small_data())
    header = set(logger.experiment.metrics_keys)
    assert {"train/loss", "train/balance_loss", "train/router_z_loss", "train/lm_z_loss", "train/perplexity"} <= header
    assert {"val/loss", "val/balance_loss", "val/router_z_loss", "val/perplexity", "val/loss/upper"} <= header


def test_a_batch_without_any_label_gives_a_zero_loss_and_no_gradient(small_config, quiet_trainer):
    batch = {"input_ids": torch.ones(2, 8, dtype=torch.int64), "labels": torch.full((2, 8), -100)}
    record = Record()
    module = OLMoE(small_config)
    quiet_trainer(record, max_steps=1, limit_val_batches=0).fit(module, DataLoader([batch], batch_size=None))
    assert record.outputs[0]["loss"] == 0
    assert record.outputs[0]["num_tokens"] == 0
    assert all((gradient == 0).all() for gradient in record.gradients[0].values())


def test_dense_models_have_no_router_losses(small_config, small_data, quiet_trainer):
    dense = small_config.replace(num_dense_layers=2, dense_hidden=32)
    trainer = quiet_trainer(val_check_interval=2, max_steps=2)
    module = OLMoE(dense)
    trainer.fit(module, small_data())
    assert not [name for name in trainer.callback_metrics if "balance" in name or "router" in name]
    assert module.routing_stats is None


@pytest.mark.slow
@pytest.mark.skipif(" " in torch.__file__, reason="torch's own compiler cannot link below a folder with a space")
def test_compiled_blocks_give_the_same_losses(small_config, small_data, quiet_trainer):
    losses = []
    for compile_blocks in (False, True):
        record = Record()
        module = OLMoE(small_config.replace(num_layers=1), compile_blocks=compile_blocks, learning_rate=1e-2)
        quiet_trainer(record, max_steps=3, limit_val_batches=0).fit(module, small_data(seq_len=16))
        losses.append([logged["train/loss"] for logged in record.logged])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)  # fused kernels round otherwise
