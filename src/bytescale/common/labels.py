"""The label of tokens without a target. Loaders write it, and the loss ignores such tokens."""

IGNORE_INDEX = -100
"""The label that ``torch.nn.functional.cross_entropy`` ignores by default."""
