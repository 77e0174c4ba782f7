"""Sharded checkpoints of the trainer to Hugging Face, to one file and back, bit for bit, on one process."""

import json
import math
import re
import shutil
import threading
import uuid
import weakref
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_model import SMALL
from torch.utils.data import DataLoader

from olmoe_lightning import MoEStrategy, OLMoE
from olmoe_lightning.checkpoint import chunks, convert, read, read_config, read_tokenizer
from olmoe_lightning.checkpoint import directory as sharded
from olmoe_lightning.checkpoint.directory import INDEX, Range
from olmoe_lightning.checkpoint.foreign.hf_layout import native_shapes
from olmoe_lightning.checkpoint.foreign.sharded_dir import LazyRange, ShardedStore, write_sharded
from olmoe_lightning.checkpoint.meta import META, new_meta, read_meta
from olmoe_lightning.cli import main
from olmoe_lightning.data.tokenizer import BPETokenizer
from olmoe_lightning.tools.processes import Workers

# One that Hugging Face can express; experts of more than one process, and sizes that a chunk's does not divide.
CONFIG = SMALL.replace(vocab_size=264, num_experts=6, expert_hidden=12, max_seq_len=64)


def batches():
    tokens = torch.randint(0, 258, (2, 2, 17), generator=torch.Generator().manual_seed(0))
    return DataLoader([{"input_ids": t[:, :-1], "labels": t[:, 1:]} for t in tokens], batch_size=None)


def trainer(strategy, **options):
    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "use_distributed_sampler"),
        False,
    )
    return Trainer(**({"accelerator": "cpu", "devices": 1, "max_steps": 2, "strategy": strategy} | quiet | options))


def train(directory, experts=1, **changes):
    """Two steps on all processes, and a checkpoint."""
    module = OLMoE(CONFIG.replace(**changes), learning_rate=0.01, schedule="constant")
    running = trainer(MoEStrategy(expert_parallel_size=experts), devices=experts)
    running.fit(module, batches())
    running.save_checkpoint(directory)
    return None if experts > 1 else {name: value.detach() for name, value in module.built().state_dict().items()}


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def contents(directory):
    """All files but those that say when and by what they were written."""
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.suffix in (".safetensors", ".json")}


def cut_by_hand(directory, config, length=101, seed=0):
    """A checkpoint whose tensors lie in chunks of a few elements, in an order that is not that of the elements."""
    generator = torch.Generator().manual_seed(seed)
    state = {name: torch.randn(shape, generator=generator) for name, shape in native_shapes(config).items()}
    ranges = [
        Range(f"state_dict.model.{name}", tensor.numel(), start, tensor.view(-1)[start : start + length].clone())
        for name, tensor in state.items()
        for start in reversed(range(0, tensor.numel(), length))
    ]
    sharded.save(directory, ranges)
    shapes = {f"model.{name}": tensor.shape for name, tensor in state.items()}
    torch.save(new_meta({"config": config.to_dict()}, shapes, {}), directory / META)
    return state


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module")
def alone(folder):
    """What a trainer of one process wrote, and the weights that it had."""
    return folder / "alone", train(folder / "alone")


@pytest.fixture(scope="module")
def cut(folder):
    """A directory with many chunks per tensor, and what is in it."""
    return folder / "cut", cut_by_hand(folder / "cut", CONFIG)


# ------------------------------------------------------------------------------------------------- identity


def test_sharded_to_hugging_face_to_sharded_is_the_identity(alone, tmp_path):
    directory, state = alone
    convert(from_native=str(directory), to_hf=str(tmp_path / "hf"), max_shard_size="6KB")
    convert(from_hf=str(tmp_path / "hf"), to_sharded=str(tmp_path / "again"))
    convert(from_native=str(tmp_path / "again"), to_hf=str(tmp_path / "hf2"), max_shard_size="6KB")
    assert_same(read(str(tmp_path / "again"))[1], state)
    assert contents(tmp_path / "hf2") == contents(tmp_path / "hf")
    # What Hugging Face's configuration has no place for comes back as a default.
    assert read_config(str(tmp_path / "again")) == CONFIG.replace(max_seq_len=64, router_z_loss_coeff=0.001)


