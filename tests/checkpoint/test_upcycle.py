"""A dense model becomes a mixture of experts that computes the same, until it is trained."""

import pytest
import torch
from lightning.pytorch import Trainer
from tiny_model import SMALL
from torch.utils.data import DataLoader

from olmoe_lightning import MoEStrategy, OLMoE
from olmoe_lightning.checkpoint import convert, read, read_config, upcycle, write
from olmoe_lightning.cli import main
from olmoe_lightning.model import Transformer

DENSE = SMALL.replace(
    d_model=32,
    num_layers=3,
    head_dim=16,
    num_experts=0,
    top_k=0,
    expert_hidden=0,
    num_dense_layers=3,
    dense_hidden=48,
    max_seq_len=32,
)


def tokens(count=2):
    return torch.randint(0, 64, (count, 32), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(path):
    return OLMoE(read_config(str(path)), pretrained=str(path), init_seed=9).eval()(tokens())


def save_dense(path, config=DENSE):
    """A dense model with weights of the size that training leaves, so that a wrong MLP shows in the logits."""
    model = Transformer(config)
    model.init_weights(3)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data *= 8
    write(model.state_dict(), config, str(path))


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    path = tmp_path_factory.mktemp("upcycle") / "dense"
    save_dense(path)
    return path


@pytest.mark.parametrize(
    ("num_experts", "top_k", "options"),
    [
        (8, 2, {}),
        (4, 1, {}),
        (4, 4, {"overrides": {"normalize_weights": False}}),  # all are chosen: softmax sums to one
        (8, 3, {"overrides": {"score_function": "sigmoid"}}),
        (8, 2, {"overrides": {"score_function": "topk_softmax", "normalize_weights": False}}),
        (8, 2, {"overrides": {"restore_weight_scale": True, "expert_weight_scale": 0.5}}),  # 2 times one half
        (8, 2, {"overrides": {"num_groups": 4, "top_k_groups": 2, "selection_bias": True}}),
        (8, 2, {"dense_layers": 1}),
        (8, 2, {"seed": 5, "dense_layers": 2}),
    ],
)
def test_logits_are_those_of_the_dense_model(dense, tmp_path, num_experts, top_k, options):
    upcycle(str(dense), str(tmp_path / "moe"), num_experts, top_k, **options)
    config = read_config(str(tmp_path / "moe"))
    assert (config.num_experts, config.top_k, config.expert_hidden) == (num_experts, top_k, 48)
    assert config.num_moe_layers == 3 - options.get("dense_layers", 0)
    wanted = logits(dense)
    assert wanted.abs().max() > 1
    # Rounding of fp32: the weights' sum is one within it, and the products are summed in another order.
    torch.testing.assert_close(logits(tmp_path / "moe"), wanted, atol=1e-5, rtol=1e-5)


def test_the_comparison_sees_a_wrong_expert(dense, tmp_path):
    upcycle(str(dense), str(tmp_path / "moe"), 8, 2)
    config, state = read(str(tmp_path / "moe"))
    state["blocks.1.moe.experts.w_down"] *= 1.01
    write(state, config, str(tmp_path / "wrong"))
    assert (logits(tmp_path / "wrong") - logits(dense)).abs().max() > 1e-3


def test_experts_are_copies_and_routers_are_those_of_a_new_model(dense, tmp_path):
    upcycle(str(dense), str(tmp_path / "moe"), 8, 2, seed=7)
    config, state = read(str(tmp_path / "moe"))
    _, before = read(str(dense))
    new = Transformer(config)
    new.init_weights(7)
    for layer in range(3):
        for ours, theirs in (("w_gate_up", "w_gate_up.weight"), ("w_down", "w_down.weight")):
            for expert in state[f"blocks.{layer}.moe.experts.{ours}"]:
                assert torch.equal(expert, before[f"blocks.{layer}.mlp.{theirs}"])
        router = state[f"blocks.{layer}.moe.router.weight"]
        assert torch.equal(router, new.blocks[layer].moe.router.weight)
        assert len(router.unique(dim=0)) == 8  # no ties
    untouched = {name for name in before if ".mlp." not in name}
    assert untouched == {name for name in state if ".moe." not in name}
    assert all(torch.equal(state[name], before[name]) for name in untouched)


def test_equal_experts_get_different_tokens_and_grow_apart(dense, tmp_path):
    upcycle(str(dense), str(tmp_path / "moe"), 4, 2)
    module = OLMoE(read_config(str(tmp_path / "moe")), pretrained=str(tmp_path / "moe"), schedule="constant")
    batch = {"input_ids": tokens(8)[:, :-1], "labels": tokens(8)[:, 1:]}
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = Trainer(accelerator="cpu", devices=1, max_steps=2, strategy=MoEStrategy(), **quiet)
    trainer.fit(module, DataLoader([batch, batch], batch_size=None))
    assert (module.routing_stats.counts > 0).all()
    experts = module.built().blocks[1].moe.experts.w_down
    assert len(experts.detach().flatten(1).unique(dim=0)) == 4


def test_the_command_upcycles_what_the_trainer_wrote_into_every_format(tmp_path, capsys):
    module = OLMoE(DENSE, learning_rate=0.25)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = Trainer(accelerator="cpu", devices=1, strategy=MoEStrategy(), **quiet)
    batch = {"input_ids": tokens()[:, :-1], "labels": tokens()[:, 1:]}
    trainer.validate(module, DataLoader([batch], batch_size=None), verbose=False)
    source = str(tmp_path / "trained")
    trainer.save_checkpoint(source)
    words = ["convert", "--from-native", source, "--upcycle-experts", "8", "--upcycle-top-k", "2"]
    targets = {"native": "n", "sharded": "s", "hf": "h", "safetensors": "x.safetensors"}
    for kind, name in targets.items():
        assert main([*words, f"--to-{kind}", str(tmp_path / name)]) == 0
        torch.testing.assert_close(logits(tmp_path / name), logits(source), atol=1e-5, rtol=1e-5)
    loaded = OLMoE.load_from_checkpoint(tmp_path / "s")
    assert (loaded.config.num_experts, loaded.learning_rate) == (8, 0.25)
    assert main(["convert", "--from-native", str(tmp_path / "n"), *words[3:], "--to-native", str(tmp_path / "m")]) == 2
    assert "3 of the model's 3 layers have experts already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ({"normalize_weights": False}, "weights of 2 of 8 experts do not sum to one"),
        ({"score_function": "sigmoid", "normalize_weights": False}, "do not sum to one"),
        ({"restore_weight_scale": True}, "multiplied by 2"),
        ({"expert_weight_scale": 0.5}, "multiplied by 0.5"),
        ({"shared_hidden": 16}, "a shared expert"),
        ({"expert_hidden": 24}, r"expert_hidden \(24\), is not the MLP's \(48\)"),
        ({"d_model": 64}, "d_model cannot be changed"),
    ],
)
def test_what_cannot_be_equal_is_refused(dense, tmp_path, overrides, reason):
    with pytest.raises(ValueError, match=reason):
        upcycle(str(dense), str(tmp_path / "moe"), 8, 2, overrides=overrides)
    assert not list(tmp_path.iterdir())


