"""The decoder as a whole: names, documents, cache, masks, options."""

import math

import pytest
import torch
from torch import Tensor

from olmoe_lightning.config import ModelConfig
from olmoe_lightning.model import KVCache, Transformer
from olmoe_lightning.model.attention import Rotary

pytestmark = pytest.mark.usefixtures("kernels")

CONFIG = ModelConfig(
    vocab_size=29,
    d_model=16,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    num_experts=5,
    top_k=2,
    expert_hidden=12,
    shared_hidden=6,
    num_dense_layers=1,
    dense_hidden=10,
    max_seq_len=64,
    init_std=0.4,  # wide: attention and routing are then far from uniform, and mistakes large
)
ARCHITECTURES = [
    {"norm_placement": placement, "qk_norm": qk_norm}
    for placement in ("pre", "post", "peri")
    for qk_norm in ("none", "flat", "head")
] + [{"norm_placement": "peri", "qk_norm": "head", "embed_norm": True, "embed_scale": True, "num_kv_heads": 4}]
# fp32 through three layers of width 16, activations up to some tens.
ATOL = 2e-4


def model_of(**changes) -> Transformer:
    model = Transformer(CONFIG.replace(**changes))
    model.init_weights(0)
    return model.eval()


def tokens(batch: int, seq: int, seed: int = 0) -> Tensor:
    return torch.randint(0, CONFIG.vocab_size, (batch, seq), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits_of(model: Transformer, ids: Tensor, documents: Tensor | None = None) -> Tensor:
    return model.logits(model(ids, documents)[0])


# ------------------------------------------------------------------------------------------------------------- names


def test_weight_names_and_shapes_are_the_contract():
    model = model_of(norm_placement="peri", embed_norm=True, selection_bias=True, num_layers=2)
    attention = {"attn.qkv.weight": ((4 + 2 * 2) * 6, 16), "attn.out.weight": (16, 24), "attn.q_norm.weight": (24,)}
    every = attention | {
        "attn.k_norm.weight": (12,),
        "attn_norm.weight": (16,),
        "attn_post_norm.weight": (16,),
        "ffn_norm.weight": (16,),
        "ffn_post_norm.weight": (16,),
    }
    expected = {"embed.weight": (29, 16), "embed_norm.weight": (16,), "norm.weight": (16,), "head.weight": (29, 16)}
    expected |= {f"blocks.{layer}.{name}": shape for layer in range(2) for name, shape in every.items()}
    expected |= {"blocks.0.mlp.w_gate_up.weight": (20, 16), "blocks.0.mlp.w_down.weight": (16, 10)}
    expected |= {
        "blocks.1.moe.router.weight": (5, 16),
        "blocks.1.moe.router.selection_bias": (5,),
        "blocks.1.moe.experts.w_gate_up": (5, 24, 16),
        "blocks.1.moe.experts.w_down": (5, 16, 12),
        "blocks.1.moe.shared.w_gate_up.weight": (12, 16),
        "blocks.1.moe.shared.w_down.weight": (16, 6),
    }
    assert {name: tuple(value.shape) for name, value in model.state_dict().items()} == expected


def test_tied_embeddings_are_one_parameter_that_gets_both_gradients():
    model = model_of(tie_embeddings=True)
    assert "head.weight" not in model.state_dict()
    ids = tokens(1, 5)
    hidden, _ = model(ids)
    model.loss(hidden, ids).total.backward()
    unused = torch.ones(CONFIG.vocab_size, dtype=torch.bool).index_fill(0, ids[0], False)
    assert (model.embed.weight.grad[unused].abs().sum(1) > 0).all()  # from the head, which sees every row

    untied = model_of()
    with torch.no_grad():
        untied.head.weight.copy_(untied.embed.weight)
    hidden, _ = untied(ids)
    untied.loss(hidden, ids).total.backward()
    both = untied.embed.weight.grad + untied.head.weight.grad
    torch.testing.assert_close(model.embed.weight.grad, both, atol=1e-4, rtol=1e-4)


# --------------------------------------------------------------------------------------------------------- documents


def packed_row(lengths: list[int], padding: int) -> tuple[Tensor, Tensor]:
    """One row of documents of the given lengths, and ids that count them; -1 on padding."""
    ids = [index for index, length in enumerate(lengths) for _ in range(length)] + [-1] * padding
    return tokens(1, len(ids)), torch.tensor([ids], dtype=torch.int32)


@pytest.mark.parametrize("changes", ARCHITECTURES, ids=str)
def test_packed_documents_have_the_logits_of_separate_ones(changes):
    model = model_of(**changes)
    lengths = [1, 4, 2, 1, 6, 3]
    ids, documents = packed_row(lengths, padding=3)
    packed = logits_of(model, ids, documents)
    start = 0
    for length in lengths:
        alone = logits_of(model, ids[:, start : start + length])
        torch.testing.assert_close(packed[:, start : start + length], alone, atol=ATOL, rtol=0)
        start += length
    # Negative control: without boundaries they differ.
    assert (logits_of(model, ids) - packed)[:, 1:].abs().max() > 100 * ATOL


@pytest.mark.parametrize("length", range(1, 9))
def test_a_document_of_any_length_has_its_own_logits_wherever_it_stands(length):
    model = model_of()
    ids, documents = packed_row([8 - length, length, 2] if length < 8 else [8, 2], padding=1)
    start = 8 - length
    packed = logits_of(model, ids, documents)[:, start:8]
    torch.testing.assert_close(packed, logits_of(model, ids[:, start:8]), atol=ATOL, rtol=0)


def test_rows_of_a_batch_have_their_own_boundaries():
    model = model_of()
    ids = tokens(2, 8)
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 1, -1]], dtype=torch.int32)
    packed = logits_of(model, ids, documents)
    torch.testing.assert_close(packed[0, 3:], logits_of(model, ids[:1, 3:])[0], atol=ATOL, rtol=0)
    torch.testing.assert_close(packed[1, :6], logits_of(model, ids[1:, :6])[0], atol=ATOL, rtol=0)


