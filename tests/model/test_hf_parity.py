"""Our network is transformers' OlmoeForCausalLM: logits, loss, all gradients, and the balance loss up to a factor.

Weights are drawn wider than an initialisation would, so that the router decides, QK-norms and clamps act, and logits
are of order one; a wrong option then shows (the negative controls say by how much).
"""

import math

import pytest
import torch
from torch import Tensor
from transformers import OlmoeConfig, OlmoeForCausalLM

from olmoe_lightning.checkpoint import load_pretrained, read_config, write
from olmoe_lightning.checkpoint.foreign.hf_layout import hf_fused_name, hf_tensors
from olmoe_lightning.config import ModelConfig
from olmoe_lightning.model.transformer import Transformer

BASE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts": 12,
    "num_experts_per_tok": 3,
    "pad_token_id": None,  # a padding index would have no gradient there
    "eos_token_id": None,
}
CONFIGS = {
    "olmoe": {},
    "grouped_queries": {"num_key_value_heads": 2},
    "one_kv_head": {"num_key_value_heads": 1, "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}},
    "clip_qkv": {"clip_qkv": 0.5},
    "normalised": {"norm_topk_prob": True},
    "tied": {"tie_word_embeddings": True},
    "top_1": {"num_experts_per_tok": 1},
    "top_1_normalised": {"num_experts_per_tok": 1, "norm_topk_prob": True},
    "all_experts": {"num_experts": 5, "num_experts_per_tok": 5},
    "many_experts": {"num_experts": 64, "num_experts_per_tok": 8, "intermediate_size": 8, "rms_norm_eps": 1e-3},
}

# fp32 rounds at 6e-8; sums of some hundred terms through two layers, in another order, end near 3e-6 for logits of up
# to 4, and at 1.5e-6 of a tensor's largest entry for gradients. The negative controls are beyond 1e-2.
LOGITS_ATOL = 1e-5
GRAD_RTOL = 1e-4


def pair(directory, **changes) -> tuple[OlmoeForCausalLM, Transformer]:
    """Their model with random weights, and ours loaded from what theirs saved."""
    torch.manual_seed(0)
    theirs = OlmoeForCausalLM(OlmoeConfig(**(BASE | changes), experts_implementation="eager"))
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=(2.0 if ".gate." in name else 1.0) / math.sqrt(parameter.shape[-1]))
    theirs.save_pretrained(directory)
    ours = Transformer(read_config(str(directory)))
    load_pretrained(ours, str(directory))
    return theirs, ours


