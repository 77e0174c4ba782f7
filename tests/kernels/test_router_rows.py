"""The router's fused rows equal their definition: values, all gradients, masks, scopes, ties, numbers that overflow."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from olmoe_lightning.kernels import RouterRows, router_rows, top_k_stable
from olmoe_lightning.kernels.router_rows import router_rows_reference

TOKENS, SCOPES = 600, 3  # neither a multiple of the kernel's blocks of tokens


def top(k: int) -> Callable[[Tensor], Tensor]:
    return lambda scores: top_k_stable(scores, k)


def logits_of(experts: int, tokens: int = TOKENS) -> Tensor:
    return 3 * torch.randn(tokens, experts, generator=torch.Generator().manual_seed(experts))


def mask_of(tokens: int = TOKENS) -> Tensor:
    return torch.rand(tokens, generator=torch.Generator().manual_seed(1)) < 0.7


def double_precision(
    logits: Tensor, ids: Tensor, mask: Tensor | None, scopes: int, sigmoid: bool = False
) -> RouterRows:
    """The definition by autograd in fp64, at a given choice."""
    scores = torch.sigmoid(logits) if sigmoid else torch.softmax(logits, -1)
    probs = scores / scores.sum(-1, keepdim=True)
    counted = probs if mask is None else probs * mask[:, None]
    prob_sum = counted.view(scopes, -1, logits.shape[1]).sum(1)
    entropy = torch.special.entr(probs).sum(-1)
    lse = torch.logsumexp(logits, -1)
    return RouterRows(ids, scores.gather(1, ids), prob_sum, lse, entropy, logits.gather(1, ids))


def differentiable(rows: RouterRows) -> list[Tensor]:
    return [rows.scores_TK, rows.prob_sum_GE, rows.logsumexp_T, rows.logits_TK]


def pulls_of(rows: RouterRows) -> list[Tensor]:
    """Gradients of the differentiable results."""
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(result.shape, generator=generator, dtype=torch.float64) for result in differentiable(rows)]


@pytest.mark.parametrize("sigmoid", [False, True], ids=["softmax", "sigmoid"])
@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize("scopes", [1, SCOPES])
@pytest.mark.parametrize(("experts", "k"), [(1, 1), (3, 2), (16, 5), (64, 8), (129, 1), (129, 4), (129, 8)])
def test_values_and_gradients_equal_the_definition_in_double_precision(
    kernels: None, experts: int, k: int, scopes: int, masked: bool, sigmoid: bool
) -> None:
    mask = mask_of() if masked else None
    logits = logits_of(experts).requires_grad_()
    rows = router_rows(logits, top(k), mask, scopes, sigmoid)
    exact = logits.detach().double().requires_grad_()
    expected = double_precision(exact, rows.expert_ids_TK, mask, scopes, sigmoid)
    for found, wanted in zip(rows, expected, strict=True):
        # The entropy is a difference of numbers of about 10, the sums go over 600 tokens.
        torch.testing.assert_close(found.to(wanted.dtype), wanted, atol=1e-5, rtol=2e-6)
    pulls = pulls_of(rows)
    torch.autograd.backward(differentiable(rows), [pull.float() for pull in pulls])
    torch.autograd.backward(differentiable(expected), pulls)
    torch.testing.assert_close(logits.grad.double(), exact.grad, atol=2e-6, rtol=1e-5)
    assert not rows.entropy_T.requires_grad


@pytest.mark.parametrize("result", range(4), ids=["scores", "prob_sum", "logsumexp", "logits"])
def test_each_result_alone_has_its_gradient(kernels: None, result: int) -> None:
    """A result that the loss does not use sends no gradient."""
    logits = logits_of(7).requires_grad_()
    rows = router_rows(logits, top(2), mask_of(), 1)
    exact = logits.detach().double().requires_grad_()
    expected = double_precision(exact, rows.expert_ids_TK, mask_of(), 1)
    pull = pulls_of(rows)[result]
    differentiable(rows)[result].backward(pull.float())
    differentiable(expected)[result].backward(pull)
    torch.testing.assert_close(logits.grad.double(), exact.grad, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("scopes", [1, SCOPES])
def test_masked_tokens_reach_neither_the_sums_nor_other_tokens(kernels: None, scopes: int, garbage: float) -> None:
    mask, clean = mask_of(), logits_of(33)
    dirty = clean.masked_fill(~mask[:, None], garbage)
    results = []
    for logits in (clean.requires_grad_(), dirty.requires_grad_()):
        rows = router_rows(logits, top(4), mask, scopes)
        torch.autograd.backward(differentiable(rows), [pull.float() for pull in pulls_of(rows)])
        results.append([rows.prob_sum_GE, *(value[mask] for value in (*rows[:2], *rows[3:], logits.grad))])
        ids = rows.expert_ids_TK
    for found, wanted in zip(*results, strict=True):
        assert torch.equal(found, wanted)
    assert ((ids >= 0) & (ids < 33)).all()  # routed all the same


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_stays_visible_in_its_own_row(kernels: None, value: float) -> None:
    logits = logits_of(20)
    logits[5, 17] = value
    rows = router_rows(logits, top(3), None, 1)
    assert not rows.scores_TK[5].isfinite().any()
    assert not rows.logsumexp_T[5].isfinite()
    assert rows.prob_sum_GE.isnan().all()
    others = torch.arange(TOKENS) != 5
    assert all(result[others].isfinite().all() for result in (rows.scores_TK, rows.logsumexp_T, rows.entropy_T))


def test_large_logits_do_not_overflow_and_an_impossible_expert_has_probability_zero(kernels: None) -> None:
    rows = router_rows(torch.tensor([[1e4, 0.0, 1e4], [-1e4, 0.0, -1e4]]), top(3), None, 1)
    torch.testing.assert_close(rows.scores_TK, torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]), atol=0, rtol=1e-6)
    torch.testing.assert_close(rows.logsumexp_T, torch.tensor([1e4 + math.log(2), 0.0]))
    assert rows.scores_TK[:, 2].tolist() == [0.0, 0.0]
    assert rows.entropy_T[1] == 0


@pytest.mark.parametrize("experts", [*range(1, 20), 31, 33, 65, 129, 200])
def test_equal_logits_have_equal_scores_wherever_they_stand_in_the_row(kernels: None, experts: int) -> None:
    """Vector and remainder parts of a loop must round alike, or ties would not be ordered by index."""
    values = torch.tensor([0.37, -1.91, 2.3, -5.5])[:, None].expand(4, experts).clone()
    values[:, experts // 2] += 1
    scores = [router_rows(values, lambda _, e=e: torch.full((4, 1), e), None, 1).scores_TK for e in range(experts)]
    others = torch.cat(scores, dim=1)[:, torch.arange(experts) != experts // 2]
    assert torch.equal(others, others[:, :1].expand_as(others))


def test_the_choice_sees_detached_scores_and_is_handed_on(kernels: None) -> None:
    logits = logits_of(9).requires_grad_()
    before = torch.arange(TOKENS * 2).view(TOKENS, 2) % 9
    seen = []

    def replay(scores: Tensor) -> Tensor:
        seen.append(scores)
        return before

    rows = router_rows(logits, replay, None, 1)
    assert torch.equal(rows.expert_ids_TK, before)
    assert not seen[0].requires_grad
    torch.testing.assert_close(seen[0], torch.softmax(logits.detach(), -1))
    torch.testing.assert_close(rows.scores_TK, seen[0].gather(1, before), atol=0, rtol=0)


def test_the_sums_do_not_depend_on_the_number_of_threads() -> None:
    before = torch.get_num_threads()
    sums = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        sums.append(router_rows(logits_of(65, 3000), top(2), None, 1).prob_sum_GE)
    torch.set_num_threads(before)
    assert torch.equal(sums[0], sums[1])
    assert torch.equal(sums[0], sums[2])


def test_strided_logits_and_masks_are_read_correctly(kernels: None) -> None:
    logits, mask = logits_of(TOKENS, 10).t(), mask_of(2 * TOKENS)[::2]
    rows = router_rows(logits, top(3), mask, 1)
    dense = router_rows_reference(logits.contiguous(), top(3), mask.contiguous(), 1, False)
    for found, wanted in zip(rows, dense, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=2e-6)


@pytest.mark.parametrize("scopes", [0, 7])
def test_scopes_that_do_not_divide_the_tokens_are_refused(kernels: None, scopes: int) -> None:
    with pytest.raises(ValueError, match=f"600 tokens .* {scopes} scopes"):
        router_rows(logits_of(4), top(1), None, scopes)


@pytest.mark.parametrize("mask", [torch.ones(TOKENS), torch.ones(TOKENS - 1, dtype=torch.bool)])
def test_a_mask_of_other_tokens_or_of_numbers_is_refused(kernels: None, mask: Tensor) -> None:
    with pytest.raises(ValueError, match=r"mask of 600 tokens must be bool \[600\]"):
        router_rows(logits_of(4), top(1), mask, 1)


def test_a_choice_of_an_expert_that_does_not_exist_is_refused(kernels: None) -> None:
    with pytest.raises(RuntimeError, match="out of bounds"):
        router_rows(logits_of(4), lambda scores: torch.full((TOKENS, 1), 4), None, 1)
