"""Layer 4: executes a plan and never decides. The plan gives the shape and the partner of every message.

The runtime works with any ``nn.Module`` that fits ``executor.DecoderModule``; it knows nothing of ``hf``.
"""
