"""When may a rank start to reduce gradients? Only after its last message: the rule and its proof.

Gradients are reduced bucket by bucket while ranks still compute (``runtime.optimizer.buckets``). Some CUDA calls wait
for ALL streams of a device (a retry of the allocator, the first launch of a kernel). Under NCCL, a rank that makes such
a call blocks until every other rank has posted the reductions that it has posted. If one of these ranks first needs
this rank's next ring message, both wait for ever.

The rule: **a rank posts reductions only after its last point-to-point message of the step**, sent or received.

The proof assumes the worst: every posted reduction blocks its rank at once, until all ranks of the group have posted
it. This covers device-wide waits at any place, and the connections that a communicator makes at its first use.

1. All messages of the step are exchanged as if there were no reductions; ``plan.pipeline_order`` proves that this ends.
2. Afterwards a rank posts its reductions in the order that all ranks share (the last bucket first). In between it
   computes and takes part in the collectives of its TP group, whose ranks all run the same sequence of both.
3. Suppose that some ranks wait for ever. In each TP group with such a rank, take the rank that is least far in the
   group's sequence. It does not wait for a TP collective, because all others of its group have reached that one. So it
   waits in a reduction. Of all these TP groups (without tensor parallelism: ranks), choose the one whose reduction k
   comes first. It waits for a rank that has not posted k. The TP group of that rank either makes progress, so that k is
   posted, or it is stuck in a reduction before k, which contradicts the choice.
4. The collectives at the end of the step follow the reductions of point 2, in the same sequence on every rank: the sums
   of a batch loss, the reductions of the remaining buckets, statistics. Gathers follow the update, in one order on all
   ranks, before the first message of the next step.

In a pipeline, the last backward of a stage ends by sending its gradient to the stage before, and a micro-batch with a
shared group exchanges messages in every layer. So reductions can overlap exactly with the last backward of a rank on
the first stage (or without stages) whose last micro-batch holds only whole sequences.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bytescale.plan.plan import Plan
from bytescale.plan.rank_plan import RankPlan


def last_backward_is_silent(rank_plan: RankPlan, stage: int = 0) -> bool:
    """Whether the rank sends and receives nothing during its last backward. False without a micro-batch."""
    return stage == 0 and bool(rank_plan.micro_batches) and rank_plan.micro_batches[-1].shared is None


def silent_last_backwards(plan: Plan) -> NDArray[np.bool_]:
    """``[R]`` ``last_backward_is_silent`` for every rank of a plan, on the first stage."""
    counts = np.diff(plan.rank_micro_batch_offsets)
    silent = np.zeros(plan.num_ranks, dtype=bool)
    some = counts > 0
    last = plan.rank_micro_batch_offsets[1:][some] - 1
    first_group = plan.micro_batch_groups[plan.micro_batch_group_offsets[last]]
    silent[some] = plan.group_sizes[first_group] == 1
    return silent
