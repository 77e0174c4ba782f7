"""``olmoe-lightning generate``: texts that a trained model writes."""

from __future__ import annotations

from pathlib import Path

import torch

from olmoe_lightning.checkpoint import read_config, read_tokenizer
from olmoe_lightning.data import load_tokenizer
from olmoe_lightning.data.tokenizer import BPETokenizer, Tokenizer
from olmoe_lightning.errors import MissingFileError, UserError
from olmoe_lightning.module import OLMoE


def generate(
    checkpoint: str,
    prompt: str = "",
    max_new_tokens: int = 200,
    temperature: float = 0.8,
    top_p: float = 0.95,
    num_samples: int = 1,
    seed: int = 0,
    tokenizer: str | None = None,
    device: str = "auto",
) -> None:
    """Print texts that a trained model writes.

    Args:
        checkpoint: a checkpoint of the trainer, or a directory or file with Hugging Face or converted weights.
        prompt: text to continue; empty to start a document.
        max_new_tokens: tokens to write at most.
        temperature: 0 takes the most likely token each time.
        top_p: sample among the most likely tokens that together reach this probability.
        num_samples: texts to write.
        seed: of the sampling.
        tokenizer: ``byte``, or the path of a ``tokenizer.json``; by default the one that is in the checkpoint.
        device: ``cpu``, ``cuda``, or ``auto`` for a GPU if there is one.

    Raises:
        UserError: a number is out of range, or the tokenizer does not fit the model.
        MissingFileError: there is no such checkpoint.
    """
    if num_samples < 1:
        raise UserError(f"num_samples ({num_samples}) must be at least 1")
    path = Path(checkpoint)
    if not path.exists():
        raise MissingFileError(f"there is no checkpoint at {checkpoint}")
    if path.is_dir() or path.suffix == ".safetensors":
        model = OLMoE(read_config(checkpoint), pretrained=checkpoint)
    else:
        model = OLMoE.load_from_checkpoint(path, map_location="cpu", weights_only=True)
    model.built()
    text = _tokenizer_of(path) if tokenizer is None else load_tokenizer(tokenizer)
    if text.vocab_size > model.config.vocab_size:
        raise UserError(
            f"the tokenizer has {text.vocab_size} tokens, the model {model.config.vocab_size}; "
            "give the tokenizer that it was trained with"
        )
    ids = [text.eos_id, *text.encode(prompt)]
    left = model.config.max_seq_len - len(ids)
    if left < 1:
        raise UserError(f"the prompt has {len(ids) - 1} tokens, the model's max_seq_len is {model.config.max_seq_len}")

    on = _device(device)
    model.to(on)
    prompts = torch.tensor([ids] * num_samples, device=on)
    sampler = torch.Generator(on).manual_seed(seed)
    rows = model.generate(prompts, min(max_new_tokens, left), temperature, top_p, text.eos_id, sampler)
    for index, row in enumerate(rows.tolist()):
        if num_samples > 1:
            print(f"--- {index + 1} of {num_samples}")
        written = row[1:]
        if text.eos_id in written:
            written = written[: written.index(text.eos_id)]
        print(text.decode(written))


def _tokenizer_of(path: Path) -> Tokenizer:
    """The tokenizer that lies in a checkpoint."""
    if (path / "tokenizer.json").is_file():
        return load_tokenizer(str(path))
    saved = read_tokenizer(path)
    if saved is None:
        raise UserError(f"{path} holds no tokenizer; name the one that it was trained with by --tokenizer")
    return load_tokenizer("byte") if saved == "byte" else BPETokenizer.from_json(saved)


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"device {name!r} is not known; give cpu, cuda or auto") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError("device 'cuda': PyTorch sees no GPU here; give cpu or auto")
    return device