def test_one_document_per_row_is_the_same_as_no_documents():
    model = model_of()
    ids = tokens(2, 7)
    torch.testing.assert_close(
        logits_of(model, ids, torch.zeros(2, 7, dtype=torch.int32)), logits_of(model, ids), atol=ATOL, rtol=0
    )


def test_what_stands_in_padding_or_in_other_documents_changes_no_loss_and_no_gradient():
    model = model_of()
    ids, documents = packed_row([4, 3], padding=3)
    labels = torch.where(documents == 1, tokens(1, 10, seed=1), -100)
    results = []
    for seed in (2, 3):
        filled = torch.where(documents == 1, ids, tokens(1, 10, seed))
        model.zero_grad()
        hidden, stats = model(filled, documents, labels != -100, torch.tensor(1.0))
        total = model.loss(hidden, labels).total
        total.backward()
        results.append(
            (
                total.detach(),
                stats.prob_sum,
                model.head.weight.grad.clone(),
                model.blocks[1].attn.qkv.weight.grad.clone(),
            )
        )
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_the_future_changes_nothing():
    model = model_of()
    ids = tokens(1, 8)
    changed = ids.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % CONFIG.vocab_size
    a, b = logits_of(model, ids), logits_of(model, changed)
    torch.testing.assert_close(a[:, :5], b[:, :5], atol=ATOL, rtol=0)
    assert (a[:, 5:] - b[:, 5:]).abs().max() > 100 * ATOL


# ------------------------------------------------------------------------------------------------------------- cache


@pytest.mark.parametrize("changes", ARCHITECTURES, ids=str)
def test_logits_with_a_cache_equal_those_of_the_whole_sequence(changes):
    model = model_of(**changes)
    ids = tokens(2, 9)
    cache = KVCache(model.config, 9)
    with torch.no_grad():
        pieces = [model.logits(model(ids[:, :4], cache=cache)[0])]
        for position in range(4, 9):
            pieces.append(model.logits(model(ids[:, position : position + 1], cache=cache)[0]))
            assert cache.length() == position + 1
    torch.testing.assert_close(torch.cat(pieces, dim=1), logits_of(model, ids), atol=ATOL, rtol=0)


def test_documents_and_a_cache_are_refused_together():
    model = model_of()
    with pytest.raises(ValueError, match="either cache or document_ids"):
        model(tokens(1, 3), torch.zeros(1, 3, dtype=torch.int32), cache=KVCache(model.config, 3))


# ------------------------------------------------------------------------------------------------ options and outputs


@pytest.mark.parametrize("layer", [0, 1], ids=["dense", "moe"])
@pytest.mark.parametrize("placement", ["pre", "post", "peri"])
def test_norms_stand_where_the_placement_says(placement, layer):
    """The block written out: each branch normalised before, after, or both, and added to what came in."""
    block = model_of(norm_placement=placement).blocks[layer]
    names = {f"{part}_{kind}norm" for part in ("attn", "ffn") for kind in ("", "post_")}
    absent = {"pre": {"attn_post_norm", "ffn_post_norm"}, "post": {"attn_norm", "ffn_norm"}, "peri": set()}[placement]
    norms = {name: getattr(block, name) for name in names}
    for name, norm in norms.items():
        assert bool(list(norm.parameters())) == (name not in absent)
        for weight in norm.parameters():
            torch.nn.init.uniform_(weight, 0.5, 1.5)

    def apply(name: str, x: Tensor) -> Tensor:
        if name in absent:
            return x
        return x / (x.square().mean(-1, keepdim=True) + CONFIG.norm_eps).sqrt() * norms[name].weight

    x = 3 * torch.randn(2, 5, CONFIG.d_model)
    rotary = Rotary.of(torch.arange(5)[None], CONFIG)
    middle = x + apply("attn_post_norm", block.attn(apply("attn_norm", x), rotary))
    inside = apply("ffn_norm", middle)
    branch = block.mlp(inside) if layer == 0 else block.moe(inside)[0]
    torch.testing.assert_close(block(x, rotary)[0], middle + apply("ffn_post_norm", branch), atol=ATOL, rtol=1e-4)


