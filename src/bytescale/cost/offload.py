"""Equation 3: which share of a sequence's activations goes to host memory, and how many ranks it then needs.

    D(r) = ceil( (l - r (l - 2)) s / (l C) )               ranks that s needs when a rank of l layers holds C tokens
    minimise D over r in [0, 1] subject to  T(s) >= r Act(s) / min(B_d2h, B_h2d)

Both sides of the constraint shrink by D alike, so it is written for the whole sequence. We add that host memory ends
too, ``r (l - 2) Act(s) / D <= H`` per device, and of all r that give the smallest D take the smallest.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bytescale.common.errors import ConfigError, problem
from bytescale.cost.profile import Profile
from bytescale.cost.stage import RESIDENT_LAYERS


def choose_offload(
    profile: Profile,
    lengths: ArrayLike,
    *,
    capacity_tokens: int,
    num_layers: int,
    host_bytes: float = math.inf,
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Offload ratio r and number of ranks D of each sequence.

    Args:
        profile: times, activation bytes and PCIe rates.
        lengths: ``[S]`` tokens.
        capacity_tokens: C, tokens that a rank holds without offloading.
        num_layers: l, layers on a rank.
        host_bytes: host memory per device.

    Returns:
        ``r [S]`` float64 in [0, 1] and ``D [S]`` int64, at least 1. Sequences of at most C tokens get r = 0, D = 1.
    """
    if capacity_tokens < 1 or num_layers < 1:
        raise ConfigError(
            problem(f"capacity_tokens = {capacity_tokens}, num_layers = {num_layers}", fix="use numbers of at least 1")
        )
    lengths = np.asarray(lengths, dtype=np.float64)
    movable = num_layers - RESIDENT_LAYERS
    full = lengths * num_layers / (num_layers * capacity_tokens)  # ranks at r = 0, before rounding up
    if movable <= 0:
        return np.zeros(len(lengths)), _ceil(full)
    per_rank_bytes = np.asarray(profile.activation_bytes(capacity_tokens), dtype=np.float64) * num_layers
    host_limit = 1.0 if math.isinf(host_bytes) else num_layers * host_bytes / (per_rank_bytes + host_bytes) / movable
    largest = np.minimum(np.minimum(hidden_ratio(profile, lengths), host_limit), 1.0)
    largest = np.where(lengths <= capacity_tokens, 0.0, largest)
    degree = _ceil((num_layers - largest * movable) * lengths / (num_layers * capacity_tokens))
    smallest = (num_layers - degree * num_layers * capacity_tokens / lengths) / movable
    return np.clip(smallest, 0.0, largest), degree


def hidden_ratio(profile: Profile, lengths: ArrayLike) -> NDArray[np.float64]:
    """``[S]`` largest r, not capped at 1, whose transfer a layer's forward pass hides: T(s) B / Act(s)."""
    lengths = np.asarray(lengths, dtype=np.float64)
    rate = min(profile.links.device_to_host_bytes_per_second, profile.links.host_to_device_bytes_per_second)
    seconds = profile.attention_forward(lengths) + profile.rest_forward(lengths)
    moved = np.maximum(profile.activation_bytes(lengths), np.finfo(float).tiny)
    return np.asarray(seconds * rate / moved)


def _ceil(ranks: NDArray[np.float64]) -> NDArray[np.int64]:
    return np.maximum(np.ceil(ranks - 1e-9), 1).astype(np.int64)
