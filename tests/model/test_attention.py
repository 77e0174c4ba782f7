"""Attention against a slow one written from the definitions: rotary positions, grouped queries, documents, cache."""

import math

import pytest
import torch
from torch import Tensor

from olmoe_lightning.config import ModelConfig
from olmoe_lightning.kernels import visibility_mask
from olmoe_lightning.model.attention import (
    Attention,
    LayerCache,
    RMSNorm,
    Rotary,
    Visible,
    document_positions,
)

pytestmark = pytest.mark.usefixtures("kernels")

# fp32 against fp64, sums of some tens of terms of order one.
ATOL = 1e-5
PLAIN = ModelConfig(
    vocab_size=8,
    d_model=12,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    num_experts=2,
    top_k=1,
    expert_hidden=4,
    rope_theta=100.0,
)


def attention_of(config: ModelConfig, seed: int = 0) -> Attention:
    """Weights wide enough that attention is far from uniform, and norms that are not one."""
    torch.manual_seed(seed)
    module = Attention(config)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=1.5 / math.sqrt(parameter.shape[1]))
    return module


def rotary_of(config: ModelConfig, seq: int) -> Rotary:
    return Rotary.of(torch.arange(seq)[None], config)


def rms(x: Tensor, norm: torch.nn.Module) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight.double()


def slow_attention(module: Attention, config: ModelConfig, x: Tensor, documents: list[int]) -> Tensor:
    """One sequence [S, D] in fp64: pair by pair, positions as complex numbers, counted from the document's start."""
    heads, kv_heads, width = config.num_heads, config.num_kv_heads, config.head_dim
    projected = x.double() @ module.qkv.weight.double().T
    q, k, v = projected.split([heads * width, kv_heads * width, kv_heads * width], dim=-1)
    if config.qk_norm == "flat":
        q, k = rms(q, module.q_norm), rms(k, module.k_norm)
    q, k, v = q.view(-1, heads, width), k.view(-1, kv_heads, width), v.view(-1, kv_heads, width)
    if config.qk_norm == "head":
        q, k = rms(q, module.q_norm), rms(k, module.k_norm)
    if config.clip_qkv is not None:  # after the norm, whatever it spans
        q, k, v = (t.clamp(-config.clip_qkv, config.clip_qkv) for t in (q, k, v))

    positions = [documents[: index + 1].count(document) - 1 for index, document in enumerate(documents)]

    def turn(vector: Tensor, position: int) -> Tensor:
        half = width // 2
        angles = torch.tensor(
            [position * config.rope_theta ** (-pair / half) for pair in range(half)], dtype=torch.float64
        )
        turned = torch.complex(vector[:half], vector[half:]) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([turned.real, turned.imag])

    out = torch.zeros(len(x), heads, width, dtype=torch.float64)
    for head in range(heads):
        kv = head // (heads // kv_heads)
        for i in range(len(x)):
            seen = [j for j in range(i + 1) if documents[j] == documents[i]]
            query = turn(q[i, head], positions[i])
            scores = torch.stack([query @ turn(k[j, kv], positions[j]) for j in seen]) / math.sqrt(width)
            out[i, head] = scores.softmax(0) @ v[seen, kv]
    return out.flatten(1) @ module.out.weight.double().T


@pytest.mark.parametrize(
    "changes",
    [
        {"qk_norm": "none"},
        {"qk_norm": "flat"},
        {"qk_norm": "head"},
        {"qk_norm": "flat", "clip_qkv": 0.7},
        {"qk_norm": "head", "clip_qkv": 0.7},
        {"num_kv_heads": 4},
        {"num_kv_heads": 1},
        {"norm_eps": 0.5},
        {"rope_theta": 1e6},
    ],
    ids=str,
)
def test_attention_equals_a_slow_one_with_and_without_documents(changes):
    config = PLAIN.replace(**changes)
    module = attention_of(config)
    x = torch.randn(1, 7, config.d_model)
    documents = [0, 0, 0, 1, 1, 2, 2]
    with torch.no_grad():
        whole, split = (slow_attention(module, config, x[0], ids) for ids in ([0] * 7, documents))
    torch.testing.assert_close(module(x, rotary_of(config, 7))[0].double(), whole, atol=ATOL, rtol=0)
    positions = document_positions(torch.tensor([documents]))
    found = module(x, Rotary.of(positions, config), Visible.of(positions))
    torch.testing.assert_close(found[0].double(), split, atol=ATOL, rtol=0)
    assert (split[3:] - whole[3:]).abs().max() > 1000 * ATOL  # negative control: documents matter


