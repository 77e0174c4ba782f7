"""OLMoE as a LightningModule: losses, optimizer, schedule, logging, generation.

B batch, S sequence, E experts, Lm MoE layers.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from typing_extensions import override

from olmoe_lightning._lightning import trainer_of
from olmoe_lightning.checkpoint import load_pretrained
from olmoe_lightning.config import ModelConfig
from olmoe_lightning.data.tokenizer import BPETokenizer, ByteTokenizer
from olmoe_lightning.errors import UserError, UserTypeError
from olmoe_lightning.kernels import keep_freed_memory
from olmoe_lightning.model import RoutingStats, Transformer
from olmoe_lightning.model.generation import Continuation, GenerationConfig
from olmoe_lightning.parallel import Mesh
from olmoe_lightning.parallel.pipeline.runner import PipelineRunner, Sums
from olmoe_lightning.plugins.precision.base import KeepsMasters
from olmoe_lightning.strategy import MoEStrategy
from olmoe_lightning.training.experts import expert_parameters
from olmoe_lightning.training.generation import TextGenerator
from olmoe_lightning.training.lr_schedule import LRSchedule, make_lr_schedule
from olmoe_lightning.training.metrics import LanguageModelMetrics, OfStep, TokenMean, has_label
from olmoe_lightning.training.network import build_network, keep_own_layers
from olmoe_lightning.training.objective import Objective, mean_output
from olmoe_lightning.training.pipeline import STAGE_BUILDER
from olmoe_lightning.training.routers import untrained_routers
from olmoe_lightning.training.stored import RESTORED, load_directory, refuse_other_network, restored_settings

Batch = dict[str, Tensor]

_HYPERPARAMETERS = (
    *("learning_rate", "weight_decay", "betas", "eps", "decay_all", "expert_lr_multiplier", "schedule"),
    *("warmup_steps", "warmup_tokens", "schedule_steps", "min_lr_ratio", "decay_fraction", "init_seed"),
)
"""What a checkpoint keeps of a module besides its configuration, in this order."""


class OLMoE(LightningModule):
    """A mixture-of-experts language model, ready for ``Trainer.fit``.

    Batches are dictionaries with ``input_ids`` (int64 [B, S]) and ``labels`` (int64 [B, S], already shifted, -100 where
    nothing is predicted), and optionally ``document_ids`` (integers [B, S], -1 on padding) and ``source_ids`` (int64
    [B], index of the mixture component).

    Args:
        config: a :class:`ModelConfig`, or the name of a preset.
        overrides: fields of the configuration to change, for example ``{num_experts: 32}``.
        learning_rate: peak learning rate.
        weight_decay: AdamW's, on weight matrices only (see ``decay_all``).
        betas: decay rates of AdamW's averages of the gradient and of its square.
        eps: AdamW's term in the denominator, for stability.
        decay_all: decay norms and embeddings too, as OLMoE-1B-7B was trained.
        expert_lr_multiplier: factor on the learning rate of the routed experts.
        schedule: ``cosine``, ``wsd`` (warm-up, stable, decay) or ``constant``.
        warmup_steps: linear warm-up in optimizer steps.
        warmup_tokens: the same in tokens; not together with ``warmup_steps``.
        schedule_steps: length of the schedule; ``None`` takes the trainer's ``max_steps``.
        min_lr_ratio: final learning rate over the peak.
        decay_fraction: share of the run in which ``wsd`` decays.
        init_seed: of the initial weights, which depend on nothing else.
        pretrained: weights to start from: a directory with a Hugging Face OLMoE or the output of
            ``olmoe-lightning convert``, or a checkpoint of the trainer; ``config`` must describe the same network.
        compile_blocks: compile each block with ``torch.compile`` (about half a minute at the first step).
        generation: how ``predict`` continues the rows of a batch.

    Raises:
        UserError: an argument is out of range, or the warm-up is given twice.
    """

    reads_weights_between_steps = False
    reads_gradients = False

    def __init__(
        self,
        config: ModelConfig | str = "tiny",
        overrides: dict[str, Any] | None = None,
        learning_rate: float = 4e-4,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        decay_all: bool = False,
        expert_lr_multiplier: float = 1.0,
        schedule: LRSchedule = "cosine",
        warmup_steps: int = 0,
        warmup_tokens: int = 0,
        schedule_steps: int | None = None,
        min_lr_ratio: float = 0.1,
        decay_fraction: float = 0.2,
        init_seed: int = 0,
        pretrained: str | None = None,
        compile_blocks: bool = False,
        generation: GenerationConfig = GenerationConfig(),  # noqa: B008  # frozen
    ) -> None:
        super().__init__()
        if warmup_steps and warmup_tokens:
            raise UserError(
                f"give the warm-up once: warmup_steps is {warmup_steps} and warmup_tokens is {warmup_tokens}"
            )
        for name, value in (
            ("learning_rate", learning_rate),
            ("expert_lr_multiplier", expert_lr_multiplier),
            ("eps", eps),
        ):
            if value <= 0:
                raise UserError(f"{name} ({value}) must be positive")
        for name, value in (
            ("weight_decay", weight_decay),
            ("warmup_steps", warmup_steps),
            ("warmup_tokens", warmup_tokens),
        ):
            if value < 0:
                raise UserError(f"{name} ({value}) must not be negative")
        if not all(0 <= beta < 1 for beta in betas):
            raise UserError(f"betas ({betas[0]}, {betas[1]}) must lie in [0, 1)")
        # The other numbers of the schedule are checked before the first step waits for data.
        make_lr_schedule(schedule, 0, schedule_steps or 1, min_lr_ratio, decay_fraction)
        self.config = _resolve(config, overrides)
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.betas = (betas[0], betas[1])  # from YAML and checkpoints also as a list
        self.eps = eps
        self.decay_all = decay_all
        self.expert_lr_multiplier = expert_lr_multiplier
        self.schedule: LRSchedule = schedule
        self.warmup_steps = warmup_steps
        self.warmup_tokens = warmup_tokens
        self.schedule_steps = schedule_steps
        self.min_lr_ratio = min_lr_ratio
        self.decay_fraction = decay_fraction
        self.init_seed = init_seed
        self.pretrained = pretrained
        self.compile_blocks = compile_blocks
        self.generation = generation
        # Plain values only, so that a checkpoint loads with weights_only=True.
        self.save_hyperparameters(
            {"config": self.config.to_dict(), **{name: getattr(self, name) for name in _HYPERPARAMETERS}}
        )
        self.model: Transformer | None = None
        self.routing_stats: RoutingStats | None = None
        """Statistics of the last training or validation batch, detached, on the device."""
        self.metrics = LanguageModelMetrics()
        self._staged = False  # the network was built for a pipeline
        self._counts: Tensor | None = None  # of the optimizer step under way, for the selection bias
        self._loaded: dict[str, Any] = {}  # hyperparameters of the checkpoint that was loaded
        self._tokenizer: str | None = None  # of the data, as checkpoints keep it

    # ---------------------------------------------------------------------------------------------- building

    @property
    def _moe(self) -> MoEStrategy | None:
        """The strategy, if other processes may hold layers or experts of this model."""
        trainer = trainer_of(self)
        return trainer.strategy if trainer is not None and isinstance(trainer.strategy, MoEStrategy) else None

    @override
    def configure_model(self) -> None:
        """Build and initialise the network once; Lightning calls this on every entry point.

        Of a network that is there, from a checkpoint or an earlier run, each process keeps its layers and experts.
        """
        moe = self._moe
        if self.model is not None and moe is not None:
            keep_own_layers(self.model, moe.stage_map, moe.mesh.pipeline.rank)
            self._staged = moe.stage_map is not None
        self.built()

    def built(self) -> Transformer:
        """The network, built on first use."""
        if self.model is None:
            moe = self._moe
            if moe is not None:
                self._staged = moe.stage_map is not None
                self.model = build_network(
                    self.config,
                    self.init_seed,
                    self.pretrained,
                    moe.root_device,
                    moe.place_experts,
                    moe.stage_map,
                    moe.mesh.pipeline.rank,
                )
            else:
                self.model = Transformer(self.config)
                self.model.init_weights(self.init_seed)
                if self.pretrained is not None:
                    load_pretrained(self.model, self.pretrained)
            if self.compile_blocks:
                for block in self.model.blocks:
                    block.compile()
        return self.model

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse methods that would not be called: the stages and sums are those of :meth:`pipeline_stages`."""
        super().__init_subclass__(**kwargs)
        moved = [name for name in vars(cls) if name in STAGE_BUILDER]
        if moved:
            raise UserTypeError(
                f"{cls.__name__} defines {', '.join(moved)}, which belong to the builder of stages: define them in a "
                "subclass of olmoe_lightning.training.objective.Objective, and return that from pipeline_stages()"
            )

    def pipeline_stages(self) -> Objective:
        """What a batch comes to, and what cuts the transformer into stages for it; overridden for another loss."""
        return Objective(self.config, self.built, self.metrics, self._token_bytes)

    @override
    def setup(self, stage: str) -> None:
        """Check the data against the model, prepare the losses of each source, and say how large the model is."""
        if self.trainer.strategy.root_device.type == "mps":
            raise UserError("Apple GPUs lack the float64 and grouped products used here; set accelerator='cpu'")
        data = getattr(self.trainer, "datamodule", None)
        tokenizer = getattr(data, "tokenizer", None)
        if tokenizer is not None and tokenizer.vocab_size > self.config.vocab_size:
            raise UserError(
                f"the tokenizer has {tokenizer.vocab_size} tokens, the model's vocabulary {self.config.vocab_size}; "
                f"set model.overrides.vocab_size to at least {tokenizer.vocab_size} or choose another tokenizer"
            )
        seq_len = getattr(data, "seq_len", 0)
        if seq_len > self.config.max_seq_len:
            raise UserError(
                f"the data's seq_len ({seq_len}) exceeds the model's max_seq_len ({self.config.max_seq_len}); "
                "shorten the one or raise the other with model.overrides.max_seq_len"
            )
        if isinstance(tokenizer, BPETokenizer):
            self._tokenizer = tokenizer.to_json()
        elif isinstance(tokenizer, ByteTokenizer):
            self._tokenizer = "byte"
        self.metrics.set_sources(getattr(data, "val_source_names", []))
        self._counts = None
        if stage == "fit":
            if self.trainer.strategy.root_device.type == "cpu":
                keep_freed_memory()  # before the model is built
            length = seq_len or self.config.max_seq_len
            rank_zero_info(
                f"Model: {self.config.num_params:,} parameters, {self.config.num_active_params:,} active per token, "
                f"{self.config.flops_per_token(length) / 1e6:,.1f} MFLOP per token of training (sequences of {length})"
            )

    # ---------------------------------------------------------------------------------------------- steps

    @override
    def forward(self, input_ids: Tensor, document_ids: Tensor | None = None) -> Tensor:
        """Logits, fp32 [B, S, V], of int64 [B, S] tokens (attention inside documents when their ids are given)."""
        model = self.built()
        hidden, _ = model(input_ids, document_ids)
        return model.logits(hidden)

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Cross entropy, balance and z-losses of a microbatch.

        Returns:
            ``loss``: fp32 [], mean over the labels that count (z-loss of the head included; the router's losses
            contribute their gradients inside the layers). ``num_tokens``: int64 [], the labels that count.
        """
        # Looked at here, where the device has nothing to do: Lightning has just read the last loss.
        labelled = has_label(batch)
        sums, stats = self._sums(batch)
        self.routing_stats = stats
        self._log_training(sums, stats, labelled)
        if stats is not None and self.config.bias_update_rate:
            self._counts = stats.counts if self._counts is None else self._counts + stats.counts
        return mean_output(sums)

    def _sums(self, batch: Batch) -> tuple[Sums, RoutingStats | None]:
        """What a batch comes to; in a pipeline the backward pass has then been made too."""
        objective, pipeline = self.pipeline_stages(), self._pipeline()
        if pipeline is not None and self._moe is not None:
            return objective.staged(batch, self._moe.pipeline_step, pipeline)
        return objective.whole(batch, self._aux_scale if self.training else None)

    def _pipeline(self) -> PipelineRunner | None:
        """The stages of this process; ``None`` if it has all layers."""
        pipeline = self._moe.pipeline if self._moe is not None else None
        if self._staged and pipeline is None:
            raise RuntimeError(
                "the layers of this model are in several processes, so that it runs only inside of their Trainer, with "
                "pipeline_parallel_size > 1; for all of them in one process save a checkpoint with "
                "trainer.save_checkpoint, and load it with load_from_checkpoint"
            )
        return pipeline if self._staged else None

    def _token_bytes(self, device: torch.device) -> Tensor | None:
        """Bytes of each token of the vocabulary, int64 [V], if the data module knows its tokenizer."""
        tokenizer = getattr(getattr(self.trainer, "datamodule", None), "tokenizer", None)
        if tokenizer is None:
            return None
        known = torch.as_tensor(tokenizer.token_bytes, dtype=torch.int64, device=device)
        return torch.nn.functional.pad(known, (0, self.config.vocab_size - len(known)))

    def _log_training(self, sums: Sums, stats: RoutingStats | None, labelled: bool) -> None:
        """Means over the tokens of all processes, equal on each of them: one reduction for all that is logged.

        Nothing is logged of a batch without a token that counts.
        """
        values = [sums[name] for name in ("num_tokens", "cross_entropy", "z")]
        if stats is not None:
            values += [stats.balance_sum.mean(), stats.z_sum.mean()]
        totals = self.trainer.strategy.reduce(
            torch.stack([value.detach().double() for value in values]), reduce_op="sum"
        )
        assert isinstance(totals, Tensor)
        count, *sums_of_all = totals
        counts = labelled or bool(count.item())  # the same on all processes
        cross_entropy, z, *routers = ((value / count).float() for value in sums_of_all)
        means = {"loss": cross_entropy, "perplexity": cross_entropy.exp()}
        if self.config.lm_z_loss_coeff:
            means["lm_z_loss"] = self.config.lm_z_loss_coeff * z
        if routers:
            means["balance_loss"] = self.config.balance_loss_coeff * routers[0]
            means["router_z_loss"] = self.config.router_z_loss_coeff * routers[1]
        for name, value in means.items():
            metric = self.metrics.of_step[name]
            assert isinstance(metric, OfStep)
            metric(value if counts else None)
            self.log(f"train/{name}", metric, prog_bar=name == "loss", metric_attribute=f"metrics.of_step.{name}")

    def _aux_scale(self, divisor: Tensor) -> Tensor:
        """Factor with which the layers' losses join the backward pass: the one that the main loss has there, fp32 [].

        It is 1 where the strategy back-propagates sums and divides at the end. Elsewhere the mean is back-propagated,
        which Lightning divides by the accumulated batches and multiplies by the scale of fp16's gradients.
        """
        if isinstance(self.trainer.strategy, KeepsMasters):
            return torch.ones((), device=divisor.device)
        scale = 1.0 / (divisor * self.trainer.accumulate_grad_batches)
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        return scale if scaler is None else scaler.scale(scale)

    @override
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Cross entropy, perplexity, nats per byte; of every source apart as well."""
        self._evaluate(batch, "val")

    @override
    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """The same as validation, logged under ``test/``."""
        self._evaluate(batch, "test")

    def _evaluate(self, batch: Batch, prefix: str) -> None:
        sums, stats = self._sums(batch)
        num_tokens = sums["num_tokens"]
        rows = len(batch["labels"])

        def log(name: str, attribute: str, total: Tensor, count: Tensor, prog_bar: bool = False) -> None:
            metric = self.metrics.get_submodule(attribute)
            assert isinstance(metric, TokenMean)
            metric.update(total, count)
            # Sums are accumulated, so an epoch's value is exact; `batch_size` only silences a guess.
            self.log(
                f"{prefix}/{name}",
                metric,
                on_step=False,
                on_epoch=True,
                batch_size=rows,
                prog_bar=prog_bar,
                metric_attribute=f"metrics.{attribute}",
            )

        log("loss", "loss", sums["cross_entropy"], num_tokens, prog_bar=True)
        log("perplexity", "perplexity", sums["cross_entropy"], num_tokens)
        if "bytes" in sums:
            log("nats_per_byte", "nats_per_byte", sums["cross_entropy"], sums["bytes"])
        for index, name in enumerate(self.metrics.source_names):
            if f"source_{index}" in sums:
                total, count = sums[f"source_{index}"], sums[f"source_{index}_tokens"]
                log(f"loss/{name}", f"source_losses.{index}", total, count)
        self.routing_stats = stats
        if stats is not None:
            tokens = num_tokens * len(stats.z_sum)
            balance, z = self.config.balance_loss_coeff, self.config.router_z_loss_coeff
            log("balance_loss", "balance_loss", balance * stats.balance_sum.sum(), tokens)
            log("router_z_loss", "router_z_loss", z * stats.z_sum.sum(), tokens)

    # ---------------------------------------------------------------------------------------------- optimizer

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW over three groups, each with its name: experts, others that decay, and others that do not.

        A group may be empty, on a stage of a pipeline or everywhere: schedules, checkpoints and other stages know
        groups by their position.
        """
        groups: dict[str, list[torch.nn.Parameter]] = {"dense": [], "dense_no_decay": [], "experts": []}
        experts = set(expert_parameters(self))
        for name, parameter in self.built().named_parameters():
            if not parameter.requires_grad:
                continue
            part = "experts" if parameter in experts else "dense"
            decays = self.decay_all or (parameter.ndim > 1 and not name.startswith("embed."))
            groups.setdefault(f"{part}{'' if decays else '_no_decay'}", []).append(parameter)
        optimizer = torch.optim.AdamW(
            [
                {
                    "params": parameters,
                    "name": name,
                    "lr": self.learning_rate * (self.expert_lr_multiplier if name.startswith("experts") else 1.0),
                    "weight_decay": 0.0 if name.endswith("no_decay") else self.weight_decay,
                }
                for name, parameters in groups.items()
            ],
            lr=self.learning_rate,
            betas=self.betas,
            eps=self.eps,
            # Lightning refuses to clip under mixed precision with a fused optimizer.
            fused=not isinstance(self.trainer.precision_plugin, MixedPrecision),
        )
        scheduler = LambdaLR(optimizer, self._lr_schedule())
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _lr_schedule(self) -> Callable[[int], float]:
        total = self.schedule_steps
        if total is None and self.trainer.max_steps > 0:
            total = self.trainer.max_steps
        if total is None and self.schedule != "constant":
            # Last resort: this loads the training data early.
            estimate = self.trainer.estimated_stepping_batches
            total = int(estimate) if math.isfinite(estimate) else None
        warmup = self._warmup_steps()
        if total is not None and total < 1 and self.schedule_steps is None:
            total = max(1, warmup)  # no step is going to be taken, as with max_steps=0
        if self.trainer.fast_dev_run and total is not None:  # type: ignore[attr-defined]
            total = max(total, warmup)  # a trial of a few steps is no reason to refuse the warm-up of the real run
        return make_lr_schedule(self.schedule, warmup, total, self.min_lr_ratio, self.decay_fraction)

    def _warmup_steps(self) -> int:
        if not self.warmup_tokens:
            return self.warmup_steps
        data: Any = getattr(self.trainer, "datamodule", None)
        if not hasattr(data, "batch_size") or not hasattr(data, "seq_len"):
            raise UserError(
                f"warmup_tokens ({self.warmup_tokens}) needs a data module with batch_size and seq_len; "
                "give warmup_steps instead"
            )
        replicas = (self.trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1)
        per_step = data.batch_size * data.seq_len * replicas * self.trainer.accumulate_grad_batches
        steps: int = math.ceil(self.warmup_tokens / per_step)
        return steps

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Step, then move the routers' selection biases by the load of the whole global batch."""
        super().optimizer_step(*args, **kwargs)
        counts, self._counts = self._counts, None
        if counts is None:
            return
        if self._moe is None:
            self.update_selection_biases(self.trainer.strategy.reduce(counts, reduce_op="sum"))
        elif not self._moe.step_skipped:
            # Stages of one pipeline have seen the same tokens: only different data is added up.
            self.update_selection_biases(self._moe.sum_over_data(counts))

    def update_selection_biases(self, counts: Tensor) -> None:
        """One step of the loss-free balancing.

        Args:
            counts: int64 [Lm, E], requested assignments of the global batch.
        """
        blocks = self.built().blocks
        here = set(blocks.layers)  # the others are in other stages of a pipeline
        with_router = range(self.config.num_dense_layers, self.config.num_layers)
        for layer, layer_counts in zip(with_router, counts, strict=True):
            if layer in here:
                moe = blocks[layer].moe
                assert moe is not None
                moe.router.update_selection_bias(layer_counts)

    # ---------------------------------------------------------------------------------------------- writing

    @override
    def predict_step(self, batch: Batch, batch_idx: int) -> list[Continuation]:
        """Give the beginning of each row to the model and let it go on, as :attr:`generation` says.

        No row becomes longer than the model's ``max_seq_len``. Under expert parallelism every rank runs as many forward
        passes as the one with the most of them; in a pipeline all ranks return the same.

        Returns:
            One :class:`~olmoe_lightning.model.generation.Continuation` per row that has a prompt, on the CPU.
        """
        tokenizer = getattr(getattr(self.trainer, "datamodule", None), "tokenizer", None)
        eos_id = None if tokenizer is None else int(tokenizer.eos_id)
        generator = self._text_generator()
        return generator.complete_rows(batch, self.generation, eos_id, self.generation.seed + batch_idx, self.generate)

    def generate(
        self,
        prompt_ids: Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
        eos_id: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Continue prompts, int64 [B, S] to [B, S + new]; see :func:`olmoe_lightning.model.generation.generate`.

        Under expert parallelism all ranks call it together, with the same number of new tokens; it does not end early
        there, because the others would wait. All ranks of a pipeline call it with the same prompts and get the same.
        """
        return self._text_generator().generate(prompt_ids, max_new_tokens, temperature, top_p, eos_id, generator)

    def _text_generator(self) -> TextGenerator:
        mesh = self._moe.mesh if self._moe is not None else Mesh.single()
        return TextGenerator(self.built(), mesh, self._pipeline())

    # ---------------------------------------------------------------------------------------------- checkpoints

    @classmethod
    @override
    def load_from_checkpoint(
        cls,
        checkpoint_path: Any,
        map_location: Any = None,
        hparams_file: Any = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> Self:
        """A module from a checkpoint: a sharded directory of :class:`~olmoe_lightning.MoEStrategy`, or a file.

        Files are loaded as Lightning does it. A directory is read into this process alone, onto the device
        ``map_location`` (by default the CPU), and without trust unless ``weights_only=False``; ``hparams_file`` is not
        for directories. Keyword arguments are hyperparameters that win over the checkpoint's.

        Raises:
            UserError: the directory is no sharded checkpoint, is damaged, or holds another network.
        """
        if isinstance(checkpoint_path, str | os.PathLike) and Path(checkpoint_path).is_dir():
            path = Path(checkpoint_path)
            return load_directory(cls, path, map_location, hparams_file, strict, weights_only, kwargs)
        return super().load_from_checkpoint(checkpoint_path, map_location, hparams_file, strict, weights_only, **kwargs)

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the tokenizer too: a checkpoint alone is enough to write text."""
        if self._tokenizer is not None:
            checkpoint["tokenizer"] = self._tokenizer

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse the weights of another network."""
        self._loaded = checkpoint.get("hyper_parameters", {})
        self._tokenizer = self._tokenizer or checkpoint.get("tokenizer")
        refuse_other_network(self.config, self._loaded)

    @override
    def on_train_start(self) -> None:
        """Say what a user may not expect: settings that came with the optimizer's state, routers that do not learn."""
        asked = {name: getattr(self, name) for name in RESTORED}
        message = restored_settings(asked, self._loaded) if self.trainer.global_step else ""
        if message:
            rank_zero_warn(message)
        untrained = "" if self._moe is not None else untrained_routers(self)  # MoEStrategy has said it
        if untrained:
            rank_zero_warn(untrained)


def _resolve(config: ModelConfig | str | dict[str, Any], overrides: dict[str, Any] | None) -> ModelConfig:
    if isinstance(config, str):
        config = ModelConfig.preset(config)
    elif isinstance(config, dict):  # as checkpoints keep it
        config = ModelConfig.from_dict(config)
    return config.replace(**overrides) if overrides else config
