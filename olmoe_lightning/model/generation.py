"""Text generation: one prefill of the prompt, then one token at a time with a key/value cache.

B batch, S prompt length, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from olmoe_lightning.errors import UserError
from olmoe_lightning.model import KVCache, Transformer


@dataclass(frozen=True)
class GenerationConfig:
    """How ``predict`` continues the rows of a batch.

    Args:
        prompt_tokens: length of a row's beginning that is given to the model; ``None`` gives the first half.
        max_new_tokens: tokens to write at most.
        temperature: 0 takes the most likely token; 1 samples from the model's distribution.
        top_p: sample among the most likely tokens that together reach this probability.
        seed: of the sampling.

    Raises:
        UserError: ``prompt_tokens`` is below 1.
    """

    prompt_tokens: int | None = None
    max_new_tokens: int = 64
    temperature: float = 0.8
    top_p: float = 0.95
    seed: int = 0

    def __post_init__(self) -> None:
        if self.prompt_tokens is not None and self.prompt_tokens < 1:
            raise UserError(f"prompt_tokens ({self.prompt_tokens}) must be at least 1")
        if self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens ({self.max_new_tokens}) must be at least 1")


class Continuation(NamedTuple):
    """What the model wrote after a prompt, beside what was there."""

    prompt: Tensor
    """int64 [S], tokens of one document."""
    written: Tensor
    """int64 [at most ``max_new_tokens``], the model's; a document's end is its last token."""
    actual: Tensor
    """int64 [at most ``max_new_tokens``], the data's own continuation within the row and document."""


def split_prompts(
    input_ids_BS: Tensor, document_ids_BS: Tensor | None, settings: GenerationConfig
) -> list[tuple[Tensor, Tensor]]:
    """Cut rows into a prompt and what really follows it.

    The model never attends from one document to another, so a prompt holds the one document that goes on at the cut,
    as far as it lies before it. Rows that have padding there have no prompt.

    Args:
        input_ids_BS: int64 [B, S].
        document_ids_BS: integers [B, S], -1 on padding; ``None``: each row is one document.
        settings: where to cut, and how much of the continuation to keep.

    Returns:
        Prompt and continuation of each row that has one, as in :class:`Continuation`.
    """
    length = input_ids_BS.shape[1]
    cut = min(settings.prompt_tokens or max(1, length // 2), length)
    documents_BS = torch.zeros_like(input_ids_BS) if document_ids_BS is None else document_ids_BS
    result = []
    for row_S, documents_S in zip(input_ids_BS, documents_BS, strict=True):
        document = documents_S[cut - 1]
        if document < 0:
            continue
        same_S = documents_S == document  # contiguous: documents lie one after the other
        before, after = row_S[:cut][same_S[:cut]], row_S[cut:][same_S[cut:]]
        result.append((before, after[: settings.max_new_tokens]))
    return result


def sample_token(logits_BV: Tensor, temperature: float, top_p: float, generator: torch.Generator | None) -> Tensor:
    """Choose one token per row.

    Args:
        logits_BV: fp32 [B, V].
        temperature: 0 for the most likely token.
        top_p: 0 < top_p <= 1; the most likely token always stays.
        generator: of the logits' device, or the global one.

    Returns:
        int64 [B, 1].
    """
    if temperature == 0:
        return logits_BV.argmax(dim=-1, keepdim=True)
    probs = torch.softmax(logits_BV / temperature, dim=-1)
    if top_p < 1:
        ordered, index = probs.sort(dim=-1, descending=True)
        ordered[ordered.cumsum(-1) - ordered >= top_p] = 0  # mass before a token: the first is never cut
        probs = torch.zeros_like(probs).scatter_(-1, index, ordered)
    return torch.multinomial(probs, 1, generator=generator)


@torch.no_grad()  # not inference_mode: autograd refuses its tensors, and samples may become training inputs
def generate(
    model: Transformer,
    prompt_ids_BS: Tensor,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    eos_id: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Continue every prompt of a batch.

    Args:
        model: in evaluation mode.
        prompt_ids_BS: int64 [B, S], S >= 1, on the model's device; one document per row.
        max_new_tokens: tokens to add; fewer when every row has met ``eos_id``.
        temperature: 0 takes the most likely token.
        top_p: nucleus sampling; 1 for all tokens.
        eos_id: a row that has produced it goes on with it.
        generator: for reproducible samples.

    Returns:
        int64 [B, S + new].

    Raises:
        UserError: an empty prompt, a sampling parameter out of range, or more positions than ``max_seq_len``.
    """
    check_request(prompt_ids_BS, max_new_tokens, temperature, top_p, model.config.max_seq_len)
    cache = KVCache(model.config, prompt_ids_BS.shape[1] + max_new_tokens)

    def next_token(ids_BS: Tensor) -> Tensor:
        hidden, _ = model(ids_BS, cache=cache)
        return sample_token(model.logits(hidden[:, -1]), temperature, top_p, generator)

    return extend_prompts(next_token, prompt_ids_BS, max_new_tokens, eos_id)


def check_request(
    prompt_ids_BS: Tensor, max_new_tokens: int, temperature: float, top_p: float, max_seq_len: int
) -> None:
    """Refuse what cannot be written; arguments and errors of :func:`generate`."""
    length = prompt_ids_BS.shape[1]
    if length < 1:
        raise UserError("the prompt is empty; give at least one token (for example the end-of-document token)")
    if max_new_tokens < 0:
        raise UserError(f"max_new_tokens ({max_new_tokens}) must not be negative")
    if temperature < 0:
        raise UserError(f"temperature ({temperature}) must not be negative; 0 takes the most likely token")
    if not 0 < top_p <= 1:
        raise UserError(f"top_p ({top_p}) must be above 0 and at most 1")
    if length + max_new_tokens > max_seq_len:
        raise UserError(
            f"a prompt of {length} tokens plus {max_new_tokens} new ones exceeds the model's max_seq_len "
            f"({max_seq_len}); shorten the prompt or ask for at most {max(0, max_seq_len - length)} new tokens"
        )


def extend_prompts(
    next_token: Callable[[Tensor], Tensor], prompt_ids_BS: Tensor, max_new_tokens: int, eos_id: int | None
) -> Tensor:
    """The loop over new tokens; arguments and result of :func:`generate`.

    Args:
        next_token: from the tokens that it has not seen yet, int64 [B, S] and then [B, 1], to the next ones [B, 1].
        prompt_ids_BS: int64 [B, S].
        max_new_tokens: as there.
        eos_id: as there.
    """
    tokens = [prompt_ids_BS]
    step_input = prompt_ids_BS
    finished = torch.zeros(len(prompt_ids_BS), 1, dtype=torch.bool, device=prompt_ids_BS.device)
    for _ in range(max_new_tokens):
        step_input = next_token(step_input)
        if eos_id is not None:
            step_input = step_input.masked_fill(finished, eos_id)
            finished |= step_input == eos_id
        tokens.append(step_input)
        if eos_id is not None and bool(finished.all()):
            break
    return torch.cat(tokens, dim=1)
