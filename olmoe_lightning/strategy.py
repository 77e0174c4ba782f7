"""MoEStrategy: expert parallelism, pipelines and a sharded optimizer under Lightning's Trainer.

All of Lightning's hooks, in the order in which it calls them. Each hands on to a part in ``training/`` that owns its
state; the file computes nothing itself.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_only as utilities_rank_zero_only
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from olmoe_lightning._lightning import (
    NoOptimizer,
    WrappingCheckpointIO,
    layer_sync_of,
    optimizers_to_device,
    reset_seed,
    step_ends,
    trainer_of,
    validation_batches,
)
from olmoe_lightning.checkpoint.full import full_optimizer_state, full_state_dict
from olmoe_lightning.checkpoint.groups import refuse_groups_of_processes
from olmoe_lightning.checkpoint.manifest import build_manifest
from olmoe_lightning.checkpoint.ranges import TrainingState
from olmoe_lightning.errors import UserError
from olmoe_lightning.parallel import Mesh
from olmoe_lightning.parallel.buffers import BUCKET_ELEMENTS
from olmoe_lightning.parallel.ownership import Ownership
from olmoe_lightning.parallel.pipeline.runner import PipelineRunner, Sums
from olmoe_lightning.parallel.pipeline.stages import StageMap
from olmoe_lightning.parallel.sharded_optimizer import ShardedOptimizer
from olmoe_lightning.parallel.shown_gradients import ShownGradients
from olmoe_lightning.parallel.weight_waits import WeightWaits
from olmoe_lightning.plugins.comm.base import CommPlugin
from olmoe_lightning.plugins.comm.capacity import DropCounters
from olmoe_lightning.plugins.precision.base import weight_dtype
from olmoe_lightning.training.checks import (
    fused_max_norm,
    gradient_hooks,
    most_batches,
    reads_weights_between_steps,
    refuse_callbacks,
    refuse_dtypes,
    refuse_manual_optimization,
    refuse_own_backward,
    refuse_scaler,
    sets_weights,
)
from olmoe_lightning.training.exact_values import ExactValues
from olmoe_lightning.training.experts import PlacedExperts, check_batches, expert_tensors
from olmoe_lightning.training.first_batch import FirstBatch, refuse_uninitialised
from olmoe_lightning.training.found_rate import keep_proportions
from olmoe_lightning.training.gradient_hooks import GradientHooks
from olmoe_lightning.training.loader import Loader, read_directory
from olmoe_lightning.training.owned import Owned
from olmoe_lightning.training.patches import Patches
from olmoe_lightning.training.pipeline import Pipeline
from olmoe_lightning.training.processes import Launcher, Processes
from olmoe_lightning.training.routers import untrained_routers
from olmoe_lightning.training.saver import Saver
from olmoe_lightning.training.signals import Asked, Signals, evaluation_handlers
from olmoe_lightning.training.sizes import refuse_batches
from olmoe_lightning.training.snapshot import SavedRun
from olmoe_lightning.training.step import NonFiniteError, OptimizerStep, Run
from olmoe_lightning.training.whole_files import WholeFiles

__all__ = ["MoEStrategy", "NonFiniteError"]


class MoEStrategy(ParallelStrategy):
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
            parallelism, for optimizers that do not treat each element alone.
        on_non_finite: ``skip`` an optimizer step whose loss or gradient is not finite, on all processes alike, or
            ``raise``.
        overlap_grad_reduce: sum gradients over the processes while the backward pass still runs.
        overlap_param_gather: let the updated weights arrive while the next forward pass already runs. It happens only
            where nothing can read the weights in between.
        bucket_megabytes: size of the buckets in which gradients and weights travel, of fp32 gradients.
        log_grad_norm: log ``grad_norm`` and ``skipped_steps`` at each optimizer step.
        state_dict_type: ``sharded`` checkpoints are directories to which every process writes its own part, and which
            load on any topology; ``full`` ones are files of Lightning's usual kind, joined in the memory of rank 0.
        async_save: block training only while the tensors are copied, and write them meanwhile. ``"overlap"``: copy them
            while the next forward and backward pass run. Between a save and the next optimizer step nothing but the
            optimizer may then change weights in place; call ``strategy.finish_copy()`` before something does.
        on_save_error: ``raise`` if a checkpoint cannot be written, or ``warn`` and train on.
        process_group_backend: ``gloo``, ``nccl``; by default what fits the device.
        timeout: how long a process waits for another, to meet it and in everything that they do together.
        accelerator: set by the Trainer.
        parallel_devices: set by the Trainer.
        cluster_environment: set by the Trainer.
        checkpoint_io: set by the Trainer.
        precision_plugin: set by the Trainer.

    Raises:
        UserError: an argument is out of range.
    """

    strategy_name = "moe"
    backpropagates_sums = True
    """A module's auxiliary losses join the backward pass as sums over tokens, with factor 1."""

    # What modules and callbacks may read, and what may change during a run.
    mesh = Owned[Mesh]("_processes")
    """Where this process stands; there is one from the start of fit, validate, test or predict on."""
    expert_parallel_size = Owned[int]("_processes", "expert_size")
    pipeline_parallel_size = Owned[int]("_processes", "pipeline_size")
    timeout = Owned[timedelta]("_processes")
    stage_map = Owned[StageMap | None]("_pipeline")
    """Which layers are where; ``None`` without a pipeline."""
    pipeline = Owned[PipelineRunner | None]("_pipeline", "runner")
    """The stages of this process, once the model is set up."""
    schedule = Owned[str]("_pipeline")
    """Name of the pipeline schedule."""
    num_microbatches = Owned[int]("_pipeline")
    stages_per_rank = Owned[int | None]("_pipeline")
    pipeline_split = Owned[list[int] | None]("_pipeline", "split")
    comm = Owned[str | CommPlugin]("_experts")
    """The comm plugin that was asked for, or its name."""
    comm_plugins = Owned[list[CommPlugin]]("_experts", "plugins")
    """The comm plugins in use: one, or one for each size of MoE layers."""
    sharded = Owned[ShardedOptimizer | None]("_step")
    """The optimizer's mechanics while fitting."""
    grad_norm = Owned[float | None]("_step")
    """Global gradient norm of the last optimizer step, before clipping; the same on all processes."""
    step_skipped = Owned[bool]("_step", "skipped")
    """Whether the last optimizer step was skipped."""
    skipped_steps = Owned[int]("_step", may_change=True)
    """Optimizer steps that were skipped because something was not finite."""
    skipped_all = Owned[bool]("_step")
    """Whether all optimizer steps of the last run were skipped, so that it has trained nothing."""
    on_non_finite = Owned[Literal["skip", "raise"]]("_step", may_change=True)
    state_dict_type = Owned[Literal["sharded", "full"]]("_saver", may_change=True)
    async_save = Owned[bool | Literal["overlap"]]("_saver", may_change=True)
    on_save_error = Owned[Literal["raise", "warn"]]("_saver", may_change=True)

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
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        if bucket_megabytes <= 0:
            raise UserError(f"bucket_megabytes ({bucket_megabytes}) must be positive")
        self.num_nodes = 1
        """Set by the Trainer."""
        self.shard_optimizer = shard_optimizer
        self.overlap_grad_reduce = overlap_grad_reduce
        self.overlap_param_gather = overlap_param_gather
        self.bucket_megabytes = bucket_megabytes
        self.log_grad_norm = log_grad_norm
        self._processes = Processes(
            pipeline_parallel_size, expert_parallel_size, process_group_backend, timeout, self._is_interrupted
        )
        self._pipeline = Pipeline(pipeline_parallel_size, schedule, num_microbatches, stages_per_rank, pipeline_split)
        self._experts = PlacedExperts(comm)
        self._step = OptimizerStep(on_non_finite)
        self._saver = Saver(state_dict_type, async_save, on_save_error)
        self._loader = Loader()
        self._first_batch: FirstBatch | None = None
        self._exact = ExactValues()
        self._patches = Patches()
        self._signals = Signals()

    # ------------------------------------------------------------------------------------------ the Trainer is made

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Processes of this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def is_distributed(self) -> bool:
        """Lightning gives distributed samplers only to strategies that say so; one process needs none."""
        return self.num_nodes * self.num_processes > 1

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    def set_world_ranks(self) -> None:
        """Tell environment and rank-zero helpers the global rank."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]
        utilities_rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        self._processes.shape(self.num_nodes * self.num_processes)  # refused before a process is started
        self._launcher = Launcher(self.cluster_environment, self.num_processes, self.num_nodes, self._before_launch)

    # ------------------------------------------------------------------------------------------ a run begins

    def _before_launch(self, trainer: Trainer, given: Mapping[str, Any]) -> None:
        """A run is asked for: no process was started, and Lightning has not yet looked for the last checkpoint."""
        self._loader.weights_only = given.get("weights_only")
        for module in given.values():
            if isinstance(module, LightningModule):
                self._check(module)
        if self.pipeline_parallel_size > 1 and trainer.state.fn == TrainerFn.FITTING:
            replicas = self._processes.shape(self.num_nodes * self.num_processes).data
            refuse_batches(trainer, list(given.values()), self.num_microbatches, replicas)
        if getattr(rank_zero_only, "rank", 0) == 0:
            folders = [getattr(callback, "dirpath", None) for callback in trainer.checkpoint_callbacks]
            self._saver.clean_folders([*folders, trainer.default_root_dir])

    def _check(self, module: LightningModule) -> None:
        """Numbers of layers and experts that do not fit."""
        with suppress(RuntimeError):  # a module may ask its trainer, which it gets when it is connected
            self._pipeline.plan(module)
        self._experts.check(module, self.expert_parallel_size, self.root_device)

    @override
    def connect(self, model: LightningModule) -> None:
        super().connect(model)
        self._pipeline.plan(model)
        self._experts.check(model, self.expert_parallel_size, self.root_device)
        refuse_manual_optimization(model)
        if self.pipeline_parallel_size > 1:
            refuse_own_backward(model)

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        reset_seed()
        self.set_world_ranks()
        assert self.cluster_environment is not None
        self._processes.join(self.cluster_environment, self.world_size, self.root_device)
        self._processes.open()
        self._saver.open(self.mesh, self.root_device, self.timeout)

    def place_experts(self, module: nn.Module) -> int:
        """Keep the own experts of each MoE layer in ``module`` and connect it with the others'.

        Called by the strategy on the whole LightningModule; a module may call it earlier, in ``configure_model``, while
        its weights are still on the meta device, so that no process ever holds all experts.

        Returns:
            Global index of the first own expert of the last layer (0 without layers).

        Raises:
            UserError: the experts cannot be shared evenly.
        """
        return self._experts.place(module, self.mesh.expert, self.root_device, weight_dtype(self.precision_plugin))

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        assert self.model is not None
        self.accelerator.setup(trainer)
        refuse_scaler(self.precision_plugin)
        refuse_callbacks(trainer)
        self._place_model()
        if self._fitting:
            self._warn_of_routers()
            self.optimizers, self.lr_scheduler_configs = [], []
            self.setup_optimizers(trainer)
            self._shard_optimizer(trainer)
        self._exact.keep_on_host()
        self.setup_precision_plugin()
        if self._fitting:
            optimizers_to_device(self.optimizers, self.root_device)
        self._patch(trainer)

    def _warn_of_routers(self) -> None:
        """Once for each stage, which has routers of its own."""
        untrained = untrained_routers(self._module) if self.mesh.data.rank == 0 else ""
        if untrained:
            warnings.warn(untrained, stacklevel=2)

    def _place_model(self) -> None:
        """Give each process its part, with equal values."""
        assert self.model is not None
        if self._fitting or self._processes.is_distributed:
            refuse_uninitialised(self._module)
        if self._fitting or (self.sharded is not None and not self.sharded.trains(self._module)):
            self._step.forget_run()
        if self._fitting and (layer_sync := layer_sync_of(self)) is not None:
            self.model = layer_sync.apply(self.model)
        self.place_experts(self._module)
        self.model_to_device()
        ownership = self.ownership()
        ownership.refuse_layouts()
        ownership.equalise(self.root_device)
        with self._exact.narrowing(self._module):
            self.model = self.precision_plugin.convert_module(self.model)
        self._pipeline.build(self._module, self.mesh.pipeline, self.root_device)

    @override
    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    def _shard_optimizer(self, trainer: Trainer) -> None:
        """Move the optimizer onto shards, and begin the steps of a fit."""
        if not self.optimizers or isinstance(self.optimizers[0], NoOptimizer):
            return
        optimizer, module = self.optimizers[0], self._module
        trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        ownership = Ownership(module, self.mesh, expert_tensors(module), trained)
        refuse_dtypes(optimizer, ownership)
        ownership.refuse_two_owners()
        views = ownership.views_of_trained()
        with self._exact.handing_over(trained) as values, ExitStack() as undo:
            sharded = ShardedOptimizer(
                optimizer,
                ownership,
                shard=self.shard_optimizer,
                overlap_reduce=self.overlap_grad_reduce,
                values=values,
                bucket_elements=int(self.bucket_megabytes * 2**20 / 4),
                attach_grads=self._pipeline.splits_backward,
            )
            undo.callback(sharded.close, connected=False, widen=bool(values))
            refuse_groups_of_processes(sharded)
            hooks, names = None, gradient_hooks(trainer, module)
            if names:
                keeps = "on_before_zero_grad" in names and self.pipeline is not None
                hooks = GradientHooks(ShownGradients(sharded), lambda: trainer.accumulate_grad_batches, keeps)
            views.follow()
            run = Run(
                sharded,
                WeightWaits(module, sharded.bucket_of()),
                views,
                gather_at_once=not self.overlap_param_gather or reads_weights_between_steps(trainer, module),
                max_norm=partial(fused_max_norm, trainer, module),
                hooks=hooks,
                third_parties=sets_weights(trainer, module),
                before_update=self.finish_copy,
                global_step=lambda: trainer.global_step,
                noted=self._signals.noted,
            )
            self._step.begin_run(run)
            undo.pop_all()
        self._first_batch = FirstBatch(module, trained, self.mesh.world)

    def _patch(self, trainer: Trainer) -> None:
        self._patches.undo()
        self._patches.clip(self.precision_plugin, self._step.clip_by_norm, self._step.clip_by_value)
        if self._fitting:
            self._patches.after_gradient_hooks(self._module, self._step.end_hooks)
        if self._fitting and self.sharded is not None:
            optimizers = [self.sharded.optimizer, self._module.optimizers()]
            self._patches.around_swaps(optimizers, self._settle, self.sharded.publish)
        self._patches.step_lr_schedules(self._module, self._advances)
        for callback in trainer.checkpoint_callbacks:
            if self.async_save:
                self._patches.count_as_existing(callback, self._is_queued)
            if self._fitting:
                self._patches.around_saves(callback, self._saver.call_hook)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if self._fitting and isinstance(callback, LearningRateFinder):
                self._patches.around_lr_find(callback, partial(self._find_rate, callback))
        self._signals.begin()
        if self._fitting:
            self._patches.handle_signals(trainer, self._signals.note_stop, self._signals.note_requeue)
            self._patches.end_train_batch(self._module, self._end_train_batch)
        else:
            self._patches.handle_signals(trainer, *evaluation_handlers(trainer))

    def _advances(self, scheduler: Any) -> bool:
        """Lightning advances an lr_schedule after each step, a skipped one too. Epochs pass all the same."""
        per_epoch = any(c.scheduler is scheduler and c.interval == "epoch" for c in self.lr_scheduler_configs)
        return per_epoch or not self.step_skipped

    def _find_rate(self, finder: LearningRateFinder, find: Callable[[], None]) -> None:
        keep_proportions(find, finder, self._module, self.optimizers, lambda: self.lr_scheduler_configs)

    def _is_queued(self, path: Any) -> bool:
        return self.reduce_boolean_decision(self._saver.is_queued(path), all=False)

    # ------------------------------------------------------------------------------------------ a checkpoint is read

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        self.finish_saves()
        path = Path(checkpoint_path)
        if weights_only is None and checkpoint_path == self._module.trainer.ckpt_path:
            weights_only = self._loader.weights_only
        if path.is_dir():
            checkpoint = read_directory(path, weights_only, self._fitting)
        else:
            checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        if self._fitting:
            self._loader.choose_own(checkpoint, self.mesh)
        return checkpoint

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self.wait_for_weights()
        if not self._fitting:
            self._step.forget_run()  # of an earlier fit: its masters are not those of the weights that come now
        self._loader.load_model(checkpoint, strict, self.training_state(), self._fitting)
        self._exact.forget_values()

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        skipped = self._loader.load_progress(checkpoint, self.mesh, self.root_device)
        if skipped is not None:
            self._step.skipped_steps = skipped
        if self.sharded is not None:
            self._loader.load_optimizer(checkpoint, self.sharded)
        else:
            super().load_optimizer_state_dict(checkpoint)

    # ------------------------------------------------------------------------------------------ data

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The data rank: processes that hold stages of one pipeline see the same samples."""
        return {"num_replicas": self.mesh.data.size, "rank": self.mesh.data.rank}

    @override
    def process_dataloader(self, dataloader: Any) -> Any:
        trainer = self._module.trainer
        if self.pipeline_parallel_size > 1 and trainer.training:
            refuse_batches(trainer, [dataloader], self.num_microbatches)
        check_batches(dataloader, most_batches(trainer), self.mesh, self.root_device)
        return dataloader

    # ------------------------------------------------------------------------------------------ evaluation

    @override
    def on_validation_start(self) -> None:
        self._synchronise()
        if self._validates_while_fitting:
            batches = validation_batches(self._module.trainer)
            self._signals.begin_validation(batches, self.mesh.world, self.root_device)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        output = super().validation_step(*args, **kwargs)
        if self._validates_while_fitting:
            asked = self._signals.agree_in_validation(self.mesh.world, self.root_device)
            self._act(asked, validating=True)
        return output

    @override
    def on_test_start(self) -> None:
        self._synchronise()

    @override
    def on_predict_start(self) -> None:
        self._synchronise()

    def pipeline_forward(self, first: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Send a batch through all stages, without gradients; for ``predict_step`` above all.

        Args:
            first: as in :meth:`pipeline_step`.
            batch: as in :meth:`pipeline_step`.

        Returns:
            What the last stage makes of the batch, on every rank of the pipeline.

        Raises:
            RuntimeError: there is no pipeline.
        """
        return self._pipeline.forward(first, batch)

    # ------------------------------------------------------------------------------------------ an optimizer step

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._saver.raise_failed()
        self._loader.begin_batch(batch_idx, self.mesh, self.root_device)

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        with self._step.accumulating():
            yield

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Its closure runs ``training_step`` and ``backward`` of the step's last batch; then the optimizer updates."""
        result = None
        with self._step.watched(closure) as watched:
            result = super().optimizer_step(optimizer, watched, model, **kwargs)
        self._step.after_update()
        if self.log_grad_norm and self.sharded is not None and self.grad_norm is not None:
            # Of a step, whatever the batch: Lightning looks for its size otherwise, and `dataloader_iter` shows none.
            self._module.log("grad_norm", self.grad_norm, batch_size=1)
            self._module.log("skipped_steps", float(self.skipped_steps), batch_size=1)
        return result

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._step.begin_forward()
        output = super().training_step(*args, **kwargs)
        if self._first_batch is not None:
            self._first_batch.compare(self._module, output)
        self._step.end_forward(output, type(self._module).__name__, staged=self.pipeline is not None)
        return output

    def _end_train_batch(self) -> None:
        """Behind all hooks of a batch: what signals have asked for, on any process, is done between two steps."""
        if step_ends(self._module.trainer):
            known = self._step.take_asked()
            self._act(Asked(*known) if known is not None else self._agree())

    def _agree(self) -> Asked:
        return self._signals.agree(self.mesh.world, self.root_device)

    def _act(self, asked: Asked, validating: bool = False) -> None:
        self._signals.act(asked, self._module.trainer, self.cluster_environment, validating)

    def pipeline_step(self, first: Tensor, batch: Mapping[str, Tensor]) -> Sums:
        """Send a batch through all stages; in training, back as well. Every rank of the pipeline has the same batch.

        Args:
            first: input of the first stage, [B, ...].
            batch: what the stages and the loss may look at, each [B, ...].

        Returns:
            The sums of ``pipeline_loss`` over the batch, fp64 [], the same on all ranks of the pipeline.

        Raises:
            UserError: the rows cannot be cut into microbatches.
            RuntimeError: there is no pipeline.
        """
        pipeline = self._pipeline.built("pipeline_step")
        if not (self._module.training and torch.is_grad_enabled()):
            return pipeline.evaluate(first, batch)
        self._step.begin_pipeline()
        sums = pipeline.train(first, batch)
        self._step.end_pipeline(sums["loss"])
        return sums

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Back-propagate the sum over tokens; the division comes once, at the end of the step."""
        if not self._step.begin_backward():
            if self.pipeline is not None:  # without an optimizer
                return closure_loss
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        self.precision_plugin.pre_backward(closure_loss, self._module)
        loss = self._step.take_loss()
        if loss is not None:
            self.precision_plugin.backward(loss, self._module, optimizer, *args, **kwargs)
        with self._step.end_backward():
            return self.precision_plugin.post_backward(closure_loss, self._module)

    # ------------------------------------------------------------------------------------------ a checkpoint is written

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        """Of checkpoints that are files."""
        if self._checkpoint_io is None:
            self._checkpoint_io = WholeFiles()
        elif isinstance(self._checkpoint_io, WrappingCheckpointIO):
            self._checkpoint_io.checkpoint_io = WholeFiles()  # of the innermost one, unless it has another
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The own part of this process; of ``full`` checkpoints all experts, in fp32 if trained, on rank 0."""
        if self._processes.interrupted:
            return self._module.state_dict()
        self._synchronise()
        return full_state_dict(self.ownership(), self.sharded) if self._saver.full else self._module.state_dict()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if not self._saver.full:
            return {}
        if self.sharded is None:
            return super().optimizer_state(optimizer)
        return {} if self._processes.interrupted else full_optimizer_state(self.sharded)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        if self._processes.interrupted:
            self._saver.refuse(filepath)
        elif self._saver.full:
            write = partial(super().save_checkpoint, storage_options=storage_options)
            self._saver.save_file(checkpoint, filepath, self._saved_run(), write)
        else:
            self._synchronise()
            self._saver.save_directory(checkpoint, filepath, storage_options, self._saved_run())

    def _saved_run(self) -> SavedRun:
        trainer = self._module.trainer
        fitting = self._fitting and trainer.state.status == TrainerStatus.RUNNING and not self._signals.saving
        return SavedRun(
            self.training_state(), self.skipped_steps, fitting, lambda: build_manifest(trainer, self._module)
        )

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        """Delete an old one; not if the save that was to replace it has failed."""
        self._saver.remove(filepath, super().remove_checkpoint)

    # ------------------------------------------------------------------------------------------ a run ends

    @override
    def on_train_end(self) -> None:
        self._experts.report_drops(self.mesh)
        self._synchronise()
        self.finish_saves()
        self._saver.end_background()
        self._act(self._agree())

    @override
    def on_exception(self, exception: BaseException) -> None:
        if self._signals.stopped and isinstance(exception, SIGTERMException):
            return
        children = self.launcher.procs if isinstance(self.launcher, Launcher) else []
        self._processes.end_others(exception, children)

    @override
    def teardown(self) -> None:
        module, interrupted = self.lightning_module, self._processes.interrupted
        self._processes.close()
        self._patches.undo()
        self._first_batch = None
        if module is not None and any(parameter.is_meta for parameter in module.parameters()):
            self._lightning_module = None  # building it failed, and Lightning could not move it to the CPU
        narrow = weight_dtype(self.precision_plugin) is not None
        self._step.close_run(interrupted, restore_masters=narrow)
        self._exact.close(module, restore=narrow)
        self._saver.close(interrupted)
        self._experts.close(module)
        super().teardown()

    # ------------------------------------------------------------------------------------------ collectives

    @override
    def barrier(self, name: str | None = None) -> None:
        self._processes.barrier()

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return self._processes.broadcast(obj, src)

    @override
    def reduce(self, tensor: Tensor | Any, group: Any | None = None, reduce_op: Any = "mean") -> Tensor | Any:
        """Sum or average over all processes; the same value on each.

        Args:
            tensor: what is not a tensor is returned as it is.
            group: a process group in place of all.
            reduce_op: ``mean``, ``avg``, ``sum``, or an operation of ``torch.distributed``.
        """
        return self._processes.reduce(tensor, group, reduce_op)

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        return super().all_gather(tensor, group, sync_grads) if self._processes.can_communicate else tensor

    def sum_over_data(self, tensor: Tensor) -> Tensor:
        """Sum over the processes that see different samples; those of one pipeline see the same ones.

        Args:
            tensor: the same shape on each; integers too.

        Returns:
            A new tensor, the same on every process.
        """
        return self._processes.sum_over_data(tensor)

    # ------------------------------------------------------------------------------------------ for modules, callbacks

    def own_drops(self) -> dict[str, dict[str, Tensor]]:
        """What each plugin dropped of this process' tokens: copies of its counters by name, on the device."""
        return self._experts.own_drops()

    def sum_of_drops(self, own: dict[str, dict[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
        """Add up counters, as :meth:`own_drops` gives them, over all processes, fp64 on the CPU; collective."""
        return self._experts.sum_of_drops(own, self.mesh)

    drop_rates = staticmethod(DropCounters.rates)

    def ownership(self) -> Ownership:
        """Which processes hold each tensor of the module, and under which name it is saved, as of now."""
        trained = [parameter for _, parameter, _ in self.sharded.parameters] if self.sharded is not None else []
        return Ownership(self._module, self.mesh, expert_tensors(self._module), trained)

    def training_state(self) -> TrainingState:
        """Weights, masters and optimizer state of this process as ranges of global tensors, as of now."""
        return TrainingState(self.ownership(), self.sharded)

    def describe(self) -> str:
        """Tables for people: who holds, changes and saves each tensor of the model that is set up; collective."""
        updated = dict.fromkeys(self._module.parameters(), 0)
        if self.sharded is not None:
            for _, parameter, number in self.sharded.parameters:
                shard = self.sharded.shards.get(number)
                updated[parameter] = shard.stop - shard.start if shard is not None else 0
        return self.ownership().describe(updated)

    def wait_for_weights(self) -> None:
        """Return when the weights of the last optimizer step have arrived from the other processes."""
        self._step.wait_for_weights()

    def finish_copy(self) -> None:
        """Return when weights and optimizer state may change; a save in the background may still be copying them."""
        self._saver.finish_copy()

    def finish_saves(self) -> None:
        """Wait for saves in the background; collective.

        Raises:
            SaveError: one failed, and ``on_save_error`` is ``"raise"``.
        """
        self._saver.finish()

    def _synchronise(self) -> None:
        """Wait for copies and weights that are on their way, and make buffers equal."""
        self._settle()
        if self.lightning_module is not None:
            self.ownership().equalise_buffers(self.root_device)

    def _settle(self) -> None:
        """Wait for copies and weights that are on their way."""
        self.finish_copy()
        self.wait_for_weights()

    @property
    def _module(self) -> LightningModule:
        if self.lightning_module is None:
            raise RuntimeError("the strategy has a module once the Trainer has started fit, validate, test or predict")
        return self.lightning_module

    @property
    def _fitting(self) -> bool:
        return self._module.trainer.state.fn == TrainerFn.FITTING

    def _is_interrupted(self) -> bool:
        trainer = trainer_of(self.lightning_module)
        interrupted = trainer is not None and trainer.state.status == TrainerStatus.INTERRUPTED
        return interrupted and not self._signals.stopped

    @property
    def _validates_while_fitting(self) -> bool:
        return self._fitting and not self._module.trainer.sanity_checking