def test_what_such_a_configuration_would_compute_is_not_equal(dense, tmp_path):
    """The refusals above are not idle."""
    upcycle(str(dense), str(tmp_path / "moe"), 8, 2)
    config, state = read(str(tmp_path / "moe"))
    for number, changes in enumerate(({"normalize_weights": False}, {"restore_weight_scale": True})):
        write(state, config.replace(**changes), str(tmp_path / f"{number}"))
        assert (logits(tmp_path / f"{number}") - logits(dense)).abs().max() > 1e-2


def test_fields_that_mean_nothing_in_a_dense_model_do_not_matter(tmp_path):
    save_dense(tmp_path / "dense", DENSE.replace(shared_hidden=8, restore_weight_scale=True, expert_hidden=5))
    upcycle(str(tmp_path / "dense"), str(tmp_path / "moe"), 4, 2)
    torch.testing.assert_close(logits(tmp_path / "moe"), logits(tmp_path / "dense"), atol=1e-5, rtol=1e-5)


def test_numbers_out_of_range_are_refused(dense, tmp_path):
    for arguments, message in (
        ((8, 0), "top_k \\(0\\)"),
        ((2, 3), "must not exceed num_experts"),
        ((8, 2, 0, 3), "between 0 and 2"),
    ):
        with pytest.raises(ValueError, match=message):
            upcycle(str(dense), str(tmp_path / "moe"), *arguments)
    with pytest.raises(ValueError, match="need upcycle_experts"):
        convert(from_native=str(dense), to_native=str(tmp_path / "moe"), upcycle_top_k=2)
