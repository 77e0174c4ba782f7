"""Private names of Lightning and torch: each is where it was, and is called as it wants to be."""

import inspect
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.io import torch_io
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.core import saving
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins import TorchSyncBatchNorm
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from olmoe_lightning import MoEStrategy, _lightning, _torch

LIGHTNING = {
    "NoOptimizer": [],
    "ScriptLauncher": ["cluster_environment", "num_processes", "num_nodes"],
    "WrappingCheckpointIO": ["checkpoint_io"],
    "default_backend": ["device"],
    "distributed_is_initialized": [],
    "init_process_group": ["cluster_environment", "torch_distributed_backend", "global_rank", "world_size", "kwargs"],
    "optimizers_to_device": ["optimizers", "device"],
    "reset_seed": [],
}
"""Names and the parameters by which they are called."""
LIGHTNING_FUNCTIONS = {"batches_processed", "begin_validation_anew", "distributes_samplers", "layer_sync_of",
                       "learning_rate_of", "loader_states", "read_directories_by", "set_loader_states",
                       "set_received_sigterm", "signal_connector_of", "step_ends", "trainer_of",
                       "validation_batches"}  # fmt: skip
LIGHTNING_METHODS = {"REQUEUE_HANDLER", "SIGTERM_BROADCAST", "SIGTERM_HANDLER"}
"""Functions of ours around private attributes; a test of each is below."""

TORCH = {
    "rebuild_tensor": ["storage", "storage_offset", "size", "stride", "requires_grad", "backward_hooks", "metadata"]
}
TORCH_OPERATORS = {
    "assert_async": "aten::_assert_async.msg(Tensor self, str assert_msg) -> ()",
    "foreach_mul_": "aten::_foreach_mul_.Tensor(Tensor(a!)[] self, Tensor other) -> ()",
}
TORCH_FUNCTIONS = {"Store", "SymmetricHandle", "TorchDispatchMode", "default_store", "gradient_dtypes", "group_timeout",
                   "is_last_hook", "is_view", "parts_of_schedule", "rendezvous", "set_group_timeout",
                   "set_last_rates", "storage_info", "symmetric_backend", "symmetric_memory", "version",
                   "will_execute_node"}  # fmt: skip


def parameters(function):
    return list(inspect.signature(function).parameters)


@pytest.mark.parametrize(("module", "expected"), [(_lightning, LIGHTNING), (_torch, TORCH)])
def test_private_names_have_the_signatures_they_are_called_with(module, expected):
    assert {name: parameters(getattr(module, name)) for name in expected} == expected


def test_every_name_is_tested():
    assert set(_lightning.__all__) == LIGHTNING.keys() | LIGHTNING_FUNCTIONS | LIGHTNING_METHODS
    assert set(_torch.__all__) == TORCH.keys() | TORCH_OPERATORS.keys() | TORCH_FUNCTIONS


def test_a_trainer_says_whether_it_shares_samples_out():
    options = {"accelerator": "cpu", "strategy": "ddp", "logger": False, "enable_checkpointing": False}
    assert _lightning.distributes_samplers(Trainer(devices=2, **options))
    assert not _lightning.distributes_samplers(Trainer(devices=2, use_distributed_sampler=False, **options))
    assert not _lightning.distributes_samplers(quiet_trainer())


def test_a_search_says_which_value_it_sets():
    module = BoringModel()
    assert _lightning.learning_rate_of(LearningRateFinder(update_attr=False), module) is None
    module.lr, module.speed = 0.5, 0.25
    assert _lightning.learning_rate_of(LearningRateFinder(), module) == 0.5
    assert _lightning.learning_rate_of(LearningRateFinder(attr_name="speed"), module) == 0.25


def test_lightning_loads_by_the_names_that_are_replaced(tmp_path):
    """Both are ours since the strategy was imported; a directory comes to them as a file does."""
    assert MoEStrategy.strategy_name == "moe"
    for module in (saving, torch_io):
        assert module.pl_load.__module__ == _lightning.__name__
        assert parameters(module.pl_load) == ["path_or_url", "map_location", "weights_only"]
    assert parameters(_lightning._load) == ["path_or_url", "map_location", "weights_only"]
    torch.save({"state_dict": 3}, tmp_path / "file")
    assert torch_io.TorchCheckpointIO().load_checkpoint(tmp_path / "file")["state_dict"] == 3


