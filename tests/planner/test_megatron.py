"""Our scheduler in Megatron's place: groups that Megatron has made, orders that cannot hang, equal ends."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytescale.common.errors import ConfigError
from bytescale.cost.model import CostModel
from bytescale.data.length_distributions import sample_lengths
from bytescale.integrations.megatron import AdaptiveCPScheduler

COSTS = (
    CostModel.from_work(),
    CostModel(
        attention_seconds_per_pair=1e-9,
        token_seconds=1e-5,
        micro_batch_seconds=1e-3,
        ring_bytes_per_token=4096.0,
        intra_node_bytes_per_second=1e9,
        inter_node_bytes_per_second=1e8,
        ring_step_seconds=1e-4,
    ),
)


@dataclass
class Ranks:
    count: int

    def size(self) -> int:
        return self.count


def groups_of_megatron(num_ranks: int) -> set[tuple[int, ...]]:
    """What ``create_hybrid_dp_cp_groups`` of Megatron-Core 0.16.1 makes: runs of 2^i ranks below the largest power that
    is not above half of the ranks; ``get_hybrid_data_context_parallel_groups`` adds all ranks."""
    sizes = [2**i for i in range(int(math.log2(num_ranks)))]
    runs = {tuple(range(start, start + size)) for size in sizes for start in range(0, num_ranks - size + 1, size)}
    return runs | {(rank,) for rank in range(num_ranks)} | {tuple(range(num_ranks))}


def run(rows: list[list[int]]) -> int:
    """Let every rank run its samples in order; a sample runs when it is next on all of its ranks. The samples left."""
    members = {sample: [r for r, row in enumerate(rows) if sample in row] for row in rows for sample in row}
    left = [list(row) for row in rows]
    progress = True
    while progress:
        progress = False
        for sample, ranks in list(members.items()):
            if all(left[rank][:1] == [sample] for rank in ranks):
                for rank in ranks:
                    left[rank].pop(0)
                del members[sample]
                progress = True
    return len(members)


@given(
    st.integers(1, 20),
    st.lists(st.integers(1, 400), min_size=1, max_size=40),
    st.integers(20, 100),
    st.sampled_from(COSTS),
)
def test_every_group_is_one_of_megatrons_and_nobody_waits_for_ever(
    num_ranks: int, lengths: list[int], capacity: int, cost: CostModel
) -> None:
    lengths = [min(length, capacity * num_ranks) for length in lengths]
    samples = [(100 + number, length) for number, length in enumerate(lengths)]
    scheduler = AdaptiveCPScheduler(capacity, Ranks(num_ranks), cost=cost)
    phases, numbers = scheduler.get_groups_and_subsamples(samples, None)
    assert len(phases) == len(numbers) == 1
    assert len(phases[0]) == len(numbers[0]) == num_ranks
    assert all(numbers[0]), "Megatron reduces gradients behind each rank's last sample, so each needs one"
    allowed = groups_of_megatron(num_ranks)
    for number, length in samples:
        ranks = tuple(rank for rank, row in enumerate(numbers[0]) if number in row)
        assert ranks in allowed
        assert length <= capacity * len(ranks)
    assert [[dict(samples)[number] for number in row] for row in numbers[0]] == phases[0]
    assert run(numbers[0]) == 0


@pytest.mark.parametrize("num_ranks", [64, 256])
def test_ranks_end_together_on_long_tails(num_ranks: int) -> None:
    lengths = sample_lengths("github", 32 * 2**20, 3000, num_ranks * 8192)
    work = CostModel.from_work().work_seconds(lengths)
    scheduler = AdaptiveCPScheduler(8192, Ranks(num_ranks))
    _, [rows] = scheduler.get_groups_and_subsamples(list(enumerate(lengths.tolist())))
    degrees = np.bincount([sample for row in rows for sample in row], minlength=len(lengths))
    seconds = np.array([sum(work[sample] / degrees[sample] for sample in row) for row in rows])
    assert seconds.max() <= 1.01 * work.sum() / num_ranks


def test_what_no_ranks_can_hold_is_refused() -> None:
    scheduler = AdaptiveCPScheduler(100, Ranks(4))
    with pytest.raises(ConfigError, match="401 tokens is longer than 4 ranks of 100 tokens hold"):
        scheduler.get_groups_and_subsamples([(0, 401)])
    with pytest.raises(ConfigError, match="no samples"):
        scheduler.get_groups_and_subsamples([])
