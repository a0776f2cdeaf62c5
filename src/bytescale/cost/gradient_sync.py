"""The costs that a step has once: gradients are reduced and parameters are gathered (ZeRO-1 over HDP).

Both are done bucket by bucket (``runtime.optimizer.buckets``). The part that computation does not hide is visible::

    reduction   Bucket i starts when bucket i - 1 is done and every rank has the bucket's gradients. A rank whose last
                backward is silent (plan.last_message) finishes them evenly over that backward, and every other rank at
                its end. The gradient of the embedding comes last. What remains after the last backward is visible.
    gathering   Bucket i has arrived after i gathers. A rank needs the buckets evenly over its first forward, but the
                embedding at once. The longest wait of a rank is visible.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bytescale.common.arrays import FloatArray
from bytescale.cost.profile import Profile

BUCKET_BYTES = 2**20
"""Of gradients in one bucket. HDP ranks reduce gradients bucket by bucket while they compute, and gather parameters in
the same parts. Large models have larger buckets, because there are at most ``MOST_BUCKETS``."""
MOST_BUCKETS = 64
"""More buckets would hardly shorten the visible part, and every bucket costs the latency of two collectives."""
GRADIENT_BYTES = 4  # gradients are reduced in fp32 or wider
UPDATE_BYTES = 28  # AdamW reads an fp32 weight, its gradient and two moments, and writes all but the gradient


def stage_parameters(profile: Profile, *, stage: int, pipeline_parallel: int) -> float:
    """Weights of one stage per device: its layers, the embedding on the first stage, and the head on the last one."""
    own, is_first, is_last = profile.of_stage(stage, pipeline_parallel), stage == 0, stage == pipeline_parallel - 1
    weights = own.spec.num_layers * own.layer_parameters + is_first * own.spec.outside
    weights += (is_last and not (own.spec.is_tied and is_first)) * own.spec.head
    return weights / profile.tensor_parallel


def sync_bytes(profile: Profile, parameters_per_device: float, num_ranks: int) -> float:
    """Bytes that each device sends in a step's reduce-scatter and all-gather: (R - 1) / R of the bytes of both."""
    both = gradient_bytes(profile) + profile.parameter_bytes
    return parameters_per_device * both * (num_ranks - 1) / num_ranks


def gathered_parameters(profile: Profile) -> tuple[float, float]:
    """Weights per device that a lockstep domain gathers in a round, without a pipeline: in forward, and in backward.

    The last layer and the head stay open until backward comes (``runtime.optimizer.units``).
    """
    words = profile.spec.head
    forward = profile.spec.num_layers * profile.layer_parameters + profile.spec.outside + words
    return forward / profile.tensor_parallel, (forward - profile.layer_parameters - words) / profile.tensor_parallel


def gather_bytes(profile: Profile, parameters_per_device: float, domain: int) -> float:
    """Bytes that each device of a lockstep domain sends in a round, in which ``parameters_per_device`` are reduced."""
    reduced, gathered = parameters_per_device * gradient_bytes(profile), sum(gathered_parameters(profile))
    return (reduced + profile.parameter_bytes * gathered) * (domain - 1) / domain


