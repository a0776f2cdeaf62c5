"""The batch that the adaptive planner works on, its trials, and how a trial becomes a plan.

Shape letters: S sequences, longest first; G of them shared; R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bytescale.common.arrays import IntArray
from bytescale.cost import Cluster, CostModel
from bytescale.plan import Plan
from bytescale.planner.adaptive.fill import micro_batches
from bytescale.planner.adaptive.placement import Placement
from bytescale.planner.adaptive.target import target_seconds
from bytescale.planner.draft import Draft, assemble
from bytescale.planner.order import rising

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """The data that all trials of a batch share."""

    lengths: IntArray  # [S] longest first
    fewest: IntArray  # [S] fewest ranks that hold each
    local_seconds: FloatArray  # [S] time on one rank, with a share of g, the fixed time of a micro-batch
    cluster: Cluster
    cost: CostModel
    target: float  # seconds; when all ranks could end together, without a pipeline
    pack_tokens: int  # most tokens of whole sequences in one micro-batch
    num_stages: int = 1

    @staticmethod
    def of(
        lengths: IntArray, cluster: Cluster, cost: CostModel, num_stages: int = 1, pack_tokens: int | None = None
    ) -> Batch:
        """The batch of ``lengths`` ``[S]``, longest first, on equal ranks. ``pack_tokens`` None: as many as fit."""
        pack_tokens = int(cluster.capacity_tokens.min()) if pack_tokens is None else pack_tokens
        fewest = cluster.fewest_ranks(lengths)
        local_seconds = cost.work_seconds(lengths) + lengths * (cost.micro_batch_seconds / pack_tokens)
        spread_evenly = float(local_seconds.sum()) / cluster.num_ranks
        num_long = num_shared(fewest, local_seconds, spread_evenly)
        target = target_seconds(
            cost, lengths[:num_long], fewest[:num_long], float(local_seconds[num_long:].sum()), cluster.num_ranks
        )
        return Batch(
            lengths=lengths,
            fewest=fewest,
            local_seconds=local_seconds,
            cluster=cluster,
            cost=cost,
            target=target,
            num_stages=num_stages,
            pack_tokens=pack_tokens,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """One way to assign the batch to the ranks."""

    shared: IntArray  # [G] places in the batch, in the order in which ranks run them
    placed: Placement
    local: IntArray  # [S - G] places of the other sequences, which stay whole
    local_ranks: IntArray  # [S - G] rank of each of them
    end: float  # makespan in seconds
    local_before: IntArray | None = None
    """``[S - G]`` the shared group (place in ``shared``) before which each whole sequence runs; G: after all of them.

    None: all whole sequences run after the shared groups.
    """
    weights: IntArray | None = None  # [sum of degrees] shares of the shared groups' members; None: equal


def num_shared(fewest: IntArray, local_seconds: FloatArray, limit: float) -> int:
    """Number of the longest sequences that no rank can hold, or that no rank ends within ``limit`` seconds."""
    return max(int(np.searchsorted(-fewest, -1)), int(np.searchsorted(-local_seconds, -limit)))


def trial_plan(batch: Batch, trial: Trial, order: IntArray, lengths: IntArray, planner: str) -> Plan:
    """The trial as a ``Plan``: shared groups in their order, and every rank's whole sequences in packs.

    Args:
        batch: the batch.
        trial: one way to assign it to the ranks.
        order: ``[S]`` sequence number of each place in the batch.
        lengths: ``[S]`` tokens, by sequence number.
        planner: name of the planner, for people.
    """
    count, num_ranks = len(trial.shared), batch.cluster.num_ranks
    # A berth is a place where a rank runs whole sequences: before one of its shared groups, or after all of them.
    berth_of, berth_ranks, berth_before = trial.local_ranks, np.arange(num_ranks), np.full(num_ranks, count)
    if trial.local_before is not None:
        berths, berth_of = np.unique(trial.local_before * num_ranks + trial.local_ranks, return_inverse=True)
        berth_ranks, berth_before = berths % num_ranks, berths // num_ranks
    by_berth = rising(berth_of)
    places, berth_of = trial.local[by_berth], berth_of[by_berth]
    # A whole sequence above the capacity offloads the excess and fills a micro-batch by itself.
    capacity = np.minimum(batch.cluster.capacity_tokens, batch.pack_tokens)[berth_ranks]
    index = micro_batches(np.minimum(batch.lengths[places], capacity[berth_of]), berth_of, capacity)
    # One local group per micro-batch, in order of time: first packs of all berths, then second packs, and so on.
    packs = index * len(berth_ranks) + berth_of
    by_pack = rising(packs)
    places, packs = places[by_pack], packs[by_pack]
    heads = np.flatnonzero(np.append(True, packs[1:] != packs[:-1])[: len(places)])
    pack_berths, pack_index = packs[heads] % len(berth_ranks), packs[heads] // len(berth_ranks)
    pack_ranks, pack_before = berth_ranks[pack_berths], berth_before[pack_berths]
    width = 1 + int((pack_index + 1)[pack_before < count].max(initial=0))  # slots: a shared group, packs before it
    shared_slots, slots = np.arange(count) * width + width - 1, pack_before * width + pack_index
    if batch.cost.micro_batch_seconds > 0 and count and len(heads) and trial.weights is None:
        joined = _joining(batch, trial, places, pack_ranks, pack_before, heads)
        slots = np.where(joined >= 0, shared_slots[joined], slots)
    draft = Draft(
        sequences=order[np.concatenate((trial.shared, places))],
        sequence_counts=np.concatenate((np.ones(count, np.int64), np.diff(np.append(heads, len(places))))),
        ranks=np.concatenate((trial.placed.ranks, pack_ranks)),
        degrees=np.concatenate((trial.placed.degrees, np.ones(len(heads), np.int64))),
        slots=np.concatenate((shared_slots, slots)),
        weights=None if trial.weights is None else np.append(trial.weights, np.ones(len(heads), np.int64)),
    )
    return assemble(draft, lengths=lengths, cluster=batch.cluster, planner=planner)


def _joining(
    batch: Batch, trial: Trial, places: IntArray, pack_ranks: IntArray, pack_before: IntArray, heads: IntArray
) -> IntArray:
    """``[packs]`` the shared group (place in ``trial.shared``) whose micro-batch each pack joins, -1 for none.

    Each joined pack saves a micro-batch, and so the time g. But the members of a group end together, so the packs that
    join it have to take about equally long. Packs join a group if it is the last shared group of all its members, each
    member has a pack that fits beside its slice, and the times of these packs differ by less than g. Each rank offers
    its longest pack that fits.

    Args:
        batch: the batch.
        trial: one way to assign it; the members of a group have equal shares.
        places: places in the batch of all whole sequences, pack by pack.
        pack_ranks: ``[packs]`` rank of each pack.
        pack_before: ``[packs]`` as ``Trial.local_before``; only packs after all shared groups of their rank join.
        heads: ``[packs]`` where each pack starts in ``places``.
    """
    joined = np.full(len(heads), -1)
    last = np.full(batch.cluster.num_ranks, -1)  # last shared group of each rank: a later one overwrites an earlier one
    members = trial.placed.ranks
    last[members] = np.repeat(np.arange(len(trial.shared)), trial.placed.degrees)
    is_last_of_all = np.bincount(last[last >= 0], minlength=len(trial.shared)) == trial.placed.degrees
    slices = -(-batch.lengths[trial.shared] // trial.placed.degrees)

    tokens = np.add.reduceat(batch.lengths[places], heads)
    seconds = np.add.reduceat(batch.cost.work_seconds(batch.lengths[places]), heads)
    group = last[pack_ranks]
    fits = (
        (group >= 0)
        & (pack_before == len(trial.shared))
        & (tokens + slices[group] <= batch.cluster.capacity_tokens[pack_ranks])
    )
    packs = np.flatnonzero(fits)
    packs = packs[np.lexsort((-seconds[packs], pack_ranks[packs]))]
    packs = packs[np.append(True, pack_ranks[packs][1:] != pack_ranks[packs][:-1])[: len(packs)]]  # the longest of each

    count, longest = np.zeros(len(trial.shared), dtype=np.int64), np.zeros(len(trial.shared))
    shortest = np.full(len(trial.shared), np.inf)
    np.add.at(count, group[packs], 1)
    np.maximum.at(longest, group[packs], seconds[packs])
    np.minimum.at(shortest, group[packs], seconds[packs])
    filled = is_last_of_all & (count == trial.placed.degrees) & (longest - shortest < batch.cost.micro_batch_seconds)
    packs = packs[filled[group[packs]]]
    joined[packs] = group[packs]
    return joined
