"""When may a rank start to reduce gradients? Not before its last message: the rule and its proof.

Gradients are reduced bucket by bucket while ranks still compute (``runtime.buckets``). On NCCL a reduction that is
posted too early can hang the run. Some calls of CUDA wait for ALL streams of a device: an allocator's retry, the first
launch of a kernel, pinned memory. A rank that meets one stands still until every reduction that it has posted is over,
hence until every other rank has posted it too. If one of them cannot get there without this rank's next ring message,
both wait for ever.

The rule: **a rank posts reductions only after its last point-to-point message of the step**, sent or received.

The proof treats every posted reduction as one that blocks its rank at once, until all ranks of the group have posted
it. That covers device-wide waits at any place, and connections that the first use of a communicator makes.

1. Up to its last message a rank has posted no reduction. So all messages of the step are exchanged as if there were no
   reductions; ``plan.pipeline_order`` proves that this ends.
2. Behind its last message a rank posts its reductions in the one order that all ranks have (the last bucket first).
   Between them it computes and, with tensor parallelism, takes part in its TP group's collectives. The ranks of a TP
   group have the same micro-batches and the same buckets: they run the same sequence of collectives and reductions.
3. Suppose that some ranks wait for ever. In a TP group with such a rank look at the one that has come least far in the
   group's sequence. It does not wait for a TP collective, which all others have reached, so it waits in a reduction. Of
   all these TP groups (without tensor parallelism: ranks) choose the one whose reduction k comes first. It waits for a
   rank that has not posted k. That rank's TP group goes on, or it is stuck in a reduction before k, against the choice.
4. Collectives at the step's end follow on every rank in the same sequence, behind the reductions of 2: the sum of a
   loss over the batch, a tied head's way home, the reductions of the remaining buckets, statistics. Gathers follow the
   update, in one order on all ranks, and before the next step's first message.

Where is the last message? In a pipeline a stage's last backward passes its gradient on, so only the first stage has
computation behind its last message: its last backward, which needs a gradient and sends none. A micro-batch with a
shared group sends along the ring in every layer, also in backward. So there is room exactly in the last backward of a
rank on the first stage (or without stages) whose last micro-batch holds whole sequences only.
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
    """``[R]`` the same for every rank of a plan, on the first stage."""
    counts = np.diff(plan.rank_micro_batch_offsets)
    silent = np.zeros(plan.num_ranks, dtype=bool)
    some = counts > 0
    last = plan.rank_micro_batch_offsets[1:][some] - 1
    first_group = plan.micro_batch_groups[plan.micro_batch_group_offsets[last]]
    silent[some] = plan.group_sizes[first_group] == 1
    return silent
