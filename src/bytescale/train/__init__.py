"""Floor 5: the trainer, its run folder, metrics and checkpoints."""

from bytescale.train.trainer import train

__all__ = ["train"]
