"""Attention sinks: a learned logit per query head that joins every softmax of the head and has no value.

A sink belongs to a query, not to a block of keys. So it is folded in once, after all blocks of all members have been
merged: for a query with output ``o`` and log-sum-exp ``l`` over its keys, and sink ``s``::

    l' = log(e^l + e^s)        o' = o e^(l - l')

Backward of every block takes ``o'`` and ``l'``, so that no kernel knows of sinks. The sink's own weight is
``e^(s - l')`` and its value is zero, hence its gradient is ``- sum over queries of e^(s - l') (do . o')``.

Shape letters: T query rows, H query heads, D width of a value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bytescale.common.errors import ConfigError


def join_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """``out [T, H, D]`` and ``lse [T, H]`` with ``sinks [H]`` in every softmax. ``out`` is changed in place.

    Raises ``ConfigError`` unless there is one sink per query head.
    """
    if sinks.shape != lse.shape[1:]:
        raise ConfigError(
            f"attention got sinks of shape {list(sinks.shape)} for {lse.shape[1]} query heads",
            so="it would be unclear which head has which sink",
            fix="give one number per query head; under tensor parallelism, those of this rank's heads",
        )
    joined = torch.logaddexp(lse, sinks.to(lse.dtype))
    return out.mul_((lse - joined).exp()[..., None]), joined


def sinks_gradient(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """``[H]`` gradient of ``sinks``, summed over these queries in the LSE's dtype.

    ``dout [T, H, D]`` is the gradient of ``out``; ``out`` and ``lse`` are what ``join_sinks`` returned.
    """
    products = torch.einsum("thd,thd->th", dout.to(lse.dtype), out.to(lse.dtype))
    weights = (sinks.to(lse.dtype) - lse).exp()
    return -(weights * products).sum(dim=0).to(sinks.dtype)