@pytest.mark.parametrize("qk_norm", ["none", "flat", "head"])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_grouped_queries_equal_repeated_key_and_value_heads(kv_heads, qk_norm):
    config = PLAIN.replace(num_kv_heads=kv_heads, qk_norm=qk_norm)
    grouped = attention_of(config)
    repeats = config.num_heads // kv_heads
    full = Attention(config.replace(num_kv_heads=config.num_heads))

    def repeat(rows: Tensor) -> Tensor:
        return rows.unflatten(0, (kv_heads, config.head_dim)).repeat_interleave(repeats, dim=0).flatten(0, 1)

    with torch.no_grad():
        q, k, v = grouped.qkv.weight.split([config.attention_dim, config.kv_dim, config.kv_dim])
        full.qkv.weight.copy_(torch.cat([q, repeat(k), repeat(v)]))
        full.out.weight.copy_(grouped.out.weight)
        if qk_norm != "none":
            full.q_norm.weight.copy_(grouped.q_norm.weight)
            k_norm = grouped.k_norm.weight
            full.k_norm.weight.copy_(repeat(k_norm) if qk_norm == "flat" else k_norm)
    x = torch.randn(2, 5, config.d_model)
    rotary = rotary_of(config, 5)
    torch.testing.assert_close(grouped(x, rotary), full(x, rotary), atol=ATOL, rtol=0)


def test_positions_count_from_the_start_of_each_document():
    ids = torch.tensor([[0, 0, 0, 1, 2, 2, -1, -1], [0, 1, 2, 3, 4, 4, 4, 4]], dtype=torch.int32)
    positions = document_positions(ids)
    assert positions.dtype == torch.int64
    assert positions.tolist() == [[0, 1, 2, 0, 0, 1, 0, 1], [0, 0, 0, 0, 0, 1, 2, 3]]


def test_a_query_sees_its_own_documents_past_and_itself():
    ids = torch.tensor([[0, 0, 1, 1, -1]], dtype=torch.int32)
    visible = Visible.of(document_positions(ids))
    assert visible.first_key_BS.tolist() == [[0, 0, 2, 2, 4]]
    mask = visibility_mask(visible.first_key_BS)
    assert mask.shape == (1, 1, 5, 5)
    expected = [[j <= i and ids[0, i] == ids[0, j] for j in range(5)] for i in range(5)]
    assert mask[0, 0].tolist() == [[bool(value) for value in row] for row in expected]


def test_only_distances_between_positions_matter():
    config = PLAIN.replace(qk_norm="none")
    module = attention_of(config)
    x = torch.randn(1, 6, config.d_model)
    shifted = Rotary.of(torch.arange(1000, 1006)[None], config)
    # Angles of a thousand radians are rounded at 6e-5 in fp32.
    torch.testing.assert_close(module(x, shifted), module(x, rotary_of(config, 6)), atol=2e-3, rtol=0)


@pytest.mark.parametrize("qk_norm", ["none", "flat", "head"])
@pytest.mark.parametrize("prompt", [1, 4])
def test_token_by_token_with_a_cache_equals_the_whole_sequence(prompt, qk_norm):
    config = PLAIN.replace(qk_norm=qk_norm)
    module = attention_of(config)
    x = torch.randn(2, 9, config.d_model)
    rotary = rotary_of(config, 9)
    cache = LayerCache(9)
    pieces = []
    with torch.no_grad():
        for start, end in [(0, prompt), *((i, i + 1) for i in range(prompt, 9))]:
            part = Rotary(rotary.cos[:, start:end], rotary.sin[:, start:end])
            pieces.append(module(x[:, start:end], part, cache=cache))
            assert cache.length == end
        torch.testing.assert_close(torch.cat(pieces, dim=1), module(x, rotary), atol=ATOL, rtol=0)


def test_a_cache_refuses_what_it_cannot_hold_or_do():
    module = attention_of(PLAIN)
    x = torch.randn(1, 3, PLAIN.d_model)
    with torch.no_grad():
        with pytest.raises(ValueError, match="holds 2 positions, 3 are needed"):
            module(x, rotary_of(PLAIN, 3), cache=LayerCache(2))
        cache = LayerCache(9)
        module(x, rotary_of(PLAIN, 3), cache=cache)
        with pytest.raises(ValueError, match="holds 3 positions already and is extended one at a time, not by 3"):
            module(x, rotary_of(PLAIN, 3), cache=cache)


def test_rms_norm_takes_its_statistics_in_fp32():
    norm = RMSNorm(64, 1e-5)
    torch.nn.init.ones_(norm.weight)
    x = torch.full((1, 64), 300.0, dtype=torch.float16)  # 300^2 overflows fp16
    y = norm.half()(x)
    assert y.dtype == torch.float16
    torch.testing.assert_close(y, torch.ones_like(y))