def test_sharded_to_one_file_to_sharded_is_the_identity(alone, tmp_path):
    directory, state = alone
    file = tmp_path / "weights.safetensors"
    convert(from_native=str(directory), to_safetensors=str(file))
    assert_same(load_file(file), state)  # with nothing but the library
    assert read_config(str(file)) == CONFIG
    convert(from_native=str(file), to_sharded=str(tmp_path / "again"))
    config, found = read(str(tmp_path / "again"))
    assert config == CONFIG
    assert_same(found, state)
    assert not list(tmp_path.glob(".*"))


def test_what_two_processes_wrote_is_converted_by_one(workers, tmp_path):
    workers(2).run(train, tmp_path / "two", 2)
    assert len(sharded.index_of(tmp_path / "two")["state_dict.model.blocks.0.moe.experts.w_down"].chunks) >= 2
    config, state = read(str(tmp_path / "two"))
    module = OLMoE(config)
    trainer(MoEStrategy()).validate(module, batches(), ckpt_path=tmp_path / "two", verbose=False)
    assert_same(state, module.built().state_dict())
    convert(from_native=str(tmp_path / "two"), to_hf=str(tmp_path / "hf"))
    assert_same(read(str(tmp_path / "hf"))[1], state)


def test_chunks_that_fit_no_row_are_joined(cut, tmp_path):
    directory, state = cut
    config, found = read(str(directory))
    assert config == CONFIG
    assert_same(found, state)
    convert(from_native=str(directory), to_hf=str(tmp_path / "hf"))
    assert_same(read(str(tmp_path / "hf"))[1], state)
    assert_same(OLMoE.load_from_checkpoint(directory).built().state_dict(), state)


@pytest.mark.parametrize(
    "index",
    [
        (),
        (slice(2, 3),),
        (slice(4, 5), slice(3, 9)),
        (slice(1, 5), slice(3, 9)),
        (slice(5, 6), slice(7, 8), slice(2, 4)),
        (slice(None), slice(None), slice(1, 2)),
        (slice(3, 3),),
    ],
)
def test_any_part_of_a_tensor_can_be_read(cut, index):
    directory, state = cut
    name = "blocks.1.moe.experts.w_down"
    store = ShardedStore(read_meta(directory))
    assert torch.equal(store.read(name, index), state[name][index or (slice(None),)])


def test_tied_embeddings_have_one_tensor(tmp_path):
    state = train(tmp_path / "a", tie_embeddings=True)
    assert "head.weight" not in state
    convert(from_native=str(tmp_path / "a"), to_hf=str(tmp_path / "hf"))
    convert(from_hf=str(tmp_path / "hf"), to_sharded=str(tmp_path / "b"))
    assert_same(read(str(tmp_path / "b"))[1], state)
    loaded = OLMoE.load_from_checkpoint(tmp_path / "b").built()
    assert_same(loaded.state_dict(), state)
    assert loaded.head_weight is loaded.embed.weight


def test_dtype_casts_all_but_the_selection_bias(tmp_path):
    config = CONFIG.replace(selection_bias=True)
    state = cut_by_hand(tmp_path / "a", config, 1000)
    wanted = {name: t if name.endswith("selection_bias") else t.bfloat16() for name, t in state.items()}
    convert(from_native=str(tmp_path / "a"), to_sharded=str(tmp_path / "b"), dtype="bfloat16")
    convert(from_native=str(tmp_path / "b"), to_safetensors=str(tmp_path / "b.safetensors"))
    assert_same(read(str(tmp_path / "b.safetensors"))[1], wanted)


