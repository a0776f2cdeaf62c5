"""Floor 2: causal attention over packs of sequences, whole or shared by a ring of ranks.

``reference`` is the slow, obvious twin; ``kernels`` are the fast blocks; ``ring`` puts blocks and transfers together.
"""

from bytescale.attention.exchange import Exchange
from bytescale.attention.kernels import AttentionKernel, select_kernel
from bytescale.attention.reference import reference_attention
from bytescale.attention.ring import PackedAttention, RingBuffers

__all__ = ["AttentionKernel", "Exchange", "PackedAttention", "RingBuffers", "reference_attention", "select_kernel"]
