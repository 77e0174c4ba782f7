"""Buffers and frozen parameters of every type and layout come back bit by bit, or a sentence refuses the run."""

import pytest
import torch
from lightning.pytorch import Trainer
from test_odd_state import Plain, data
from tiny_model import SMALL
from torch import nn

from olmoe_lightning import MoEStrategy
from olmoe_lightning.checkpoint.meta import load_sharded, read_meta
from olmoe_lightning.errors import UserError
from olmoe_lightning.model.moe import MoE

TYPES = [
    *(torch.complex32, torch.complex64, torch.complex128, torch.float64, torch.float16, torch.bfloat16),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32, torch.int64),
    *([torch.float4_e2m1fn_x2] if hasattr(torch, "float4_e2m1fn_x2") else []),
]


def numbers(dtype, seed, shape=(6,)):
    """Any bits, NaNs among them."""
    generator = torch.Generator().manual_seed(seed)
    size = dtype.itemsize * torch.Size(shape).numel()
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)


def name_of(dtype):
    return f"of_{str(dtype).removeprefix('torch.')}"  # modules have methods called as types are


def dense(seed):
    """Tensors of every type and layout that is its elements alone, by name."""
    complex_numbers = [torch.full((3,), seed * (1 + each * 1j), dtype=torch.complex64) for each in (1, 2)]
    return {
        **{name_of(dtype): numbers(dtype, seed) for dtype in TYPES},
        "bool": numbers(torch.uint8, seed) > 127,
        "number": torch.tensor(3 + seed),
        "complex_number": torch.tensor(1j * seed),
        "nothing": torch.empty(0, 3, dtype=torch.complex64),
        "conjugate": complex_numbers[0].conj(),
        "negative": complex_numbers[1].conj().imag,
        "transposed": numbers(torch.uint16, seed, (2, 3)).T,
        "channels_last": numbers(torch.int16, seed, (2, 3, 4, 4)).to(memory_format=torch.channels_last),
        "expanded": numbers(torch.uint32, seed, (1, 4)).expand(3, 4),
        "expanded_complex": numbers(torch.complex64, seed, (3, 1)).expand(3, 4),
    }


def sparse_and_quantised(seed):
    matrix = torch.eye(3) * seed
    rows = torch.randn(4, 2, generator=torch.Generator().manual_seed(seed))
    return {
        "entries": matrix.to_sparse(),
        "rows": matrix.to_sparse_csr(),
        "quantised": torch.quantize_per_tensor(rows, 0.1 * seed, 2, torch.quint8),
        "quantised_rows": torch.quantize_per_channel(
            rows, torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.zeros(4, dtype=torch.int64), 0, torch.qint8
        ),
    }


def bits(tensor):
    """What tells two tensors apart."""
    if tensor.is_quantized:
        steps = tensor.q_per_channel_scales() if "channel" in str(tensor.qscheme()) else tensor.q_scale()
        return str((tensor.int_repr().tolist(), steps, tensor.dtype))
    if tensor.layout != torch.strided:
        return str((tensor.layout, tensor.to_dense().tolist()))
    values = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    return str((tensor.dtype, tensor.shape, values.view(torch.uint8).tolist()))


class Odd(Plain):
    """Buffers and frozen parameters besides the weights that are trained."""

    def __init__(self, make, seed, frozen=True):
        super().__init__()
        for name, value in make(seed).items():
            self.register_buffer(name, value)
            if frozen:
                setattr(self, f"frozen_{name}", nn.Parameter(make(seed)[name], requires_grad=False))

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.layer.parameters(), lr=0.1)

    def odd(self):
        named = [*self.named_buffers(), *self.named_parameters()]
        return {name: bits(value) for name, value in named if not name.startswith("layer")}


def trainer(devices=1, max_epochs=1, strategy=None, **options):
    return Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy or MoEStrategy(**options),
        max_epochs=max_epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )


def save(path, make, devices, **options):
    run = trainer(devices, **options)
    run.fit(Odd(make, 1), data())
    run.save_checkpoint(path)


def resume(path, make, devices, **options):
    """Whether a module with other values has the saved ones after it has gone on from them."""
    module = Odd(make, 5)
    trainer(devices, 2, **options).fit(module, data(), ckpt_path=path)
    expected = Odd(make, 1).odd()
    return [name for name, value in module.odd().items() if value != expected[name]]


