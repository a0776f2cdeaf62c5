"""A member's own segments, without those of the members behind it."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bytescale.plan.layout import member_bounds, segment_bounds


@given(
    lengths=st.lists(st.integers(0, 500), min_size=1, max_size=5),
    weights=st.lists(st.integers(1, 9), min_size=1, max_size=20),
)
def test_a_members_bounds_are_those_of_all_members(lengths: list[int], weights: list[int]) -> None:
    everyone = segment_bounds(np.array(lengths), np.array(weights))
    for member, expected in enumerate(everyone):
        assert (member_bounds(np.array(lengths), np.array(weights), member) == expected).all()
