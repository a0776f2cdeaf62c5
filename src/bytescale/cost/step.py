"""What a step costs once: gradients are reduced and parameters gathered (ZeRO-1 over HDP), and what of it is visible.

Both go bucket by bucket (``runtime.buckets``), one bucket after the other. With K buckets::

    reduction   Bucket i starts when bucket i - 1 is done and when every rank has got there: a rank whose last backward
                is silent (plan.last_message) in proportion to that backward, every other rank at its end. The
                embedding's gradient comes at the very end. Visible: what ends after the last rank's last backward.
    gathering   Bucket i is there after i gathers. A rank needs it in proportion to its first forward, and the embedding
                at once. Visible: what the rank that waits longest waits.

With one bucket all of it is visible.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bytescale.cost.profile import Profile
from bytescale.cost.split import stage_chunks

FloatArray = NDArray[np.float64]

MOST_BUCKETS = 64
"""More would make the visible end of the sync hardly shorter, but every bucket has the latency of two collectives."""
GRADIENT_BYTES = 4  # gradients are reduced in fp32
PARAMETER_BYTES = 2  # updated parameters are gathered in bf16


def stage_parameters(profile: Profile, *, stage: int, pipeline_parallel: int, virtual_stages: int = 1) -> float:
    """Weights per device of one stage: its layers, the embedding on the first, the head on the last."""
    shape = profile.architecture
    layers = sum(map(len, stage_chunks(shape, pipeline_parallel, stage, virtual_stages)))
    matrices = int(stage == 0) + int(stage == pipeline_parallel - 1 and not (shape.tie_embeddings and stage == 0))
    return (layers * profile.layer_parameters + matrices * shape.vocab_size * shape.hidden_size) / (
        profile.tensor_parallel
    )


def sync_bytes(parameters_per_device: float, num_ranks: int) -> float:
    """Bytes that each device sends in one step's reduce-scatter and all-gather: (R - 1) / R of both."""
    return parameters_per_device * (GRADIENT_BYTES + PARAMETER_BYTES) * (num_ranks - 1) / num_ranks


def sync_seconds(profile: Profile, parameters_per_device: float, *, num_ranks: int, ranks_per_node: int) -> float:
    """Time of one step's reduce-scatter and all-gather over ``num_ranks`` ranks, nothing of it hidden."""
    seconds = bucket_seconds(profile, parameters_per_device, 1, num_ranks=num_ranks, ranks_per_node=ranks_per_node)
    return seconds.reduce + seconds.gather


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketSeconds:
    """What one bucket's two collectives take."""

    reduce: float
    gather: float


def bucket_seconds(
    profile: Profile, parameters_per_device: float, num_buckets: int, *, num_ranks: int, ranks_per_node: int
) -> BucketSeconds:
    """Time of each collective on one of ``num_buckets`` equal parts of the parameters.

    ``bytes / bandwidth + ceil(log2 R) latency``, at the pace of the slowest link that the ranks span; every rank sends
    (R - 1) / R of the bucket.
    """
    if num_ranks == 1:
        return BucketSeconds(reduce=0.0, gather=0.0)
    rate = profile.links.ring_bytes_per_second(num_ranks > ranks_per_node)
    latency = math.ceil(math.log2(num_ranks)) * profile.links.latency_seconds
    sent = parameters_per_device / num_buckets * (num_ranks - 1) / num_ranks
    return BucketSeconds(reduce=GRADIENT_BYTES * sent / rate + latency, gather=PARAMETER_BYTES * sent / rate + latency)


def num_buckets(parameters_per_device: float, bucket_bytes: float) -> int:
    """Into which a device's gradients are cut, if none is smaller than ``bucket_bytes``; 0: there is one."""
    if not bucket_bytes:
        return 1
    return min(MOST_BUCKETS, max(1, math.ceil(GRADIENT_BYTES * parameters_per_device / bucket_bytes)))


def embedding_share(profile: Profile, parameters_per_device: float, *, stage: int) -> float:
    """Of a stage's parameters, those that forward needs first and whose gradients come last."""
    shape = profile.architecture
    own = shape.vocab_size * shape.hidden_size / profile.tensor_parallel if stage == 0 else 0.0
    return own / parameters_per_device


def visible_reduction(
    seconds: float,
    count: int,
    *,
    starts: FloatArray,
    ends: FloatArray,
    silent: NDArray[np.bool_],
    before: float = 0.0,
    in_front: float = 0.0,
) -> float:
    """Seconds by which ``count`` reductions, one after the other, outlast the last rank's last backward.

    Args:
        seconds: of one reduction.
        count: buckets, K.
        starts, ends: ``[R]`` of each rank's last backward, 0 for a rank without one.
        silent: ``[R]`` whether the rank may reduce during it.
        before: share of the parameters whose gradients are finished before it: of other chunks of an interleaved stage.
        in_front: share of the parameters whose gradients are finished at its end.
    """
    # Each bucket is followed by those behind it. What has to be maximal is linear between these buckets.
    turns = (math.floor(count * before), math.floor(count * (1.0 - in_front)))
    done = 0.0
    for bucket in {1, *(min(max(turn + more, 1), count) for turn in turns for more in (0, 1)), count}:
        # The last bucket holds what is finished at the step's end.
        progress = 1.0 if bucket == count else _share(bucket / count, before, 1.0 - in_front)
        there = np.where(silent, starts + progress * (ends - starts), ends)
        done = max(done, float(there.max()) + (count - bucket + 1) * seconds)
    return done - float(ends.max())


def visible_gathering(
    seconds: float, count: int, *, starts: FloatArray, ends: FloatArray, first: float, last: float = 1.0
) -> float:
    """Seconds that some rank waits in its first forward, at most, for ``count`` gathers that begin at 0, one by one.

    Args:
        seconds: of one gather.
        count: buckets, K.
        starts, ends: ``[N]`` of the first forward of each rank that has one, through a chunk of layers.
        first, last: shares of the parameters that lie before the chunk's layers, and before their end. What lies before
            them is needed at the start.
    """
    if not len(starts):
        return 0.0
    turns = (math.floor(count * first), math.ceil(count * last) - 1)
    bucket = np.clip([0, turns[0], turns[0] + 1, turns[1]], 0, max(turns[1], 0))  # linear between these
    progress = np.array([_share(share, first, last) for share in bucket / count])
    needed = starts[:, None] + progress * (ends - starts)[:, None]
    return max(0.0, float(((bucket + 1) * seconds - needed).max()))


def _share(share: float, low: float, high: float) -> float:
    """Where ``share`` lies between ``low`` and ``high``: 0 before, 1 behind."""
    if share <= low:
        return 0.0
    return min(1.0, (share - low) / (high - low)) if high > low else 1.0
