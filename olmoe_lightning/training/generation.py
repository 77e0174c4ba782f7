"""Text from a model whose layers or experts may be spread over processes.

B batch, S prompt length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from olmoe_lightning.model import KVCache, Transformer
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
from olmoe_lightning.parallel.mesh import Mesh
from olmoe_lightning.parallel.pipeline.runner import PipelineRunner


class TextGenerator:
    """Continues prompts with a model.

    Args:
        model: the transformer, or the layers of this process.
        mesh: the processes.
        pipeline: the stages of this process; ``None`` if all layers are here.
    """

    def __init__(self, model: Transformer, mesh: Mesh, pipeline: PipelineRunner | None) -> None:
        self.model = model
        self.mesh = mesh
        self.pipeline = pipeline

    def generate(
        self,
        prompt_ids: Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
        eos_id: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Continue prompts, int64 [B, S] to [B, S + new]; see :meth:`olmoe_lightning.OLMoE.generate`."""
        if self.mesh.expert.size > 1:
            eos_id = None  # the others would wait for a process that ends early
        with _evaluating(self.model):
            if self.pipeline is None:
                return generate(self.model, prompt_ids, max_new_tokens, temperature, top_p, eos_id, generator)
            check_request(prompt_ids, max_new_tokens, temperature, top_p, self.model.config.max_seq_len)
            sample = partial(sample_token, temperature=temperature, top_p=top_p, generator=generator)
            return self._through_stages(self.pipeline, prompt_ids, max_new_tokens, sample, eos_id)

    @torch.no_grad()
    def _through_stages(
        self,
        pipeline: PipelineRunner,
        prompt_ids: Tensor,
        max_new_tokens: int,
        sample: Callable[[Tensor], Tensor],
        eos_id: int | None,
    ) -> Tensor:
        """The process of the last stage chooses the tokens, by ``sample`` from logits, fp32 [B, V]."""

        def next_token(ids: Tensor) -> Tensor:
            hidden = pipeline.forward(ids, {"labels": ids}, parts=1)
            chosen = ids.new_empty(len(ids), 1) if hidden is None else sample(self.model.logits(hidden[:, -1]))
            return pipeline.from_last(chosen)

        stages = [stage for stage in pipeline.modules.values() if isinstance(stage, Stage)]
        cache = KVCache(self.model.config, prompt_ids.shape[1] + max_new_tokens)
        for stage in stages:
            stage.cache = cache
        try:
            return extend_prompts(next_token, prompt_ids, max_new_tokens, eos_id)
        finally:
            for stage in stages:
                stage.cache = None
                stage.take_stats()

    def complete_rows(
        self,
        batch: Mapping[str, Tensor],
        settings: GenerationConfig,
        eos_id: int | None,
        seed: int,
        generate: Callable[..., Tensor],
    ) -> list[Continuation]:
        """Give the beginning of each row to the model and let it go on.

        Args:
            batch: ``input_ids`` int64 [B, S], and optionally ``document_ids``.
            settings: where to cut, and how to go on.
            eos_id: token that ends a document, if there is one.
            seed: of the sampling.
            generate: continues prompts of one length, as :meth:`generate` does.

        Returns:
            One :class:`~olmoe_lightning.model.generation.Continuation` per row that has a prompt, on the CPU.
        """
        device = batch["input_ids"].device
        generator = torch.Generator(device).manual_seed(seed)
        pairs = split_prompts(batch["input_ids"], batch.get("document_ids"), settings)
        lengths = [len(prompt) for prompt, _ in pairs]
        result: dict[int, Continuation] = {}
        groups = sorted(set(lengths))  # a generated batch has prompts of one length
        left = max(0, self.model.config.max_seq_len - max(groups, default=1))
        rounds, new = self._agreed(len(groups), min(settings.max_new_tokens, left), device)
        for length in groups:
            rows = [row for row, found in enumerate(lengths) if found == length]
            prompts = torch.stack([pairs[row][0] for row in rows])
            texts = generate(prompts, new, settings.temperature, settings.top_p, eos_id, generator)
            for row, written in zip(rows, texts[:, length:].cpu(), strict=True):
                ends = (written == eos_id).nonzero() if eos_id is not None else []
                written = written[: int(ends[0]) + 1] if len(ends) else written
                result[row] = Continuation(pairs[row][0].cpu(), written, pairs[row][1].cpu())
        for _ in range(rounds - len(groups)):
            generate(torch.zeros(1, 1, dtype=torch.int64, device=device), new)
        return [result[row] for row in sorted(result)]

    def _agreed(self, rounds: int, new: int, device: torch.device) -> tuple[int, int]:
        """Most rounds and fewest new tokens among the ranks that exchange tokens."""
        found = torch.tensor([rounds, -new], device=device)
        most, negative = self.mesh.expert.all_reduce(found, torch.distributed.ReduceOp.MAX).tolist()
        return most, -negative


@contextmanager
def _evaluating(model: Transformer) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
