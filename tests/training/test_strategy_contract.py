"""The strategy and the precision keep the contract of Lightning's base classes, by signature and by name."""

import inspect

import pytest
import yaml
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy, StrategyRegistry
from strategy_lab import quiet

from olmoe_lightning import MoEStrategy
from olmoe_lightning.cli import main
from olmoe_lightning.plugins import BF16Precision


def public_methods(ours, base):
    """Methods that our classes define and that the base class has."""
    return [
        pytest.param(ours, base, name, id=f"{ours.__name__}.{name}")
        for name in dir(base)
        if not name.startswith("__")
        and callable(getattr(base, name))
        and getattr(ours, name).__module__.startswith("olmoe_lightning")
    ]


@pytest.mark.parametrize(
    ("ours", "base", "name"), public_methods(MoEStrategy, ParallelStrategy) + public_methods(BF16Precision, Precision)
)
def test_methods_can_be_called_like_those_of_the_base_class(ours, base, name):
    mine, theirs = (list(inspect.signature(getattr(kind, name)).parameters.values()) for kind in (ours, base))
    catch_all = {parameter.kind for parameter in mine}
    for position, parameter in enumerate(theirs):
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            assert parameter.kind in catch_all, f"{parameter} is not accepted"
            continue
        same = next((other for other in mine if other.name == parameter.name), None)
        if same is None:
            assert {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD} <= catch_all, f"{parameter.name} is not accepted"
            continue
        assert mine.index(same) == position
        if parameter.default is not parameter.empty:
            assert same.default == parameter.default, f"{parameter.name} must be optional, with the same default"
    names = {parameter.name for parameter in theirs}
    for other in mine:
        if other.name not in names and other.kind not in (other.VAR_POSITIONAL, other.VAR_KEYWORD):
            assert other.default is not other.empty, f"Lightning does not give {other.name}"


def test_the_check_of_signatures_can_fail():
    class Narrow(MoEStrategy):
        def reduce(self, tensor):
            return tensor

    with pytest.raises(AssertionError, match="group is not accepted"):
        test_methods_can_be_called_like_those_of_the_base_class(Narrow, ParallelStrategy, "reduce")


def test_the_constructor_takes_everything_that_the_trainer_hands_on():
    assert inspect.signature(ParallelStrategy).parameters.keys() <= inspect.signature(MoEStrategy).parameters.keys()
    assert ParallelStrategy in MoEStrategy.__mro__


def test_the_name_moe_gives_the_strategy_with_its_defaults():
    assert "moe" in StrategyRegistry.available_strategies()
    strategy = quiet("moe", devices=1).strategy
    assert type(strategy) is MoEStrategy
    assert (strategy.expert_parallel_size, strategy.shard_optimizer) == (1, True)


def test_a_strategy_says_whether_it_needs_distributed_samplers():
    assert not quiet(devices=1).strategy.is_distributed
    assert quiet(devices=2).strategy.is_distributed


def test_yaml_names_the_strategy_and_the_precision_by_their_class_path(tmp_path, token_files, capsys):
    config = {
        "trainer": {
            "accelerator": "cpu",
            "devices": 2,
            "strategy": {
                "class_path": "olmoe_lightning.MoEStrategy",
                "init_args": {"expert_parallel_size": 2, "comm": "all_to_all", "timeout": "0:05:00"},
            },
            "plugins": [{"class_path": "olmoe_lightning.plugins.BF16Precision"}],
        },
        "data": {"train": str(token_files / "lower.npy"), "val": str(token_files / "upper.npy")},
    }
    first = tmp_path / "first.yaml"
    first.write_text(yaml.safe_dump(config))
    printed = []
    for path in (first, tmp_path / "second.yaml"):
        with pytest.raises(SystemExit):
            main(["fit", "--config", str(path), "--print_config"])
        printed.append(capsys.readouterr().out)
        (tmp_path / "second.yaml").write_text(printed[0])
    assert printed[0] == printed[1]
    trainer = yaml.safe_load(printed[0])["trainer"]
    assert trainer["strategy"]["class_path"].endswith("MoEStrategy")
    given = trainer["strategy"]["init_args"]
    assert (given["expert_parallel_size"], given["comm"], given["timeout"]) == (2, "all_to_all", "0:05:00")
    assert given["shard_optimizer"] is True
    assert trainer["plugins"][0]["class_path"].endswith("BF16Precision")