def test_of_the_ranges_that_are_written_only_one_is_held(tmp_path, monkeypatch):
    written, held = [], []

    def value(start):
        held.append(sum(each() is not None for each in written))
        return torch.arange(start, start + 1000, dtype=torch.float64)

    ranges = [
        LazyRange(f"state_dict.{name}", 2000, start, 1000, torch.float32, lambda start=start: value(start))
        for name in "ab"
        for start in (0, 1000)
    ]
    write = chunks.write_chunk

    def watch(file, values):
        written.append(weakref.ref(values))
        write(file, values)

    (tmp_path / "a").mkdir()
    monkeypatch.setattr(chunks, "write_chunk", watch)
    write_sharded(tmp_path / "a", ranges, {}, lambda _: None)
    assert len(written) == 4
    assert held == [0, 0, 0, 0]
    for name in "ab":
        assert torch.equal(sharded.read_range(tmp_path / "a", f"state_dict.{name}", 0, 2000), torch.arange(2000.0))


# ------------------------------------------------------------------------------------------------- loading


def test_load_from_checkpoint_takes_a_directory_and_hyperparameters(alone):
    directory, state = alone
    module = OLMoE.load_from_checkpoint(directory, learning_rate=0.5, overrides={"recompute": "block"})
    assert_same(module.built().state_dict(), state)
    assert (module.learning_rate, module.schedule) == (0.5, "constant")
    assert module.config == CONFIG.replace(recompute="block")
    assert OLMoE.load_from_checkpoint(str(directory)).learning_rate == 0.01
    assert OLMoE.load_from_checkpoint(directory, map_location="meta").built().embed.weight.is_meta
    with pytest.raises(ValueError, match=r"another network.*top_k"):
        OLMoE.load_from_checkpoint(directory, overrides={"top_k": 3})
    with pytest.raises(ValueError, match="hparams_file"):
        OLMoE.load_from_checkpoint(directory, hparams_file="x.yaml")
    with pytest.raises(ValueError, match="must be a device"):
        OLMoE.load_from_checkpoint(directory, map_location={"cuda:0": "cpu"})


class WithMore(OLMoE):
    """A user's own module."""

    def __init__(self, *args, extra=3, **kwargs):
        super().__init__(*args, **kwargs)
        self.more = torch.nn.Linear(2, extra)


def test_a_module_of_ones_own_is_loaded_as_strictly_as_it_wants(alone, tmp_path):
    directory, state = alone
    with pytest.raises(ValueError, match=r"missing: more\.weight, missing: more\.bias"):
        WithMore.load_from_checkpoint(directory)
    assert_same(WithMore.load_from_checkpoint(directory, strict=False).built().state_dict(), state)
    module = WithMore(CONFIG)
    running = trainer(MoEStrategy())
    running.validate(module, batches(), verbose=False)
    running.save_checkpoint(tmp_path / "more")
    with pytest.raises(ValueError, match=r"unexpected: more\.weight"):
        OLMoE.load_from_checkpoint(tmp_path / "more")
    again = WithMore.load_from_checkpoint(tmp_path / "more", extra=3)
    assert torch.equal(again.more.weight, module.more.weight)
    with pytest.raises(ValueError, match=r"more\.weight is \[3, 2\] there, \[4, 2\] here"):
        WithMore.load_from_checkpoint(tmp_path / "more", strict=False, extra=4)
    assert read(str(tmp_path / "more"))[0] == CONFIG  # conversions are about the network


def test_files_still_go_through_lightning(alone, tmp_path):
    directory, state = alone
    module = OLMoE.load_from_checkpoint(directory)
    running = trainer("auto")
    running.strategy.connect(module)
    running.save_checkpoint(tmp_path / "last.ckpt")
    assert_same(OLMoE.load_from_checkpoint(tmp_path / "last.ckpt", weights_only=True).built().state_dict(), state)
    with (tmp_path / "last.ckpt").open("rb") as file:
        assert_same(OLMoE.load_from_checkpoint(file, weights_only=True).built().state_dict(), state)
    convert(from_native=str(tmp_path / "last.ckpt"), to_sharded=str(tmp_path / "again"))
    again = OLMoE.load_from_checkpoint(tmp_path / "again")
    assert_same(again.built().state_dict(), state)
    assert again.learning_rate == 0.01  # hyperparameters come along


