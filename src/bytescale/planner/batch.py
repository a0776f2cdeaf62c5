"""What planners do with their input first: check it, and sort it so that the result does not depend on its order."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from bytescale.common.arrays import IntArray
from bytescale.common.errors import PlanError
from bytescale.common.units import format_bytes
from bytescale.cost.cluster import Cluster

DIGIT = 16
"""Bits. NumPy's stable sort of 16-bit keys is a radix sort, five to ten times as fast as its sorts of longer keys."""


def checked_lengths(lengths: ArrayLike, *, cluster: Cluster, uniform: bool = False) -> IntArray:
    """The lengths as ``[S]`` int64. Raises ``PlanError`` for a batch that no plan can run.

    Args:
        lengths: ``[S]`` whole numbers of at least 1.
        cluster: the ranks that have to hold them.
        uniform: whether the planner gives every rank the same share, so that the smallest capacity limits all ranks.
    """
    array = np.asarray(lengths)
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise PlanError(
            f"lengths have shape {array.shape} and type {array.dtype}",
            fix="give one whole number of tokens per sequence",
        )
    if array.size == 0:
        raise PlanError("the batch has no sequences", so="there is nothing to plan", fix="give at least one")
    array = array.astype(np.int64, copy=False)
    if array.min() < 1:
        sequence = int(np.flatnonzero(array < 1)[0])
        raise PlanError(
            f"sequence {sequence} has {array[sequence]} tokens", fix="drop sequences of less than one token"
        )
    room = cluster.largest_sequence if uniform else cluster.room
    sequence = int(array.argmax())
    longest, smallest = int(array[sequence]), int(cluster.capacity_tokens.min())
    if longest <= room:
        return array
    if (rule := cluster.offload) is not None:
        over = (longest - room) / cluster.num_ranks * rule.num_layers * float(rule.profile.activation_bytes(1.0))
        raise PlanError(
            f"sequence {sequence} has {longest} tokens, but {cluster.num_ranks} ranks hold {room} together even when "
            f"they offload all they may (activations of {format_bytes(over)} a rank too many)",
            so="the whole cluster could not hold it",
            fix="use more ranks, memory.checkpointing, more host memory (memory.host_gib), or shorten or split it",
        )
    counted = "the smallest capacity" if uniform and not cluster.is_uniform else "capacity"
    raise PlanError(
        f"sequence {sequence} has {longest} tokens, but {cluster.num_ranks} ranks hold {room} together "
        f"({counted} {smallest} tokens each)",
        so="the whole cluster could not hold it",
        fix=f"use {-(-longest // smallest)} ranks, a capacity of {-(-longest // cluster.num_ranks)} tokens, or "
        "shorten or split it",
    )


def longest_first(lengths: IntArray) -> IntArray:
    """``[S]`` sequence numbers by descending length; equal lengths are in the order of their numbers."""
    return rising(lengths.max() - lengths)


def rising(keys: IntArray) -> IntArray:
    """Stable argsort of ``keys`` ``[n]``, each at least 0. Sorts digit by digit, the lowest digit first."""
    order = np.argsort(keys.astype(np.uint16), kind="stable")
    for shift in range(DIGIT, int(keys.max(initial=0)).bit_length(), DIGIT):
        order = order[np.argsort((keys >> shift).astype(np.uint16)[order], kind="stable")]
    return order
