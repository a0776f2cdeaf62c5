"""Attention's twin: layers that carry a state along a sequence, on packs and on sequences that ranks share."""

from bytescale.recurrence.cuts import Cuts, GroupCuts, OneProcessCuts
from bytescale.recurrence.kernels import KERNELS, lightning_mixer, require_known_kernel

__all__ = ["KERNELS", "Cuts", "GroupCuts", "OneProcessCuts", "lightning_mixer", "require_known_kernel"]
