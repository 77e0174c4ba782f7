"""Pipelines under Lightning: loops, checkpoints, refusals, what a stage builds, and modules of others."""

import re
import weakref

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from strategy_lab import Items, quiet
from tiny_model import SMALL
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from olmoe_lightning import MoEStrategy, OLMoE
from olmoe_lightning.model import Transformer
from olmoe_lightning.model.generation import GenerationConfig
from olmoe_lightning.parallel.pipeline.stages import PIPELINE_SCHEDULES, make_stage_map

CONFIG = SMALL.replace(
    num_layers=5,
    num_dense_layers=1,
    dense_hidden=24,
    expert_hidden=8,
    balance_loss_coeff=0.02,
    balance_loss_scope="sequence",  # the same function of a batch, however it is cut
)


def batches(count, rows=4):
    generator = torch.Generator().manual_seed(0)
    made = []
    for index in range(count):
        tokens = torch.randint(0, 64, (rows, 17), generator=generator)
        labels = tokens[:, 1:].clone()
        labels[0, : 3 * index] = -100
        documents = (torch.arange(16) > 6 + index).int().expand(rows, 16).clone()
        made.append({"input_ids": tokens[:, :-1].clone(), "labels": labels, "document_ids": documents})
    return made


def every_batch(items):
    """The same on all ranks of the one pipeline."""
    return DataLoader(Items(items), batch_size=None)


def model(**options):
    return OLMoE(CONFIG, schedule="constant", learning_rate=1e-2, **options)


def strategy(schedule="1f1b", microbatches=4, **options):
    return MoEStrategy(pipeline_parallel_size=2, schedule=schedule, num_microbatches=microbatches, **options)


def evaluate(make_strategy, schedule, devices):
    """Sanity check, training, validation in between, then validate and test on their own."""
    chosen = strategy(schedule) if make_strategy else "auto"
    trainer = quiet(chosen, devices=devices, max_steps=4, val_check_interval=2, num_sanity_val_steps=1)
    module = model()
    trainer.fit(module, every_batch(batches(4)), every_batch(batches(2, rows=4)))
    flags = {part.training for part in module.model.modules()}
    metrics = {
        name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith(("val", "train"))
    }
    (validated,) = trainer.validate(module, every_batch(batches(3, rows=3)), verbose=False)  # rows that do not split
    (tested,) = trainer.test(module, every_batch(batches(2)), verbose=False)
    return metrics, validated, tested, flags


@pytest.mark.parametrize("schedule", PIPELINE_SCHEDULES)
def test_losses_of_every_loop_are_those_of_one_process_on_all_ranks(workers, schedule):
    metrics, validated, tested, _ = evaluate(False, schedule, 1)
    for rank in workers(2).run(evaluate, True, schedule, 2):
        for ours, alone in zip(rank[:3], (metrics, validated, tested), strict=True):
            assert ours == pytest.approx(alone, rel=1e-5)
        assert rank[3] == {True}


def predict(chosen, devices, fit):
    trainer = quiet(chosen() if devices == 2 else "auto", devices=devices, max_steps=2)
    module = model(generation=GenerationConfig(prompt_tokens=8, max_new_tokens=6, temperature=0.7))
    if fit:
        trainer.fit(module, every_batch(batches(2)))
    return trainer.predict(module, every_batch(batches(2, rows=4)))


def predict_in_a_pipeline(schedule, fit):
    return predict(lambda: strategy(schedule), 2, fit)


@pytest.mark.parametrize("schedule", PIPELINE_SCHEDULES)
@pytest.mark.parametrize("fit", [True, False], ids=["after fit", "alone"])
def test_predict_writes_on_every_rank_what_one_process_writes(workers, schedule, fit):
    alone = predict(None, 1, fit)
    assert sum(len(continuation.written) for batch in alone for continuation in batch) > 20
    for ours in workers(2).run(predict_in_a_pipeline, schedule, fit):
        for mine, expected in zip(ours, alone, strict=True):
            for one, other in zip(mine, expected, strict=True):
                assert torch.equal(one.written, other.written)
                assert torch.equal(one.prompt, other.prompt)


