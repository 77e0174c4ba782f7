"""load_pretrained writes every weight into the model that is there, or says why not."""

import pytest
import torch
from tiny_model import SMALL

from olmoe_lightning.checkpoint import convert, load_pretrained, write
from olmoe_lightning.checkpoint.foreign.hf_layout import native_shapes
from olmoe_lightning.config import ModelConfig
from olmoe_lightning.model.transformer import Transformer

CONFIG = SMALL.replace(vocab_size=40, num_experts=11, expert_hidden=6, max_seq_len=4096)


@pytest.fixture(scope="module")
def state():
    torch.manual_seed(0)
    return {name: torch.randn(shape) for name, shape in native_shapes(CONFIG).items()}


@pytest.fixture(scope="module", params=["native", "hf", "ckpt"])
def checkpoint(request, state, tmp_path_factory):
    path = tmp_path_factory.mktemp("load") / request.param
    if request.param == "ckpt":
        tensors = {f"model.{name}": tensor for name, tensor in state.items()}
        torch.save({"state_dict": tensors, "hyper_parameters": {"config": CONFIG.to_dict()}}, path)
    else:
        write(state, CONFIG, str(path), hf=request.param == "hf", max_shard_size="6KB")
    return str(path)


@pytest.fixture
def native(state, tmp_path):
    write(state, CONFIG, str(tmp_path / "native"))
    return str(tmp_path / "native")


def nan_model(config: ModelConfig = CONFIG) -> Transformer:
    """A model in which any weight that stays unwritten is seen."""
    model = Transformer(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    return model


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        CONFIG.replace(tie_embeddings=True),
        CONFIG.replace(qk_norm="none"),
        *(ModelConfig.preset(name) for name in ("tiny", "tiny-64e", "bench-8l-8e")),
        ModelConfig.preset("tiny-64e", selection_bias=True, qk_norm="flat"),
    ],
    ids=["small", "tied", "no-qk-norm", "tiny", "tiny-64e", "bench-8l-8e", "bias"],
)
def test_layout_names_exactly_the_weights_of_the_built_model(config):
    with torch.device("meta"):
        model = Transformer(config)
    assert {name: tuple(t.shape) for name, t in model.state_dict().items()} == native_shapes(config)


def test_every_weight_is_loaded_in_place_from_every_format(checkpoint, state):
    model = nan_model()
    before = {name: (id(p), p.data_ptr(), p._version) for name, p in model.named_parameters()}
    load_pretrained(model, checkpoint)
    assert model.state_dict().keys() == state.keys()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, state[name]), name
        assert parameter.requires_grad
        identity, pointer, version = before[name]
        assert (id(parameter), parameter.data_ptr()) == (
            identity,
            pointer,
        )  # an optimizer made before keeps its weights
        assert parameter._version > version  # and autograd notices the change


def test_values_are_cast_to_the_models_type(native, state):
    model = nan_model().bfloat16()
    load_pretrained(model, native)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, state[name].bfloat16()), name


def test_nan_weights_load_as_they_are(state, tmp_path):
    write(state | {"norm.weight": torch.full((16,), torch.nan)}, CONFIG, str(tmp_path / "nan"))
    model = Transformer(CONFIG)
    load_pretrained(model, str(tmp_path / "nan"))
    assert model.norm.weight.isnan().all()


class CopyingTransformer(Transformer):
    """Hands out copies of its weights, as a wrapper that casts or quantises would: writes to them are lost."""

    def state_dict(self, *args, **kwargs):
        return {name: tensor.clone() for name, tensor in super().state_dict(*args, **kwargs).items()}


def test_a_write_that_does_not_reach_the_model_is_an_error(native):
    model = CopyingTransformer(CONFIG)
    for parameter in model.parameters():  # memory that was freed with the right values in it must not pass for a write
        torch.nn.init.constant_(parameter, float("nan"))
    with pytest.raises(RuntimeError, match=r"embed\.weight: the model does not hold what was written"):
        load_pretrained(model, native)


def test_a_model_without_storage_is_refused(native):
    with torch.device("meta"):
        model = Transformer(CONFIG)
    with pytest.raises(ValueError, match=r"no storage yet.*embed\.weight"):
        load_pretrained(model, native)


def test_a_model_that_computes_something_else_is_refused_and_training_options_are_free(native):
    with pytest.raises(ValueError) as error:
        load_pretrained(nan_model(CONFIG.replace(rope_theta=5e5, normalize_weights=True)), native)
    assert "rope_theta: the model has 500000.0, the checkpoint 10000.0" in str(error.value)
    assert "normalize_weights: the model has True, the checkpoint False" in str(error.value)
    load_pretrained(nan_model(CONFIG.replace(balance_loss_coeff=0.5, recompute="block", max_seq_len=128)), native)


def test_a_module_with_other_weights_is_refused_with_all_of_them_listed(native):
    model = nan_model(CONFIG.replace(num_experts=12))
    model.config = None  # any module with the right weights may be loaded
    model.extra = torch.nn.Linear(2, 2, bias=False)
    with pytest.raises(ValueError) as error:
        load_pretrained(model, native)
    assert "1 unexpected: extra.weight" in str(error.value)
    assert "6 misshapen: blocks.0.moe.router.weight [12, 16] instead of [11, 16]" in str(error.value)


def test_tied_weights_load_once(tmp_path):
    config = CONFIG.replace(tie_embeddings=True)
    state = {name: torch.randn(shape) for name, shape in native_shapes(config).items()}
    write(state, config, str(tmp_path / "hf"), hf=True)
    convert(from_hf=str(tmp_path / "hf"), to_native=str(tmp_path / "native"))
    model = nan_model(config)
    load_pretrained(model, str(tmp_path / "native"))
    assert torch.equal(model.head_weight, state["embed.weight"])