def test_a_converted_directory_is_validated_like_the_one_that_was_trained(alone, tmp_path):
    directory, _ = alone
    convert(from_native=str(directory), to_sharded=str(tmp_path / "again"))
    losses = [
        trainer(MoEStrategy()).validate(OLMoE(CONFIG, init_seed=1), batches(), ckpt_path=path, verbose=False)
        for path in (directory, tmp_path / "again", None)
    ]
    assert losses[0] == losses[1] != losses[2]


def test_it_is_a_start_for_training_and_for_writing(alone, tmp_path, capsys):
    directory, state = alone
    assert_same(OLMoE(CONFIG, pretrained=str(directory)).built().state_dict(), state)
    file = str(tmp_path / "w.safetensors")
    assert main(["convert", "--from-native", str(directory), "--to-safetensors", file]) == 0
    for checkpoint in (str(directory), file):
        words = ["generate", "--checkpoint", checkpoint, "--prompt", "ab", "--max_new_tokens", "3"]
        assert main([*words, "--tokenizer", "byte"]) == 0
        assert "ab" in capsys.readouterr().out
        assert main(words) == 2
        assert "holds no tokenizer" in capsys.readouterr().err


def test_the_tokenizer_comes_along(tmp_path, capsys):
    state = {name: torch.zeros(shape) for name, shape in native_shapes(CONFIG).items()}
    shapes = {f"model.{name}": tensor.shape for name, tensor in state.items()}
    tokenizer = BPETokenizer.train(["a few words"], 258).to_json()
    for name, text in (("bpe", tokenizer), ("byte", "byte")):
        sharded.save(
            tmp_path / name,
            [Range(f"state_dict.model.{n}", t.numel(), 0, t.view(-1)) for n, t in state.items()],
        )
        meta = new_meta({"config": CONFIG.to_dict()}, shapes, {"tokenizer": text})
        torch.save(meta, tmp_path / name / META)
        convert(from_native=str(tmp_path / name), to_safetensors=str(tmp_path / f"{name}.safetensors"))
        convert(from_native=str(tmp_path / f"{name}.safetensors"), to_sharded=str(tmp_path / f"{name}2"))
        assert read_tokenizer(tmp_path / f"{name}2") == text
        assert main(["generate", "--checkpoint", str(tmp_path / f"{name}2"), "--max_new_tokens", "2"]) == 0
    convert(from_native=str(tmp_path / "bpe"), to_hf=str(tmp_path / "hf"))
    assert (tmp_path / "hf" / "tokenizer.json").read_text() == tokenizer
    convert(from_hf=str(tmp_path / "hf"), to_sharded=str(tmp_path / "bpe3"))
    assert read_tokenizer(tmp_path / "bpe3") == tokenizer


def test_token_ids_of_hugging_face_come_back(tmp_path):
    cut_by_hand(tmp_path / "a", CONFIG, 1000)
    convert(from_native=str(tmp_path / "a"), to_hf=str(tmp_path / "hf"))
    config = json.loads((tmp_path / "hf" / "config.json").read_text()) | {"eos_token_id": 5}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    for target in ({"to_sharded": "b"}, {"to_safetensors": "b.safetensors"}):
        ((option, name),) = target.items()
        convert(from_hf=str(tmp_path / "hf"), **{option: str(tmp_path / name)})
        convert(from_native=str(tmp_path / name), to_hf=str(tmp_path / f"hf-{name}"))
        assert json.loads((tmp_path / f"hf-{name}" / "config.json").read_text())["eos_token_id"] == 5


# ------------------------------------------------------------------------------------------------- what is refused


