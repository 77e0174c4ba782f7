"""OLMoE writing text: ``predict`` and ``generate``, also where the experts are spread over processes."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from typing_extensions import override

from olmoe_lightning._lightning import trainer_of
from olmoe_lightning.model import KVCache
from olmoe_lightning.model.generation import (
    Continuation,
    GenerationConfig,
    check_request,
    extend_prompts,
    generate,
    sample_token,
    split_prompts,
)
from olmoe_lightning.model.stage import Stage
from olmoe_lightning.parallel import Mesh
from olmoe_lightning.parallel.pipeline.runner import PipelineRunner
from olmoe_lightning.training.module_stages import StagedModel

Batch = dict[str, Tensor]


@runtime_checkable
class ExpertPlacement(Protocol):
    """A strategy that shares experts, and possibly layers, among processes."""

    root_device: torch.device
    mesh: Mesh
    pipeline: PipelineRunner | None

    def place_experts(self, module: torch.nn.Module) -> int:
        """Keep the own experts of each MoE layer; the global index of the first one."""


class WritingModel(StagedModel):
    """A language model that continues prompts."""

    generation: GenerationConfig

    @override
    def predict_step(self, batch: Batch, batch_idx: int) -> list[Continuation]:
        """Give the beginning of each row to the model and let it go on, as :attr:`generation` says.

        No row becomes longer than the model's ``max_seq_len``. Under expert parallelism every rank runs as many forward
        passes as the one with the most of them; in a pipeline all ranks return the same.

        Returns:
            One :class:`~olmoe_lightning.model.generation.Continuation` per row that has a prompt, on the CPU.
        """
        settings = self.generation
        generator = torch.Generator(self.device).manual_seed(settings.seed + batch_idx)
        tokenizer = getattr(getattr(self.trainer, "datamodule", None), "tokenizer", None)
        eos_id = None if tokenizer is None else int(tokenizer.eos_id)
        pairs = split_prompts(batch["input_ids"], batch.get("document_ids"), settings)
        lengths = [len(prompt) for prompt, _ in pairs]
        result: dict[int, Continuation] = {}
        groups = sorted(set(lengths))  # a generated batch has prompts of one length
        room = max(0, self.config.max_seq_len - max(groups, default=1))
        rounds, new = self._agreed(len(groups), min(settings.max_new_tokens, room))
        for length in groups:
            rows = [row for row, found in enumerate(lengths) if found == length]
            prompts = torch.stack([pairs[row][0] for row in rows])
            texts = self.generate(prompts, new, settings.temperature, settings.top_p, eos_id, generator)
            for row, written in zip(rows, texts[:, length:].cpu(), strict=True):
                ends = (written == eos_id).nonzero() if eos_id is not None else []
                written = written[: int(ends[0]) + 1] if len(ends) else written
                result[row] = Continuation(pairs[row][0].cpu(), written, pairs[row][1].cpu())
        for _ in range(rounds - len(groups)):
            self.generate(torch.zeros(1, 1, dtype=torch.int64, device=self.device), new)
        return [result[row] for row in sorted(result)]

    def _elsewhere(self) -> ExpertPlacement | None:
        """The strategy, if other processes have experts that are needed here."""
        strategy = getattr(trainer_of(self), "strategy", None)
        return strategy if isinstance(strategy, ExpertPlacement) and strategy.mesh.expert.size > 1 else None

    def _agreed(self, rounds: int, new: int) -> tuple[int, int]:
        """Most rounds and fewest new tokens among the ranks that exchange tokens."""
        strategy = self._elsewhere()
        if strategy is None:
            return rounds, new
        found = torch.tensor([rounds, -new], device=self.device)
        most, negative = strategy.mesh.expert.all_reduce(found, torch.distributed.ReduceOp.MAX).tolist()
        return most, -negative

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
        if self._elsewhere() is not None:
            eos_id = None
        model = self.built()
        was_training = model.training
        model.eval()
        try:
            if self._stage_map is not None:
                return self._through_stages(prompt_ids, max_new_tokens, temperature, top_p, eos_id, generator)
            return generate(model, prompt_ids, max_new_tokens, temperature, top_p, eos_id, generator)
        finally:
            model.train(was_training)

    @torch.no_grad()
    def _through_stages(
        self,
        prompt_ids: Tensor,
        max_new_tokens: int,
        temperature: float,
        top_p: float,
        eos_id: int | None,
        generator: torch.Generator | None,
    ) -> Tensor:
        """:meth:`generate` where the layers are in several processes: that of the last stage chooses the tokens."""
        strategy = getattr(trainer_of(self), "strategy", None)
        pipeline = strategy.pipeline if isinstance(strategy, ExpertPlacement) else None
        if pipeline is None:
            raise RuntimeError("the layers of this model are in several processes; text is written inside the Trainer")
        check_request(prompt_ids, max_new_tokens, temperature, top_p, self.config.max_seq_len)
        cache = KVCache(self.config, prompt_ids.shape[1] + max_new_tokens)

        def next_token(ids: Tensor) -> Tensor:
            hidden = pipeline.forward(ids, {"labels": ids}, parts=1)
            chosen = ids.new_empty(len(ids), 1)
            if hidden is not None:
                chosen = sample_token(self.built().logits(hidden[:, -1]), temperature, top_p, generator)
            return pipeline.from_last(chosen)

        stages = [stage for stage in pipeline.modules.values() if isinstance(stage, Stage)]
        for stage in stages:
            stage.cache = cache
        try:
            return extend_prompts(next_token, prompt_ids, max_new_tokens, eos_id)
        finally:
            for stage in stages:
                stage.cache = None
                stage.take_stats()
