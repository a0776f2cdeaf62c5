"""Layer 3: from lengths, a cluster and a cost model to a plan. Pure: no torch, no clock, no randomness, no I/O."""
