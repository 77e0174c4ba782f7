"""The picture of expert load: one panel for what was requested, one for what the router gave in probability.

Shape letters: L MoE layers, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

_RANGE_LOG2 = 2.0


def draw_heat_map(load: Tensor, probability: Tensor, layers: Sequence[int], title: str) -> np.ndarray:
    """Draw load and probability of every expert in every layer, relative to the mean over experts.

    White is the fair share, red is more and blue is less on a logarithmic scale from a quarter to four times; black
    is an expert that no token asked for. The figure is drawn on its own canvas: pyplot and its global state stay
    untouched.

    Args:
        load: [L, E] shares of the requested assignments, each row sums to 1.
        probability: [L, E] mean router probabilities, each row sums to 1.
        layers: the L block numbers, for the axis.
        title: printed above.

    Returns:
        uint8 [height, width, 3], RGB.
    """
    from matplotlib import colormaps  # a slow import that only runs with pictures need
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    num_layers, num_experts = load.shape
    width = min(14.0, max(5.0, 1.8 + 0.14 * num_experts))
    height = min(14.0, max(2.0, 1.0 + 0.16 * num_layers)) * 2
    figure = Figure(figsize=(width, height), dpi=80, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    colors = colormaps["RdBu_r"].with_extremes(bad="black")
    figure.suptitle(title, fontsize=10)
    axes = figure.subplots(2, 1, sharex=True)
    panels = (("requested load / mean", load), ("router probability / mean", probability))
    for axis, (label, share) in zip(axes, panels, strict=True):
        relative = share.double().cpu().numpy() * num_experts
        with np.errstate(divide="ignore"):
            log_ratio = np.log2(relative)
        image = axis.imshow(
            np.ma.masked_invalid(log_ratio),
            cmap=colors,
            vmin=-_RANGE_LOG2,
            vmax=_RANGE_LOG2,
            aspect="auto",
            interpolation="nearest",
        )
        axis.set_title(label, fontsize=9)
        axis.set_ylabel("layer")
        ticks = range(0, num_layers, max(1, num_layers // 16))
        axis.set_yticks(list(ticks), [str(layers[tick]) for tick in ticks])
        bar = figure.colorbar(image, ax=axis, ticks=[-2, -1, 0, 1, 2])
        bar.ax.set_yticklabels(["¼", "½", "1", "2", "4"])
    axes[-1].set_xlabel("expert")
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()
