"""A sharded checkpoint of a hostile hand: each way in refuses it, and nothing of it is executed."""

import os
import pickle
import shutil

import pytest
import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from olmoe_lightning import ModelConfig, MoEStrategy, OLMoE
from olmoe_lightning.checkpoint import convert, load_pretrained, read, read_config, read_tokenizer
from olmoe_lightning.checkpoint import directory as sharded
from olmoe_lightning.checkpoint.directory import INDEX, CorruptCheckpoint, Range
from olmoe_lightning.checkpoint.foreign.hf_layout import native_shapes
from olmoe_lightning.checkpoint.meta import META, new_meta
from olmoe_lightning.model import Transformer

CONFIG = ModelConfig(
    vocab_size=8,
    d_model=4,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=4,
    num_experts=2,
    top_k=1,
    expert_hidden=4,
)


def validate(path):
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        strategy=MoEStrategy(),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    batches = DataLoader([{"input_ids": tokens, "labels": tokens}], batch_size=None)
    trainer.validate(OLMoE(CONFIG), batches, ckpt_path=path, verbose=False)


WAYS = {
    "validate": validate,
    "convert": lambda path: convert(from_native=str(path), to_hf=str(path.parent / "out")),
    "read": lambda path: read(str(path)),
    "load_from_checkpoint": lambda path: OLMoE.load_from_checkpoint(path),
    "load_pretrained": lambda path: load_pretrained(Transformer(CONFIG), str(path)),
}


class Call:
    """Calls a function when it is unpickled."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    path = tmp_path_factory.mktemp("safety") / "good"
    state = {f"model.{name}": torch.ones(shape) for name, shape in native_shapes(CONFIG).items()}
    sharded.save(path, [Range(f"state_dict.{name}", t.numel(), 0, t.view(-1)) for name, t in state.items()])
    shapes = {name: t.shape for name, t in state.items()}
    torch.save(new_meta({"config": CONFIG.to_dict()}, shapes, {}), path / META)
    return path


@pytest.fixture
def bad(good, tmp_path):
    path = tmp_path / "bad"
    shutil.copytree(good, path)
    return path


@pytest.fixture(params=WAYS)
def way(request):
    return WAYS[request.param]


def index_of(path):
    with (path / INDEX).open("rb") as file:
        return pickle.load(file)


def put_index(path, metadata):
    (path / INDEX).write_bytes(pickle.dumps(metadata))


def test_the_checkpoint_is_good_before_it_is_made_bad(good, tmp_path, way):
    copy = tmp_path / "good"
    shutil.copytree(good, copy)
    put_index(copy, index_of(copy))
    way(copy)


def test_an_index_that_calls_something_is_refused(bad, way):
    trace = bad.parent / "executed"
    metadata = index_of(bad)
    metadata.planner_data = Call(os.mkdir, str(trace))
    put_index(bad, metadata)
    with pytest.raises(CorruptCheckpoint, match=r"posix\.mkdir|os\.mkdir|nt\.mkdir"):
        way(bad)
    assert not trace.exists()
    pickle.loads((bad / INDEX).read_bytes())
    assert trace.exists()  # it was no blank


def test_a_dictionary_with_an_object_is_refused(bad):
    trace = bad.parent / "executed"
    meta = torch.load(bad / META, weights_only=True)
    torch.save(meta | {"callbacks": Call(os.mkdir, str(trace))}, bad / META)
    for way in (*WAYS.values(), lambda path: read_config(str(path)), read_tokenizer):
        with pytest.raises(CorruptCheckpoint, match="without trust"):
            way(bad)
    assert not trace.exists()
    OLMoE.load_from_checkpoint(bad, weights_only=False)  # who trusts it gets what it does
    assert trace.exists()


def test_a_chunk_with_an_object_is_refused(bad, way):
    trace = bad.parent / "executed"
    (chunks,) = bad.glob("*.distcp")
    torch.save(Call(os.mkdir, str(trace)), chunks)
    metadata = index_of(bad)
    for info in metadata.storage_data.values():
        info.offset, info.length = 0, chunks.stat().st_size
    put_index(bad, metadata)
    with pytest.raises(CorruptCheckpoint, match="damaged"):
        way(bad)
    assert not trace.exists()


@pytest.mark.parametrize("place", ["../outside.distcp", "{parent}/outside.distcp", "link.distcp"])
def test_a_file_outside_of_the_directory_is_not_read(bad, way, place):
    (chunks,) = bad.glob("*.distcp")
    outside = bad.parent / "outside.distcp"
    shutil.move(chunks, outside)
    (bad / "link.distcp").symlink_to(outside)
    metadata = index_of(bad)
    for info in metadata.storage_data.values():
        info.relative_path = place.format(parent=bad.parent)
    put_index(bad, metadata)
    with pytest.raises(CorruptCheckpoint, match="outside of the checkpoint"):
        way(bad)


def test_a_size_that_no_memory_has_is_refused(bad, way):
    metadata = index_of(bad)
    entry = metadata.state_dict_metadata["state_dict.model.norm.weight"]
    entry.size = torch.Size([2**60])
    entry.chunks[0].sizes = torch.Size([2**60])
    put_index(bad, metadata)
    meta = torch.load(bad / META, weights_only=True)
    meta["moe_checkpoint"]["shapes"]["model.norm.weight"] = [2**60]
    torch.save(meta, bad / META)
    with pytest.raises(ValueError, match=r"norm\.weight"):
        way(bad)


def test_values_of_the_wrong_kind_are_refused_with_a_sentence(bad):
    meta = torch.load(bad / META, weights_only=True)
    for change in (
        {"moe_checkpoint": 3},
        {"moe_checkpoint": meta["moe_checkpoint"] | {"format": "1"}},
        {"moe_checkpoint": meta["moe_checkpoint"] | {"format": 99}},
        {"moe_checkpoint": meta["moe_checkpoint"] | {"shapes": {"model.norm.weight": [-4]}}},
        {"hyper_parameters": 3},
        {"hyper_parameters": {"config": {"vocab_size": 8}}},
        {"hyper_parameters": {"config": CONFIG.to_dict() | {"vocab_size": "8"}}},
    ):
        torch.save(meta | change, bad / META)
        with pytest.raises(ValueError, match="bad"):
            WAYS["convert"](bad)
        with pytest.raises((ValueError, TypeError), match=r"bad|vocab_size|ModelConfig lacks|not supported between"):
            WAYS["load_from_checkpoint"](bad)
