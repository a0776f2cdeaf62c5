"""The planning methods of other projects, for ``planners.py``. Waiting for members is left out, which favours them."""

from __future__ import annotations

import heapq
import importlib
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bytescale.common.arrays import IntArray
from bytescale.cost.model import CostModel

FloatArray = NDArray[np.float64]


def load_megatron() -> ModuleType | str:
    """Return the module with Megatron-Core's BalancedCPScheduler, or the reason why it cannot be used."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    try:
        return importlib.import_module("megatron.core.pipeline_parallel.hybrid_cp_schedule")
    except Exception as error:  # its import pulls in much and can fail in many ways
        return f"not installed or not importable ({error}); pip install --no-deps megatron-core"
    finally:
        logging.disable(logging.NOTSET)


@dataclass(frozen=True)
class _Ranks:
    """A stand-in for a process group."""

    count: int

    def size(self) -> int:
        return self.count


def megatron_end(
    scheduler: Callable[..., Any], lengths: IntArray, cost: CostModel, num_ranks: int, capacity: int
) -> tuple[float, float]:
    """Return the makespan of a scheduler of Megatron's with its barriers, as it runs, and without barriers.

    ``scheduler`` is ``BalancedCPScheduler``, or ours, which takes its place.
    """
    _, sample_groups = scheduler(capacity, _Ranks(num_ranks)).get_groups_and_subsamples(
        list(enumerate(lengths.tolist())), None
    )
    with_barriers, rank_seconds = 0.0, np.zeros(num_ranks)
    for group in sample_groups:
        counts = [len(samples) for samples in group]
        samples = np.array([sample for samples in group for sample in samples], dtype=np.int64)
        ranks = np.repeat(np.arange(len(group)), counts)
        degree = np.bincount(samples, minlength=len(lengths))
        tokens, members = lengths[samples], degree[samples]
        taken = cost.group_seconds(tokens, cost.squares_of(tokens), members, members > cost.ranks_per_node)
        seconds = np.bincount(ranks, weights=taken, minlength=num_ranks)
        with_barriers += float(seconds.max())
        rank_seconds += seconds
    return with_barriers, float(rank_seconds.max())


def karmarkar_karp_end(lengths: IntArray, work: FloatArray, num_ranks: int, capacity: int) -> tuple[float, int]:
    """Plan as verl does: static groups of the power of two that holds the longest sequence, balanced by differencing.

    Returns the makespan and the number of ranks per group.
    """
    degree = 1
    while degree * capacity < lengths.max():
        degree *= 2
    degree = min(degree, num_ranks)
    rows = num_ranks // degree
    return max(_largest_differencing(work.tolist(), rows)) / degree, degree


def _largest_differencing(items: list[float], parts: int) -> list[float]:
    """Return the sums of ``parts`` sets that the largest differencing method makes."""
    heap = []
    for number, item in enumerate(items):
        heap.append((-item, number, [item] + [0.0] * (parts - 1)))  # sums in descending order
    heapq.heapify(heap)
    number = len(items)
    while len(heap) > 1:
        _, _, one = heapq.heappop(heap)
        _, _, other = heapq.heappop(heap)
        merged = sorted((a + b for a, b in zip(one, reversed(other), strict=True)), reverse=True)
        heapq.heappush(heap, (merged[-1] - merged[0], number, merged))
        number += 1
    return heap[0][2]
