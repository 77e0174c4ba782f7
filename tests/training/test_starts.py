"""Starts from weights in every format: a process builds, reads, trains and saves its own layers and experts only."""

import pytest
import torch
from safetensors.torch import save_file
from strategy_lab import quiet, sentences
from test_ownership import CONFIG, EXPRESSIBLE, batches_of
from torch.utils._python_dispatch import TorchDispatchMode

from olmoe_lightning import MoEStrategy, OLMoE
from olmoe_lightning.checkpoint import convert, read, upcycle, write
from olmoe_lightning.checkpoint.directory import read_range
from olmoe_lightning.checkpoint.foreign.hf_layout import hf_fused_name, hf_tensors
from olmoe_lightning.checkpoint.foreign.safetensors_dir import SafetensorsReader
from olmoe_lightning.checkpoint.foreign.sharded_dir import ShardedStore
from olmoe_lightning.checkpoint.foreign.sources import MemoryStore
from olmoe_lightning.checkpoint.meta import MODEL, is_sharded

DENSE = CONFIG.replace(
    num_experts=0, top_k=0, expert_hidden=0, num_dense_layers=CONFIG.num_layers, dense_hidden=48, selection_bias=False
)
STORES = (SafetensorsReader, ShardedStore, MemoryStore)


def fuse(folder, config):
    """The experts of a layer as one tensor, as transformers 5 has them."""
    _, state = read(str(folder))
    fused = {}
    for native, parts in hf_tensors(config).items():
        name = hf_fused_name(native)
        fused |= {name: state[native]} if name else {part.name: state[native][part.index].clone() for part in parts}
    save_file(fused, folder / "model.safetensors")


def trained_checkpoint(path, config, kind):
    trainer = quiet(MoEStrategy(state_dict_type=kind), devices=1, max_steps=1)
    trainer.fit(OLMoE(config, init_seed=7, learning_rate=1e-2), batches_of(1, sentences(1)))
    trainer.save_checkpoint(path)


def weights_in(folder):
    """Checkpoints of every format, by name: the configuration and the path."""
    hf = EXPRESSIBLE.replace(balance_loss_coeff=0.0)
    found = {name: (hf, folder / name) for name in ("hugging face", "hugging face, fused")}
    for _, path in found.values():
        write(OLMoE(hf, init_seed=7).built().state_dict(), hf, str(path), hf=True)
    fuse(folder / "hugging face, fused", hf)
    write(OLMoE(DENSE, init_seed=7).built().state_dict(), DENSE, str(folder / "dense"))
    upcycle(str(folder / "dense"), str(folder / "upcycled"), 4, 2)
    upcycled = read(str(folder / "upcycled"))[0]
    found["upcycled"] = upcycled, folder / "upcycled"
    for name, options in {
        "upcycled, one file": {"to_safetensors": str(folder / "upcycled.safetensors")},
        "upcycled, sharded": {"to_sharded": str(folder / "upcycled.ckpt")},
    }.items():
        convert(from_native=str(folder / "upcycled"), **options)
        found[name] = upcycled, folder / next(iter(options.values()))
    for name, kind in (("a directory of a run", "sharded"), ("a file of a run", "full")):
        found[name] = CONFIG, folder / name
        trained_checkpoint(folder / name, CONFIG, kind)
    return found


class Allocated(TorchDispatchMode):
    """Counts bytes of the memory that is taken on the CPU for tensors without values."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if "empty" in str(function) and made.device.type == "cpu":
            self.bytes += made.nbytes
        return made


class Started(OLMoE):
    """Looks at what it takes to build the network."""

    def configure_model(self):
        if self.model is not None:
            super().configure_model()
            return
        self.read = 0
        originals = {store: store.read for store in STORES}

        def counted(original):
            def read_and_count(store, *args):
                values = original(store, *args)
                self.read += values.nbytes
                return values

            return read_and_count

        for store, original in originals.items():
            store.read = counted(original)
        try:
            with Allocated() as allocated:
                super().configure_model()
        finally:
            for store, original in originals.items():
                store.read = original
        self.allocated = allocated.bytes


def start(config, path, pipeline, experts, saved):
    """What a process has taken and read, in bytes of its own weights; and which tensors are not what they should be."""
    strategy = MoEStrategy(pipeline_parallel_size=pipeline, expert_parallel_size=experts, num_microbatches=2)
    trainer = quiet(strategy, devices=pipeline * experts, max_steps=1)
    module = Started(config, pretrained=str(path), learning_rate=1e-2)
    begun = {}
    module.on_train_start = lambda: begun.update({n: p.detach().clone() for n, p in module.named_parameters()})
    trainer.fit(module, batches_of(experts, sentences(2)))
    trainer.save_checkpoint(saved)
    ownership, wrong = strategy.ownership(), []
    _, state = read(str(path))
    moved = False
    for name, parameter in module.named_parameters():
        first = ownership.start(parameter)
        source = state[name.removeprefix("model.")].reshape(-1)[first : first + parameter.numel()]
        written = read_range(saved, MODEL + name, first, first + parameter.numel())
        if not torch.equal(begun[name].reshape(-1), source):
            wrong.append(f"{name} at the start")
        if not torch.equal(parameter.detach().reshape(-1), written):
            wrong.append(f"{name} as saved")
        moved |= not torch.equal(written, source)
    own = sum(value.nbytes for value in module.built().state_dict().values())
    return module.allocated / own, module.read / own, wrong, moved, own


@pytest.mark.parametrize(("pipeline", "experts"), [(2, 1), (1, 2)])
def test_weights_of_every_format_are_built_read_trained_and_saved_in_parts(workers, tmp_path, pipeline, experts):
    for name, (config, path) in weights_in(tmp_path).items():
        whole = sum(value.nbytes for value in OLMoE(config).built().state_dict().values())
        ranks = workers(2).run(start, config, path, pipeline, experts, tmp_path / f"saved from {name}")
        for allocated, has_read, wrong, moved, own in ranks:
            assert wrong == [], name
            assert moved, name
            assert own < 0.8 * whole, name
            blocks = 1.0 if is_sharded(path) else 0.0  # each is read into memory of its own, and let go
            assert allocated == pytest.approx(1.0 + blocks, abs=0.05), name
            assert has_read == pytest.approx(1.0, abs=0.05), name


def built_whole(path, saved):
    """The same with a network that each process builds whole, and cuts then."""
    module = Started.configure_model

    def build(self):
        with Allocated() as allocated:
            self.model = OLMoE(CONFIG, pretrained=str(path)).built()
        module(self)
        self.allocated, self.read = allocated.bytes, 0

    Started.configure_model = build
    try:
        return start(CONFIG, path, 2, 1, saved)
    finally:
        Started.configure_model = module


def test_the_measure_sees_a_network_that_is_built_whole(workers, tmp_path):
    write(OLMoE(CONFIG, init_seed=7).built().state_dict(), CONFIG, str(tmp_path / "weights"))
    for allocated, _, wrong, moved, _ in workers(2).run(built_whole, tmp_path / "weights", tmp_path / "saved"):
        assert (wrong, moved) == ([], True)
        assert allocated > 1.3
