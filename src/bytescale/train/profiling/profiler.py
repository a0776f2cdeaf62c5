"""Measures the costs of one layer on this device and fits the curves of the cost model to them (``bytescale profile``).

Each value is a median: of several sweeps over all lengths, and of several runs within each sweep. With the fastest
runs, predicted steps were a tenth too short (docs/decisions/profiles.md). Ranks that train share caches, memory and
power, so several ranks measure the same things at the same time. The slowest counts: the others wait for it.

* attention   Forward and backward of the causal kernel for one sequence.
* sequences   The same of many sequences of ``SHORT_TOKENS`` tokens: what a sequence adds, however short it is.
* rest        A layer whose attention does next to nothing: projections, norms, rotation, feed-forward. Backward adds to
              existing gradients, as it does from the second micro-batch on.
* head        The linear cross-entropy as in training: its forward computes the gradients and its backward scales them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from bytescale.cost.curve import Curve, fit_curve, relative_errors
from bytescale.cost.links import Links
from bytescale.cost.profile import Point, Profile
from bytescale.cost.profile_file import CURVES
from bytescale.runtime.group import RankGroup
from bytescale.train.profiling.links import measure_links, slowest
from bytescale.train.profiling.measurer import SHORT_TOKENS, Measurer
from bytescale.train.profiling.peak import device_name

MIN_TOKENS = 256
SWEEPS = 5
"""Number of sweeps over all lengths. A burst of other load on the machine disturbs only one of them."""


def measure_profile(
    measurer: Measurer,
    *,
    max_tokens: int,
    seconds: float,
    hdp: RankGroup | None = None,
    nodes: Sequence[int] | None = None,
) -> Profile:
    """Measure at ``MIN_TOKENS`` tokens, twice that, and so on to ``max_tokens``, and fit curves to the results.

    Every rank calls it and gets the same profile.

    Args:
        seconds: for all lengths together. A length that would take too long, by the time of the last one, is left out.
        hdp: the ranks that measure together; None: this rank alone. Links are then taken to be ideal.
        nodes: the node of each of them, by any number; None: they share one.
    """
    spec, device, dtype = measurer.model.spec, measurer.device, measurer.dtype
    hdp = hdp or RankGroup(device=device)
    measure_lengths(measurer, hdp, max_tokens=max_tokens, seconds=seconds)
    medians = [statistics.median(values) for values in measurer.sweeps.values()]
    found = zip(measurer.sweeps, np.max(hdp.share(medians), axis=0).tolist(), strict=True)
    points = [Point(curve=curve, tokens=tokens, value=value) for (curve, tokens), value in found]
    links = measure_links(hdp, measurer, nodes) if hdp.size > 1 else Links()
    to_host, to_device, updated = np.max(hdp.share(list(measurer.host_rates())), axis=0).tolist()
    element = dtype.itemsize
    keys, gradients = (spec.mean("key_numbers") * size for size in (element, max(4, element)))
    fits: dict[str, Any] = {name: _fit(points, name) for name in CURVES}
    for way in ("forward", "backward"):
        fits[f"sequence_{way}_seconds"] = SHORT_TOKENS * _fit(points, f"sequences_{way}").linear
    return Profile(
        name=f"measured on {device_name(device, dtype)}",
        source=f"bytescale profile, median of {SWEEPS} sweeps on {hdp.size} rank(s), torch {torch.__version__}",
        device=device_name(device, dtype),
        spec=spec,
        ring_forward_bytes_per_token=keys,
        ring_backward_bytes_per_token=keys + gradients,
        links=replace(
            links,
            device_to_host_bytes_per_second=to_host,
            host_to_device_bytes_per_second=to_device,
            host_update_bytes_per_second=updated,
        ),
        layer_parameters=spec.mean("parameters"),
        parameter_bytes=element,
        points=tuple(points),
        **fits,
    )


def measure_lengths(measurer: Measurer, hdp: RankGroup, *, max_tokens: int, seconds: float) -> None:
    """Measure every curve at every length, ``SWEEPS`` times. Every rank calls it; see ``measure_profile``."""
    measurer.measure(MIN_TOKENS)  # warm-up: on a GPU, compilers and libraries take seconds to start
    measurer.sweeps.clear()
    lengths: list[int] = []
    started, elapsed, last, tokens = time.perf_counter(), 0.0, 0.0, MIN_TOKENS
    # The first sweep finds the lengths. A length that is twice as long takes at most four times as long.
    while not lengths or (tokens <= max_tokens and SWEEPS * (elapsed + 4 * last) <= seconds):
        before = time.perf_counter()
        measurer.measure(tokens)
        ended = time.perf_counter()
        elapsed, last = slowest(hdp, ended - started), slowest(hdp, ended - before)
        lengths.append(tokens)
        tokens *= 2
    for _ in range(SWEEPS - 1):
        for tokens in lengths:
            hdp.share([0.0])  # all start together
            measurer.measure(tokens)


def _fit(points: list[Point], name: str) -> Curve:
    """Fit a curve. If a few points are far off it, after a burst of other load, fit again without them."""
    chosen = [point for point in points if point.curve == name]
    tokens, values = (np.array(column) for column in zip(*((p.tokens, p.value) for p in chosen), strict=True))
    quadratic = name.startswith("attention")
    weights = np.sqrt(tokens)  # long micro-batches hold most of the tokens
    curve = fit_curve(tokens, values, quadratic=quadratic, weights=weights)
    errors = np.abs(relative_errors(curve, tokens, values))
    kept = errors <= max(3 * float(np.median(errors)), 0.1)
    if kept.all() or kept.sum() < max(3, 0.7 * len(kept)):
        return curve
    return fit_curve(tokens[kept], values[kept], quadratic=quadratic, weights=weights[kept])
