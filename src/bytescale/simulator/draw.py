"""Draws ranks over time as a PNG: what every rank runs, with how many others, and where it waits. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bytescale.common.atomic import refuse_special
from bytescale.common.errors import BytescaleError, ConfigError
from bytescale.common.units import format_seconds
from bytescale.simulator.result import SimulatedStep
from bytescale.simulator.trace import simulated_tracks, spread_evenly

COLUMNS = 1600  # width of the picture in pixels, along the time axis
MAX_ROWS = 512  # most ranks x stages that are drawn; they are spread evenly
MIN_OUTLINED = 12  # a task wider than this many columns is separated from the next by a line
_IDLE, _SYNC, _ENCODE, _LOCAL = 0.0, 1.0, 2.0, 3.0  # then 3 + log2 of the degree


def draw_steps(steps: dict[str, SimulatedStep], path: Path) -> None:
    """Draw one panel per step on one time axis, so that two plans of a batch can be compared by eye.

    The colour shows the degree, which is the number of ranks that share the micro-batch. A title tells the step's time,
    beside that of the first one. Raises ``BytescaleError`` if matplotlib is not installed.
    """
    refuse_special(path)
    pyplot, colors = _matplotlib()
    longest = max(step.step_seconds for step in steps.values())
    unit, name = next((u, n) for u, n in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")) if longest >= u or u == 1e-6)
    highest = max(float(step.events.loads.degree.max()) for step in steps.values())
    levels = int(np.ceil(np.log2(highest)))
    palette = ["#f7d9d5", "#a8a8a8", "#7fb069", "#4a90c2", *pyplot.get_cmap("plasma")(np.linspace(0.95, 0.05, levels))]
    heights = [1.1 + 0.6 * step.num_stages for step in steps.values()]
    first, slowest = next(iter(steps.items()))
    figure, axes = pyplot.subplots(
        len(steps),
        1,
        figsize=(9, 1.2 + sum(heights)),
        height_ratios=heights,
        sharex=True,
        squeeze=False,
        layout="constrained",
    )
    for axis, (title, step) in zip(axes[:, 0], steps.items(), strict=True):
        picture, num_stages = raster(step, longest)
        num_rows = step.events.num_ranks * num_stages
        axis.imshow(
            picture,
            aspect="auto",
            interpolation="nearest",
            cmap=colors.ListedColormap(palette),
            vmin=-0.5,
            vmax=len(palette) - 0.5,
            extent=(0, longest / unit, num_rows, 0),
        )
        axis.axvline(step.step_seconds / unit, color="black", linewidth=1)
        waiting = (step.dp_bubble + step.pp_bubble + step.wait_members).mean() / step.step_seconds
        faster = (
            f", {slowest.step_seconds / step.step_seconds:.2g} times as fast as {first}" if step is not slowest else ""
        )
        words = f"{title}: {format_seconds(step.step_seconds)}{faster}; ranks wait {waiting:.0%} of it"
        axis.set_title(words, loc="left", fontsize=12)
        axis.set_ylabel("rank")
        if num_stages > 1:
            _mark_stages(axis, num_stages, step.events.num_ranks)
    axes[-1, 0].set_xlabel(f"time in {name}")
    _legend(figure, palette, levels, has_pictures=any(step.encoders for step in steps.values()))
    try:
        figure.savefig(path, dpi=150)
    except ValueError as error:
        raise ConfigError(f"the picture cannot be {path} ({error})", fix="name a file that ends in .png") from error
    pyplot.close(figure)


def raster(step: SimulatedStep, seconds: float) -> tuple[NDArray[np.float64], int]:
    """Return the picture ``[rows, COLUMNS]``, a colour number per rank and time, and the number of stages.

    The rows are the drawn ranks of the first stage, then those of the next. NaN is drawn as nothing.
    """
    num_stages, scale = step.num_stages, COLUMNS / seconds
    ranks = spread_evenly(step.events.num_ranks, max(1, MAX_ROWS // num_stages))
    picture = np.full((len(ranks) * num_stages, COLUMNS), _IDLE)
    picture[:, round(step.step_seconds * scale) :] = np.nan
    for place, rank in enumerate(ranks):
        for stage, track in enumerate(simulated_tracks(step, rank)):
            row = picture[stage * len(ranks) + place]
            for span in track.spans:
                start, end = round(span.start * scale), round(span.end * scale)
                if span.category in ("sync", "encode"):
                    row[start:end] = _SYNC if span.category == "sync" else _ENCODE
                    continue
                row[start : max(end, start + 1)] = _LOCAL + np.ceil(np.log2(span.about["ranks"]))
                if end - start > MIN_OUTLINED:
                    row[end - 1] = np.nan
    return picture, num_stages


def _mark_stages(axis: Any, num_stages: int, num_ranks: int) -> None:
    for stage in range(1, num_stages):
        axis.axhline(stage * num_ranks, color="black", linewidth=0.8)
    axis.set_yticks(
        [(stage + 0.5) * num_ranks for stage in range(num_stages)], [f"stage {p}" for p in range(num_stages)]
    )
    axis.set_ylabel(f"{num_ranks} ranks a stage")


def _legend(figure: Any, palette: list[Any], levels: int, *, has_pictures: bool) -> None:
    from matplotlib.patches import Patch

    names = ["waiting", "gradient sync", "pictures", "one rank"]
    names += [f"{2 ** (i - 1) + 1}-{2**i} ranks" if i > 1 else "2 ranks" for i in range(1, levels + 1)]
    patches = [
        Patch(facecolor=colour, edgecolor="black", linewidth=0.4, label=name)
        for colour, name in zip(palette, names, strict=True)
        if has_pictures or name != "pictures"
    ]
    figure.legend(handles=patches, loc="outside lower center", ncols=4, fontsize=11, frameon=False)


def _matplotlib() -> tuple[Any, Any]:
    try:
        import matplotlib
        from matplotlib import colors
    except ImportError as error:
        raise BytescaleError(
            "drawing needs matplotlib, which is not installed", fix="pip install 'bytescale[plot]'"
        ) from error
    matplotlib.use("Agg", force=False)
    from matplotlib import pyplot

    return pyplot, colors
