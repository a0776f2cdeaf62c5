"""Layer 2: causal attention over packs of sequences, whole or shared by a ring of ranks.

``kernels`` are blocks, fast ones and a slow twin; ``rings.grid`` and ``rings.window`` put blocks and transfers
together.
"""

from bytescale.attention.choose import select_kernel
from bytescale.attention.kernels import AttentionKernel
from bytescale.attention.packed import PackedAttention
from bytescale.attention.rings.exchange import Exchange
from bytescale.attention.rings.messages import RingBuffers
from bytescale.attention.rules import AttentionRules

__all__ = ["AttentionKernel", "AttentionRules", "Exchange", "PackedAttention", "RingBuffers", "select_kernel"]
