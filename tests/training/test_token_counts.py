"""Numbers of tokens keep all their digits, whatever the dtype of a loss."""

import pytest
import torch
from lightning.pytorch import LightningModule
from strategy_lab import SMALL_BUCKETS, own_batches, quiet, vectors
from tiny_model import SMALL
from torch import nn

from olmoe_lightning import MoEStrategy
from olmoe_lightning.model.losses import attach_loss
from olmoe_lightning.plugins import BF16Precision
from olmoe_lightning.plugins.comm.capacity import DropCounters
from olmoe_lightning.training.loss_graph import passes_narrow


def narrow(module, slope):
    return (module.w.bfloat16() * slope).sum()


def widened(module, slope):
    """Too late: the gradient of the conversion is a conversion."""
    return narrow(module, slope).float()


def half(module, slope):
    return (module.w.half() * slope).sum()


def per_sample(module, slope):
    """The same number for every sample, rounded behind the mean."""
    return (module.w.bfloat16() * slope).expand(3, 64).sum(1).float().mean()


def wide(module, slope):
    return (module.w.float() * slope).sum()


LOSSES = {loss.__name__: loss for loss in (narrow, widened, half, per_sample, wide)}
COUNTS = [257, 1001, 99_999, 3]
"""Of the batches: bf16 has 256, 1000, 99840 and 3 for them, fp16 nothing for the third."""
SLOPES = [1.0, 3.0, 1.0, 2.0]


class Counting(LightningModule):
    """Its gradient is the slope of the batch, in any dtype."""

    def __init__(self, loss, counts=True):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(64))
        self.loss, self.counts = LOSSES[loss], counts

    def training_step(self, batch, batch_idx):
        number = 2 * batch_idx + self.trainer.global_rank if self.trainer.world_size == 2 else batch_idx
        loss = self.loss(self, SLOPES[number])
        return {"loss": loss, "num_tokens": torch.tensor(COUNTS[number])} if self.counts else loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


def train(loss, counts=True, precise=True, **options):
    """One step with all four batches."""
    module = Counting(loss, counts)
    chosen = MoEStrategy(bucket_megabytes=SMALL_BUCKETS, **options)
    accumulate = 2 if torch.distributed.is_initialized() else 4
    plugins = [] if precise else [BF16Precision()]
    trainer = quiet(chosen, plugins=plugins, accumulate_grad_batches=accumulate)
    trainer.fit(module, own_batches(vectors(4)))
    return module.w.detach().float(), trainer.strategy.skipped_steps


MEAN = sum(count * slope for count, slope in zip(COUNTS, SLOPES, strict=True)) / sum(COUNTS)


@pytest.mark.parametrize("precise", [True, False], ids=["fp32 weights", "bf16 weights"])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_mean_over_tokens_is_exact_in_every_dtype_of_the_loss(workers, loss, precise):
    found = [train(loss, precise=precise), *workers(2).run(train, loss, True, precise)]
    found += workers(2).run(train_replicated, loss, precise)
    for weights, skipped in found:
        assert skipped == 0
        torch.testing.assert_close(weights, torch.full((64,), -MEAN), rtol=1e-6, atol=0)


def train_replicated(loss, precise):
    return train(loss, True, precise, shard_optimizer=False, overlap_grad_reduce=False)


def test_without_counts_batches_count_alike():
    weights, _ = train("narrow", counts=False)
    torch.testing.assert_close(weights, torch.full((64,), -sum(SLOPES) / 4), rtol=1e-6, atol=0)


def test_a_rounded_count_is_seen():
    """Negative control: what the gradients would be if counts were rounded as the losses are."""
    for dtype in (torch.bfloat16, torch.float16):
        counts = torch.tensor(COUNTS).to(dtype).float()
        assert float((counts * torch.tensor(SLOPES)).sum()) / sum(COUNTS) != pytest.approx(MEAN, rel=1e-6)


@pytest.mark.parametrize("loss", LOSSES)
def test_where_a_gradient_is_rounded_is_found(loss):
    assert passes_narrow(LOSSES[loss](Counting(loss), 1.0)) == (loss != "wide")


def test_a_loss_in_fp32_behind_narrow_activations_is_none():
    w = nn.Parameter(torch.zeros(8, 8, dtype=torch.bfloat16))
    logits = (torch.ones(4, 8, dtype=torch.bfloat16) @ w).float()
    loss = torch.nn.functional.cross_entropy(logits, torch.zeros(4, dtype=torch.int64))
    assert not passes_narrow(loss)
    assert not passes_narrow(loss * 0.5)


class Mask(Counting):
    """Counts with a mask that the precision plugin narrows."""

    def training_step(self, batch, batch_idx):
        return {"loss": wide(self, 1.0), "num_tokens": (batch != 0).to(batch.dtype).sum()}


class Attached(Counting):
    def training_step(self, batch, batch_idx):
        w = attach_loss(self.w, self.w.square().sum(), torch.ones(()))
        return {"loss": w.bfloat16().sum(), "num_tokens": torch.tensor(257)}


def test_a_count_that_is_narrow_already_is_refused():
    trainer = quiet(MoEStrategy(), devices=1, plugins=[BF16Precision()])
    with pytest.raises(
        ValueError, match=r"num_tokens is torch.bfloat16, which rounds numbers above 256.*mask.bool\(\)"
    ):
        trainer.fit(Mask("wide"), own_batches(vectors(1)))


def test_attached_losses_beside_a_narrow_one_are_refused():
    with pytest.raises(ValueError, match=r"Attached's loss passes through bfloat16.*logits.float\(\)"):
        quiet(MoEStrategy(), devices=1).fit(Attached("wide"), own_batches(vectors(1)))


def test_dropped_weight_adds_up_over_a_long_run():
    drops = DropCounters(SMALL.num_experts, 1, torch.device("cpu"))
    drops.weight_removed_by_expert += 2.0**26  # of earlier steps: fp32 would have no digit for what follows
    ids = torch.zeros(1, 1, dtype=torch.int64)
    for _ in range(16):
        drops.add(ids, ids, torch.zeros(1, 1, dtype=torch.bool), torch.full((1, 1), 0.5))
    assert drops.weight_removed_by_expert[0] == 2.0**26 + 8
