"""Generation with a cache writes what one would write token by token without it; sampling keeps to its contract."""

import pytest
import torch
from tiny_model import SMALL
from torch import Tensor

from olmoe_lightning.model import Transformer
from olmoe_lightning.model.generation import generate, sample_token

CONFIG = SMALL.replace(vocab_size=23, d_model=12, head_dim=6, expert_hidden=8, max_seq_len=24, init_std=0.4)


@pytest.fixture(scope="module")
def model() -> Transformer:
    model = Transformer(CONFIG)
    model.init_weights(0)
    return model.eval()


def prompt(batch: int = 3, length: int = 4) -> Tensor:
    return torch.randint(0, CONFIG.vocab_size, (batch, length), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def greedy_without_cache(model: Transformer, ids: Tensor, steps: int) -> Tensor:
    for _ in range(steps):
        logits = model.logits(model(ids)[0])[:, -1]
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=1)
    return ids


@pytest.mark.parametrize("length", [1, 4])
def test_greedy_generation_equals_argmax_step_by_step_without_a_cache(model, length):
    ids = prompt(length=length)
    found = generate(model, ids, 12, temperature=0)
    assert torch.equal(found, greedy_without_cache(model, ids, 12))
    assert torch.equal(found[:, :length], ids)
    assert len({tuple(row) for row in found[:, length:].tolist()}) > 1  # negative control: rows differ


def test_rows_of_a_batch_do_not_touch_each_other(model):
    whole = generate(model, prompt(), 6, temperature=0)
    for row in range(3):
        assert torch.equal(generate(model, prompt()[row : row + 1], 6, temperature=0)[0], whole[row])


def test_generation_fills_the_whole_context_and_not_more(model):
    assert generate(model, prompt(length=4), 20, temperature=0).shape == (3, 24)
    with pytest.raises(ValueError, match=r"4 tokens plus 21 new ones exceeds.*max_seq_len \(24\).*at most 20 new"):
        generate(model, prompt(length=4), 21)


def test_no_new_tokens_return_the_prompt(model):
    assert torch.equal(generate(model, prompt(), 0), prompt())


def test_the_same_generator_writes_the_same_text(model):
    texts = [
        generate(model, prompt(), 15, top_p=0.9, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    ]
    assert torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[0], texts[2])


def test_a_row_that_has_ended_goes_on_with_the_end_token_and_all_ended_stop(model):
    free = generate(model, prompt(), 12, temperature=0)
    eos = free[0, 6].item()  # the third new token of the first row
    ended = generate(model, prompt(), 12, temperature=0, eos_id=eos)
    for row, reference in zip(ended.tolist(), free.tolist(), strict=True):
        new, expected = row[4:], reference[4 : len(row)]
        end = expected.index(eos) if eos in expected else len(expected)
        assert new[: end + 1] == expected[: end + 1]
        assert all(token == eos for token in new[end:])
    single = generate(model, prompt()[:1], 12, temperature=0, eos_id=eos)
    assert single[0, -1] == eos
    assert single.shape[1] < 4 + 12


def test_an_end_token_in_the_prompt_does_not_end_the_row(model):
    ids = prompt()
    free = generate(model, ids, 3, temperature=0)
    eos = ids[0, -1].item()
    assert eos not in free[:, 4:]
    assert torch.equal(generate(model, ids, 3, temperature=0, eos_id=eos), free)


def test_generated_text_may_be_trained_on(model):
    text = generate(model, prompt(), 5)
    hidden, _ = model(text[:, :-1])
    model.loss(hidden, text[:, 1:]).total.backward()
    assert model.embed.weight.grad is not None
    model.zero_grad()


def test_generation_keeps_no_graph(model):
    assert all(not p.grad_fn for p in model.parameters())
    assert not generate(model, prompt(), 2).requires_grad


def test_impossible_requests_are_refused_with_their_numbers(model):
    with pytest.raises(ValueError, match="prompt is empty"):
        generate(model, prompt(length=4)[:, :0], 2)
    with pytest.raises(ValueError, match=r"max_new_tokens \(-1\)"):
        generate(model, prompt(), -1)
    with pytest.raises(ValueError, match=r"temperature \(-0.5\)"):
        generate(model, prompt(), 2, temperature=-0.5)
    for top_p in (0.0, 1.5):
        with pytest.raises(ValueError, match=rf"top_p \({top_p}\)"):
            generate(model, prompt(), 2, top_p=top_p)


# ---------------------------------------------------------------------------------------------------------- sampling

PROBABILITIES = torch.tensor([0.1, 0.4, 0.05, 0.3, 0.15])


def frequencies(temperature: float, top_p: float, draws: int = 4000) -> Tensor:
    logits = PROBABILITIES.log().expand(draws, -1) + 3.0  # any shift
    tokens = sample_token(logits, temperature, top_p, torch.Generator().manual_seed(0))
    assert tokens.shape == (draws, 1)
    return torch.bincount(tokens[:, 0], minlength=5) / draws


# 4000 draws: four standard deviations of a frequency are at most 0.032.
SPREAD = 0.032


def test_sampling_follows_the_distribution():
    torch.testing.assert_close(frequencies(1.0, 1.0), PROBABILITIES, atol=SPREAD, rtol=0)


def test_temperature_sharpens_and_flattens():
    for temperature in (0.5, 2.0):
        expected = PROBABILITIES.pow(1 / temperature)
        torch.testing.assert_close(frequencies(temperature, 1.0), expected / expected.sum(), atol=SPREAD, rtol=0)


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(1e-6, [1]), (0.39, [1]), (0.41, [1, 3]), (0.69, [1, 3]), (0.71, [1, 3, 4]), (0.96, [0, 1, 2, 3, 4])],
)
def test_top_p_keeps_the_fewest_likely_tokens_that_reach_it(top_p, kept):
    expected = torch.zeros(5).index_copy(0, torch.tensor(kept), PROBABILITIES[kept])
    found = frequencies(1.0, top_p)
    torch.testing.assert_close(found, expected / expected.sum(), atol=SPREAD, rtol=0)
    assert found[expected == 0].sum() == 0


def test_each_row_is_cut_by_its_own_distribution():
    logits = torch.stack([torch.tensor([10.0, 0.0, 0.0]), torch.zeros(3)]).repeat(300, 1)
    tokens = sample_token(logits, 1.0, 0.9, torch.Generator().manual_seed(0)).view(300, 2)
    assert (tokens[:, 0] == 0).all()
    assert set(tokens[:, 1].tolist()) == {0, 1, 2}


def test_temperature_zero_takes_the_most_likely_token():
    assert sample_token(PROBABILITIES.log()[None], 0, 1.0, None).tolist() == [[1]]
