"""Floor 7: the trainer, its run folder and its metrics."""

from bytescale.train.loop.trainer import train

__all__ = ["train"]