def batch() -> tuple[Tensor, Tensor]:
    """Tokens [2, 24], and labels that are not shifted yet (as transformers takes them), some ignored."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, BASE["vocab_size"], (2, 24), generator=generator)
    ignored = torch.rand(ids.shape, generator=generator) < 0.2
    return ids, ids.masked_fill(ignored, -100)


def shifted(labels: Tensor) -> Tensor:
    return torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], dim=1)


def our_mean_loss(model: Transformer, ids: Tensor, labels: Tensor, aux_scale: Tensor | None = None) -> Tensor:
    hidden, _ = model(ids, aux_scale=aux_scale)
    return model.loss(hidden, shifted(labels)).total / (shifted(labels) != -100).sum()


def grad_deviations(theirs: OlmoeForCausalLM, ours: Transformer) -> dict[str, float]:
    """Largest difference of each of our gradients, relative to the largest entry of theirs."""
    grads = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    largest = max(grad.abs().max() for grad in grads.values())
    deviations = {}
    for name, parts in hf_tensors(ours.config).items():
        fused = hf_fused_name(name)
        reference = grads[fused] if fused is not None else torch.cat([grads[part.name] for part in parts])
        found = ours.get_parameter(name).grad
        scale = reference.abs().max()
        if name.endswith("router.weight") and ours.config.normalize_weights and ours.config.top_k == 1:
            # One weight over itself is 1: the gradient is zero but for rounding, in theirs and so in ours.
            assert scale < 1e-6 * largest, name
            scale = largest
        deviations[name] = ((found - reference).abs().max() / scale).item()
    assert deviations.keys() == dict(ours.named_parameters()).keys()
    return deviations


@pytest.mark.parametrize("changes", CONFIGS.values(), ids=CONFIGS.keys())
def test_logits_loss_and_all_gradients_equal_transformers(tmp_path, changes):
    theirs, ours = pair(tmp_path, **changes)
    ids, labels = batch()
    reference = theirs(input_ids=ids, labels=labels)
    logits = ours.logits(ours(ids)[0])
    assert reference.logits.std() > 0.5
    torch.testing.assert_close(logits, reference.logits, atol=LOGITS_ATOL, rtol=0)

    loss = our_mean_loss(ours, ids, labels)
    torch.testing.assert_close(loss, reference.loss, atol=0, rtol=GRAD_RTOL)
    reference.loss.backward()
    loss.backward()
    deviations = grad_deviations(theirs, ours)
    assert max(deviations.values()) <= GRAD_RTOL, deviations


@pytest.mark.parametrize(
    "option",
    [{"normalize_weights": True}, {"clip_qkv": 0.5}, {"rope_theta": 5_000.0}, {"norm_eps": 1e-2}, {"top_k": 2}],
    ids=str,
)
def test_a_wrong_option_breaks_parity(tmp_path, option):
    theirs, ours = pair(tmp_path)
    wrong = Transformer(ours.config.replace(**option))
    wrong.load_state_dict(ours.state_dict())
    ids, labels = batch()
    reference = theirs(input_ids=ids, labels=labels)
    assert (wrong.logits(wrong(ids)[0]) - reference.logits).abs().max() > 1000 * LOGITS_ATOL
    reference.loss.backward()
    our_mean_loss(wrong, ids, labels).backward()
    assert max(grad_deviations(theirs, wrong).values()) > 10 * GRAD_RTOL


def test_a_model_of_ours_gives_the_same_logits_after_export(tmp_path):
    config = ModelConfig.preset(
        "tiny", d_model=48, num_heads=4, num_kv_heads=2, head_dim=12, qk_norm="flat", init_std=0.1
    )
    ours = Transformer(config)
    ours.init_weights(seed=3)
    write(ours.state_dict(), config, str(tmp_path / "hf"), hf=True, token_ids={"eos_token_id": 2})
    theirs = OlmoeForCausalLM.from_pretrained(tmp_path / "hf")
    ids, _ = batch()
    with torch.no_grad():
        torch.testing.assert_close(ours.logits(ours(ids)[0]), theirs(ids).logits, atol=LOGITS_ATOL, rtol=0)
    assert theirs.config.eos_token_id == 2


@pytest.mark.parametrize("top_k", [1, 3])
def test_one_layers_balance_loss_times_top_k_is_transformers_aux_loss_with_its_gradient(tmp_path, top_k):
    coeff = 0.5
    theirs, ours = pair(
        tmp_path, num_hidden_layers=1, num_experts_per_tok=top_k, router_aux_loss_coef=coeff, output_router_logits=True
    )
    ids, labels = batch()
    reference = theirs(input_ids=ids, labels=labels)
    _, stats = ours(ids)
    torch.testing.assert_close(top_k * stats.balance_sum.sum() / ids.numel(), reference.aux_loss, atol=0, rtol=1e-5)

    # Their loss holds coeff · aux; ours has to be told top_k · coeff for the same pull on the router.
    same = Transformer(ours.config.replace(balance_loss_coeff=top_k * coeff, router_z_loss_coeff=0.0))
    same.load_state_dict(ours.state_dict())
    reference.loss.backward()
    our_mean_loss(same, ids, labels, aux_scale=torch.tensor(1.0 / ids.numel())).backward()
    assert max(grad_deviations(theirs, same).values()) <= GRAD_RTOL
    # Negative control: the balance loss must be a visible part of that gradient.
    same.zero_grad()
    our_mean_loss(same, ids, labels).backward()
    assert grad_deviations(theirs, same)["blocks.0.moe.router.weight"] > 10 * GRAD_RTOL


def test_routing_statistics_of_all_layers_give_transformers_aux_loss(tmp_path):
    """Theirs averages load and probability over all layers first; ours keeps the layers apart, so it can be rebuilt."""
    theirs, ours = pair(tmp_path, output_router_logits=True)
    ids, labels = batch()
    _, stats = ours(ids)
    routed = ids.numel() * ours.config.num_layers
    load, probability = stats.counts.sum(0) / routed, stats.prob_sum.sum(0) / routed
    rebuilt = ours.config.num_experts * (load * probability).sum()
    torch.testing.assert_close(rebuilt, theirs(input_ids=ids, labels=labels).aux_loss, atol=0, rtol=1e-5)
