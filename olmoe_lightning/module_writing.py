"""OLMoE writing text: ``predict`` and ``generate``, also where the experts are spread over processes."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from typing_extensions import override

from olmoe_lightning.generate import Continuation, GenerationConfig, generate, split_prompts
from olmoe_lightning.module_stages import StagedModel
from olmoe_lightning.parallel import Mesh

Batch = dict[str, Tensor]


@runtime_checkable
class ExpertPlacement(Protocol):
    """A strategy that shares experts among processes."""

    root_device: torch.device
    mesh: Mesh

    def place_experts(self, module: torch.nn.Module) -> int:
        """Keep the own experts of each MoE layer; the global index of the first one."""


class WritingModel(StagedModel):
    """A language model that continues prompts."""

    generation: GenerationConfig

    @override
    def predict_step(self, batch: Batch, batch_idx: int) -> list[Continuation]:
        """Give the beginning of each row to the model and let it go on, as :attr:`generation` says.

        Under expert parallelism every rank runs as many forward passes as the one with the most lengths of prompts.

        Returns:
            One :class:`~olmoe_lightning.generate.Continuation` per row that has a prompt, on the CPU.
        """
        settings = self.generation
        generator = torch.Generator(self.device).manual_seed(settings.seed + batch_idx)
        tokenizer = getattr(getattr(self.trainer, "datamodule", None), "tokenizer", None)
        eos_id = None if tokenizer is None else int(tokenizer.eos_id)
        pairs = split_prompts(batch["input_ids"], batch.get("document_ids"), settings)
        lengths = [len(prompt) for prompt, _ in pairs]
        result: dict[int, Continuation] = {}
        groups = sorted(set(lengths))  # a generated batch has prompts of one length
        most = self._most_over_experts(len(groups))
        for length in groups:
            rows = [row for row, found in enumerate(lengths) if found == length]
            prompts = torch.stack([pairs[row][0] for row in rows])
            texts = self.generate(
                prompts, settings.max_new_tokens, settings.temperature, settings.top_p, eos_id, generator
            )
            for row, written in zip(rows, texts[:, length:].cpu(), strict=True):
                ends = (written == eos_id).nonzero() if eos_id is not None else []
                written = written[: int(ends[0]) + 1] if len(ends) else written
                result[row] = Continuation(pairs[row][0].cpu(), written, pairs[row][1].cpu())
        for _ in range(most - len(groups)):
            self.generate(torch.zeros(1, 1, dtype=torch.int64, device=self.device), settings.max_new_tokens)
        return [result[row] for row in sorted(result)]

    def _experts_elsewhere(self) -> bool:
        strategy = getattr(self._trainer, "strategy", None)
        return isinstance(strategy, ExpertPlacement) and strategy.mesh.expert.size > 1

    def _most_over_experts(self, count: int) -> int:
        """The largest count among the ranks that exchange tokens."""
        if not self._experts_elsewhere():
            return count
        strategy: Any = self.trainer.strategy
        counts = torch.tensor(count, device=self.device)
        return int(strategy.mesh.expert.all_reduce(counts, torch.distributed.ReduceOp.MAX))

    def generate(
        self,
        prompt_ids: Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
        eos_id: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Continue prompts, int64 [B, S] to [B, S + new]; see :func:`olmoe_lightning.generate.generate`.

        Under expert parallelism all ranks call it together, with the same number of new tokens; it does not end early
        there, because the others would wait.

        Raises:
            RuntimeError: the layers are shared among the ranks of a pipeline.
        """
        if self._stage_map is not None:
            raise RuntimeError(
                "a pipeline cannot generate text, as no process has all layers; save a checkpoint, and generate from "
                "it in one process (olmoe-lightning generate --checkpoint ...)"
            )
        if self._experts_elsewhere():
            eos_id = None
        model = self.built()
        was_training = model.training
        model.eval()
        try:
            return generate(model, prompt_ids, max_new_tokens, temperature, top_p, eos_id, generator)
        finally:
            model.train(was_training)
