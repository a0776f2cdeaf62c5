"""Which samples there are, in which order they come, and which of them make a batch."""