def test_the_embedding_is_scaled_by_the_root_of_the_width_and_then_normalised():
    ids = tokens(1, 4)
    seen = {}
    for changes in ({}, {"embed_scale": True}, {"embed_scale": True, "embed_norm": True}):
        model = model_of(**changes)
        model.blocks[0].register_forward_pre_hook(lambda _, inputs: seen.__setitem__("x", inputs[0]))
        logits_of(model, ids)
        expected = model.embed.weight[ids] * (math.sqrt(CONFIG.d_model) if changes else 1)
        if "embed_norm" in changes:
            expected = expected / (expected.square().mean(-1, keepdim=True) + CONFIG.norm_eps).sqrt()
        torch.testing.assert_close(seen["x"], expected)


def test_statistics_have_one_row_per_moe_layer_and_dense_models_have_none():
    model = model_of()
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[1, 3:] = False
    _, stats = model(tokens(2, 7), token_mask_BS=mask)
    assert stats.counts.shape == (2, 5)
    assert stats.z_sum.shape == (2,)
    assert stats.counts.sum(-1).tolist() == [10 * CONFIG.top_k] * 2
    assert stats.num_tokens == 10
    assert model_of(num_dense_layers=3)(tokens(1, 4))[1] is None


def test_the_auxiliary_losses_of_all_layers_reach_their_routers_with_the_scale():
    model = model_of(balance_loss_coeff=0.5, router_z_loss_coeff=0.1, num_dense_layers=0)
    ids = tokens(2, 7)
    grads = []
    for scale in (None, torch.tensor(0.0), torch.tensor(1.0), torch.tensor(2.0)):
        model.zero_grad()
        hidden, _ = model(ids, aux_scale=scale)
        model.loss(hidden, ids).total.backward()
        grads.append([block.moe.router.weight.grad.clone() for block in model.blocks])
    for none, zero, one, two in zip(*grads, strict=True):
        assert torch.equal(none, zero)
        assert (one - none).abs().max() > 0.1
        # Differences of larger sums in fp32.
        torch.testing.assert_close(two - none, 2 * (one - none), atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize(
    "changes", [{}, {"norm_placement": "peri", "qk_norm": "head", "tie_embeddings": True}], ids=str
)
def test_no_uninitialised_memory_reaches_loss_or_gradients(changes):
    """Fresh memory holds NaN in this mode; nothing may read what it did not write."""
    model = model_of(**changes)
    torch.use_deterministic_algorithms(True)
    try:
        ids, documents = packed_row([4, 3], padding=3)
        labels = torch.where(documents >= 0, tokens(1, 10, seed=1), -100)
        hidden, _ = model(ids, documents, labels != -100, torch.tensor(1.0))
        total = model.loss(hidden, labels).total
        total.backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert total.isfinite()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


def test_a_bf16_model_gives_fp32_logits_losses_and_statistics():
    model = model_of(init_std=0.1)
    ids = tokens(2, 7)
    expected = logits_of(model, ids)
    model.bfloat16()
    hidden, stats = model(ids)
    assert hidden.dtype == torch.bfloat16
    logits = model.logits(hidden)
    losses = model.loss(hidden, ids)
    assert {logits.dtype, losses.total.dtype, losses.cross_entropy_N.dtype} == {torch.float32}
    assert {stats.prob_sum.dtype, stats.entropy_sum.dtype, stats.balance_sum.dtype} == {torch.float32}
    assert stats.z_sum.dtype == torch.float64
    # Some twenty roundings to 8 bits of values around one; the logits themselves have a spread of about 0.4.
    assert (logits - expected).abs().mean() < 0.05
    losses.total.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_a_model_runs_and_learns_under_autocast():
    """As Lightning's ``bf16-mixed`` runs it."""
    model = model_of(init_std=0.1)
    ids = tokens(2, 7)
    with torch.autocast("cpu", torch.bfloat16):
        hidden, _ = model(ids, aux_scale=torch.tensor(1.0))
        total = model.loss(hidden, ids).total
    total.backward()
    expected = model.loss(model(ids)[0], ids).total
    # 16-bit products: relative errors of 2^-8 and their sums.
    torch.testing.assert_close(total, expected, atol=0, rtol=2e-2)
    for name, parameter in model.named_parameters():
        assert parameter.grad.dtype == torch.float32, name
        assert parameter.grad.isfinite().all(), name
