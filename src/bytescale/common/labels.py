"""The label of tokens without a target: loaders write it, the loss passes over it."""

IGNORE_INDEX = -100
"""What ``torch.nn.functional.cross_entropy`` ignores by default."""
