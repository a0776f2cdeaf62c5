"""Layer 0: errors, units, labels, cuts and version checks. It imports no other module of bytescale, and no torch."""
