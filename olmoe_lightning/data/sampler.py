"""Which sample numbers each data-parallel rank reads, and a DataLoader that starts late.

Global batch j of a run holds the samples [j·G, (j+1)·G), G = ranks x batch size; rank r reads the r-th contiguous part.
So the ranks' batches laid end to end are the batch of one process, whatever the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from typing import Any

from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class SampleRange(DistributedSampler[int]):
    """Sample numbers of one rank for one epoch; a DistributedSampler, so that Lightning does not inject its own.

    Args:
        dataset: what is sampled from; only its length is used.
        num_replicas: data-parallel ranks.
        rank: which of them this is.
        batch_size: samples per rank and batch.
        num_batches: batches per epoch.
        first_sample: called with the epoch (see ``set_epoch``) when its first batch is read; returns the global
            number of the epoch's first sample.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        num_replicas: int,
        rank: int,
        batch_size: int,
        num_batches: int,
        first_sample: Callable[[int], int],
    ) -> None:
        assert isinstance(dataset, Sized)
        super().__init__(dataset, num_replicas=num_replicas, rank=rank, shuffle=False)
        self.batch_size, self.num_batches, self.first_sample = batch_size, num_batches, first_sample
        self.num_samples = batch_size * num_batches
        self.total_size = self.num_samples * num_replicas

    def __iter__(self) -> Iterator[int]:
        first = self.first_sample(self.epoch) + self.rank * self.batch_size
        for batch in range(self.num_batches):
            start = first + batch * self.batch_size * self.num_replicas
            yield from range(start, start + self.batch_size)

    def __len__(self) -> int:
        return self.num_samples


class ResumableLoader(DataLoader[Any]):
    """A DataLoader whose workers start at the first batch, not when the iterator is made.

    Lightning makes a run's iterator before it restores a checkpoint when something asks for the number of steps early
    (``trainer.estimated_stepping_batches``). Reading the position at the first batch is always late enough.
    """

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        yield from super().__iter__()

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the data module keeps the position. That there is a state tells Lightning that resuming is exact."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to restore, see :meth:`state_dict`."""
