"""The native choice of the largest values equals its definition, ties and special values included."""

from __future__ import annotations

import pytest
import torch

from olmoe_lightning.kernels import reference_kernels, top_k_stable


@pytest.mark.parametrize(("rows", "size", "k"), [(1, 1, 1), (7, 5, 5), (300, 16, 2), (33, 128, 8), (2, 257, 257)])
@pytest.mark.parametrize("kind", ["normal", "ties", "special"])
def test_the_choice_equals_the_reference(rows: int, size: int, k: int, kind: str) -> None:
    scores = torch.randn(rows, size, generator=torch.Generator().manual_seed(rows * size))
    if kind == "ties":
        scores = scores.round()  # a handful of distinct values, both zeros among them
    elif kind == "special":
        special = torch.tensor([float("inf"), float("-inf"), float("nan"), 0.0, -0.0, 1e-42, -1e-42])
        scores = special[torch.randint(len(special), (rows, size), generator=torch.Generator().manual_seed(1))]
    with reference_kernels():
        expected = top_k_stable(scores, k)
    assert torch.equal(top_k_stable(scores, k), expected)


def test_leading_dimensions_and_strides_are_kept() -> None:
    scores = torch.randn(6, 4, 3, generator=torch.Generator().manual_seed(0)).transpose(1, 2)
    assert torch.equal(top_k_stable(scores, 4), torch.sort(scores, descending=True, stable=True).indices)


def test_equal_values_come_by_index() -> None:
    assert top_k_stable(torch.zeros(2, 9), 4).tolist() == [[0, 1, 2, 3]] * 2