def test_targets_that_exist_and_names_that_mislead_are_refused(alone, tmp_path):
    directory, _ = alone
    file = tmp_path / "w.safetensors"
    convert(from_native=str(directory), to_safetensors=str(file))
    before = file.read_bytes()
    for target in ({"to_safetensors": str(file)}, {"to_sharded": str(directory)}):
        with pytest.raises(FileExistsError, match="choose a new"):
            convert(from_native=str(directory), **target)
    assert file.read_bytes() == before
    with pytest.raises(ValueError, match=r"must end in \.safetensors"):
        convert(from_native=str(directory), to_safetensors=str(tmp_path / "w"))
    with pytest.raises(ValueError, match="pass it as from_native"):
        convert(from_hf=str(directory), to_sharded=str(tmp_path / "x"))
    assert [path.name for path in tmp_path.iterdir()] == ["w.safetensors"]


def test_a_file_of_another_hand_is_refused(tmp_path):
    save_file({"norm.weight": torch.ones(3)}, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match="no configuration in its metadata"):
        read(str(tmp_path / "a.safetensors"))
    cut_by_hand(tmp_path / "b", CONFIG, 1000)
    convert(from_native=str(tmp_path / "b"), to_safetensors=str(tmp_path / "b.safetensors"))
    with safe_open(tmp_path / "b.safetensors", framework="pt") as handle:
        metadata = handle.metadata()
    tensors = load_file(tmp_path / "b.safetensors")
    del tensors["norm.weight"]
    save_file(tensors, tmp_path / "c.safetensors", metadata)
    with pytest.raises(ValueError, match=r"1 missing: norm\.weight"):
        read(str(tmp_path / "c.safetensors"))
    with pytest.raises(FileNotFoundError, match="does not exist"):
        read(str(tmp_path / "d.safetensors"))


@pytest.fixture
def broken(alone, tmp_path):
    copy = tmp_path / "broken"
    shutil.copytree(alone[0], copy)
    return copy


def every_way_in(path):
    yield lambda: convert(from_native=str(path), to_hf=str(path.parent / "out"))
    yield lambda: OLMoE.load_from_checkpoint(path)
    yield lambda: OLMoE(CONFIG, pretrained=str(path)).built()


