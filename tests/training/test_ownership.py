"""One place knows which process holds a tensor, and no name has two owners."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from strategy_lab import CONFIG, Items, own_batches, quiet, rank_and_size, sentences
from torch import nn
from torch.utils.data import DataLoader

from olmoe_lightning import ModelConfig, MoEStrategy, OLMoE
from olmoe_lightning.checkpoint import directory, write
from olmoe_lightning.checkpoint.chunks import read_chunk
from olmoe_lightning.checkpoint.directory import read_range
from olmoe_lightning.checkpoint.meta import MODEL
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
        if self.layers:
            return
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


class OneTrainsIt(Everywhere):
    """The second stage trains the scale, the first one has a copy that stays as it is."""

    def configure_optimizers(self):
        rank = self.trainer.strategy.mesh.pipeline.rank
        return torch.optim.SGD([p for n, p in self.named_parameters() if n != "scale" or rank == 1], lr=0.01)


class OtherShape(Everywhere):
    """A tensor of one name and another shape on each stage."""

    def configure_model(self):
        super().configure_model()
        self.register_buffer("seen", torch.zeros(1 + self.trainer.strategy.mesh.pipeline.rank))


def refusal_of(module, options):
    trainer = quiet(MoEStrategy(**options), devices=2, max_steps=1)
    try:
        trainer.fit(module, batches_of(1, [torch.ones(4, 4)]))
    except UserError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (OneTrainsIt, r"1 parameters are trained by one stage .* held by others too.*example scale;"),
        (OtherShape, r"seen is torch.float32 \[1\] on pipeline rank 0 and .* \[2\] on rank 1"),
    ],
)
def test_a_copy_that_would_go_stale_is_refused_on_all_ranks(workers, module, words):
    options = {"pipeline_parallel_size": 2, "num_microbatches": 2}
    for message in workers(2).run(refusal_of, module("nothing"), options):
        assert re.search(words, message), message


class OwnSizes(LightningModule):
    """As many classes as this process has seen."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def configure_model(self):
        self.head = nn.Linear(4, 2 + rank_and_size()[0])

    def training_step(self, batch, batch_idx):
        return self.head(self.layer(batch)).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def test_data_ranks_with_other_tensors_are_refused_on_all_ranks(workers):
    for message in workers(2).run(refusal_of, OwnSizes(), {}):
        assert re.search(r"data rank 1 has other parameters.*head\.weight of torch\.float32 \[2, 4\]", message), message


class Rebuilt(Everywhere):
    """Builds its layers anew whenever Lightning asks, as before validation."""

    def configure_model(self):
        self.layers.clear()
        super().configure_model()

    def validation_step(self, batch, batch_idx):
        self.trainer.strategy.pipeline_step(batch, {"target": batch})


def saved_after_rebuilding(path):
    trainer = quiet(MoEStrategy(pipeline_parallel_size=2, num_microbatches=2), devices=2, max_steps=1)
    module = Rebuilt("nothing")
    trainer.fit(module, batches_of(1, [torch.ones(4, 4)]))
    trainer.validate(module, batches_of(1, [torch.ones(4, 4)]), verbose=False)
    trainer.save_checkpoint(path)
    layer = str(rank_and_size()[0])
    saved = read_range(path, MODEL + f"layers.{layer}.weight", 0, 16)
    return torch.equal(saved, module.layers[layer].weight.detach().view(-1))


def test_what_a_module_builds_anew_is_what_is_saved(workers, tmp_path):
    assert workers(2).run(saved_after_rebuilding, tmp_path / "saved.ckpt") == [True, True]


class Counter(Everywhere):
    """A constant and a counter on both stages, with values of their own at first."""

    def __init__(self):
        super().__init__("nothing")
        self.register_buffer("count", torch.zeros(()))

    def configure_model(self):
        if self.layers:
            return
        super().configure_model()
        rank = self.trainer.strategy.mesh.pipeline.rank
        self.frozen.data.fill_(5.0 + rank)
        self.count.fill_(10.0 * rank)

    def training_step(self, batch, batch_idx):
        self.count += 1 + self.trainer.strategy.mesh.pipeline.rank
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        sums = self.trainer.strategy.pipeline_step(batch, {"target": batch})
        self.log("loss", sums["loss"].float())


