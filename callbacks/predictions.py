"""WritePredictions: what ``predict`` wrote, as readable lines in a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import IO, Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from typing_extensions import override


class WritePredictions(Callback):
    """Writes one JSON line per prompt while predicting: ``prompt``, ``written`` by the model, ``actual`` in the data.

    The file lies in the trainer's log directory (``default_root_dir`` without a logger). With several ranks each
    writes its own, with its number before the suffix. It grows batch by batch, so a run that is stopped leaves what
    it had.

    Args:
        filename: name of the file.
    """

    def __init__(self, filename: str = "predictions.jsonl") -> None:
        self.filename = filename
        self.path: Path | None = None
        """The file of this rank, once predicting has started."""
        self.num_written = 0
        self._file: IO[str] | None = None

    @override
    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        directory = Path(trainer.log_dir or trainer.default_root_dir)  # a broadcast: every rank must ask
        path = directory / self.filename
        self.path = path if trainer.world_size == 1 else path.with_suffix(f".{trainer.global_rank}{path.suffix}")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("w", encoding="utf-8")
        self.num_written = 0

    @override
    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        assert self._file is not None
        tokenizer: Any = getattr(trainer.datamodule, "tokenizer", None)  # type: ignore[attr-defined]

        def readable(ids: Tensor) -> str | list[int]:
            return ids.tolist() if tokenizer is None else tokenizer.decode(ids.tolist())

        for continuation in outputs:
            texts = {name: readable(ids) for name, ids in continuation._asdict().items()}
            self._file.write(json.dumps(texts, ensure_ascii=False) + "\n")
            self.num_written += 1
        self._file.flush()

    @override
    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close()
        if trainer.is_global_zero:
            print(f"{self.num_written} continuations: {self.path}", flush=True)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