def flags_after_validation(schedule):
    trainer = quiet(strategy(schedule), devices=2, max_steps=2)
    module = model()
    found = []

    module.on_train_batch_start = lambda *_: found.append({part.training for part in module.modules()})
    trainer.fit(module, every_batch(batches(2)), every_batch(batches(1)))
    return found


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "zbv_zero_bubble"])
def test_every_chunk_trains_again_after_the_sanity_check(workers, schedule):
    for found in workers(2).run(flags_after_validation, schedule):
        assert found == [{True}, {True}]


def joined(schedule=None):
    """Writes files that a test can look into."""
    return strategy(schedule, state_dict_type="full") if schedule else MoEStrategy(state_dict_type="full")


def save(path, chosen, devices, ckpt_path=None, steps=2):
    trainer = quiet(chosen, devices=devices, max_epochs=steps // 2)
    trainer.fit(model(), every_batch(batches(2)), ckpt_path=ckpt_path)
    trainer.save_checkpoint(path)


def save_pipeline(path, schedule, ckpt_path=None, steps=2):
    save(path, joined(schedule), 2, ckpt_path, steps)


def test_checkpoints_load_with_and_without_a_pipeline(workers, tmp_path):
    workers(2).run(save_pipeline, tmp_path / "pipeline.ckpt", "1f1b")
    whole = torch.load(tmp_path / "pipeline.ckpt", weights_only=True)
    module = model()
    module.built()
    assert set(whole["state_dict"]) == set(module.state_dict())
    assert len(whole["optimizer_states"][0]["state"]) == len(list(module.parameters()))

    workers(2).run(save_pipeline, tmp_path / "resumed.ckpt", "zbv_zero_bubble", tmp_path / "pipeline.ckpt", 4)
    workers(2).run(save_pipeline, tmp_path / "straight.ckpt", "1f1b", None, 4)
    save(tmp_path / "alone.ckpt", joined(), 1, tmp_path / "pipeline.ckpt", 4)
    resumed, straight, alone = (
        torch.load(tmp_path / f"{name}.ckpt", weights_only=True)["state_dict"]
        for name in ("resumed", "straight", "alone")
    )
    torch.testing.assert_close(resumed, straight, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(alone, straight, rtol=1e-5, atol=1e-6)

    save(tmp_path / "first.ckpt", joined(), 1)
    workers(2).run(save_pipeline, tmp_path / "then.ckpt", "1f1b", tmp_path / "first.ckpt", 4)
    assert torch.load(tmp_path / "then.ckpt", weights_only=True)["global_step"] == 4


def built(schedule):
    """Layers of a process, and which ends it has."""
    trainer = quiet(strategy(schedule), devices=2, max_steps=1, limit_train_batches=1)
    trainer.validate(model(), every_batch(batches(1)), verbose=False)
    module = trainer.lightning_module
    return module.model.blocks.layers, module.model.embed is not None, module.model.head is not None


def test_a_process_builds_its_own_layers_only(workers):
    loop = workers(2).run(built, "1f1b")
    assert sorted(layer for layers, _, _ in loop for layer in layers) == list(range(5))
    assert [(embed, head) for _, embed, head in loop] == [(True, False), (False, True)]
    v = workers(2).run(built, "zbv_zero_bubble")
    assert sorted(layer for layers, _, _ in v for layer in layers) == list(range(5))
    assert [(embed, head) for _, embed, head in v] == [(True, True), (False, False)]


LARGE = CONFIG.replace(d_model=256, num_layers=8, expert_hidden=512, num_experts=8, num_dense_layers=0)
"""13 MB a layer in fp32."""


@pytest.mark.parametrize("schedule", ["1f1b", "zbv_zero_bubble"])
def test_stages_on_the_meta_device_add_up_to_the_model(schedule):
    stages = make_stage_map(schedule, 4, None, LARGE.num_layers, 8)
    with torch.device("meta"):
        parts = [
            Transformer(LARGE, stages.layers_of(rank), rank == stages.first_rank, rank == stages.last_rank)
            for rank in range(4)
        ]
        names = [name for part in parts for name, _ in part.named_parameters()]
        assert sorted(names) == sorted(name for name, _ in Transformer(LARGE).named_parameters())
        layer = sum(value.numel() for value in Transformer(LARGE, [0], False, False).parameters())
    ends = 2 * LARGE.vocab_size * LARGE.d_model + LARGE.d_model
    for part in parts:
        assert sum(value.numel() for value in part.parameters()) <= 2 * layer + ends


class LiveTensors(TorchDispatchMode):
    """Counts the bytes of the tensors that operators make while it is on: not what an allocator keeps of freed ones."""

    def __init__(self):
        super().__init__()
        self.live, self.peak = {}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self.live:  # else another view
                    self.live[storage.data_ptr()] = storage.nbytes()
                    weakref.finalize(storage, self.live.pop, storage.data_ptr())
        self.peak = max(self.peak, sum(self.live.values()))
        return result


class Weighed(OLMoE):
    """Watches the memory of its tensors while it is built."""

    def configure_model(self):
        with LiveTensors() as tensors:
            super().configure_model()
        self.peak = tensors.peak


def memory_of_construction(schedule):
    """Bytes: the most while the model was built, all weights, the largest of them."""
    trainer = quiet(strategy(schedule) if schedule else MoEStrategy(), devices=2)
    module = Weighed(LARGE)
    trainer.validate(module, every_batch(batches(1)), verbose=False)
    weights = [value.nbytes for value in module.parameters()]
    return module.peak, sum(weights), max(weights)


def test_a_process_never_holds_more_than_its_stages_while_it_builds_them(workers):
    """And one weight in the making, with what it takes to draw it."""
    stages, whole = (workers(2).run(memory_of_construction, schedule) for schedule in ("1f1b", None))
    limits = [held + weight for _, held, weight in stages]
    for (peak, held, _), limit in zip(stages, limits, strict=True):
        assert held == pytest.approx(2 * LARGE.num_params, rel=0.02)
        assert held <= peak <= limit
    for peak, held, _ in whole:  # negative control: the whole model is seen
        assert held == 4 * LARGE.num_params
        assert peak >= held > 1.5 * max(limits)


REFUSED = [
    (lambda: strategy("1f1b", 1), r"num_microbatches \(1\)"),
    (lambda: MoEStrategy(pipeline_parallel_size=2, schedule="1f2b"), r"unknown schedule '1f2b'.*1f1b"),
    (lambda: strategy(pipeline_split=[4, 2]), r"split \[4, 2\].*sum 5"),
    (lambda: strategy("interleaved_1f1b", stages_per_rank=3), r"num_layers \(5\).*= 6"),
    (lambda: MoEStrategy(pipeline_parallel_size=2, expert_parallel_size=2), r"processes \(2\).*= 4"),
]


class MoreInValidation(OLMoE):
    """Its validation sums up more than its training, as with the data module, which knows the bytes of a token."""

    def _token_bytes(self, device):
        return torch.arange(64, device=device)


def nats_per_byte(devices):
    trainer = quiet(strategy() if devices == 2 else "auto", devices=devices, max_steps=2, val_check_interval=1)
    trainer.fit(MoreInValidation(CONFIG, learning_rate=0.01), every_batch(batches(2)), every_batch(batches(2)))
    return float(trainer.callback_metrics["val/nats_per_byte"])


def test_validation_may_sum_up_other_things_than_training(workers):
    assert workers(2).run(nats_per_byte, 2) == pytest.approx([nats_per_byte(1)] * 2, rel=1e-5)


def refusal(number):
    make, module = [(make, model) for make, _ in REFUSED][number] if number >= 0 else (strategy, Plain)
    try:
        quiet(make(), devices=2).fit(module(), every_batch(batches(1)))
    except (ValueError, MisconfigurationException) as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("number", range(5))
def test_what_cannot_run_is_refused_on_all_ranks(workers, number):
    for message in workers(2).run(refusal, number):
        assert re.search(REFUSED[number][1], message), message


class Plain(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)


def test_a_module_that_cannot_be_cut_is_told_what_it_lacks(workers):
    for message in workers(2).run(refusal, -1):
        assert re.search(r"Plain cannot be cut.*pipeline_layers.*pipeline_loss", message)


def messages(kind):
    trainer = quiet(strategy(), devices=2, max_steps=1)
    module = model() if kind != "tied" else OLMoE(CONFIG.replace(tie_embeddings=True))
    try:
        if kind == "rows":
            trainer.fit(module, every_batch(batches(1, rows=6)))
        else:
            trainer.fit(module, every_batch(batches(1)))
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("rows", "a batch of 6 rows cannot be cut into num_microbatches (4)"),
        ("tied", "tied embeddings need the first and the last stage on one rank"),
    ],
)
def test_all_ranks_say_what_is_wrong(workers, kind, words):
    for message in workers(2).run(messages, kind):
        assert words in message


