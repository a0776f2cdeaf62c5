"""A cost as a function of length: ``a s^2 + b s + g``, and its fit to measured points (paper section 5.2)."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import combinations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bytescale.common.errors import ConfigError
from bytescale.common.limits import limits


@dataclass(frozen=True, slots=True)
class Curve:
    """``quadratic * s^2 + linear * s + constant``, seconds or bytes, of a sequence of ``s`` tokens."""

    quadratic: float = field(default=0.0, metadata=limits(least=0))
    linear: float = field(default=0.0, metadata=limits(least=0))
    constant: float = field(default=0.0, metadata=limits(least=0))

    def __call__(self, tokens: ArrayLike) -> NDArray[np.float64]:
        """The curve at ``tokens`` (any shape)."""
        tokens = np.asarray(tokens, dtype=np.float64)
        return (self.quadratic * tokens + self.linear) * tokens + self.constant

    def times(self, factor: float) -> Curve:
        return Curve(self.quadratic * factor, self.linear * factor, self.constant * factor)


def fit_curve(
    tokens: ArrayLike, values: ArrayLike, *, quadratic: bool = True, weights: ArrayLike | None = None
) -> Curve:
    """The curve of non-negative coefficients with the smallest (weighted) sum of squared RELATIVE errors.

    Errors are relative because points span several powers of ten. Every subset of coefficients is solved.

    Args:
        tokens: ``[P]`` lengths, at least one.
        values: ``[P]`` seconds or bytes, each above 0.
        quadratic: whether the curve may have a term in ``s^2``.
        weights: ``[P]`` weights of the squared errors; None: all are 1.
    """
    tokens = np.asarray(tokens, dtype=np.float64)
    values = np.asarray(values, dtype=np.float64)
    if len(tokens) == 0 or tokens.shape != values.shape or (tokens <= 0).any() or (values <= 0).any():
        raise ConfigError(
            f"cannot fit a curve to {len(tokens)} lengths and {len(values)} values",
            fix="give at least one point; lengths and values have to be above 0",
        )
    root = np.ones(len(tokens)) if weights is None else np.sqrt(np.asarray(weights, dtype=np.float64))
    powers = (2, 1, 0) if quadratic else (1, 0)
    best: tuple[float, dict[int, float]] = (np.inf, {})
    for count in range(1, min(len(powers), len(tokens)) + 1):
        for chosen in combinations(powers, count):
            columns = np.stack([root * tokens**power / values for power in chosen], axis=1)
            scale = columns.max(axis=0)
            solution = np.linalg.lstsq(columns / scale, root, rcond=None)[0] / scale
            error = float(np.square(columns @ solution - root).sum())
            if (solution >= 0).all() and error < best[0]:
                best = (error, dict(zip(chosen, solution.tolist(), strict=True)))
    return Curve(best[1].get(2, 0.0), best[1].get(1, 0.0), best[1].get(0, 0.0))


def relative_errors(curve: Curve, tokens: ArrayLike, values: ArrayLike) -> NDArray[np.float64]:
    """``[P]`` the curve divided by each point, minus one."""
    return curve(tokens) / np.asarray(values, dtype=np.float64) - 1.0
