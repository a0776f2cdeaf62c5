"""Floor 0: errors, logging, units and seeds. Imports nothing of ours, and no torch."""
