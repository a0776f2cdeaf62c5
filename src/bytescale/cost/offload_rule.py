"""Equation 3: which share of a sequence's activations goes to host memory, and how many ranks the sequence needs then.

    D(r) = ceil( (1 - r p) s / C ),  p = (l - 2) / l       ranks that s needs when a rank of l layers holds C tokens
    minimise D over r in [0, 1] subject to  T(s) >= r Act(s) / min(B_d2h, B_h2d)

We add the limit of host memory, ``r (l - 2) Act(s) / D <= H`` per device. Of all r that give the smallest D, the
smallest r is taken.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bytescale.common.arrays import IntArray
from bytescale.cost.curve import Curve
from bytescale.cost.profile import Profile
from bytescale.cost.stage import movable_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadRule:
    """Equation 3 for planners. ``profile.activation_bytes`` has to be the bytes that a layer keeps."""

    profile: Profile
    num_layers: int
    movable_share: float
    """The share of a token's device memory that the movable layers keep.

    It is (l - 2) / l in Eq. 3; in reality it is less (``plan.limits``).
    """
    host_bytes: float = math.inf

    @staticmethod
    def of_layers(
        times: Profile, kept_per_token: float, *, num_layers: int, movable_share: float, host_bytes: float
    ) -> OffloadRule:
        """The rule for layers that keep so many bytes of a token; ``times`` are those of a layer and of the links."""
        profile = replace(times, activation_bytes=Curve(0.0, kept_per_token, 0.0), points=())
        return OffloadRule(profile=profile, num_layers=num_layers, movable_share=movable_share, host_bytes=host_bytes)

    def fewest_ranks(self, lengths: ArrayLike, capacity_tokens: int, num_ranks: int) -> IntArray:
        """``[S]`` ranks that each sequence needs if it offloads as much as its compute hides.

        A sequence that would need more than ``num_ranks`` gets all of them and offloads more than compute hides. One
        that does not fit even then keeps its number, which is above ``num_ranks``.
        """
        lengths = np.asarray(lengths, dtype=np.float64)
        full = lengths / capacity_tokens  # ranks at r = 0, before rounding up
        degree = _ceil(full)
        if self.movable_share > 0:
            host, moved = self._whole_token_bytes, self._moved_bytes_per_token * capacity_tokens
            host_limit = 1.0 if math.isinf(host) else host / (moved + self.movable_share * host)
            largest = np.minimum(np.minimum(hidden_ratio(self.profile, lengths), host_limit), 1.0)
            largest = np.where(lengths <= capacity_tokens, 0.0, largest)
            degree = _ceil((1.0 - largest * self.movable_share) * full)
        fits_at_all = lengths <= num_ranks * self.largest_slice(capacity_tokens)
        return np.where((degree > num_ranks) & fits_at_all, num_ranks, degree)

    def ratio(self, slices: ArrayLike, capacity_tokens: int) -> NDArray[np.float64]:
        """``[G]`` smallest r with which a member's slice needs no more device memory than C tokens at r = 0."""
        slices = np.maximum(np.asarray(slices, dtype=np.float64), 1.0)
        if self.movable_share <= 0:
            return np.zeros_like(slices)
        moved = np.ceil(np.maximum(slices - capacity_tokens, 0.0) / self.movable_share - 1e-9)  # whole tokens
        return np.minimum(moved / slices, 1.0)

    def largest_slice(self, capacity_tokens: int) -> int:
        """Tokens of one sequence that a rank can hold if it offloads as much as possible, hidden by compute or not."""
        if self.movable_share <= 0:
            return capacity_tokens
        by_device = capacity_tokens / (1.0 - self.movable_share)
        by_host = capacity_tokens + self.movable_share * self._whole_token_bytes / self._moved_bytes_per_token
        return int(min(by_device, by_host) + 1e-9)

    @property
    def _moved_bytes_per_token(self) -> float:
        return float(self.profile.activation_bytes(1.0)) * movable_layers(self.num_layers)

    @property
    def _whole_token_bytes(self) -> float:
        """Host memory minus that of one token, because the number of moved tokens is rounded up by less than one."""
        return max(self.host_bytes - self._moved_bytes_per_token, 0.0)


def hidden_ratio(profile: Profile, lengths: ArrayLike) -> NDArray[np.float64]:
    """``[S]`` largest r, not capped at 1, whose transfer a layer's forward pass hides: T(s) B / Act(s)."""
    lengths = np.asarray(lengths, dtype=np.float64)
    rate = min(profile.links.device_to_host_bytes_per_second, profile.links.host_to_device_bytes_per_second)
    seconds = profile.attention_forward(lengths) + profile.rest_forward(lengths)
    moved = np.maximum(profile.activation_bytes(lengths), np.finfo(float).tiny)
    return np.asarray(seconds * rate / moved)


def _ceil(ranks: NDArray[np.float64]) -> IntArray:
    return np.maximum(np.ceil(ranks - 1e-9), 1).astype(np.int64)
