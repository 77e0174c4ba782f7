"""The progress bar of everything that is not training, which has Lightning's."""

from __future__ import annotations

from tqdm import tqdm  # type: ignore[import-untyped]


def progress_bar(label: str, total: int, unit: str) -> tqdm:
    """A progress bar that appears only when the work takes longer than two seconds.

    Args:
        label: what is being done, in two or three words.
        total: amount of work in ``unit``; 0 when it is not known.
        unit: name of one item of work; ``"B"`` is scaled to kB, MB, GB.
    """
    scale = unit == "B"
    return tqdm(desc=label, total=total or None, unit=unit, unit_scale=scale, delay=2, leave=False, dynamic_ncols=True)