def test_schedules_are_taken_apart_and_told_their_rates():
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)
    parts = [torch.optim.lr_scheduler.LinearLR(optimizer), torch.optim.lr_scheduler.StepLR(optimizer, 2)]
    chain = torch.optim.lr_scheduler.ChainedScheduler(parts)
    assert _torch.parts_of_schedule(chain) == [chain, *parts]
    assert _torch.parts_of_schedule(parts[0]) == [parts[0]]
    _torch.set_last_rates(chain, [0.5])
    assert chain.get_last_lr() == [0.5]


class CountingLoader(torch.utils.data.DataLoader):
    def state_dict(self):
        return {"read": 3}

    def load_state_dict(self, state_dict):
        self.loaded = state_dict


def test_the_states_of_data_loaders_are_where_lightning_looks_for_them(tmp_path):
    loader = CountingLoader(torch.utils.data.TensorDataset(torch.zeros(4, 32)))
    module = BoringModel()
    module.training_step = lambda batch, batch_idx: module.layer(batch[0]).sum()
    trainer = quiet_trainer(max_steps=2, limit_val_batches=0)
    trainer.fit(module, loader)
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    checkpoint = torch.load(tmp_path / "saved.ckpt", weights_only=True)
    assert _lightning.loader_states(checkpoint) == [{"read": 3}]
    assert _lightning.loader_states({}) == []
    _lightning.set_loader_states(checkpoint, [{"read": 5}])
    torch.save(checkpoint, tmp_path / "other.ckpt")
    quiet_trainer(max_steps=3, limit_val_batches=0).fit(module, loader, ckpt_path=tmp_path / "other.ckpt")
    assert loader.loaded == {"read": 5}


def test_a_view_is_known_from_a_tensor_of_its_own():
    tensor = torch.zeros(2, requires_grad=True) * 1
    assert _torch.is_view(tensor.view(2))
    assert not _torch.is_view(tensor.view(2).clone())


def test_a_moved_signature_is_found(monkeypatch):
    monkeypatch.setattr(_lightning, "default_backend", lambda accelerator: "gloo")
    with pytest.raises(AssertionError):
        test_private_names_have_the_signatures_they_are_called_with(_lightning, LIGHTNING)


def test_a_module_tells_its_trainer_and_a_trainer_its_progress():
    module = BoringModel()
    assert _lightning.trainer_of(module) is _lightning.trainer_of(None) is None
    trainer = Trainer(
        max_steps=3, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0,
    )  # fmt: skip
    trainer.fit(module)
    assert _lightning.trainer_of(module) is trainer
    assert _lightning.batches_processed(trainer) == 3


def quiet_trainer(**options):
    return Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
                   enable_model_summary=False, **options)  # fmt: skip


def test_methods_that_are_replaced_are_called_as_they_are_replaced():
    trainer = quiet_trainer()
    connector = _lightning.signal_connector_of(trainer)
    for name in (_lightning.SIGTERM_HANDLER, _lightning.REQUEUE_HANDLER):
        assert len(parameters(getattr(connector, name))) == 2
    assert parameters(getattr(trainer.fit_loop.epoch_loop, _lightning.SIGTERM_BROADCAST)) == []
    assert not trainer.received_sigterm
    _lightning.set_received_sigterm(trainer)
    assert trainer.received_sigterm


class Looks(BoringModel):
    def __init__(self):
        super().__init__()
        self.steps, self.batches, self.counts = [], [], []

    def on_train_batch_end(self, *_):
        self.steps.append(_lightning.step_ends(self.trainer))

    def on_validation_start(self):
        if not self.trainer.sanity_checking:
            self.batches.append(_lightning.validation_batches(self.trainer))

    def validation_step(self, batch, batch_idx):
        if not self.trainer.sanity_checking:
            progress = self.trainer.fit_loop.epoch_loop.val_loop.batch_progress
            undo = _lightning.begin_validation_anew(self.trainer)
            anew = progress.current.ready, progress.current.completed, progress.total.ready - progress.total.processed
            undo()
            self.counts.append((anew, progress.current.ready, progress.current.completed))
        return super().validation_step(batch, batch_idx)


def test_a_trainer_tells_where_it_is():
    module = Looks()
    trainer = quiet_trainer(max_epochs=1, limit_train_batches=3, accumulate_grad_batches=2, limit_val_batches=2)
    trainer.fit(module)
    assert module.steps == [False, True, True]
    assert module.batches == [2]
    assert module.counts == [((1, 0, 1), 1, 0), ((1, 0, 1), 2, 1)]


def test_a_strategy_tells_its_layer_sync():
    strategy = DDPStrategy()
    assert _lightning.layer_sync_of(strategy) is None
    trainer = Trainer(sync_batchnorm=True, accelerator="cpu", devices=1, strategy=strategy, logger=False)
    assert isinstance(_lightning.layer_sync_of(trainer.strategy), TorchSyncBatchNorm)


