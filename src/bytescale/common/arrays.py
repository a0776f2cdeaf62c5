"""The array types that most of the project shares. The docstring of each use says the shape."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
"""Whole numbers: lengths in tokens, offsets, ranks."""
FloatArray = NDArray[np.float64]
"""Seconds, bytes, shares."""
