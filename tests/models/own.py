"""Small models of our own families."""

from __future__ import annotations

import torch

from bytescale.config import Architecture
from bytescale.models import Llama, build_model


def small_shape(**changes: object) -> Architecture:
    """A Llama that runs in milliseconds, with grouped-query attention."""
    numbers = {
        "vocab_size": 61,
        "num_layers": 2,
        "hidden_size": 24,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 4,
        "ffn_hidden_size": 40,
    }
    return Architecture(**{**numbers, **changes})  # type: ignore[arg-type]


def make_model(shape: Architecture, dtype: torch.dtype, seed: int = 0) -> Llama:
    model = build_model(shape).to(dtype)
    model.initialise(seed)
    return model
