"""Weights in and out, bit for bit; and every wrong checkpoint is one complete error before anything is written."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import OlmoeConfig, OlmoeForCausalLM

from olmoe_lightning import OLMoE
from olmoe_lightning.checkpoint import convert, read, read_config, write
from olmoe_lightning.checkpoint.foreign.hf_layout import hf_tensors, native_shapes
from olmoe_lightning.checkpoint.foreign.huggingface import _new_directory
from olmoe_lightning.config import ModelConfig

# More than ten experts, so that an order by text (10 before 2) shows; grouped queries, so that q, k and v differ.
SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 12,
    "num_experts_per_tok": 3,
    "eos_token_id": 5,
    "pad_token_id": None,
}


def save_hf(directory: Path, dtype: torch.dtype = torch.float32, **changes: object) -> OlmoeForCausalLM:
    torch.manual_seed(0)
    model = OlmoeForCausalLM(OlmoeConfig(**(SIZES | changes))).to(dtype)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)  # norms too, or a swap of two of them would not show
    model.save_pretrained(directory, max_shard_size="8KB")
    return model


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in sorted(directory.glob("*.safetensors")) for k, v in load_file(file).items()}


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.fixture(scope="module")
def hf_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("hf") / "source"
    save_hf(directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        (directory / name).write_text(json.dumps({"is": name}))
    return directory


@pytest.fixture
def broken(hf_dir, tmp_path):
    """A copy of the checkpoint as one file, and a function that rewrites its tensors."""
    directory = tmp_path / "broken"
    directory.mkdir()
    shutil.copy(hf_dir / "config.json", directory)

    def rewrite(change):
        tensors = tensors_of(hf_dir)
        change(tensors)
        save_file({k: v.contiguous() for k, v in tensors.items()}, directory / "model.safetensors")
        return str(directory)

    return rewrite


# ------------------------------------------------------------------------------------------------- identity


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("max_shard_size", ["4GB", "6KB"])
def test_hf_to_native_to_hf_is_the_identity(tmp_path, dtype, max_shard_size):
    model = save_hf(tmp_path / "hf", dtype)
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 3  # several shards in
    convert(from_hf=str(tmp_path / "hf"), to_native=str(tmp_path / "native"), max_shard_size=max_shard_size)
    convert(from_native=str(tmp_path / "native"), to_hf=str(tmp_path / "again"), max_shard_size=max_shard_size)
    assert_same(tensors_of(tmp_path / "again"), tensors_of(tmp_path / "hf"))

    loaded, info = OlmoeForCausalLM.from_pretrained(tmp_path / "again", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert loaded.dtype == dtype
    assert_same(loaded.state_dict(), model.state_dict())
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert (config["eos_token_id"], config["pad_token_id"]) == (5, None)


def test_native_to_hf_to_native_is_the_identity(tmp_path):
    config = ModelConfig(
        vocab_size=40,
        d_model=16,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        num_experts=11,
        top_k=1,
        expert_hidden=6,
    )
    state = {name: torch.randn(shape) for name, shape in native_shapes(config).items()}
    write(state, config, str(tmp_path / "native"), max_shard_size="6KB")
    convert(from_native=str(tmp_path / "native"), to_hf=str(tmp_path / "hf"))
    convert(from_hf=str(tmp_path / "hf"), to_native=str(tmp_path / "again"))
    assert_same(tensors_of(tmp_path / "again"), state)
    assert read_config(str(tmp_path / "again")) == read_config(str(tmp_path / "hf")) == config


def test_rows_stand_in_the_documented_order(hf_dir):
    theirs = tensors_of(hf_dir)
    config, ours = read(str(hf_dir))
    assert {name: tuple(t.shape) for name, t in ours.items()} == native_shapes(config)
    q, k, v = (theirs[f"model.layers.1.self_attn.{x}_proj.weight"] for x in "qkv")
    assert torch.equal(ours["blocks.1.attn.qkv.weight"], torch.cat([q, k, v]))
    for e in (0, 2, 10, 11):
        expert = f"model.layers.1.mlp.experts.{e}."
        gate, up = theirs[expert + "gate_proj.weight"], theirs[expert + "up_proj.weight"]
        assert torch.equal(ours["blocks.1.moe.experts.w_gate_up"][e], torch.cat([gate, up]))
        assert torch.equal(ours["blocks.1.moe.experts.w_down"][e], theirs[expert + "down_proj.weight"])


def test_fused_experts_of_transformers_5_read_like_single_ones(hf_dir, tmp_path):
    fused = tmp_path / "fused"
    fused.mkdir()
    shutil.copy(hf_dir / "config.json", fused)
    live = OlmoeForCausalLM.from_pretrained(hf_dir).state_dict()
    assert "model.layers.0.mlp.experts.gate_up_proj" in live
    save_file(live, fused / "model.safetensors")
    assert_same(read(str(fused))[1], read(str(hf_dir))[1])
    convert(from_hf=str(fused), to_hf=str(tmp_path / "split"))
    assert_same(tensors_of(tmp_path / "split"), tensors_of(hf_dir))


def test_a_checkpoint_that_the_trainer_wrote_becomes_a_hugging_face_model(tmp_path):
    config = ModelConfig.preset("tiny", num_layers=1, num_experts=11, expert_hidden=8, qk_norm="flat")
    module = OLMoE(config)
    trainer = Trainer(accelerator="cpu", logger=False, enable_model_summary=False)
    module.configure_model()
    trainer.strategy.connect(module)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    convert(from_native=str(tmp_path / "last.ckpt"), to_hf=str(tmp_path / "hf"))
    assert_same(read(str(tmp_path / "hf"))[1], module.built().state_dict())
    tokens = torch.randint(0, config.vocab_size, (1, 16))
    with torch.no_grad():
        theirs = OlmoeForCausalLM.from_pretrained(tmp_path / "hf")(tokens).logits
        ours = OLMoE(config, pretrained=str(tmp_path / "hf"), init_seed=1)(tokens)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)  # rounding of fp32, as in the parity tests


def test_lightning_checkpoint_is_a_native_source(hf_dir, tmp_path):
    config, state = read(str(hf_dir))
    path = tmp_path / "last.ckpt"
    lightning = {
        "state_dict": {f"model.{name}": tensor for name, tensor in state.items()},
        "hyper_parameters": {"config": config.to_dict(), "lr": 1e-3},
        "optimizer_states": [{"state": {0: {"exp_avg": torch.zeros(3)}}}],
    }
    torch.save(lightning, path)
    assert read_config(str(path)) == config
    convert(from_native=str(path), to_hf=str(tmp_path / "hf"))
    assert_same(tensors_of(tmp_path / "hf"), tensors_of(hf_dir))

    del lightning["state_dict"]["model.norm.weight"]
    torch.save(lightning, path)
    with pytest.raises(ValueError, match=r"1 missing: norm\.weight"):
        convert(from_native=str(path), to_hf=str(tmp_path / "no"))


def test_every_native_model_moves_between_native_directories(tmp_path):
    """Also what Hugging Face cannot express; a cast leaves the selection bias in fp32."""
    config = ModelConfig.preset(
        "tiny-64e",
        vocab_size=32,
        d_model=16,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        num_experts=4,
        expert_hidden=6,
        shared_hidden=4,
        dense_hidden=10,
        selection_bias=True,
    )
    state = {name: torch.randn(shape) for name, shape in native_shapes(config).items()}
    write(state, config, str(tmp_path / "a"))
    convert(from_native=str(tmp_path / "a"), to_native=str(tmp_path / "b"), dtype="bfloat16", max_shard_size=2000)
    read_back, tensors = read(str(tmp_path / "b"))
    assert read_back == config
    bias = "blocks.1.moe.router.selection_bias"
    assert_same(tensors, {n: t if n == bias else t.bfloat16() for n, t in state.items()})
    with pytest.raises(ValueError, match="a shared expert"):
        convert(from_native=str(tmp_path / "a"), to_hf=str(tmp_path / "hf"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]


def test_tied_embeddings_have_one_tensor_also_when_the_source_has_two(tmp_path):
    save_hf(tmp_path / "hf", tie_word_embeddings=True)
    theirs = tensors_of(tmp_path / "hf")
    assert "lm_head.weight" not in theirs
    convert(from_hf=str(tmp_path / "hf"), to_native=str(tmp_path / "native"))
    convert(from_native=str(tmp_path / "native"), to_hf=str(tmp_path / "again"))
    assert_same(tensors_of(tmp_path / "again"), theirs)
    again = OlmoeForCausalLM.from_pretrained(tmp_path / "again")
    assert again.lm_head.weight is again.model.embed_tokens.weight

    twice = tmp_path / "twice"
    twice.mkdir()
    shutil.copy(tmp_path / "hf" / "config.json", twice)
    embed = theirs["model.embed_tokens.weight"]
    save_file(theirs | {"lm_head.weight": embed.clone()}, twice / "model.safetensors")
    assert_same(read(str(twice))[1], read(str(tmp_path / "hf"))[1])
    save_file(theirs | {"lm_head.weight": embed + 1}, twice / "model.safetensors")
    with pytest.raises(ValueError, match=r"lm_head\.weight is not the embedding"):
        read(str(twice))
    del theirs["model.embed_tokens.weight"]
    save_file(theirs, twice / "model.safetensors")
    with pytest.raises(ValueError, match=r"1 missing: model\.embed_tokens\.weight"):
        read(str(twice))


def test_dtype_casts_on_the_way(hf_dir, tmp_path):
    convert(from_hf=str(hf_dir), to_hf=str(tmp_path / "half"), dtype="bfloat16")
    assert_same(tensors_of(tmp_path / "half"), {n: t.bfloat16() for n, t in tensors_of(hf_dir).items()})
    assert OlmoeForCausalLM.from_pretrained(tmp_path / "half").dtype == torch.bfloat16


# ------------------------------------------------------------------------------------------------- the files


def test_tokenizer_files_come_along_both_ways(hf_dir, tmp_path):
    convert(from_hf=str(hf_dir), to_native=str(tmp_path / "native"))
    convert(from_native=str(tmp_path / "native"), to_hf=str(tmp_path / "hf"))
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json"):
        assert (tmp_path / "hf" / name).read_bytes() == (hf_dir / name).read_bytes()


def test_shards_keep_their_limit_and_the_index_is_complete(hf_dir, tmp_path):
    convert(from_hf=str(hf_dir), to_native=str(tmp_path / "native"), max_shard_size="12KB")
    files = sorted((tmp_path / "native").glob("*.safetensors"))
    index = json.loads((tmp_path / "native" / "model.safetensors.index.json").read_text())
    assert {file.name for file in files} == set(index["weight_map"].values())
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert index["metadata"]["total_parameters"] == read_config(str(hf_dir)).num_params
    assert index["metadata"]["total_size"] == 4 * read_config(str(hf_dir)).num_params
    for file in files:
        with safe_open(file, framework="pt") as handle:
            assert handle.metadata() == {"format": "pt"}
            assert {name for name, f in index["weight_map"].items() if f == file.name} == set(handle.keys())
        tensors = load_file(file)
        assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= 12_000


@pytest.mark.parametrize("size", ["4 parsecs", "0", "-1", "GB", ""])
def test_shard_sizes_that_mean_nothing_are_refused(hf_dir, tmp_path, size):
    with pytest.raises(ValueError, match="max_shard_size"):
        convert(from_hf=str(hf_dir), to_native=str(tmp_path / "x"), max_shard_size=size)


def test_an_existing_target_is_refused_and_an_empty_directory_is_used(hf_dir, tmp_path):
    target = tmp_path / "target"
    target.mkdir()
    convert(from_hf=str(hf_dir), to_native=str(target))
    before = sorted(target.iterdir())
    with pytest.raises(FileExistsError, match="choose a new one"):
        convert(from_hf=str(hf_dir), to_native=str(target))
    assert sorted(target.iterdir()) == before
    assert list(tmp_path.iterdir()) == [target]


def test_a_failure_while_writing_leaves_nothing_behind(tmp_path):
    def write_half_of_it():
        with _new_directory(tmp_path / "deep" / "target", 10) as directory:
            (directory / "model.safetensors").write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_half_of_it()
    assert list((tmp_path / "deep").iterdir()) == []


def test_a_disk_that_is_too_small_is_found_before_writing(tmp_path):
    with pytest.raises(OSError, match="are free on that disk"), _new_directory(tmp_path / "target", 10**18):
        raise AssertionError("must not get here")
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------------- wrong sources


def test_missing_unexpected_and_misshapen_tensors_are_listed_together_before_writing(broken, tmp_path):
    def change(tensors):
        del tensors["model.layers.1.mlp.experts.10.up_proj.weight"]
        del tensors["model.norm.weight"]
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(16)
        tensors["model.layers.0.mlp.gate.weight"] = torch.zeros(13, 16)
        tensors["lm_head.weight"] = torch.zeros(40, 16, dtype=torch.int8)

    source = broken(change)
    with pytest.raises(ValueError) as error:
        convert(from_hf=source, to_native=str(tmp_path / "out"))
    for line in (
        "2 missing: model.layers.1.mlp.experts.10.up_proj.weight, model.norm.weight",
        "1 unexpected: model.layers.0.self_attn.q_proj.bias",
        "1 misshapen: model.layers.0.mlp.gate.weight [13, 16] instead of [12, 16]",
        "1 of a type that is not read: lm_head.weight (I8)",
    ):
        assert line in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["broken"]


def test_a_long_list_of_problems_is_shortened_with_its_count(broken, tmp_path):
    def change(tensors):
        for name in [name for name in tensors if ".experts." in name]:
            del tensors[name]

    with pytest.raises(ValueError, match=r"72 missing: .* and 52 more") as error:
        read(broken(change))
    assert str(error.value).count("proj.weight") == 20


def test_types_that_differ_within_one_tensor_need_a_choice(broken, tmp_path):
    def change(tensors):
        name = "model.layers.0.self_attn.k_proj.weight"
        tensors[name] = tensors[name].bfloat16()

    source = broken(change)
    with pytest.raises(ValueError, match=r"bfloat16, torch\.float32.*q_proj"):
        convert(from_hf=source, to_native=str(tmp_path / "out"))
    convert(from_hf=source, to_native=str(tmp_path / "out"), dtype="float32")
    convert(from_hf=source, to_hf=str(tmp_path / "hf"))  # here each stays a tensor of its own
    assert_same(tensors_of(tmp_path / "hf"), tensors_of(Path(source)))


def test_incomplete_and_damaged_checkpoints_name_the_file(hf_dir, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(hf_dir, copy)
    shard = sorted(copy.glob("*.safetensors"))[1]
    content = shard.read_bytes()
    shard.write_bytes(content[:-100])
    with pytest.raises(ValueError, match=f"{shard.name}.*cannot be read"):
        read(str(copy))
    shard.unlink()
    with pytest.raises(FileNotFoundError, match=f"{shard.name} is missing"):
        read(str(copy))
    shard.write_bytes(content)
    index = copy / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    values["weight_map"]["model.norm.weight"] = next(
        f.name for f in copy.glob("*.safetensors") if f.name != values["weight_map"]["model.norm.weight"]
    )
    index.write_text(json.dumps(values))
    with pytest.raises(ValueError, match=r"not in the shard that the index names: model\.norm\.weight"):
        read(str(copy))
    index.write_text("{")
    with pytest.raises(ValueError, match="is not an index"):
        read(str(copy))


def test_wrong_places_get_advice(hf_dir, tmp_path):
    native = str(tmp_path / "native")
    convert(from_hf=str(hf_dir), to_native=native)
    out = str(tmp_path / "out")
    with pytest.raises(ValueError, match="from_native"):
        convert(from_hf=native, to_hf=out)
    with pytest.raises(ValueError, match="from_hf"):
        convert(from_native=str(hf_dir), to_hf=out)
    with pytest.raises(FileNotFoundError, match="hf download allenai/OLMoE-1B-7B-0924"):
        convert(from_hf="allenai/OLMoE-1B-7B-0924", to_native=out)
    with pytest.raises(FileNotFoundError, match=r"config\.json is missing"):
        convert(from_hf=str(tmp_path), to_native=out)

    pickled = tmp_path / "pickled"
    pickled.mkdir()
    shutil.copy(hf_dir / "config.json", pickled)
    with pytest.raises(FileNotFoundError, match="neither"):
        convert(from_hf=str(pickled), to_native=out)
    (pickled / "pytorch_model-00001-of-00002.bin").touch()
    with pytest.raises(FileNotFoundError, match="save_pretrained"):
        convert(from_hf=str(pickled), to_native=out)

    config = json.loads((tmp_path / "native" / "config.json").read_text())
    (tmp_path / "native" / "config.json").write_text(json.dumps(config | {"version": 9}))
    with pytest.raises(ValueError, match="version 9"):
        read(native)


class Arbitrary:
    pass


def test_a_checkpoint_file_that_is_not_ours_is_refused(tmp_path):
    path = tmp_path / "x.ckpt"
    out = str(tmp_path / "out")
    torch.save({"state_dict": {}, "hyper_parameters": {"lr": 1.0}}, path)
    with pytest.raises(ValueError, match="lacks state_dict or hyper_parameters"):
        convert(from_native=str(path), to_hf=out)
    torch.save({"state_dict": Arbitrary()}, path)  # would run code of its own when unpickled
    with pytest.raises(ValueError, match="not loaded without trust"):
        convert(from_native=str(path), to_hf=out)
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match=re.escape(str(path))):
        convert(from_native=str(path), to_hf=out)


@pytest.mark.parametrize(
    "arguments", [{}, {"from_hf": "a"}, {"to_hf": "b"}, {"from_hf": "a", "from_native": "b", "to_hf": "c"}]
)
def test_convert_wants_one_source_and_one_target(arguments):
    with pytest.raises(ValueError, match="exactly one"):
        convert(**arguments)


def test_an_unknown_dtype_is_refused(hf_dir, tmp_path):
    with pytest.raises(ValueError, match="'int4' must be one of float32, bfloat16, float16"):
        convert(from_hf=str(hf_dir), to_hf=str(tmp_path / "x"), dtype="int4")


def test_every_hf_tensor_of_the_released_model_is_covered_once():
    config = ModelConfig.preset("olmoe-1b-7b")
    tensors = [tensor for parts in hf_tensors(config).values() for tensor in parts]
    assert len({tensor.name for tensor in tensors}) == len(tensors) == 3 + 16 * (9 + 3 * 64)
    assert sum(torch.Size(tensor.shape).numel() for tensor in tensors) == config.num_params == 6_919_161_856
