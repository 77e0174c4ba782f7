"""One place knows which process holds a tensor, and no name has two owners."""

import re
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule
from strategy_lab import CONFIG, Items, own_batches, quiet, rank_and_size, sentences
from torch import nn
from torch.utils.data import DataLoader

from olmoe_lightning import ModelConfig, MoEStrategy, OLMoE
from olmoe_lightning.checkpoint import write
from olmoe_lightning.errors import UserError

DOCS = Path(__file__).resolve().parents[2] / "docs" / "strategy.md"
EXPRESSIBLE = ModelConfig.preset("olmoe-1b-7b").replace(
    vocab_size=64, d_model=16, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=8, num_experts=4, top_k=2,
    expert_hidden=16, max_seq_len=16,
)  # fmt: skip
EVERYTHING = CONFIG.replace(num_layers=2, num_dense_layers=1, dense_hidden=32)


def batches_of(data_ranks, batches):
    """Those of this process; all stages of a pipeline have the same ones."""
    rank, _ = rank_and_size()
    return DataLoader(Items(batches[rank % data_ranks :: data_ranks]), batch_size=None)


def description():
    """Of two layers on 8 processes: two stages, two replicas, experts on two ranks."""
    strategy = MoEStrategy(expert_parallel_size=2, pipeline_parallel_size=2, num_microbatches=2)
    trainer = quiet(strategy, devices=8, max_steps=1)
    module = OLMoE(EVERYTHING)
    text = []
    module.on_train_start = lambda: text.append(strategy.describe())
    trainer.fit(module, batches_of(4, sentences(4)))
    return text[0]


def test_the_documentation_shows_what_the_code_prints(workers):
    texts = workers(8).run(description, timeout=120)
    assert len(set(texts)) == 1
    (shown,) = re.findall(r"```\n(8 processes: .*?)\n```", DOCS.read_text(), re.DOTALL)
    assert shown == texts[0]


def elements_that_ranks_hold():
    """Number of elements of each tensor of a row by what the table says, and by what this process has."""
    strategy = MoEStrategy(expert_parallel_size=2)
    trainer = quiet(strategy, devices=4, max_steps=1)
    trainer.fit(OLMoE(CONFIG), own_batches(sentences(4)))
    ownership, sharded = strategy.ownership(), strategy.sharded
    held = {name: (ownership.start(value), value.numel()) for name, value in ownership.tensors.items()}
    updated = {sharded.parameters[number].name: (piece.start, piece.stop) for number, piece in sharded.shards.items()}
    sizes = {name: ownership.size(value) for name, value in ownership.tensors.items()}
    experts = {name for name, value in ownership.tensors.items() if ownership.is_expert(value)}
    return held, updated, sizes, experts


def test_parts_cover_every_tensor_and_every_element_is_updated_once_among_its_replicas(workers):
    ranks = workers(4).run(elements_that_ranks_hold)
    sizes, experts = ranks[0][2:]
    assert experts == {name for name in sizes if ".experts." in name}
    assert experts
    for name, size in sizes.items():
        parts = sorted({held[name] for held, *_ in ranks})
        assert parts == ([(0, size // 2), (size // 2, size // 2)] if name in experts else [(0, size)])
        if name.endswith("selection_bias"):
            continue
        touched = torch.zeros(size)
        for held, updated, *_ in ranks:
            if name in updated:
                start, stop = updated[name]
                touched[held[name][0] + start : held[name][0] + stop] += 1
        assert (touched == 1).all(), name


class Everywhere(LightningModule):
    """Has all layers on every rank, as a module that was not written for a pipeline."""

    def __init__(self, shared):
        super().__init__()
        self.shared = shared
        self.layers = nn.ModuleDict()
        self.scale = nn.Parameter(torch.ones(()))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def configure_model(self):
        stages = self.trainer.strategy.stage_map
        own = range(2) if self.shared == "layers" else stages.layers_of(self.trainer.strategy.mesh.pipeline.rank)
        for layer in own:
            self.layers[str(layer)] = nn.Linear(4, 4)

    @property
    def pipeline_layers(self):
        return 2

    def pipeline_stage(self, layers, first, last):
        parts, scale = [self.layers[str(layer)] for layer in layers], self.scale

        class Part(nn.Sequential):
            def forward(self, x, **_):
                return super().forward(x) * scale

        return Part(*parts)

    def pipeline_hidden(self, inputs):
        return torch.empty(*inputs["target"].shape, device="meta")

    def pipeline_loss(self, output, inputs):
        return {"loss": (output - inputs["target"]).square().sum(), "num_tokens": torch.tensor(len(output))}

    def training_step(self, batch, batch_idx):
        sums = self.trainer.strategy.pipeline_step(batch, {"target": batch})
        return {"loss": sums["loss"] / sums["num_tokens"], "num_tokens": sums["num_tokens"]}

    def configure_optimizers(self):
        parameters = [p for name, p in self.named_parameters() if name != "scale" or self.shared == "scale"]
        return torch.optim.SGD(parameters, lr=0.01)


def refusal(shared):
    trainer = quiet(MoEStrategy(pipeline_parallel_size=2, num_microbatches=2), devices=2, max_steps=1)
    try:
        trainer.fit(Everywhere(shared), batches_of(1, [torch.ones(4, 4)]))
    except UserError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(("shared", "name"), [("layers", "layers.0.weight"), ("scale", "scale")])
def test_a_name_that_two_stages_train_is_refused_on_all_ranks(workers, shared, name):
    for message in workers(2).run(refusal, shared):
        assert re.search(rf"trained by several stages.*example {re.escape(name)};", message), message


def test_what_two_stages_hold_and_none_trains_is_no_reason_to_refuse(workers):
    assert workers(2).run(refusal, "frozen") == ["nothing"] * 2


def trained_from(config, weights, pipeline, experts):
    devices = pipeline * experts
    strategy = MoEStrategy(
        pipeline_parallel_size=pipeline, expert_parallel_size=experts, num_microbatches=2, state_dict_type="full"
    )
    trainer = quiet(strategy, devices=devices, max_steps=2, accumulate_grad_batches=2 // experts)
    # With AdamW's usual eps, elements whose gradient is rounding alone would move by a whole learning rate.
    module = OLMoE(config, pretrained=str(weights), learning_rate=1e-2, eps=1e-3)
    trainer.fit(module, batches_of(experts, sentences(4)))
    held = sum(value.numel() for value in module.parameters())
    return {name: value.clone() for name, value in strategy.lightning_module_state_dict().items()}, held


@pytest.mark.parametrize(
    ("pipeline", "experts", "hf"), [(2, 1, False), (1, 2, False), (2, 2, False), (2, 1, True), (1, 2, True)]
)
def test_pretrained_weights_are_read_by_their_owners_only(workers, tmp_path, pipeline, experts, hf):
    # A pipeline's microbatches have one row each; the balance loss is that of a microbatch.
    config = (EXPRESSIBLE if hf else CONFIG).replace(balance_loss_coeff=0.0)
    write(OLMoE(config, init_seed=7).built().state_dict(), config, str(tmp_path / "weights"), hf=hf)
    alone, whole = trained_from(config, tmp_path / "weights", 1, 1)
    ranks = workers(pipeline * experts).run(trained_from, config, tmp_path / "weights", pipeline, experts)
    torch.testing.assert_close(ranks[0][0], alone, rtol=1e-5, atol=1e-6)
    assert all(held < whole for _, held in ranks)
