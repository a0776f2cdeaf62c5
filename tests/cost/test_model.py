"""The planner's cost model against hand computations."""

import math
from dataclasses import replace

import numpy as np
import pytest

from bytescale.common.errors import ConfigError
from bytescale.cost.cluster import Cluster
from bytescale.cost.model import CostModel

MODEL = CostModel(
    attention_seconds_per_pair=2.0,
    token_seconds=3.0,
    micro_batch_seconds=5.0,
    ring_bytes_per_token=100.0,
    ring_step_seconds=7.0,
    intra_node_bytes_per_second=50.0,
    inter_node_bytes_per_second=10.0,
    ranks_per_node=4,
)


def test_work_of_a_sequence() -> None:
    np.testing.assert_array_equal(MODEL.work_seconds([1, 10]), [2 + 3, 200 + 30])


def test_group_of_one_has_no_traffic() -> None:
    assert MODEL.group_seconds(10, 100, 1) == 200 + 30 + 5


def test_hidden_and_exposed_rings_by_hand() -> None:
    # D = 4, one sequence of 8 tokens: blocks 2 * 64 / 16 = 8 s; transfers 2 tokens * 100 / 50 + 7 = 11 s inside a node.
    assert MODEL.exposed_seconds(8, 64, 4) == 3 * (11 - 8)
    assert MODEL.group_seconds(8, 64, 4) == (2 * 64 + 3 * 8) / 4 + 9 + 5
    # across nodes: 2 * 100 / 10 + 7 = 27 s a transfer
    assert MODEL.exposed_seconds(8, 64, 4, True) == 3 * (27 - 8)
    # long enough to hide it: 80 tokens, blocks 2 * 6400 / 16 = 800 s, transfers 20 * 2 + 7 = 47 s
    assert MODEL.exposed_seconds(80, 6400, 4) == 0


def test_states_take_rounds_that_do_not_depend_on_the_length() -> None:
    # 3 of 4 layers are recurrent. Rings wait for a quarter of 7 s; 4 members exchange states in 3 rounds.
    hybrid = replace(MODEL, ring_share=0.25, recurrent_share=0.75, state_bytes=200.0)
    states = 3 * (200 / 50 + 0.75 * 7)
    assert hybrid.exposed_seconds(80, 6400, 4) == states
    assert hybrid.exposed_seconds(800, 640000, 4) == states
    assert hybrid.exposed_seconds(8, 64, 4) == pytest.approx(states)  # a ring hides 5.75 s behind 8
    assert hybrid.exposed_seconds(80, 6400, 1) == 0
    assert hybrid.exposed_of_one(80, 4, 1) == states
    assert hybrid.exposed_seconds(80, 6400, [1, 5]).tolist() == [0, 4 * (200 / 50 + 0.75 * 7)]


def test_group_seconds_broadcasts() -> None:
    degree = np.array([1, 2, 4])
    result = MODEL.group_seconds(8.0, 64.0, degree, np.array([False, False, True]))
    assert result.tolist() == [float(MODEL.group_seconds(8, 64, d, d == 4)) for d in degree]


def test_work_units_of_peers() -> None:
    model = CostModel.from_work()
    assert model.work_seconds([4096]).tolist() == [4096**2 + 24576 * 4096]
    assert model.exposed_seconds(4096, 4096**2, 64, True) == 0


def test_which_groups_leave_a_node() -> None:
    assert MODEL.leaves_node([0, 0, 3, 4], [4, 5, 2, 4]).tolist() == [False, True, True, False]


@pytest.mark.parametrize(
    ("name", "value"), [("token_seconds", -1.0), ("inter_node_bytes_per_second", 0.0), ("ring_step_seconds", math.nan)]
)
def test_nonsense_is_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=name):
        CostModel(**{"attention_seconds_per_pair": 1.0, "token_seconds": 1.0, name: value})


def test_cluster() -> None:
    cluster = Cluster.uniform(6, 1024)
    assert (cluster.num_ranks, cluster.is_uniform) == (6, True)
    with pytest.raises(ConfigError, match="speed"):
        Cluster(capacity_tokens=np.array([8]), speeds=np.array([0.0]))
    with pytest.raises(ConfigError, match="shape"):
        Cluster(capacity_tokens=np.array([8, 8]), speeds=np.array([1.0]))
    with pytest.raises(ConfigError, match="no ranks"):
        Cluster.uniform(0, 8)


def test_a_model_in_which_computing_costs_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="both 0"):
        CostModel(attention_seconds_per_pair=0.0, token_seconds=0.0, ring_message_seconds=0.03)
