"""Radix sort of whole numbers."""

from __future__ import annotations

import numpy as np

from bytescale.common.arrays import IntArray

DIGIT = 16
"""Bits. NumPy's stable sort of 16-bit keys is a radix sort, five to ten times as fast as its sorts of longer keys."""


def rising(keys: IntArray) -> IntArray:
    """Stable argsort of ``keys`` ``[n]``, each at least 0. Sorts digit by digit, the lowest digit first."""
    order = np.argsort(keys.astype(np.uint16), kind="stable")
    for shift in range(DIGIT, int(keys.max(initial=0)).bit_length(), DIGIT):
        order = order[np.argsort((keys >> shift).astype(np.uint16)[order], kind="stable")]
    return order