def saved_and_live(path, kind):
    strategy = MoEStrategy(pipeline_parallel_size=2, num_microbatches=2, state_dict_type=kind)
    trainer = quiet(strategy, devices=2, max_steps=2)
    module = Counter()
    trainer.fit(module, batches_of(1, [torch.ones(4, 4)] * 2))
    (before,) = trainer.validate(module, batches_of(1, [torch.ones(4, 4)]), verbose=False)
    trainer.save_checkpoint(path)
    live = {name: value.detach().clone() for name, value in module.state_dict().items()}
    again = Counter()
    (after,) = trainer.validate(again, batches_of(1, [torch.ones(4, 4)]), ckpt_path=path, verbose=False)
    return live, dict(again.state_dict()), before["loss"], after["loss"]


@pytest.mark.parametrize("kind", ["sharded", "full"])
def test_what_several_stages_hold_is_one_tensor_live_and_saved(workers, tmp_path, kind):
    ranks = workers(2).run(saved_and_live, tmp_path / "saved.ckpt", kind)
    for live, again, before, after in ranks:
        assert live["frozen"].tolist() == [5.0] * 3
        assert float(live["count"]) == 2.0
        torch.testing.assert_close(again, live, rtol=0, atol=0)
        assert after == before


class AllLayers(Everywhere):
    """All layers on each rank, of values of their own: what counts is what the first one has."""

    def __init__(self):
        super().__init__("layers")
        rank, _ = rank_and_size()
        torch.manual_seed(rank)

    def validation_step(self, batch, batch_idx):
        sums = self.trainer.strategy.pipeline_step(batch, {"target": batch})
        self.log("loss", sums["loss"].float())


def validated_everywhere(path):
    trainer = quiet(MoEStrategy(pipeline_parallel_size=2, num_microbatches=2), devices=2)
    module = AllLayers()
    (before,) = trainer.validate(module, batches_of(1, [torch.ones(4, 4)]), verbose=False)
    trainer.save_checkpoint(path)
    again = AllLayers()
    (after,) = trainer.validate(again, batches_of(1, [torch.ones(4, 4)]), ckpt_path=path, verbose=False)
    return before["loss"], after["loss"], dict(module.state_dict())


def test_evaluation_with_all_layers_on_every_stage_saves_the_weights_that_it_used(workers, tmp_path):
    (before, after, first), (_, _, second) = workers(2).run(validated_everywhere, tmp_path / "saved.ckpt")
    assert before == after
    torch.testing.assert_close(first, second, rtol=0, atol=0)


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


def start_of(kind, config, folder):
    """A module at its start, and the checkpoint that it goes on from."""
    if kind == "pretrained":
        return OLMoE(config, pretrained=str(folder / "weights"), learning_rate=1e-2), None
    if kind == "pretrained from a checkpoint":
        return OLMoE(config, pretrained=str(folder / "run.ckpt"), learning_rate=1e-2), None
    if kind == "loaded":
        return OLMoE.load_from_checkpoint(folder / "run.ckpt", learning_rate=1e-2), None
    module = OLMoE(config, init_seed=7, learning_rate=1e-2)
    if kind == "built before":
        module.built()
    if kind == "trained before in every process":
        trainer = quiet(MoEStrategy(), max_steps=1)
        trainer.fit(module, batches_of(1, sentences(1)))
    return module, folder / f"{kind}.ckpt" if kind in ("run", "file") else None


STARTS = (
    *("fresh", "pretrained", "pretrained from a checkpoint", "loaded", "built before"),
    *("trained before in every process", "run", "file"),
)


def prepared(folder, config):
    write(OLMoE(config, init_seed=7).built().state_dict(), config, str(folder / "weights"))
    for name, kind in (("run", "sharded"), ("file", "full")):
        trainer = quiet(MoEStrategy(state_dict_type=kind), devices=1, max_steps=1)
        trainer.fit(OLMoE(config, init_seed=7, learning_rate=1e-2), batches_of(1, sentences(1)))
        trainer.save_checkpoint(folder / f"{name}.ckpt")