def gradient_bytes(profile: Profile) -> int:
    """Bytes of one gradient: sums are made in fp32 or wider."""
    return max(GRADIENT_BYTES, profile.parameter_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketSeconds:
    """Seconds of the two collectives of one bucket."""

    reduce: float
    gather: float


def bucket_seconds(
    profile: Profile, parameters_per_device: float, num_buckets: int, *, num_ranks: int, ranks_per_node: int
) -> BucketSeconds:
    """Time of each collective for one of ``num_buckets`` equal parts of the parameters.

    Every rank sends (R - 1) / R of the bucket. Where the profile has not measured collectives, the bandwidth is that of
    the slowest link between the ranks, and the latency that of ceil(log2 R) messages.
    """
    if num_ranks == 1:
        return BucketSeconds(reduce=0.0, gather=0.0)
    links, far = profile.links, num_ranks > ranks_per_node
    ring = links.ring_bytes_per_second(far)
    latency = links.collective_seconds
    if latency is None:
        latency = math.ceil(math.log2(num_ranks)) * links.ring_latency_seconds(far)
    sent = parameters_per_device / num_buckets * (num_ranks - 1) / num_ranks
    return BucketSeconds(
        reduce=gradient_bytes(profile) * sent / (links.reduce_bytes_per_second or ring) + latency,
        gather=profile.parameter_bytes * sent / (links.gather_bytes_per_second or ring) + latency,
    )


def round_seconds(profile: Profile, *, domain: int, ranks_per_node: int) -> tuple[float, float]:
    """Seconds of a lockstep domain's collectives in a round, without a pipeline: in forward, and in backward.

    Forward gathers the parameters layer by layer. Backward does it once more, and reduces the gradients.
    """
    count, (forward, backward) = profile.spec.num_layers, gathered_parameters(profile)
    reduced = stage_parameters(profile, stage=0, pipeline_parallel=1)
    of_forward, of_backward, of_gradients = (
        bucket_seconds(profile, parameters, count, num_ranks=domain, ranks_per_node=ranks_per_node)
        for parameters in (forward, backward, reduced)
    )
    return count * of_forward.gather, count * (of_backward.gather + of_gradients.reduce)


def num_buckets(parameters_per_device: float, bucket_bytes: float) -> int:
    """Number of buckets for a device's gradients, about ``bucket_bytes`` each; 0 means a single bucket."""
    if not bucket_bytes:
        return 1
    return min(MOST_BUCKETS, max(1, math.ceil(GRADIENT_BYTES * parameters_per_device / bucket_bytes)))


def visible_reduction(
    seconds: float, count: int, *, starts: FloatArray, ends: FloatArray, silent: NDArray[np.bool_], in_front: float
) -> float:
    """Seconds from the end of the last rank's last backward to the end of ``count`` reductions, made one by one.

    Args:
        seconds: seconds of one reduction.
        count: number of buckets, K.
        starts, ends: ``[R]`` seconds at which each rank's last backward starts and ends, 0 for a rank without one.
        silent: ``[R]`` whether the rank may reduce during its last backward.
        in_front: share of the parameters whose gradients are complete only when the last backward ends.
    """
    # The reductions end when, for the worst bucket k, all ranks have reached k and buckets k to K have been reduced one
    # after the other. This time is linear in k between the buckets tested here, so one of them has the largest.
    turn = math.floor(count * (1.0 - in_front))
    done = 0.0
    for bucket in {1, *(min(max(turn + more, 1), count) for more in (0, 1)), count}:
        # The last bucket holds the gradients that are complete only when the last backward ends.
        progress = 1.0 if bucket == count else _share(bucket / count, 0.0, 1.0 - in_front)
        there = np.where(silent, starts + progress * (ends - starts), ends)
        done = max(done, float(there.max()) + (count - bucket + 1) * seconds)
    return done - float(ends.max())


def visible_gathering(seconds: float, count: int, *, starts: FloatArray, ends: FloatArray, first: float) -> float:
    """The longest time in seconds that a rank waits in its first forward for ``count`` gathers, made one by one from 0.

    Args:
        seconds: seconds of one gather.
        count: number of buckets, K.
        starts, ends: ``[N]`` seconds at which the first forward starts and ends, for each rank that has one.
        first: share of the parameters that lie before the first layer. They are needed when the forward starts.
    """
    if not len(starts):
        return 0.0
    turn = math.floor(count * first)
    bucket = np.clip([0, turn, turn + 1, count - 1], 0, count - 1)  # the wait is linear between these
    progress = np.array([_share(share, first, 1.0) for share in bucket / count])
    needed = starts[:, None] + progress * (ends - starts)[:, None]
    return max(0.0, float(((bucket + 1) * seconds - needed).max()))


def _share(share: float, low: float, high: float) -> float:
    """Position of ``share`` between ``low`` and ``high``: 0 at ``low`` and below, 1 at ``high`` and above."""
    if share <= low:
        return 0.0
    return min(1.0, (share - low) / (high - low)) if high > low else 1.0
