"""Layer 7: is a model under ``bytescale.HDP`` equal to itself in one process? Run it on your own model::

    python -m bytescale.parity Qwen/Qwen3-0.6B      # a folder, a model of the hub, or a model type such as qwen3

A small copy of the model with random weights is trained for one step on random documents, masks and weights: by plain
transformers, one document at a time, and by ``HDP`` on several ranks (threads) under random plans. Loss,
log-probabilities and every gradient are compared.
"""

from bytescale.parity.compare import Comparison, Setup, compare
from bytescale.parity.families import FAMILIES, small_model

__all__ = ["FAMILIES", "Comparison", "Setup", "compare", "small_model"]