WAYS = {
    "sharded": {},
    "async": {"async_save": True},
    "overlap": {"async_save": "overlap"},
    "full": {"state_dict_type": "full"},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", [dense, sparse_and_quantised])
def test_in_one_process_every_bit_comes_back(tmp_path, way, make):
    assert all(value != Odd(make, 5).odd()[name] for name, value in Odd(make, 1).odd().items() if "nothing" not in name)
    save(tmp_path / "a.ckpt", make, 1, **WAYS[way])
    assert resume(tmp_path / "a.ckpt", make, 1, **WAYS[way]) == []


@pytest.mark.parametrize("way", ["sharded", "overlap", "full"])
def test_two_processes_write_and_read_what_one_reads_and_writes(workers, tmp_path, way):
    workers(2).run(save, tmp_path / "two.ckpt", dense, 2, **WAYS[way])
    assert resume(tmp_path / "two.ckpt", dense, 1) == []
    save(tmp_path / "one.ckpt", dense, 1, **WAYS[way])
    for name in ("one", "two"):
        assert workers(2).run(resume, tmp_path / f"{name}.ckpt", dense, 2) == [[], []]


def test_values_of_rank_0_are_those_of_all_processes_in_every_type(workers):
    first, second = workers(2).run(fit_with_values_of_its_own)
    assert first == second == Odd(dense, 0).odd()


def fit_with_values_of_its_own():
    module = Odd(dense, torch.distributed.get_rank())
    trainer(2).fit(module, data())
    return module.odd()


def test_a_directory_is_read_into_a_module_of_one_process(tmp_path):
    save(tmp_path / "a.ckpt", dense, 1)
    module = Odd(dense, 5)
    load_sharded(module, read_meta(tmp_path / "a.ckpt"))
    assert module.odd() == Odd(dense, 1).odd()


# ---------------------------------------------------------------------------------------------- experts


class OddExperts(Plain):
    """Each expert has its own values of every type."""

    def __init__(self, seed):
        super().__init__()
        self.moe = MoE(SMALL)
        for parameter in self.moe.parameters():
            nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(0))
        self.seed = seed

    def setup(self, stage):
        """A layer with experts has buffers for its own ones."""
        axis = self.trainer.strategy.mesh.expert
        for dtype in TYPES:
            values = numbers(dtype, self.seed, (SMALL.num_experts, 3)).view(torch.uint8).chunk(axis.size)[axis.rank]
            self.moe.experts.register_buffer(name_of(dtype), values.clone().view(dtype))

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean() + self.moe(torch.ones(1, 4, SMALL.d_model))[0].square().mean()


def save_experts(path, devices, expert_parallel_size, **options):
    run = trainer(devices, expert_parallel_size=expert_parallel_size, **options)
    run.fit(OddExperts(1), data())
    run.save_checkpoint(path)


def read_experts(path, devices, expert_parallel_size):
    module = OddExperts(5)
    trainer(devices, 2, expert_parallel_size=expert_parallel_size).fit(module, data(), ckpt_path=path)
    return {name: value.view(torch.uint8).tolist() for name, value in module.moe.experts.named_buffers()}


@pytest.mark.parametrize("kind", ["sharded", "full"])
def test_values_of_spread_experts_are_joined_and_shared_out_in_every_type(workers, tmp_path, kind):
    rows = (SMALL.num_experts, 3)
    expected = {name_of(dtype): numbers(dtype, 1, rows).view(torch.uint8).tolist() for dtype in TYPES}
    workers(2).run(save_experts, tmp_path / "two.ckpt", 2, 2, state_dict_type=kind)
    assert read_experts(tmp_path / "two.ckpt", 1, 1) == expected
    save_experts(tmp_path / "one.ckpt", 1, 1, state_dict_type=kind)
    first, second = workers(2).run(read_experts, tmp_path / "one.ckpt", 2, 2)
    assert {name: first[name] + second[name] for name in first} == expected


# ---------------------------------------------------------------------------------------------- refusals


def nested(layout):
    def make(seed):
        return {"lines": torch.nested.nested_tensor([torch.ones(2) * seed, torch.ones(3)], layout=layout)}

    return make


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_refused_before_training_unless_they_are_not_saved(tmp_path, layout):
    with pytest.raises(UserError, match="lines is a nested tensor, which cannot be loaded from a checkpoint"):
        trainer().fit(Odd(nested(layout), 1, frozen=False), data())
    module = Odd(lambda seed: {}, 1)
    module.register_buffer("lines", nested(layout)(1)["lines"], persistent=False)
    run = trainer()
    run.fit(module, data())
    run.save_checkpoint(tmp_path / "a.ckpt")


def fit_refused(name):
    module = Odd(lambda seed: {name: sparse_and_quantised(seed)[name]}, 1, frozen=False)
    try:
        trainer(2).fit(module, data())
    except UserError as error:
        return str(error), module.trainer.global_step
    return "went on", 0


def test_several_processes_refuse_sparse_and_quantised_tensors_before_training(workers):
    for name, kind in (("entries", "sparse_coo"), ("rows", "sparse_csr"), ("quantised", "quantised")):
        for message, steps in workers(2).run(fit_refused, name):
            assert message.startswith(f"{name} is a {kind} tensor, which cannot be exchanged by 2 processes; keep")
            assert steps == 0


def test_sparse_weights_are_refused_before_training():
    module = Odd(lambda seed: {}, 1)
    module.sparse = nn.Parameter(torch.eye(3).to_sparse())
    with pytest.raises(UserError, match="sparse is a sparse_coo tensor, which cannot be trained on shards"):
        trainer().fit(module, data())
