"""MoEStrategy: expert parallelism and a sharded optimizer under Lightning's Trainer.

The file ties Lightning's hooks to the mechanics in ``parallel/`` and to the plugins; it computes nothing itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from olmoe_lightning._lightning import NoOptimizer, optimizers_to_device
from olmoe_lightning.errors import UserError
from olmoe_lightning.parallel.buffers import BUCKET_ELEMENTS
from olmoe_lightning.parallel.pipeline.stages import find_pipeline_schedule
from olmoe_lightning.parallel.sharded_optimizer import ShardedOptimizer, StepResult
from olmoe_lightning.parallel.weight_waits import WeightWaits
from olmoe_lightning.plugins.comm.base import CommPlugin
from olmoe_lightning.training.checks import reads_weights_between_steps, refuse_callbacks, refuse_dtypes
from olmoe_lightning.training.experts import is_expert
from olmoe_lightning.training.saver import CheckpointStrategy

log = logging.getLogger(__name__)


class NonFiniteError(RuntimeError):
    """A loss or gradient was not finite, and the strategy was told to stop at that."""


class MoEStrategy(CheckpointStrategy):
    """Trains any LightningModule in several processes: experts on their ranks, the optimizer sharded over all.

    ``training_step`` returns a mean loss, or ``{"loss": mean, "num_tokens": n}``; the gradient is that of the mean over
    all tokens of the optimizer step, whatever the number of processes and of accumulated batches. Without
    ``num_tokens`` each batch counts as one.

    Args:
        expert_parallel_size: processes among which the experts of a layer are shared. It divides the number of
            processes and the number of experts.
        pipeline_parallel_size: processes among which the layers are shared, in stages that work on different
            microbatches at the same time. It divides the number of processes; 1 is no pipeline.
        schedule: order of the stages' work: ``gpipe``, ``1f1b``, ``interleaved_1f1b``, ``interleaved_zero_bubble``,
            ``zbv_zero_bubble``, ``dualpipev``.
        num_microbatches: equal parts into which a pipeline cuts the rows of each batch; by default twice the size of
            the pipeline.
        stages_per_rank: stages of each process; by default what the schedule needs.
        pipeline_split: number of layers of each stage, in place of the split by cost.
        comm: how tokens travel to them: ``auto``, the name of a plugin (``local``, ``all_to_all``, ``rowwise``, or one
            that another package registered), or a :class:`~olmoe_lightning.plugins.CommPlugin`.
        shard_optimizer: each process updates its part of the parameters (ZeRO stage 1); ``False`` is plain data
            parallelism, for optimizers that need whole matrices.
        on_non_finite: ``skip`` an optimizer step whose loss or gradient is not finite, on all processes alike, or
            ``raise``.
        overlap_grad_reduce: sum gradients over the processes while the backward pass still runs.
        overlap_param_gather: let the updated weights arrive while the next forward pass already runs. It happens only
            where nothing can read the weights in between.
        bucket_megabytes: size of the pieces in which gradients and weights travel, of fp32 gradients.
        log_grad_norm: log ``grad_norm`` and ``skipped_steps`` at each optimizer step.
        state_dict_type: ``sharded`` checkpoints are directories to which every process writes its own part, and which
            load on any topology; ``full`` ones are files of Lightning's usual kind, joined in the memory of rank 0.
        async_save: block training only while the tensors are copied, and write them meanwhile. ``"overlap"``: copy them
            while the next forward and backward pass run. Between a save and the next optimizer step nothing but the
            optimizer may then change weights in place; call ``strategy.finish_copy()`` before something does.
        on_save_error: ``raise`` if a checkpoint cannot be written, or ``warn`` and train on.
        process_group_backend: ``gloo``, ``nccl``; by default what fits the device.
        timeout: of the collectives.
        accelerator: set by the Trainer.
        parallel_devices: set by the Trainer.
        cluster_environment: set by the Trainer.
        checkpoint_io: set by the Trainer.
        precision_plugin: set by the Trainer.

    Raises:
        ValueError: an argument is out of range.
    """

    strategy_name = "moe"
    backpropagates_sums = True
    """A module's auxiliary losses join the backward pass as sums over tokens, with factor 1."""

    def __init__(
        self,
        expert_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        schedule: str = "1f1b",
        num_microbatches: int | None = None,
        stages_per_rank: int | None = None,
        pipeline_split: list[int] | None = None,
        comm: str | CommPlugin = "auto",
        shard_optimizer: bool = True,
        on_non_finite: Literal["skip", "raise"] = "skip",
        overlap_grad_reduce: bool = True,
        overlap_param_gather: bool = True,
        bucket_megabytes: float = BUCKET_ELEMENTS * 4 / 2**20,
        log_grad_norm: bool = True,
        state_dict_type: Literal["sharded", "full"] = "sharded",
        async_save: bool | Literal["overlap"] = False,
        on_save_error: Literal["raise", "warn"] = "raise",
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=30),  # immutable
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(
            pipeline_parallel_size,
            schedule,
            num_microbatches,
            stages_per_rank,
            pipeline_split,
            comm=comm,
            state_dict_type=state_dict_type,
            async_save=async_save,
            on_save_error=on_save_error,
            expert_parallel_size=expert_parallel_size,
            process_group_backend=process_group_backend,
            timeout=timeout,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        if on_non_finite not in ("skip", "raise"):
            raise UserError(f"on_non_finite ({on_non_finite!r}) must be 'skip' or 'raise'")
        if bucket_megabytes <= 0:
            raise UserError(f"bucket_megabytes ({bucket_megabytes}) must be positive")
        self.shard_optimizer = shard_optimizer
        self.on_non_finite = on_non_finite
        self.overlap_grad_reduce = overlap_grad_reduce
        self.overlap_param_gather = overlap_param_gather
        self.bucket_megabytes = bucket_megabytes
        self.log_grad_norm = log_grad_norm
        self.grad_norm: float | None = None
        """Global gradient norm of the last optimizer step, before clipping; the same on all processes."""
        self.step_skipped = False
        """Whether the last optimizer step was skipped."""
        self._sync = True
        self._step_open = False
        self._loss_sum: Tensor | None = None
        self._pipelined = False  # the schedule of a pipeline has made the gradients of this batch
        self._gather_at_once = True
        self._folded = False
        self._fitted: LightningModule | None = None  # whose optimizer `sharded` is

    @override
    def connect(self, model: LightningModule) -> None:
        """Refuse what cannot work before any process is started."""
        super().connect(model)
        if not model.automatic_optimization:
            raise MisconfigurationException(
                "MoEStrategy sums, divides and clips gradients itself, which needs automatic optimization; remove "
                "`self.automatic_optimization = False`, or take Lightning's `ddp` strategy for manual optimization"
            )

    # ---------------------------------------------------------------------------------------------- setup

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        assert self.model is not None
        module = self.lightning_module
        assert module is not None
        self.accelerator.setup(trainer)
        self._refuse(trainer)
        self._open_save_group()
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting or self._fitted is not module:
            self._close_optimizer()
        if fitting and self._layer_sync is not None:
            self.model = self._layer_sync.apply(self.model)
        self.place_experts(module)
        self.model_to_device()
        self._equalise(module)
        values = {parameter: parameter.data for parameter in module.parameters()} if fitting else {}
        self.model = self.precision_plugin.convert_module(self.model)
        self._build_pipeline(module)
        if fitting:
            self._reset_optimizers_and_schedulers()
            self.setup_optimizers(trainer)
            narrowed = {p: value for p, value in values.items() if p.dtype != value.dtype}
            self._shard(trainer, module, narrowed)
        self.setup_precision_plugin()
        if fitting:
            optimizers_to_device(self.optimizers, self.root_device)

    def _refuse(self, trainer: Trainer) -> None:
        if getattr(self.precision_plugin, "scaler", None) is not None or self.precision_plugin.precision == "16-true":
            raise MisconfigurationException(
                f"precision {self.precision_plugin.precision!r} needs a gradient scaler, whose decisions would differ "
                "between processes; use plugins=[BF16Precision()] or precision='bf16-mixed', which need none"
            )
        refuse_callbacks(trainer)

    def _equalise(self, module: nn.Module) -> None:
        """All replicas start from the values of the first one."""
        for parameter in module.parameters():
            axis = self.mesh.expert_replica if is_expert(parameter) else self.mesh.data
            axis.broadcast(parameter.data)
        self._equalise_buffers(module)

    def _shard(self, trainer: Trainer, module: LightningModule, values: Mapping[nn.Parameter, Tensor]) -> None:
        self._step_open, self._loss_sum, self._fitted = False, None, module
        if not self.optimizers or isinstance(self.optimizers[0], NoOptimizer):
            return
        names = {parameter: name for name, parameter in module.named_parameters()}
        refuse_dtypes(self.optimizers[0], names)
        self.sharded = ShardedOptimizer(
            self.optimizers[0],
            names,
            self.mesh,
            is_expert,
            shard=self.shard_optimizer,
            overlap_reduce=self.overlap_grad_reduce,
            values=values,
            bucket_elements=int(self.bucket_megabytes * 2**20 / 4),
            attach_grads=self.stage_map is not None and find_pipeline_schedule(self.stage_map.schedule).splits_backward,
        )
        self._waits = WeightWaits(module, self.sharded.bucket_of())
        self._gather_at_once = not self.overlap_param_gather or reads_weights_between_steps(trainer, module)
        # Lightning advances the schedule after each optimizer step, a skipped one too. Epochs pass all the same.
        step = module.lr_scheduler_step

        def unless_skipped(scheduler: Any, metric: Any | None) -> None:
            per_epoch = any(c.scheduler is scheduler and c.interval == "epoch" for c in self.lr_scheduler_configs)
            if per_epoch or not self.step_skipped:
                step(scheduler, metric)

        module.lr_scheduler_step = unless_skipped  # type: ignore[method-assign]

    @override
    def setup_precision_plugin(self) -> None:
        super().setup_precision_plugin()
        # Trainer(gradient_clip_val=...) ends in these two, for stock and custom plugins alike.
        self.precision_plugin.clip_grad_by_norm = self._clip_by_norm  # type: ignore[method-assign]
        self.precision_plugin.clip_grad_by_value = self._clip_by_value  # type: ignore[method-assign]

    @override
    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    # ---------------------------------------------------------------------------------------------- optimizer step

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Accumulate: gradients stay here until the last backward pass of the step."""
        self._sync = False
        try:
            yield
        finally:
            self._sync = True

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._waits is not None:
            self._waits.begin_forward()
        self._pipelined = False
        output = super().training_step(*args, **kwargs)
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if self.sharded is None:
            return output
        if not isinstance(loss, Tensor):  # Lightning knows what to say to that, or skips this microbatch
            if self._sync and self._step_open:
                self.sharded.begin_backward(sync=True)
                self._finish_gradients()
            return output
        tokens = output.get("num_tokens") if isinstance(output, Mapping) else None
        if tokens is None:
            tokens = 1
        if self.pipeline is not None and not self._pipelined:
            raise RuntimeError(
                f"{type(self.lightning_module).__name__}.training_step did not call "
                "self.trainer.strategy.pipeline_step, so that the stages made no gradients"
            )
        count = torch.as_tensor(tokens, device=loss.device)
        self._loss_sum = loss * count.to(loss.dtype)
        self.sharded.add_loss(loss, count)
        return output

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Back-propagate the sum over tokens; the division comes once, at the end of the step."""
        if self.sharded is None or self._loss_sum is None:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        module = self.lightning_module
        assert module is not None
        loss_sum, self._loss_sum = self._loss_sum, None
        if not self._pipelined:
            self._open_step()
            self.sharded.begin_backward(self._sync)
        self.precision_plugin.pre_backward(closure_loss, module)
        if not self._pipelined:  # else the schedule has made the gradients already
            self.precision_plugin.backward(loss_sum, module, optimizer, *args, **kwargs)
        if self._waits is not None:
            self._waits.end_backward()
        if self._sync:
            self._finish_gradients()
        return self.precision_plugin.post_backward(closure_loss, module)

    def _open_step(self) -> None:
        """The first backward pass of an optimizer step starts it."""
        assert self.sharded is not None
        if not self._step_open:
            self.sharded.begin_step()
            self._step_open = True

    @override
    def _before_pipeline_backward(self) -> None:
        self._pipelined = True
        if self.sharded is not None:
            self._open_step()
            self.sharded.begin_backward(sync=False)

    def _finish_gradients(self) -> None:
        assert self.sharded is not None
        self._step_open = False
        result = self.sharded.finish_backward()
        self.finish_copy()  # the optimizer is about to change what may still be copied
        self.grad_norm = result.grad_norm
        self.step_skipped = not result.finite
        if not result.finite:
            self._handle_non_finite(result)
            self.sharded.drop_grads()
        else:
            self.sharded.assign_grads(self._folded_clip())

    def _handle_non_finite(self, result: StepResult) -> None:
        assert self.sharded is not None
        trainer = self.lightning_module.trainer  # type: ignore[union-attr]
        what = (
            f"the loss of {result.bad_losses} microbatches was not finite"
            if result.bad_losses
            else f"the global gradient norm is {result.grad_norm}"
        )
        if self.on_non_finite == "raise":
            bad = self.sharded.non_finite_parameters()
            found = f"; not finite on {self.mesh}: {', '.join(bad[:5]) or 'nothing'}"
            raise NonFiniteError(f"optimizer step {trainer.global_step}: {what}{found}. Nothing was changed by it.")
        self.skipped_steps += 1
        rank_zero_warn(
            f"Skipped optimizer step {trainer.global_step} ({self.skipped_steps} in all): {what}. Weights, optimizer, "
            "schedule and router biases are as before it."
        )

    def _folded_clip(self) -> float | None:
        """The norm to clip to, where division and clipping can be one multiplication: nobody looks in between."""
        module = self.lightning_module
        assert module is not None
        trainer = module.trainer
        looks = any(is_overridden("on_before_optimizer_step", c) for c in trainer.callbacks)  # type: ignore[attr-defined]
        looks = looks or is_overridden("on_before_optimizer_step", module)
        looks = looks or is_overridden("on_after_backward", module)
        own = is_overridden("configure_gradient_clipping", module)
        by_norm = (trainer.gradient_clip_algorithm or "norm") == "norm"
        self._folded = bool(trainer.gradient_clip_val) and by_norm and not looks and not own
        return float(trainer.gradient_clip_val) if self._folded else None  # type: ignore[arg-type]

    @torch.no_grad()
    def _clip_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        if self.sharded is None or self._folded or self.step_skipped or self.grad_norm is None:
            return
        coefficient = min(clip_val / (self.grad_norm + 1e-6), 1.0)
        torch._foreach_mul_(self.sharded.gradients(), coefficient)

    @torch.no_grad()
    def _clip_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        if self.sharded is not None:
            for gradient in self.sharded.gradients():
                gradient.clamp_(-clip_val, clip_val)

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        if self.sharded is None:
            return result
        self.sharded.check_groups()
        if not self.step_skipped:
            self.sharded.start_gather()
            if self._gather_at_once:
                self.wait_for_weights()
        if self.log_grad_norm and self.lightning_module is not None and self.grad_norm is not None:
            self.lightning_module.log("grad_norm", self.grad_norm)
            self.lightning_module.log("skipped_steps", float(self.skipped_steps))
        return result

    # ---------------------------------------------------------------------------------------------- other loops

    @override
    def on_validation_start(self) -> None:
        self._settle()

    @override
    def on_test_start(self) -> None:
        self._settle()

    @override
    def on_predict_start(self) -> None:
        self._settle()

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        self._settle()
        self.finish_saves()

    # ---------------------------------------------------------------------------------------------- the end

    @override
    def teardown(self) -> None:
        module = self.lightning_module
        if module is not None:
            vars(module).pop("lr_scheduler_step", None)
            if any(parameter.is_meta for parameter in module.parameters()):
                self._lightning_module = None  # building it failed, and Lightning could not move it to the CPU
        if self._waits is not None:
            self._waits.close()
            self._waits = None
        if self.sharded is not None and not self._interrupted:
            if hasattr(self.precision_plugin, "param_dtype"):
                # The plugin's module leaves with its masters: a second fit must not start from rounded weights.
                for parameter, value in self.sharded.local_masters().items():
                    parameter.data = value
            self.sharded.close()
        self._close_saves()
        super().teardown()
