"""Floor 5: checkpoints. How they are written, published, read on any mesh, and exchanged with Hugging Face folders."""

from bytescale.checkpoint.checkpointer import Checkpointer
from bytescale.checkpoint.manifest import RunState

__all__ = ["Checkpointer", "RunState"]
