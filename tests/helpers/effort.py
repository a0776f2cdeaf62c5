"""How many tests run: ``make test`` proves every claim once, and ``make test-rest`` runs the rest.

A test marked ``exhaustive`` runs in the rest only. It tries another value of something that ``make test`` has tried
already, or it runs many processes whose parts are tested one by one. A property test runs in both, with more examples
in the rest.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest
from hypothesis import settings

Test = TypeVar("Test", bound=Callable[..., Any])

REST = os.environ.get("BYTESCALE_TESTS") == "rest"
"""Whether this is the rest; set by ``pytest --rest`` before tests are imported."""


def examples(quick: int, rest: int, **options: Any) -> Callable[[Test], Test]:
    """Hypothesis settings: ``quick`` examples in ``make test``, ``rest`` in ``make test-rest``."""

    def decorate(test: Test) -> Test:
        chosen = settings(max_examples=rest if REST else quick, deadline=None, **options)
        return pytest.mark.more_examples(chosen(test))  # type: ignore[no-any-return]

    return decorate


def in_the_rest(decorator: Callable[[Test], Test]) -> Callable[[Test], Test]:
    """A decorator, such as a further example, that holds in ``make test-rest`` alone."""
    return decorator if REST else lambda test: test


def one_in(step: int, values: Sequence[Any]) -> list[Any]:
    """Parameters of a test, every ``step``-th of them in ``make test`` and the others in the rest.

    Take a ``step`` that has no divisor in common with the number of values of any factor of a product: then
    ``make test`` tries every value of every factor.
    """
    return [
        value if place % step == 0 else pytest.param(*_tuple(value), marks=pytest.mark.exhaustive)
        for place, value in enumerate(values)
    ]


def one_of(values: Sequence[Any], quick: Any) -> list[Any]:
    """Parameters of a test, of which ``make test`` tries ``quick`` and the rest all others."""
    assert quick in values, f"{quick!r} is none of {list(values)}"
    return [value if value == quick else pytest.param(*_tuple(value), marks=pytest.mark.exhaustive) for value in values]


def pairs(first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
    """Every pair of two parameters.

    ``make test`` tries every value of the longer list once, and with them every value of the shorter one. The rest
    tries all other pairs.
    """
    shorter = min(len(first), len(second))
    return [
        pytest.param(a, b, marks=() if place % shorter == other % shorter else pytest.mark.exhaustive)
        for place, a in enumerate(first)
        for other, b in enumerate(second)
    ]


def _tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
