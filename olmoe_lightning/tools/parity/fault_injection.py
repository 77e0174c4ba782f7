"""Two mistakes that trainers of this kind have really made, to show that the comparison would find them."""

from __future__ import annotations

from functools import partial
from typing import Literal

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from olmoe_lightning.errors import UserError
from olmoe_lightning.parallel.buffers import Bucket
from olmoe_lightning.strategy import MoEStrategy
from olmoe_lightning.tools.parity.case import ParityCase

Fault = Literal["expert_scale", "missing_reduction"]


def check_fault(case: ParityCase, fault: Fault) -> None:
    """Refuse a mistake that would be none.

    Raises:
        UserError: what the topology needs.
    """
    if fault == "expert_scale" and case.expert_parallel == 1:
        raise UserError("'expert_scale' breaks nothing with expert_parallel (1): it multiplies by that; take 2")
    if fault == "missing_reduction" and case.devices == 1:
        raise UserError("'missing_reduction' breaks nothing with devices (1): there is nothing to reduce; take 2")


class FaultInjection(Callback):
    """Makes one mistake while training.

    Args:
        case: the topology.
        fault: ``expert_scale`` multiplies the experts' gradients by the number of expert-parallel ranks, as
            averaging them over their replicas instead of over all data ranks does; ``missing_reduction`` leaves out the
            sum of gradients over the processes that hold the same parameters.

    Raises:
        UserError: on this topology the mistake would be none.
    """

    def __init__(self, case: ParityCase, fault: Fault) -> None:
        check_fault(case, fault)
        self.case = case
        self.fault = fault

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The strategy has made its buckets by now."""
        strategy = trainer.strategy
        assert isinstance(strategy, MoEStrategy)
        assert strategy.sharded is not None
        if self.fault == "expert_scale":
            for _, parameter, _ in strategy.sharded.parameters:
                if strategy.sharded.ownership.is_expert(parameter):
                    parameter.register_hook(lambda gradient: gradient * self.case.expert_parallel)
        else:
            for bucket in strategy.sharded.buckets:
                bucket.launch = partial(_leave_out_reduction, bucket)  # type: ignore[method-assign]


def _leave_out_reduction(bucket: Bucket) -> None:
    bucket.launched = True
    for written, view in zip(bucket.written, bucket.grad_views, strict=True):
        if not written:
            view.zero_()