def saved_bits(kind, config, folder, pipeline, experts):
    """Whether what was saved is what is live, bit for bit; whether it moved; elements here and in all."""
    module, ckpt_path = start_of(kind, config, folder)
    strategy = MoEStrategy(pipeline_parallel_size=pipeline, expert_parallel_size=experts, num_microbatches=2)
    trainer = quiet(strategy, devices=2, max_steps=3, max_epochs=4)
    begun = {}
    module.on_train_start = lambda: begun.update({n: p.detach().clone() for n, p in module.named_parameters()})
    trainer.fit(module, batches_of(experts, sentences(4)), ckpt_path=ckpt_path)
    path = folder / f"saved {kind} {pipeline}.ckpt"
    trainer.save_checkpoint(path)
    ownership = strategy.ownership()
    equal, moved = True, False
    for name, parameter in module.named_parameters():
        start = ownership.start(parameter)
        saved = read_range(path, MODEL + name, start, start + parameter.numel())
        equal &= torch.equal(saved, parameter.detach().reshape(-1))
        moved |= not torch.equal(saved, begun[name].reshape(-1))
    return equal, moved, sum(value.numel() for value in module.parameters())


@pytest.mark.parametrize(("pipeline", "experts"), [(2, 1), (1, 2)])
def test_every_way_to_start_trains_and_saves_the_own_part_only(workers, tmp_path, pipeline, experts):
    prepared(tmp_path, CONFIG)
    for kind in STARTS:
        ranks = workers(2).run(saved_bits, kind, CONFIG, tmp_path, pipeline, experts)
        assert [(equal, moved) for equal, moved, _ in ranks] == [(True, True)] * 2, kind
        assert all(held < CONFIG.num_params for *_, held in ranks), kind


def bytes_read(path, pipeline, experts):
    """Of tensors, while a run goes on from a checkpoint."""
    read = []

    def counting(file, offset, length, elements, dtype, first, target):
        read.append(target.numel() * dtype.itemsize)
        return read_chunk(file, offset, length, elements, dtype, first, target)

    directory.read_chunk = counting
    try:
        strategy = MoEStrategy(pipeline_parallel_size=pipeline, expert_parallel_size=experts, num_microbatches=2)
        trainer = quiet(strategy, devices=dist.get_world_size(), max_steps=2)
        trainer.fit(OLMoE(CONFIG, learning_rate=1e-2), batches_of(experts, sentences(4)), ckpt_path=path)
    finally:
        directory.read_chunk = read_chunk
    return sum(read)


def test_a_process_reads_its_part_of_a_checkpoint_only(workers, tmp_path):
    prepared(tmp_path, CONFIG)
    whole = 3 * 4 * CONFIG.num_params  # weights and two moments
    assert sum(workers(2).run(bytes_read, tmp_path / "run.ckpt", 2, 1)) == pytest.approx(whole, rel=0.01)
    # Experts are shared, and so are the masters and moments of everything: dense layers are sharded over both.
    assert sum(workers(2).run(bytes_read, tmp_path / "run.ckpt", 1, 2)) == pytest.approx(whole, rel=0.01)


def fit_again(first, second):
    module = OLMoE(CONFIG, learning_rate=1e-2)
    for options in (first, second):
        experts = options.get("expert_parallel_size", 1)
        try:
            strategy = MoEStrategy(num_microbatches=2, **options)
            quiet(strategy, devices=2, max_steps=1).fit(module, batches_of(experts, sentences(2)))
        except (UserError, ValueError) as error:
            return str(error)
    return "nothing"


STAGES, ZERO_BUBBLE = {"pipeline_parallel_size": 2}, {"pipeline_parallel_size": 2, "schedule": "zbv_zero_bubble"}


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ({}, STAGES, "nothing"),
        ({}, {"expert_parallel_size": 2}, "nothing"),
        (STAGES, STAGES, "nothing"),
        (STAGES, {}, r"needs layer .* of an earlier run with another pipeline; make a new module"),
        ({"expert_parallel_size": 2}, {}, r"experts were shared among 2 processes before"),
    ],
)
def test_a_module_fits_again_on_another_mesh_if_it_has_the_weights(workers, first, second, words):
    for message in workers(2).run(fit_again, first, second):
        assert re.search(words, message), message
