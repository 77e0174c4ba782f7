"""One process that converts Hugging Face's checkpoint to our format: with our streams, and with other libraries.

The other ways read and write whole tensors: ``safe_open`` and ``save_file`` of safetensors, and the Hugging Face reader
and writer of ``torch.distributed.checkpoint``.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _memory import peak_growth
from _timing import turn_order
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from olmoe_lightning import ModelConfig
from olmoe_lightning.checkpoint import convert, write
from olmoe_lightning.checkpoint.foreign.hf_layout import hf_tensors, native_shapes
from olmoe_lightning.model import Transformer

FILE = "model.safetensors"


class ConversionSide:
    """Converts in several ways.

    Args:
        config: fields of :class:`ModelConfig`.
        folder: for everything that is written.
        processes: of the run: one.
    """

    def __init__(self, config: dict[str, Any], folder: str, processes: int) -> None:
        self._config, self._folder = ModelConfig.from_dict(config), Path(folder)
        self._source, self._target = self._folder / "hf", self._folder / "native"
        model = Transformer(self._config)
        model.init_weights(0)
        write(model.state_dict(), self._config, str(self._source), hf=True)
        self._ways: dict[str, Callable[[], None]] = {
            "ours": lambda: convert(from_hf=str(self._source), to_native=str(self._target)),
            "safetensors": self._with_safetensors,
            "torch": self._with_torch,
        }

    def measure(self, rounds: int) -> dict[str, Any]:
        """Time each way in turns, one untimed before, whose memory is looked at.

        Returns:
            ``seconds`` of each round by way; ``memory``: peak growth of RssAnon in bytes; ``bytes`` of the weights.
        """
        seconds: dict[str, list[float]] = {way: [] for way in self._ways}
        memory: dict[str, int] = {}
        for index in range(-1, rounds):
            for way in turn_order(list(self._ways), max(index, 0)):
                shutil.rmtree(self._target, ignore_errors=True)
                if index < 0:
                    with peak_growth() as growth:
                        self._ways[way]()
                    memory[way] = growth["peak"]
                    continue
                start = time.perf_counter()
                self._ways[way]()
                seconds[way].append(time.perf_counter() - start)
        return {"seconds": seconds, "memory": memory, "bytes": 4 * self._config.num_params}

    def _with_safetensors(self) -> None:
        self._target.mkdir()
        with safe_open(self._source / FILE, framework="pt") as file:
            save_file(self._joined(file.get_tensor), self._target / FILE)
        descriptor = os.open(self._target / FILE, os.O_RDONLY)
        os.fsync(descriptor)  # ours does so too
        os.close(descriptor)

    def _with_torch(self) -> None:
        tensors = [tensor for tensors in hf_tensors(self._config).values() for tensor in tensors]
        state = {tensor.name: torch.empty(tensor.shape) for tensor in tensors}
        load(state, storage_reader=HuggingFaceStorageReader(str(self._source)), no_dist=True)
        save(self._joined(state.pop), storage_writer=HuggingFaceStorageWriter(str(self._target)), no_dist=True)

    def _joined(self, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        parts = hf_tensors(self._config)
        return {
            name: torch.cat([read(part.name).reshape(-1) for part in parts[name]]).view(shape)
            for name, shape in native_shapes(self._config).items()
        }
