"""From sample numbers to batches: what a DataLoader worker runs.

Letters used below: B rows of a batch, S sequence length, R rows of a source.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from olmoe_lightning.data.order import MixtureOrder, mix, permute
from olmoe_lightning.data.packing import IGNORE, Packing, RowTable, make_batch, pack_concat, pack_documents
from olmoe_lightning.data.token_files import TokenFile


class SourceRows:
    """The rows of one mixture component: those of its files, one file after the other.

    A row never spans two files. Rows of ``documents`` packing need the documents' ends, so the files are read once.

    Args:
        name: for messages and logs.
        files: the token files, at least one.
        seq_len: S.
        packing: how streams become rows.
        eos_id: the end-of-document id.
    """

    def __init__(self, name: str, files: Sequence[TokenFile], seq_len: int, packing: Packing, eos_id: int) -> None:
        self.name, self.files = name, list(files)
        self.tables: list[RowTable] = []
        for file in self.files:
            if packing == "concat":
                self.tables.append(pack_concat(len(file), seq_len))
            else:
                self.tables.append(pack_documents(file.positions_of(eos_id), len(file), seq_len))
        self._first_row = np.cumsum([0] + [len(table) for table in self.tables])
        self.num_rows = int(self._first_row[-1])
        self.num_tokens = sum(len(file) for file in self.files)

    def read(self, rows: np.ndarray, windows: np.ndarray, lengths: np.ndarray, at: np.ndarray) -> None:
        """Copy rows into a batch under construction.

        Args:
            rows: int64, row numbers of this source.
            windows: int64 [B,S+1], filled with -100; gets the tokens of a row and the one after it.
            lengths: int64 [B]; gets the number of tokens of a row.
            at: int64, same length as ``rows``: the places in the batch.
        """
        which = np.searchsorted(self._first_row, rows, side="right") - 1
        for number in np.unique(which).tolist():
            here = which == number
            tokens = self.files[number].tokens
            starts, stops = self.tables[number].spans(rows[here] - self._first_row[number])
            places = at[here]
            lengths[places] = stops - starts
            for place, start, stop in zip(places.tolist(), starts.tolist(), stops.tolist(), strict=True):
                window = tokens[start : stop + 1]  # shorter by one at the end of the file
                windows[place, : window.size] = window


class _Rows(Dataset[dict[str, Tensor]], ABC):
    """Common to training and validation: a batch at a time, from the rows of several sources."""

    def __init__(self, sources: Sequence[SourceRows], seq_len: int, eos_id: int, pad_id: int) -> None:
        self.sources = list(sources)
        self.seq_len, self.eos_id, self.pad_id = seq_len, eos_id, pad_id
        self.num_rows = np.array([source.num_rows for source in self.sources], dtype=np.int64)

    def __len__(self) -> int:
        return int(self.num_rows.sum())

    @abstractmethod
    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Source and row of each sample number; source -1 is a row of padding."""

    def __getitems__(self, samples: list[int]) -> dict[str, Tensor]:
        """A whole batch: DataLoader prefers this over item by item, and the collate function has nothing left to do."""
        sources, rows = self.locate(np.asarray(samples, dtype=np.int64))
        windows = np.full((len(samples), self.seq_len + 1), IGNORE, dtype=np.int64)
        lengths = np.zeros(len(samples), dtype=np.int64)
        for number in np.unique(sources).tolist():
            if number >= 0:
                at = np.flatnonzero(sources == number)
                self.sources[number].read(rows[at], windows, lengths, at)
        batch = make_batch(windows, lengths, self.eos_id, self.pad_id)
        batch["source_ids"] = np.maximum(sources, 0)  # padding counts nowhere; 0 keeps the field a valid index
        return {name: torch.from_numpy(values) for name, values in batch.items()}

    def __getitem__(self, sample: int) -> dict[str, Tensor]:
        """One sample, without the batch dimension."""
        return {name: values[0] for name, values in self.__getitems__([sample]).items()}


class TrainRows(_Rows):
    """The endless training stream; sample number → row is a pure function of the seed.

    Args:
        sources: the mixture's components.
        weights: their relative shares of the samples.
        seed: of the order.
        seq_len: S.
        eos_id: the end-of-document id.
        pad_id: what padding holds.

    Raises:
        DataError: the weights are negative or all zero.
    """

    def __init__(
        self, sources: Sequence[SourceRows], weights: Sequence[float], seed: int, seq_len: int, eos_id: int, pad_id: int
    ) -> None:
        super().__init__(sources, seq_len, eos_id, pad_id)
        self.mixture = MixtureOrder(weights, seed)

    def __len__(self) -> int:
        """Rows of all sources that are switched on: the length of what we call an epoch."""
        return int(self.num_rows[np.array(self.mixture.weights) > 0].sum())

    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Source and row of each sample number."""
        sources, draws = self.mixture.locate(samples)
        sizes = self.num_rows[sources]
        keys = mix(self.mixture.seed, 2, sources, draws // sizes)  # a new permutation for each pass over a source
        return sources, permute(draws % sizes, sizes, keys)


class EvalRows(_Rows):
    """Every row once, in one fixed order that does not depend on any seed.

    The order is spread over all sources, so that the first batches (``limit_val_batches``) already represent them.
    Sample numbers past the end are rows of padding.
    """

    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Source and row of each sample number; source -1 is a row of padding."""
        total = len(self)
        real = samples < total
        rows = permute(np.where(real, samples, 0), total, mix(0, 3))
        first = np.cumsum(self.num_rows)
        sources = np.searchsorted(first, rows, side="right")
        rows -= (first - self.num_rows)[sources]
        return np.where(real, sources, -1), rows


def keep(batch: Any) -> Any:
    """The collate function for data sets that make whole batches."""
    return batch
