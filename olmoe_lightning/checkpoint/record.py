"""What a checkpoint says of a run besides its tensors: the record of each process, and the joined one in the file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from olmoe_lightning.checkpoint.per_rank import OwnState, OwnStates

_OWN = ("random", "loaders", "own_other", "of_experts")
FORMAT = 2
"""Of checkpoints; it goes up when a reader of the old one would misunderstand the new one."""


@dataclass
class RankRecord:
    """What one process contributes."""

    shapes: dict[str, list[int]]
    """Global shape of each of its tensors, by name."""
    aliases: dict[str, str]
    """Second names of tied tensors."""
    own: OwnState
    """What it has for itself."""
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Of the optimizer's state what is no range of numbers (steps), by parameter and key."""
    optimizer: str = ""
    """Class of the optimizer."""
    param_groups: list[dict[str, Any]] = field(default_factory=list)
    """Options of the optimizer's groups, the same on all processes."""
    group_of: dict[str, int] = field(default_factory=dict)
    """The place of the group of each trained parameter."""
    problems: list[str] = field(default_factory=list)
    """Why its optimizer's state cannot be saved."""
    not_finite: list[str] = field(default_factory=list)
    """Names of ranges that are not finite."""
    failed: str = ""
    """Why it cannot take part."""


@dataclass(frozen=True)
class RunRecord:
    """The entry :data:`~olmoe_lightning.checkpoint.meta.KEY` of a checkpoint; a joined file has the first seven."""

    format: int
    topology: dict[str, int]
    """Sizes of the mesh by axis."""
    skipped_steps: int
    random: Sequence[dict[str, Any]] = ()
    """This and the next three are those of :class:`~olmoe_lightning.checkpoint.per_rank.OwnStates`."""
    loaders: Sequence[list[Any]] = ()
    own_other: Sequence[Mapping[str, Any]] = ()
    of_experts: Sequence[str] = ()
    shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    other: Mapping[str, Any] = field(default_factory=dict)
    scalars: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    group_of: Mapping[str, int | str] = field(default_factory=dict)
    """Places; names in format 1."""
    optimizer: str = ""
    param_groups: Sequence[dict[str, Any]] = ()
    tensors: Sequence[str] = ()
    """Names of all ranges of tensors, optimizer state included."""
    directory: str = ""
    """Where it was read from; empty of a joined file."""

    @classmethod
    def read(cls, entry: Mapping[str, Any]) -> RunRecord:
        """From a checkpoint's entry; what a newer version has added is passed over."""
        known = {each.name for each in fields(cls)}
        return cls(**{name: value for name, value in entry.items() if name in known})

    @property
    def own_states(self) -> OwnStates:
        """What each process has for itself."""
        return OwnStates(self.random, self.loaders, self.other, self.own_other, self.of_experts)

    def joined_entry(self, ranks: Sequence[OwnState]) -> dict[str, Any]:
        """The entry of a joined file, from the states of all processes in the order of their ranks."""
        return self._run() | {name: getattr(OwnStates.of(ranks), name) for name in _OWN}

    def _run(self) -> dict[str, Any]:
        return {"format": self.format, "topology": self.topology, "skipped_steps": self.skipped_steps}

    def entry(self, ranks: Sequence[RankRecord], tensors: Sequence[str]) -> dict[str, Any]:
        """The entry of a directory, from the records of all processes in the order of their ranks.

        What several processes name is the first one's.
        """
        joined: dict[str, Any] = {name: {} for name in ("shapes", "aliases", "scalars", "group_of")}
        for rank in ranks:
            for name, merged in joined.items():
                for key, value in getattr(rank, name).items():
                    merged.setdefault(key, value)
        states = OwnStates.of([rank.own for rank in ranks])
        return {
            **self._run(),
            **joined,
            **{name: getattr(states, name) for name in ("other", *_OWN)},
            "optimizer": ranks[0].optimizer,
            "param_groups": ranks[0].param_groups,
            "tensors": list(tensors),
        }
