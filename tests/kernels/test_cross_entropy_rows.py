"""Rows of logits: loss, logsumexp, and the gradient that takes their place. (The head around it: tests/model.)"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from olmoe_lightning.kernels import cross_entropy_rows_

pytestmark = pytest.mark.usefixtures("kernels")

IGNORE = -100
ROWS, VOCAB = 6, 37


def operands(scale: float = 2.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = scale * torch.randn(ROWS, VOCAB, generator=generator)
    labels = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    labels[2] = IGNORE
    return logits, labels


@pytest.mark.parametrize("z_coeff", [0.0, 0.05])
@pytest.mark.parametrize("scale", [0.0, 2.0, 60.0])
@pytest.mark.parametrize("offset", [0.0, 500.0, -500.0])
def test_loss_logsumexp_and_gradient_equal_torch(scale, offset, z_coeff):
    logits, labels = operands(scale)
    logits = logits + offset
    wide = logits.double().requires_grad_()
    expected = F.cross_entropy(wide, labels, ignore_index=IGNORE, reduction="none")
    lse = wide.logsumexp(-1)
    (grad,) = torch.autograd.grad(expected.sum() + z_coeff * lse[labels != IGNORE].square().sum(), wide)
    loss, found_lse = cross_entropy_rows_(logits, labels, IGNORE, z_coeff, True)
    torch.testing.assert_close(loss.double(), expected.detach(), atol=2e-5, rtol=1e-6)
    torch.testing.assert_close(found_lse.double(), lse.detach(), atol=2e-5, rtol=1e-6)
    torch.testing.assert_close(logits.double(), grad, atol=2e-5, rtol=1e-4)
    assert torch.equal(logits[2], torch.zeros(VOCAB))
    assert loss[2] == 0


@pytest.mark.parametrize("size", [1e4, 1e6, 1e12, 1e25])
def test_small_losses_of_huge_logits_are_exact(size):
    """Negative control: fp32 spaces numbers of 1e4 by 1e-3, so that logsumexp minus logit is another number."""
    step = torch.tensor(size).nextafter(torch.tensor(math.inf)).item() - torch.tensor(size).item()
    differences = step * torch.tensor([[0.0, -1.0, -3.0, -6.0], [-2.0, 0.0, -1.0, -5e4]])
    logits, labels = size + differences, torch.tensor([1, 0])
    assert torch.equal(logits.double() - torch.tensor(size).double(), differences.double())
    wide = logits.double().requires_grad_()
    expected = F.cross_entropy(wide, labels, reduction="none")
    z = 0.01 * wide.logsumexp(-1).square()
    (grad,) = torch.autograd.grad((expected + z).sum(), wide)
    naive = logits.logsumexp(-1) - logits.gather(1, labels[:, None])[:, 0]
    loss, lse = cross_entropy_rows_(logits, labels, IGNORE, 0.01, True)
    torch.testing.assert_close(loss.double(), expected.detach(), atol=0, rtol=1e-6)
    torch.testing.assert_close(lse.double(), wide.detach().logsumexp(-1), atol=0, rtol=1e-6)
    torch.testing.assert_close(logits.double(), grad, atol=1e-20 * size, rtol=2e-6)
    if size == 1e4:
        assert (naive.double() - expected).abs().max() > 100 * (loss.double() - expected).abs().max()


def test_labels_may_be_strided_or_of_another_integer_type():
    logits, labels = operands()
    expected, _ = cross_entropy_rows_(logits.clone(), labels, IGNORE, 0.0, False)
    strided = torch.stack([labels, labels + 1], dim=1)[:, 0]
    assert not strided.is_contiguous()
    assert torch.equal(cross_entropy_rows_(logits.clone(), strided, IGNORE, 0.0, False)[0], expected)


def test_strided_logits_are_read_and_overwritten_as_what_they_show():
    logits, labels = operands()
    dense = logits.clone()
    strided = logits.t().contiguous().t()
    loss, _ = cross_entropy_rows_(dense, labels, IGNORE, 0.0, True)
    again, _ = cross_entropy_rows_(strided, labels, IGNORE, 0.0, True)
    torch.testing.assert_close(again, loss)
    torch.testing.assert_close(strided, dense, atol=1e-6, rtol=1e-5)


def test_nan_stays_visible_in_its_row_alone():
    logits, labels = operands()
    logits[4, 7] = math.nan
    loss, lse = cross_entropy_rows_(logits, labels, IGNORE, 0.0, True)
    assert loss.isnan().tolist() == lse.isnan().tolist() == [False] * 4 + [True, False]
    assert logits[4].isnan().all()
    assert logits[[0, 1, 2, 3, 5]].isfinite().all()


@pytest.mark.parametrize("label", [-1, VOCAB, 2**40])
def test_a_label_that_is_no_token_is_refused_before_memory_is_touched(label):
    logits, labels = operands()
    before = logits.clone()
    labels[3] = label
    with pytest.raises((IndexError, RuntimeError), match=r"vocabulary of 37|out of bounds"):
        cross_entropy_rows_(logits, labels, IGNORE, 0.0, False)
    assert torch.equal(logits, before)