@pytest.mark.parametrize("name", TORCH_OPERATORS)
def test_private_operators_have_the_overload_that_is_called(name):
    schema = TORCH_OPERATORS[name]
    packet = getattr(torch.ops.aten, schema.split(".")[0].removeprefix("aten::"))
    assert schema in [str(getattr(packet, overload)._schema) for overload in packet.overloads()]


def test_private_operators_do_what_they_are_called_for():
    values = [torch.ones(2), torch.full((3,), 2.0)]
    _torch.foreach_mul_(values, torch.tensor(3.0))
    assert [value.tolist() for value in values] == [[3, 3], [6, 6, 6]]
    _torch.foreach_mul_([], torch.tensor(3.0))
    _torch.assert_async(torch.tensor(True), "fine")
    with pytest.raises(RuntimeError, match="this is wrong"):
        _torch.assert_async(torch.tensor(False), "this is wrong")


def test_a_node_tells_the_dtypes_of_its_gradients():
    x = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    node = x.sum().float().grad_fn
    assert _torch.gradient_dtypes(node) == [torch.float32]
    assert _torch.gradient_dtypes(node.next_functions[0][0]) == [torch.bfloat16]


def test_a_parameter_tells_which_hook_is_called_last():
    parameter = nn.Parameter(torch.ones(1))
    first = parameter.register_post_accumulate_grad_hook(lambda _: None)
    assert _torch.is_last_hook(parameter, first)
    second = parameter.register_post_accumulate_grad_hook(lambda _: None)
    assert not _torch.is_last_hook(parameter, first)
    assert _torch.is_last_hook(parameter, second)


def test_a_dispatch_mode_sees_the_operators_inside_of_it():
    seen = []

    class Mode(_torch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    with Mode():
        torch.ones(3).norm()
    torch.zeros(3)
    assert seen == ["ones", "linalg_vector_norm"]


def test_the_version_of_a_tensor_tells_writes_through_itself_alone():
    """A gradient that lies in a larger buffer is told apart from its neighbours there."""
    buffer = torch.zeros(4)
    left, right = buffer[:2].data, buffer[2:].data
    before = _torch.version(left), _torch.version(right)
    left += 0
    assert _torch.version(left) > before[0]
    assert _torch.version(right) == before[1]


def test_the_engine_tells_which_nodes_a_backward_pass_runs():
    found = []

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y):
            return x * y

        @staticmethod
        def backward(ctx, grad):
            found.append(tuple(_torch.will_execute_node(node) for node, _ in ctx.next_functions))
            return grad, grad

    x, y = (nn.Parameter(torch.ones(1)).view(1) for _ in range(2))
    torch.autograd.grad(Probe.apply(x, y), [x])
    torch.autograd.grad(Probe.apply(x, y), [x, y])
    assert found == [(True, False), (True, True)]


def test_where_a_part_of_a_checkpoint_lies():
    info = _torch.storage_info("0.distcp", 5, 7)
    assert (info.relative_path, info.offset, info.length) == ("0.distcp", 5, 7)


def test_a_group_tells_its_timeout():
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore(), timeout=timedelta(seconds=17))
    try:
        assert _torch.group_timeout(dist.group.WORLD) == timedelta(seconds=17)
        _torch.set_group_timeout(dist.group.WORLD, timedelta(seconds=23))
        assert _torch.group_timeout(dist.group.WORLD) == timedelta(seconds=23)
        _torch.default_store().set("key", "value")
        assert _torch.default_store().get("key") == b"value"
    finally:
        dist.destroy_process_group()


def test_symmetric_memory_is_called_as_it_wants_to_be():
    from torch._C._distributed_c10d import _SymmetricMemory
    from torch.distributed import _symmetric_memory

    assert parameters(_symmetric_memory.get_backend) == ["device"]
    assert parameters(_symmetric_memory.rendezvous) == ["tensor", "group"]
    made = _SymmetricMemory.empty_strided_p2p.__doc__  # compiled: only its documentation has the parameters
    assert "(size: Tuple[int, ...], stride: Tuple[int, ...], dtype: torch.dtype, device: torch.device, group" in made
    for name in ("get_buffer", "barrier"):
        text = getattr(_SymmetricMemory, name).__doc__
        wanted = parameters(getattr(_torch.SymmetricHandle, name))
        assert [text.index(f"{each}:") for each in wanted] == sorted(text.index(f"{each}:") for each in wanted)
