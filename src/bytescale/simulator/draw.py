"""Ranks over time as a PNG: what every rank runs, with how many others, and where it waits. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bytescale.common.errors import BytescaleError, problem
from bytescale.common.units import format_seconds
from bytescale.simulator.result import SimulatedStep

COLUMNS = 1600  # of time
MAX_ROWS = 512  # ranks x stages that are drawn, spread evenly
_IDLE, _SYNC, _LOCAL = 0.0, 1.0, 2.0  # then 2 + log2 of the degree


def draw_steps(steps: dict[str, SimulatedStep], path: Path) -> None:
    """One panel per step, on one time axis, so that two plans of a batch can be compared by eye.

    Colour is the degree, the number of ranks that share the micro-batch; white is waiting, grey the gradient sync.
    Raises ``BytescaleError`` when matplotlib is not installed.
    """
    pyplot, colors = _matplotlib()
    longest = max(step.step_seconds for step in steps.values())
    unit, name = next((u, n) for u, n in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")) if longest >= u or u == 1e-6)
    highest = max(float(step.events.loads.degree.max()) for step in steps.values())
    levels = int(np.ceil(np.log2(highest)))
    palette = _palette(pyplot, levels)
    figure, axes = pyplot.subplots(
        len(steps), 1, figsize=(12, 0.9 + 2.3 * len(steps)), sharex=True, squeeze=False, layout="constrained"
    )
    for axis, (title, step) in zip(axes[:, 0], steps.items(), strict=True):
        picture, ranks = raster(step, longest)
        axis.imshow(
            picture,
            aspect="auto",
            interpolation="nearest",
            cmap=colors.ListedColormap(palette),
            vmin=-0.5,
            vmax=len(palette) - 0.5,
            extent=(0, longest / unit, ranks, 0),
        )
        axis.axvline(step.step_seconds / unit, color="black", linewidth=1)
        waiting = (step.dp_bubble + step.pp_bubble + step.wait_members).mean() / step.step_seconds
        axis.set_title(
            f"{title}: {format_seconds(step.step_seconds)}, ranks wait {waiting:.0%} of it", loc="left", fontsize=10
        )
        axis.set_ylabel("rank")
    axes[-1, 0].set_xlabel(f"time in {name}")
    _legend(figure, palette, levels)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def raster(step: SimulatedStep, seconds: float) -> tuple[NDArray[np.float64], int]:
    """``[rows, COLUMNS]`` colour number per rank (stages below each other) and time, and the number of ranks."""
    events, timeline = step.events, step.timeline
    num_stages = timeline.start.shape[1]
    shown = min(events.num_ranks, max(1, MAX_ROWS // num_stages))
    ranks = np.unique(np.linspace(0, events.num_ranks - 1, shown).astype(np.int64))
    row_of = np.full(events.num_ranks, -1)
    row_of[ranks] = np.arange(len(ranks))
    picture = np.full((len(ranks) * num_stages, COLUMNS), _IDLE)
    rows = row_of[events.micro_batch_ranks]
    visible = np.flatnonzero(rows >= 0)
    colour = _LOCAL + np.ceil(np.log2(events.loads.degree))
    scale = COLUMNS / seconds
    for stage in range(num_stages):
        for direction in range(2):
            start = np.round(timeline.start[:, stage, direction][events.micro_batch_events] * scale).astype(int)
            end = np.round(timeline.end[:, stage, direction][events.micro_batch_events] * scale).astype(int)
            for item in visible.tolist():
                picture[rows[item] * num_stages + stage, start[item] : max(end[item], start[item] + 1)] = colour[item]
        begin = timeline.end[:, stage].max()
        finish = begin + step.sync_seconds[0, stage]
        picture[stage::num_stages, round(begin * scale) : round(finish * scale)] = _SYNC
    return picture, events.num_ranks


def _palette(pyplot: Any, levels: int) -> list[Any]:
    degrees = pyplot.get_cmap("plasma")(np.linspace(0.95, 0.05, levels)) if levels else []
    return ["white", "#b0b0b0", "#4a90c2", *degrees]


def _legend(figure: Any, palette: list[Any], levels: int) -> None:
    from matplotlib.patches import Patch

    names = ["waiting", "gradient sync", "one rank"]
    names += [f"{2 ** (i - 1) + 1}-{2**i} ranks" if i > 1 else "2 ranks" for i in range(1, levels + 1)]
    patches = [
        Patch(facecolor=colour, edgecolor="black", linewidth=0.4, label=name)
        for colour, name in zip(palette, names, strict=True)
    ]
    figure.legend(handles=patches, loc="outside lower center", ncols=6, fontsize=8, frameon=False)


def _matplotlib() -> tuple[Any, Any]:
    try:
        import matplotlib
        from matplotlib import colors
    except ImportError as error:
        raise BytescaleError(
            problem("drawing needs matplotlib, which is not installed", fix="pip install 'bytescale[plot]'")
        ) from error
    matplotlib.use("Agg", force=False)
    from matplotlib import pyplot

    return pyplot, colors
