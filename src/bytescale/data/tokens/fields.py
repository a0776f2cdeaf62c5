"""Numbers per token beside the tokens of a pair: weights of the loss, labels, and whatever else a corpus has.

Field ``weights`` of ``NAME.bin/.idx`` is a second pair ``NAME.weights.bin/.idx`` of the same format: fp32 numbers
(or another numeric type that another program wrote), cut into the same documents. Field ``labels`` holds int32 ids:
what is to be predicted at the place of each token. A pair has it only where that differs from the token itself.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bytescale.common.labels import OWN_FIELDS

WEIGHTS, LABELS = OWN_FIELDS


def field_dtype(name: str) -> np.dtype:
    """Return the type in which the numbers of a field are kept."""
    return np.dtype("<i4") if name == LABELS else np.dtype("<f4")


def without_field(name: str, tokens: NDArray) -> NDArray:
    """``[T]`` what field ``name`` of ``OWN_FIELDS`` is for ``tokens [T]`` that do not have it: weight 1, own label."""
    assert name in OWN_FIELDS, f"{name} has no default"
    return tokens.astype(field_dtype(name)) if name == LABELS else np.ones(len(tokens), field_dtype(name))
