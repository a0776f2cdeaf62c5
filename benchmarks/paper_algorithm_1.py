"""Algorithm 1 with Eq. 3, to the letter: in the order of the batch, with the ranks that Eq. 3 asks for.

``bytescale.planner.naive_plan`` deals longest first, which already ends earlier; the paper's loop runs over the batch
as it comes, and its rank times (60 to 279 s) are met by that order only.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from bytescale.cost import Cluster
from bytescale.plan import Plan
from bytescale.planner.draft import Draft, assemble, consecutive
from bytescale.planner.packing import best_fit, grouped

IntArray = NDArray[np.int64]


def algorithm_1(lengths: IntArray, *, cluster: Cluster, ratios: NDArray[np.float64], degrees: IntArray) -> Plan:
    """Groups of ``degrees`` ranks for the long, best-fit packs for the short, dealt to the ranks in turn.

    Args:
        lengths: ``[S]`` in the batch's order.
        cluster: R equal ranks.
        ratios: ``[S]`` offload ratio of each sequence.
        degrees: ``[S]`` ranks of each sequence, 1 for those that are packed.
    """
    long, short = np.flatnonzero(degrees > 1), np.flatnonzero(degrees == 1)
    packs, counts = grouped(short, best_fit(lengths[short], int(cluster.capacity_tokens[0])))
    pack_starts = np.cumsum(counts) - counts
    parts = [(sequence, np.array([sequence])) for sequence in long.tolist()]
    parts += [(int(packs[a]), packs[a : a + n]) for a, n in zip(pack_starts.tolist(), counts.tolist(), strict=True)]
    parts.sort(key=lambda part: part[0])  # a pack comes when its first sequence comes
    group_degrees = np.array([degrees[first] for first, _ in parts])
    draft = Draft(
        sequences=np.concatenate([members for _, members in parts]),
        sequence_counts=np.array([len(members) for _, members in parts]),
        ranks=consecutive(np.cumsum(group_degrees) - group_degrees, group_degrees, modulo=cluster.num_ranks),
        degrees=group_degrees,
        slots=np.arange(len(parts)),
    )
    plan = assemble(draft, lengths=lengths, cluster=cluster, planner="algorithm-1")
    return replace(plan, group_offload_ratio=ratios[plan.group_sequences[plan.group_sequence_offsets[:-1]]])