class Chain(LightningModule):
    """A third party's dense network: the protocol and nothing else."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict()

    @property
    def pipeline_layers(self):
        return 4

    def configure_model(self):
        stages = getattr(self.trainer.strategy, "stage_map", None)
        rank = 0 if stages is None else self.trainer.strategy.mesh.pipeline.rank
        for layer in range(4) if stages is None else stages.layers_of(rank):
            torch.manual_seed(layer)
            self.layers[str(layer)] = nn.Linear(8, 8)

    def pipeline_stage(self, layers, first, last):
        parts = [self.layers[str(layer)] for layer in layers]

        class Part(nn.Sequential):
            def forward(self, x, **_):
                return super().forward(x)

        return Part(*parts)

    def pipeline_hidden(self, inputs):
        return torch.empty(*inputs["target"].shape, device="meta")

    def pipeline_loss(self, output, inputs):
        return {"loss": (output - inputs["target"]).square().sum(), "num_tokens": torch.tensor(len(output))}

    def training_step(self, batch, batch_idx):
        x, target = batch
        if getattr(self.trainer.strategy, "stage_map", None) is None:
            for layer in range(4):
                x = self.layers[str(layer)](x)
            sums = self.pipeline_loss(x, {"target": target})
        else:
            sums = self.trainer.strategy.pipeline_step(x, {"target": target})
        return {"loss": sums["loss"] / sums["num_tokens"], "num_tokens": sums["num_tokens"]}

    def predict_step(self, batch, batch_idx):
        x, target = batch
        if getattr(self.trainer.strategy, "stage_map", None) is None:
            for layer in range(4):
                x = self.layers[str(layer)](x)
            return x
        return self.trainer.strategy.pipeline_forward(x, {"target": target})

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def train_chain(chosen, devices):
    generator = torch.Generator().manual_seed(0)
    data = [(torch.randn(8, 8, generator=generator), torch.randn(8, 8, generator=generator)) for _ in range(4)]
    trainer = quiet(chosen() if callable(chosen) else chosen, devices=devices, max_steps=4)
    module = Chain()
    trainer.fit(module, every_batch(data))
    parameters = {name: value.detach().clone() for name, value in module.named_parameters()}
    return parameters, trainer.predict(module, every_batch([(x[:6], target[:6]) for x, target in data]))


def train_chain_in_a_pipeline(schedule):
    return train_chain(lambda: strategy(schedule), 2)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_zero_bubble"])
def test_a_third_partys_module_trains_and_predicts_as_in_one_process(workers, schedule):
    alone, predicted = train_chain(MoEStrategy(), 1)
    ranks = workers(2).run(train_chain_in_a_pipeline, schedule)
    together = {name: value for parameters, _ in ranks for name, value in parameters.items()}
    assert together.keys() == alone.keys()
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-6)
    for _, ours in ranks:
        torch.testing.assert_close(ours, predicted, rtol=1e-5, atol=1e-5)
