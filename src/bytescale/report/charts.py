"""Charts as HTML with SVG inside. Shapes stretch with the page; text is HTML, so it stays readable on a phone.

Colours are classes of style.css. Every function returns a string.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from bytescale.common.units import KIBI, format_bytes, format_count, format_seconds
from bytescale.report.parts import waits_of
from bytescale.simulator.step_trace import StepTrace, track_place
from bytescale.simulator.trace import Span, spread_evenly

WIDTH, HEIGHT = 1000.0, 100.0  # of every drawing, in its own units
MAX_POINTS = 400  # most points of a line and columns of a chart; neighbours are averaged
MAX_RANKS = 16  # most ranks drawn over time
_THIN = 0.5  # spans of one kind that are closer than this many units are drawn as one


@dataclass(frozen=True, kw_only=True)
class Series:
    """A line: ``ys[i]`` at ``xs[i]``. None is a gap."""

    name: str
    css: str
    xs: Sequence[float]
    ys: Sequence[float | None]


def line_chart(series: Sequence[Series], *, label: Callable[[float], str], from_zero: bool = False) -> str:
    """Lines over steps on one pair of axes. ``label`` writes the numbers of the y axis."""
    drawn = [_thinned(one) for one in series]
    xs = [x for one in drawn for x in one.xs]
    ys = [y for one in drawn for y in one.ys if y is not None]
    if not ys:
        return ""
    x_axis, y_axis = _Axis(min(xs), max(xs)), _Axis.around(0.0 if from_zero else min(ys), max(ys))
    marks = []
    for one in drawn:
        points = [(x_axis.place(x) * WIDTH, y_axis.place(y) * HEIGHT) for x, y in _known(one)]
        path = "M" + "L".join(f"{x:.1f} {HEIGHT - y:.2f}" for x, y in points) if points else ""
        dot = "h0" if len(points) == 1 else ""
        marks.append(f'<path class="line {one.css}" d="{path}{dot}"><title>{escape(one.name)}</title></path>')
    names = "" if len(series) == 1 else legend([(one.css, one.name) for one in series])
    return names + _plot("".join(marks), x_axis.ticks(lambda x: f"{x:.0f}", whole=True), y_axis.ticks(label), "step")


def stacked_columns(
    columns: Sequence[tuple[float, Sequence[tuple[str, float]]]], *, highest: float, label: Callable[[float], str]
) -> str:
    """Columns of (step, [(css class, height), ...]); the parts stand on each other from below.

    ``highest``: the height that the y axis has room for.
    """
    grouped = _grouped(list(columns))
    y_axis = _Axis.around(0.0, highest)
    width = WIDTH / len(grouped)
    marks = []
    for place, (_, parts) in enumerate(grouped):
        bottom = 0.0
        for css, height in parts:
            top = bottom + height
            y, tall = HEIGHT * (1 - y_axis.place(top)), HEIGHT * (y_axis.place(top) - y_axis.place(bottom))
            if tall > 0.02:
                marks.append(_rect(place * width, y, width * (0.92 if len(grouped) < 120 else 1.02), tall, css))
            bottom = top
    x_axis = _Axis(grouped[0][0] - 0.5, grouped[-1][0] + 0.5)
    return _plot("".join(marks), x_axis.ticks(lambda x: f"{x:.0f}", whole=True), y_axis.ticks(label), "step")


def grouped_columns(names: Sequence[str], series: Sequence[tuple[str, str, Sequence[float]]], x_title: str) -> str:
    """Shares (0 to 1) per name, as columns side by side. A series is (css class, name, shares)."""
    highest = max((value for _, _, values in series for value in values), default=0.0)
    y_axis = _Axis.around(0.0, highest or 1.0)
    slot = WIDTH / len(names)
    width = 0.8 * slot / len(series)
    marks = []
    for number, (css, title, values) in enumerate(series):
        for place, value in enumerate(values):
            tall = HEIGHT * y_axis.place(value)
            x = place * slot + 0.1 * slot + number * width
            text = f"{title}, {names[place]}: {value:.1%}"
            marks.append(_rect(x, HEIGHT - tall, width, tall, css, text))
    every = math.ceil(len(names) / 8)
    ticks = [((place + 0.5) / len(names), name) for place, name in enumerate(names) if place % every == 0]
    keys = legend([(css, title) for css, title, _ in series])
    return keys + _plot("".join(marks), ticks, y_axis.ticks(lambda y: f"{y:.0%}"), x_title)


def share_bar(parts: Sequence[tuple[str, str, float]]) -> str:
    """One horizontal bar of (css class, name, share) that is as wide as the page."""
    pieces = [
        f'<span class="{css}" style="width:{100 * share:.2f}%" title="{escape(name)}: {share:.1%}">'
        + (f"<b>{share:.0%}</b>" if share >= 0.08 else "")
        + "</span>"
        for css, name, share in parts
        if share > 0
    ]
    return f'<div class="bar">{"".join(pieces)}</div>'


def legend(items: Sequence[tuple[str, str]]) -> str:
    """What the colours mean: (css class, name)."""
    entries = "".join(f'<li><i class="{css}"></i>{escape(name)}</li>' for css, name in items)
    return f'<ul class="legend">{entries}</ul>'


def ranks_over_time(trace: StepTrace, *, until: float | None = None) -> str:
    """What each rank did in a step, measured above and predicted below, on one time axis.

    ``until``: seconds at which the axis ends; None: with the last span.
    """
    ranks = sorted({track.rank for track in trace.measured})
    shown = {ranks[place] for place in spread_evenly(len(ranks), MAX_RANKS)}
    tracks = [("measured", track) for track in trace.measured] + [("predicted", track) for track in trace.predicted]
    tracks = [(kind, track) for kind, track in tracks if track.rank in shown]
    tracks.sort(key=lambda item: (*track_place(item[1])[:2], item[0], item[1].name))
    spans = [span for _, track in tracks for span in track.spans]
    axis = _Axis(min(span.start for span in spans), max(span.end for span in spans) if until is None else until)
    many_tracks = len(tracks) > 2 * len(shown)
    rows = []
    for kind, track in tracks:
        name = f"rank {track.rank}" + (f", {track.name}" if many_tracks else "")
        text = name if kind == "measured" else "predicted"
        drawing = "".join(_span_rects(track.spans, axis))
        rows.append(
            f'<div class="track {kind}"><span>{escape(text)}</span>'
            f'<svg viewBox="0 0 {WIDTH:.0f} 10" preserveAspectRatio="none" role="img" '
            f'aria-label="{escape(name)}, {kind}">{drawing}</svg></div>'
        )
    ticks = _ticks(axis.ticks(format_seconds), "left")
    num_ranks = trace.metadata.num_ranks
    left_out = "" if len(shown) == num_ranks else f" {len(shown)} of {num_ranks} ranks are shown."
    return f'<div class="tracks">{"".join(rows)}<div class="track axis"><span></span><div>{ticks}</div></div></div>' + (
        f"<p class=note>{left_out}</p>" if left_out else ""
    )


def _span_rects(spans: Sequence[Span], axis: _Axis) -> list[str]:
    """Rectangles of a track: first what the rank does, then the waits inside of forward and backward."""
    rects = []
    waits, tasks = waits_of(spans), [span for span in spans if span.category != "wait"]
    for inside, some in ((False, tasks), (True, waits)):
        last: tuple[float, float, str, str] | None = None
        for span in sorted(some, key=lambda span: span.start):
            x, end = axis.place(span.start) * WIDTH, axis.place(span.end) * WIDTH
            text = f"{span.name}: {format_seconds(span.seconds)}" + _details(span)
            if last is not None and inside and x - last[1] < _THIN:
                last = (last[0], max(end, last[1]), last[2], "several waits")
                continue
            if last is not None:
                rects.append(_rect(last[0], 0, max(last[1] - last[0], 0.3), 10, last[2], last[3]))
            last = (x, end, f"k-{span.category}", text)
        if last is not None:
            rects.append(_rect(last[0], 0, max(last[1] - last[0], 0.3), 10, last[2], last[3]))
    return rects


def _details(span: Span) -> str:
    return f", {span.about['tokens']} tokens" if "tokens" in span.about else ""


@dataclass(frozen=True)
class _Axis:
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

    def ticks(self, label: Callable[[float], str], *, whole: bool = False) -> list[tuple[float, str]]:
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


def _plot(drawing: str, x_ticks: list[tuple[float, str]], y_ticks: list[tuple[float, str]], x_title: str) -> str:
    grid = "".join(
        f'<path class="grid" d="M0 {HEIGHT * (1 - place):.2f}h{WIDTH:.0f}"/>' for place, _ in y_ticks if 0 <= place <= 1
    )
    return (
        f'<div class="plot"><div class="y">{_ticks(y_ticks, "bottom")}</div>'
        f'<svg viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}" preserveAspectRatio="none" role="img">{grid}{drawing}</svg>'
        f'<div class="x">{_ticks(x_ticks, "left")}</div><div class="title">{escape(x_title)}</div></div>'
    )


def _ticks(ticks: list[tuple[float, str]], side: str) -> str:
    return "".join(f'<span style="{side}:{100 * place:.2f}%">{escape(text)}</span>' for place, text in ticks)


def _rect(x: float, y: float, width: float, height: float, css: str, text: str = "") -> str:
    title = f"<title>{escape(text)}</title>" if text else ""
    return f'<rect class="{css}" x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}">{title}</rect>'


def _known(series: Series) -> list[tuple[float, float]]:
    return [(x, y) for x, y in zip(series.xs, series.ys, strict=True) if y is not None and math.isfinite(y)]


def _thinned(series: Series) -> Series:
    """The series with at most ``MAX_POINTS`` points, each the mean of neighbours. Gaps are dropped."""
    known = _known(series)
    size = math.ceil(len(known) / MAX_POINTS) or 1
    groups = [known[place : place + size] for place in range(0, len(known), size)]
    return Series(
        name=series.name,
        css=series.css,
        xs=[sum(x for x, _ in group) / len(group) for group in groups],
        ys=[sum(y for _, y in group) / len(group) for group in groups],
    )


def _grouped(
    columns: list[tuple[float, Sequence[tuple[str, float]]]],
) -> list[tuple[float, list[tuple[str, float]]]]:
    """At most ``MAX_POINTS`` columns, each the mean of neighbours."""
    size = math.ceil(len(columns) / MAX_POINTS)
    grouped = []
    for place in range(0, len(columns), size):
        some = columns[place : place + size]
        names = [css for css, _ in some[0][1]]
        means = [sum(parts[row][1] for _, parts in some) / len(some) for row in range(len(names))]
        grouped.append((sum(x for x, _ in some) / len(some), list(zip(names, means, strict=True))))
    return grouped