def test_damage_is_found_before_anything_is_written(broken):
    chunks = next(broken.glob("*.distcp"))
    content = chunks.read_bytes()

    def refused(pattern):
        for way in every_way_in(broken):
            with pytest.raises(sharded.CorruptCheckpoint, match=pattern):
                way()
        assert [path.name for path in broken.parent.iterdir()] == ["broken"]

    chunks.write_bytes(content[: len(content) // 10])  # the weights come first
    refused(f"{chunks.name}, which is missing or cut off")
    chunks.unlink()
    refused(f"{chunks.name}, which is missing or cut off")
    chunks.write_bytes(content)
    for name, pattern in ((META, "is damaged, or not loaded"), (INDEX, "is damaged, or no index")):
        good = (broken / name).read_bytes()
        (broken / name).write_bytes(good[:40])
        refused(pattern)
        (broken / name).unlink()
        refused(f"needs {re.escape(META)} and")
        (broken / name).write_bytes(good)
    meta = torch.load(broken / META, weights_only=True)
    meta["moe_checkpoint"]["shapes"]["model.norm.weight"] = [17]
    torch.save(meta, broken / META)
    refused(r"model\.norm\.weight has 16 elements in a row, its shape \[17\] 17")
    meta["moe_checkpoint"]["shapes"] = {"model.norm.weight": "?"}
    torch.save(meta, broken / META)
    refused("does not say what shapes")


def test_flipped_bytes_are_found_while_reading(broken):
    chunks = next(broken.glob("*.distcp"))
    content = bytearray(chunks.read_bytes())
    for at in range(0, len(content), 64):
        content[at] ^= 0xFF
    chunks.write_bytes(content)
    with pytest.raises(sharded.CorruptCheckpoint, match="damaged"):
        read(str(broken))
    with pytest.raises(sharded.CorruptCheckpoint, match="damaged"):
        convert(from_native=str(broken), to_sharded=str(broken.parent / "out"))
    assert [path.name for path in broken.parent.iterdir()] == ["broken"]


def test_the_weights_of_another_configuration_are_listed(tmp_path):
    cut_by_hand(tmp_path / "a", CONFIG, 1000)
    meta = torch.load(tmp_path / "a" / META, weights_only=True)
    meta["hyper_parameters"]["config"] |= {"num_experts": 5, "tie_embeddings": True}
    torch.save(meta, tmp_path / "a" / META)
    with pytest.raises(ValueError, match=r"(?s)1 unexpected: head\.weight.*6 misshapen"):
        convert(from_native=str(tmp_path / "a"), to_hf=str(tmp_path / "x"))
    meta["hyper_parameters"] = {"config": "tiny"}
    torch.save(meta, tmp_path / "a" / META)
    with pytest.raises(ValueError, match="not a checkpoint of OLMoE"):
        read_config(str(tmp_path / "a"))


# ------------------------------------------------------------------------------------------------- memory

LARGE = CONFIG.replace(d_model=512, head_dim=64, num_heads=8, num_experts=8, expert_hidden=1024, num_layers=5)


def own_memory():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def memory_grown(call, options):
    """Most memory of its own that this process has during a call, beyond what it had before; sampled every 2 ms."""
    before, peak, done = own_memory(), [0], threading.Event()

    def sample():
        while not done.wait(0.002):
            peak[0] = max(peak[0], own_memory())

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    call(**options)
    done.set()
    thread.join()
    return peak[0] - before


def grown_in_a_new_process(small, call, options):
    """Memory that an older one has freed and kept would hide what is needed; imports are made before it is measured."""
    pool = Workers(1)
    try:
        pool.run(read, directory=str(small))
        for number, kind in enumerate(("to_safetensors", "to_sharded")):
            target = small.parent / f"{uuid.uuid4().hex}{'' if number else '.safetensors'}"
            pool.run(convert, from_native=str(small), **{kind: str(target)})
        return pool.run(memory_grown, call, options)[0]
    finally:
        pool.close()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc, which only Linux has")
def test_memory_is_that_of_a_few_blocks(tmp_path):
    """Of a model with 265 MB in chunks of 4 MiB."""
    chunk = 2**20
    ranges, shapes = [], native_shapes(LARGE)
    for name, shape in shapes.items():
        size = math.prod(shape)
        for start in range(0, size, chunk):
            length = min(chunk, size - start)
            make = lambda length=length: torch.zeros(length)  # noqa: E731
            ranges.append(LazyRange(f"state_dict.model.{name}", size, start, length, torch.float32, make))
    meta = new_meta({"config": LARGE.to_dict()}, {f"model.{name}": shape for name, shape in shapes.items()}, {})
    (tmp_path / "a").mkdir()
    write_sharded(tmp_path / "a", ranges, meta, lambda _: None)
    source, total = str(tmp_path / "a"), 4 * LARGE.num_params
    assert total > 250e6
    single = {"from_native": source, "to_safetensors": str(tmp_path / "a.safetensors")}
    again = {"from_native": source, "to_sharded": str(tmp_path / "b")}
    cut_by_hand(tmp_path / "small", CONFIG, 1000)
    conversions = [grown_in_a_new_process(tmp_path / "small", convert, options) for options in (single, again)]
    in_memory = grown_in_a_new_process(tmp_path / "small", read, {"directory": source})
    assert in_memory > 0.9 * total  # negative control: reading it all is seen
    for grown in conversions:
        # A block of at most 32 MiB and a copy of it are in use. What the allocator keeps of earlier blocks differs
        # from machine to machine, so the bound is what it means: the model is never in memory.
        assert grown < 0.75 * total, grown
