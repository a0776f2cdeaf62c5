"""The shapes of charts, as paths of SVG, and what their axes say. ``pieces.html`` draws them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from bytescale.common.arrays import FloatArray
from bytescale.common.units import KIBI, format_bytes, format_count

WIDTH, HEIGHT = 1000.0, 100.0  # of every drawing, in its own units
MAX_POINTS = 400  # most points of a line and columns of a chart; neighbours are averaged
Label = Callable[[float], str]


class Outline(NamedTuple):
    """A shape, and what it says under the mouse."""

    css: str
    path: str
    text: str = ""


class Plot(NamedTuple):
    """A chart. Ticks are a place from 0 to 1 and a text; ``keys`` say what colours mean: (css class, name)."""

    marks: Sequence[Outline]
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    x_title: str = "step"
    keys: Sequence[tuple[str, str]] = ()


class Series(NamedTuple):
    """A line, or one part of every column: ``ys[i]`` at ``xs[i]``. None is a gap."""

    name: str
    css: str
    xs: Sequence[float]
    ys: Sequence[float | None]


def line_chart(series: Sequence[Series], *, label: Label, from_zero: bool = False) -> Plot | None:
    """Lines over steps on one pair of axes; None without a point. ``label`` writes the numbers of the y axis."""
    points = [_thinned(np.array([pair for pair in zip(one.xs, one.ys, strict=True) if _known(pair)])) for one in series]
    some = [line for line in points if len(line)]
    if not some:
        return None
    (x_low, low), (x_high, high) = np.concatenate(some).min(axis=0), np.concatenate(some).max(axis=0)
    x_axis, y_axis = _Axis(x_low, x_high), _Axis.around(0.0 if from_zero else low, high)
    marks = []
    for one, line in zip(series, points, strict=True):
        path = "L".join(f"{x_axis.place(x) * WIDTH:.1f} {HEIGHT * (1 - y_axis.place(y)):.2f}" for x, y in line)
        dot = "h0" if len(line) == 1 else ""
        marks.append(Outline(f"line {one.css}", f"M{path}{dot}" if path else "", one.name))
    keys = [(one.css, one.name) for one in series] if len(series) > 1 else []
    return Plot(marks, x_axis.steps(), y_axis.ticks(label), keys=keys)


def stacked_columns(parts: Sequence[Series], *, highest: float, label: Label) -> Plot:
    """Columns over steps, each made of all parts from below. ``highest``: what the y axis has room for."""
    thinned = _thinned(np.array([parts[0].xs, *(part.ys for part in parts)], dtype=float).T)  # [N, 1 + parts]
    y_axis, width = _Axis.around(0.0, highest), WIDTH / len(thinned)
    wide = width * (0.92 if len(thinned) < 120 else 1.02)
    marks = []
    for place, row in enumerate(thinned):
        tops = HEIGHT * (1 - np.cumsum([0.0, *row[1:]]) / y_axis.high)
        for part, bottom, top in zip(parts, tops, tops[1:], strict=False):
            if bottom - top > 0.02:
                marks.append(Outline(part.css, _rectangle(place * width, top, wide, bottom - top)))
    return Plot(marks, _Axis(thinned[0, 0] - 0.5, thinned[-1, 0] + 0.5).steps(), y_axis.ticks(label))


def grouped_columns(names: Sequence[str], series: Sequence[tuple[str, str, Sequence[float]]], x_title: str) -> Plot:
    """Shares (0 to 1) per name, as columns side by side. A series is (css class, name, shares)."""
    y_axis = _Axis.around(0.0, max(max(values) for _, _, values in series))
    slot = WIDTH / len(names)
    width = 0.8 * slot / len(series)
    marks = []
    for number, (css, title, values) in enumerate(series):
        for place, value in enumerate(values):
            tall = HEIGHT * y_axis.place(value)
            path = _rectangle((place + 0.1) * slot + number * width, HEIGHT - tall, width, tall)
            marks.append(Outline(css, path, f"{title}, {names[place]}: {value:.1%}"))
    every = math.ceil(len(names) / 8)
    ticks = [((place + 0.5) / len(names), name) for place, name in enumerate(names) if place % every == 0]
    return Plot(marks, ticks, y_axis.ticks("{:.0%}".format), x_title, [(css, title) for css, title, _ in series])


class _Axis(NamedTuple):
    low: float
    high: float

    @staticmethod
    def around(low: float, high: float) -> _Axis:
        """An axis with a little room above, and below unless it begins at 0."""
        room = 0.05 * (high - low) or abs(high) * 0.1 or 1.0
        return _Axis(low if low == 0.0 else low - room, high + room)

    def place(self, value: float) -> float:
        """Where a value is: 0 at the low end, 1 at the high end."""
        return (value - self.low) / (self.high - self.low) if self.high > self.low else 0.5

    def ticks(self, label: Label, *, whole: bool = False) -> list[tuple[float, str]]:
        """Up to six values that ``label`` writes as round numbers, each with its place and its text."""
        span = self.high - self.low
        if span <= 0:
            return [(0.5, label(self.low))]
        kibi = 1.0  # K and M of tokens and bytes are powers of 1024
        while label in (format_count, format_bytes) and span / kibi > 2 * KIBI:
            kibi *= KIBI
        step = 10.0 ** math.floor(math.log10(span / kibi / 5)) * kibi
        step *= next(factor for factor in (1, 2, 2.5, 5, 10) if span / (step * factor) <= 6)
        step = max(1.0, round(step)) if whole else step
        first = math.ceil(self.low / step - 1e-9)
        values = [number * step for number in range(first, math.floor(self.high / step + 1e-9) + 1)]
        return [(self.place(value), label(value) if value else "0") for value in values]

    def steps(self) -> list[tuple[float, str]]:
        return self.ticks("{:.0f}".format, whole=True)


def _rectangle(x: float, y: float, width: float, height: float) -> str:
    return f"M{x:.2f} {y:.2f}h{width:.2f}v{height:.2f}H{x:.2f}z"


def _known(point: tuple[float, float | None]) -> bool:
    return point[1] is not None and math.isfinite(point[1])


def _thinned(rows: FloatArray) -> FloatArray:
    """At most ``MAX_POINTS`` rows, each the mean of neighbours."""
    if len(rows) <= MAX_POINTS:
        return rows
    return np.array([group.mean(axis=0) for group in np.array_split(rows, MAX_POINTS)])
