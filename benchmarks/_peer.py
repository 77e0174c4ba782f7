"""The other side: transformers' ``OlmoeForCausalLM`` in a bare loop, computed in the fastest way it offers.

S tokens of a sequence, T tokens of a step, K chosen experts, D model width, H expert width, L layers.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
import transformers
from _bare_loop import OPTIMIZER, BareLoop, make_batches
from _machine import available_bytes
from torch import Tensor
from transformers import OlmoeConfig, OlmoeForCausalLM

from olmoe_lightning.checkpoint.foreign.hf_config import config_to_hf
from olmoe_lightning.config import ModelConfig
from olmoe_lightning.kernels import keep_freed_memory


class PeerSide(BareLoop):
    """The same sizes, balance loss on, SDPA attention, no key/value cache, the same groups for weight decay.

    Args:
        config: fields of :class:`ModelConfig`.
        seq_len: S.
        tokens: T.
        compile_model: run the whole model through ``torch.compile``.
        keep_memory: let the C library keep freed memory, as OLMoE does in training.
    """

    def __init__(
        self, config: dict[str, Any], seq_len: int, tokens: int, compile_model: bool, keep_memory: bool
    ) -> None:
        if keep_memory:
            keep_freed_memory()
        transformers.utils.logging.set_verbosity_error()
        ours = ModelConfig.from_dict(config)
        torch.manual_seed(0)
        values = config_to_hf(ours) | {"output_router_logits": True, "use_cache": False}
        values["attn_implementation"] = "sdpa"
        self.model = OlmoeForCausalLM(OlmoeConfig(**values)).train()
        decayed: list[Tensor] = []
        others: list[Tensor] = []
        for name, parameter in self.model.named_parameters():
            (decayed if parameter.ndim > 1 and "embed_tokens" not in name else others).append(parameter)
        groups: list[dict[str, Any]] = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, fused=True, **OPTIMIZER)
        super().__init__(make_batches(ours.vocab_size, seq_len, tokens), optimizer)
        self._forward: Callable[..., Any] = torch.compile(self.model) if compile_model else self.model
        # `batched_mm` copies the weights of every route: 3·H·D fp32 numbers for each of T·K, kept for the backward pass
        # of each of L layers.
        self._gathered = 4 * ours.num_layers * tokens * ours.top_k * 3 * ours.expert_hidden * ours.d_model

    def loss(self, batch: dict[str, Tensor], microbatches: int) -> Tensor:
        """Cross entropy and balance loss."""
        # `shift_labels` are taken as they are; `labels` only switches the loss on.
        labels = batch["labels"]
        loss = self._forward(input_ids=batch["input_ids"], labels=labels, shift_labels=labels).loss
        return loss / microbatches if microbatches > 1 else loss

    def choose(self, steps: int) -> dict[str, Any]:
        """Try the ways transformers can compute the experts, and keep the fastest.

        Args:
            steps: to time of each.

        Returns:
            ``chosen``: its name. ``seconds``: median step of each that ran. ``left_out``: why others did not.

        Raises:
            RuntimeError: none runs.
        """
        candidates, left_out = ["grouped_mm", "eager"], {}
        free = available_bytes()
        if free is not None and self._gathered <= free / 2:  # the rest is for their gradients
            candidates.append("batched_mm")
        else:
            has = f"{free / 2**30:.1f} GiB are free" if free is not None else "free memory is not known"
            left_out["batched_mm"] = f"gathers {self._gathered / 2**30:.1f} GiB of weights, {has}"
        seconds = {}
        for name in candidates:
            try:
                self.use(name)
                seconds[name] = statistics.median(self.steps(steps, warmup=1)["seconds"])
            except Exception as error:  # a way that does not run here is one that nobody can take here
                left_out[name] = f"{type(error).__name__}: {error}"
                self.optimizer.zero_grad()
        if not seconds:
            raise RuntimeError(f"no experts_implementation of transformers runs here: {left_out}")
        chosen = min(seconds, key=lambda name: seconds[name])
        self.use(chosen)
        return {"chosen": chosen, "seconds": seconds, "left_out": left_out}

    def use(self, implementation: str) -> None:
        """Compute the experts in a given way."""
        self.model.set_experts_implementation(implementation)
