"""SampleText: what the trained model writes, the shortest proof that training did something.

Shape letters: B batch, S sequence.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from olmoe_lightning.callbacks._logging import logged_step, tensorboards
from olmoe_lightning.errors import UserError


class SampleText(Callback):
    """Lets the model continue a prompt when training ends, prints the text and gives it to TensorBoard.

    Uses the data module's ``tokenizer`` and the module's ``generate``. Random numbers come from a generator of its
    own, so that the text repeats and training's random state stays as it was. All ranks generate (a sharded model
    needs them all); rank 0 prints, after the progress bar has closed.

    Args:
        prompt: beginning of the text; an empty one starts from the end-of-document token.
        max_new_tokens: tokens to generate at most; a document's end stops earlier.
        temperature: softmax temperature; 0 always takes the likeliest token.
        top_p: sample from the smallest set of tokens with at least this probability.
        seed: seed of the generator.

    Raises:
        UserError: a number is out of range.
    """

    reads_weights_between_steps = False

    def __init__(
        self,
        prompt: str = "def ",
        max_new_tokens: int = 200,
        temperature: float = 0.8,
        top_p: float = 0.95,
        seed: int = 0,
    ) -> None:
        if max_new_tokens < 1:
            raise UserError(f"max_new_tokens ({max_new_tokens}) must be at least 1")
        if temperature < 0:
            raise UserError(f"temperature ({temperature}) must not be negative")
        if not 0 < top_p <= 1:
            raise UserError(f"top_p ({top_p}) must be above 0 and at most 1")
        self.prompt = prompt
        self.max_new_tokens = max_new_tokens
        self.temperature = temperature
        self.top_p = top_p
        self.seed = seed
        self.text: str | None = None
        """Prompt and continuation, once training has ended."""

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.text = None

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Here and not in on_fit_end: by then the strategy has moved the module off its device.
        tokenizer: Any = getattr(trainer.datamodule, "tokenizer", None)  # type: ignore[attr-defined]
        if tokenizer is None or not hasattr(pl_module, "generate"):
            rank_zero_warn(
                "SampleText writes nothing: it needs a data module with a `tokenizer` and a module with `generate`; "
                f"there are {type(trainer.datamodule).__name__} and {type(pl_module).__name__}."  # type: ignore[attr-defined]
            )
            return
        self.text = self._generate(trainer, pl_module, tokenizer)
        step = logged_step(trainer)
        for logger in tensorboards(trainer):
            if trainer.is_global_zero:  # TensorBoard reads Markdown: four spaces keep the text as it is
                logger.experiment.add_text("sample", "    " + self.text.replace("\n", "\n    "), step)

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.text is not None and trainer.is_global_zero:
            print(f"\nThe model continues {self.prompt!r}:\n\n{self.text}\n", flush=True)

    def _generate(self, trainer: Trainer, pl_module: LightningModule, tokenizer: Any) -> str:
        ids = tokenizer.encode(self.prompt) or [tokenizer.eos_id]
        device = pl_module.device
        generator = torch.Generator(device=device).manual_seed(self.seed)
        was_training = pl_module.training
        pl_module.eval()
        try:
            with torch.inference_mode(), trainer.precision_plugin.val_step_context():
                output = pl_module.generate(  # type: ignore[operator]
                    torch.tensor([ids], dtype=torch.int64, device=device),  # [B=1, S]
                    max_new_tokens=self.max_new_tokens,
                    temperature=self.temperature,
                    top_p=self.top_p,
                    eos_id=tokenizer.eos_id,
                    generator=generator,
                )
        finally:
            pl_module.train(was_training)
        new = output[0, len(ids) :].tolist()
        if tokenizer.eos_id in new:
            new = new[: new.index(tokenizer.eos_id)]
        # A model's vocabulary may be larger than the tokenizer's; a young model also writes ids that are no token.
        return self.prompt + str(tokenizer.decode([token for token in new if token < tokenizer.vocab_size]))
