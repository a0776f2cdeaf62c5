"""The array type that most of the project shares."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
"""Whole numbers: lengths in tokens, offsets, ranks. The docstring of each use says the shape."""
