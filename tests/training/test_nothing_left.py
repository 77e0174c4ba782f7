"""What a fit that ends in an error leaves at a module, its parameters and its hooks: nothing."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from olmoe_lightning import MoEStrategy
from olmoe_lightning.plugins import BF16Precision

HOOKS = [
    *("configure_optimizers", "setup", "on_fit_start", "on_train_start", "on_train_batch_start", "training_step"),
    *("on_before_backward", "on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping"),
    *("optimizer_step", "lr_scheduler_step", "on_train_batch_end", "on_train_epoch_end", "validation_step"),
    *("on_train_end", "on_save_checkpoint"),
]


class Small(LightningModule):
    """Trained and frozen parameters, a buffer, and a view of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first, self.second = nn.Linear(4, 3), nn.Linear(3, 1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        self.second.bias.requires_grad_(False)
        self.register_buffer("scale", torch.ones(3))
        self.register_buffer("row", self.first.weight.detach()[1], persistent=False)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        weight = self.first.weight
        return self.second(self.first(batch.to(weight.dtype)) * self.scale.to(weight.dtype)).float().square().mean()

    def validation_step(self, batch: Tensor, index: int) -> None:
        pass

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer), "interval": "step"}]


def fit(module: LightningModule, strategy: Any, devices: int = 1, bf16: bool = False, folder: Any = None) -> None:
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        plugins=[BF16Precision()] if bf16 else None,
        max_epochs=1,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=folder is not None,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    rows = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
    trainer.fit(module, DataLoader(rows, 4), DataLoader(rows, 4))


def left(module: nn.Module) -> dict[Any, Any]:
    """What can be reached at a module, but for values: its attributes, hooks, and how its tensors are kept."""
    found: dict[Any, Any] = {}
    for name, part in module.named_modules():
        own = {key: value for key, value in vars(part).items() if key not in ("_parameters", "_buffers", "_modules")}
        found[name] = (type(part), sorted(key for key in own if key != "_hparams"))
        found[name, "hooks"] = {key: len(value or ()) for key, value in own.items() if "hooks" in key}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        found[name] = (type(tensor), tensor.dtype, tensor.requires_grad, tensor.grad_dtype, sorted(vars(tensor)))
        found[name, "hooks"] = len(tensor._post_accumulate_grad_hooks or ()) + len(tensor._backward_hooks or ())
        found[name, "bytes"] = tensor.untyped_storage().nbytes()
    return found


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("hook", HOOKS)
def test_a_fit_that_fails_in_a_hook_leaves_the_module_as_plain_lightning_does(hook, bf16, tmp_path):
    module, untouched = Small(), Small()
    if bf16:
        del module.row, untouched.row  # narrowed to a buffer of its own
    before = left(module)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise LookupError(hook)

    setattr(module, hook, fail)
    with pytest.raises(LookupError):
        fit(module, MoEStrategy(), bf16=bf16, folder=tmp_path)
    assert vars(module).pop(hook) is fail, "a method that the user replaced is the user's again"
    assert left(module) == before
    assert bf16 or module.row.data_ptr() == module.first.weight[1].data_ptr()

    module.load_state_dict(untouched.state_dict())
    fit(module, "auto")
    fit(untouched, "auto")
    for name, value in untouched.state_dict().items():
        assert torch.equal(module.state_dict()[name], value), name


class Failing(Small):
    """Raises in its second batch, on all processes alike."""

    fails = True

    def on_after_backward(self) -> None:
        if self.fails and self.trainer.global_step == 1:
            raise LookupError("second batch")


def _fail_and_fit(bf16: bool) -> tuple[bool, bool, list[Tensor], list[Tensor]]:
    module, fresh = Failing(), Failing()
    del module.row, fresh.row
    before = left(module)
    try:
        fit(module, MoEStrategy(), devices=2, bf16=bf16)
    except LookupError:
        failed = True
    else:
        failed = False
    clean = left(module) == before
    moved = not torch.equal(module.first.weight, fresh.first.weight)
    fresh.load_state_dict(module.state_dict())
    module.fails = fresh.fails = False
    for each in (module, fresh):
        fit(each, MoEStrategy(shard_optimizer=False), devices=2)
    return failed and moved, clean, [*module.parameters()], [*fresh.parameters()]


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_several_processes_leave_a_failed_module_in_fp32_and_without_hooks(bf16, workers):
    for failed, clean, again, fresh in workers(2).run(_fail_and_fit, bf16):
        assert failed
        assert clean
        for value, wanted in zip(again, fresh, strict=True):
            assert torch.equal(value, wanted)
