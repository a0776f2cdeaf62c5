"""The full cost model, term by term, against hand computations; Eq. 3 against brute force."""

from dataclasses import replace

import numpy as np
import pytest

from bytescale.cost.curve import Curve
from bytescale.cost.gradient_sync import (
    bucket_seconds,
    num_buckets,
    stage_parameters,
    visible_gathering,
    visible_reduction,
)
from bytescale.cost.links import Links
from bytescale.cost.offload_rule import OffloadRule, hidden_ratio
from bytescale.cost.profile import Profile, stages_of
from bytescale.cost.profile_file import load_profile
from bytescale.cost.stage import Loads, stage_times
from tests.helpers.llama import spec_of_llama

PROFILE = Profile(
    name="hand",
    spec=spec_of_llama("7b", num_hidden_layers=4),
    attention_forward=Curve(2.0, 3.0, 5.0),
    attention_backward=Curve(4.0, 6.0, 10.0),
    rest_forward=Curve(0.0, 7.0, 11.0),
    rest_backward=Curve(0.0, 14.0, 22.0),
    head_forward=Curve(0.0, 1.0, 0.0),
    head_backward=Curve(0.0, 2.0, 0.0),
    activation_bytes=Curve(0.0, 100.0, 0.0),
    ring_forward_bytes_per_token=40.0,
    ring_backward_bytes_per_token=120.0,
    links=Links(
        intra_node_bytes_per_second=2.0,
        inter_node_bytes_per_second=1.0,
        latency_seconds=6.0,
        device_to_host_bytes_per_second=1.0,
        host_to_device_bytes_per_second=2.0,
    ),
    layer_parameters=1000,
)


def of_layers(profile: Profile, number: int) -> Profile:
    """The profile for so many of its layers."""
    (layer,) = profile.spec.layers
    return replace(profile, spec=replace(profile.spec, layers=(replace(layer, count=number),)))


def loads(**values: float | bool) -> Loads:
    """One micro-batch; whatever is not given is nothing."""
    defaults: dict[str, float | bool] = {
        "local_tokens": 0.0,
        "local_squares": 0.0,
        "shared_tokens": 0.0,
        "shared_squares": 0.0,
        "local_sequences": 0.0,
        "shared_sequences": 0.0,
        "degree": 1.0,
        "columns": 1.0,
        "share": 0.0,
        "largest_share": 0.0,
        "inter_node": False,
        "row_leaves_node": False,
        "offload_ratio": 0.0,
        "speed": 1.0,
    }
    values = {"tile": values.get("share", 0.0)} | values
    return Loads(**{name: np.array([value]) for name, value in (defaults | values).items()})


def test_local_compute_and_head_by_hand() -> None:
    times = stage_times(of_layers(PROFILE, 2), loads(local_tokens=3.0, local_squares=5.0), has_head=True)
    forward = 2 * ((7 * 3 + 11) + (2 * 5 + 3 * 3 + 5)) + 1 * 3
    backward = 2 * ((14 * 3 + 22) + (4 * 5 + 6 * 3 + 10)) + 2 * 3
    assert times.total[:, 0].tolist() == [forward, backward]
    assert times.exposed_ring.sum() == 0


def test_recomputation_is_one_more_forward_ring_included() -> None:
    item = loads(shared_tokens=8.0, shared_squares=64.0, degree=4.0, share=0.25, largest_share=0.25, local_tokens=1.0)
    plain, again = (
        stage_times(replace(of_layers(PROFILE, 3), checkpointing=own), item, has_head=True) for own in ("none", "full")
    )
    head = 1.0 * (0.25 * 8 + 1)
    assert (again.compute[0], again.exposed_ring[0]) == (plain.compute[0], plain.exposed_ring[0])
    assert again.compute[1] == pytest.approx(plain.compute[1] + plain.compute[0] - head)
    assert again.exposed_ring[1] == pytest.approx(plain.exposed_ring[1] + plain.exposed_ring[0])
    assert plain.exposed_ring[0] > 0


def test_a_faster_rank_computes_faster_but_its_links_do_not() -> None:
    slow = loads(shared_tokens=8.0, shared_squares=64.0, degree=4.0, share=0.25, largest_share=0.25)
    fast = replace(slow, speed=np.array([2.0]))
    one, two = (stage_times(of_layers(PROFILE, 1), item, has_head=False) for item in (slow, fast))
    np.testing.assert_allclose(one.compute, 2 * two.compute)
    assert (two.exposed_ring > one.exposed_ring).all()


@pytest.mark.parametrize(("inter_node", "bandwidth"), [(False, 2.0), (True, 1.0)])
def test_ring_by_hand(inter_node: bool, bandwidth: float) -> None:
    item = loads(
        shared_tokens=8.0,
        shared_squares=64.0,
        degree=4.0,
        share=0.25,
        largest_share=0.25,
        local_tokens=2.0,
        local_squares=4.0,
        inter_node=inter_node,
    )
    times = stage_times(of_layers(PROFILE, 3), item, has_head=False)
    block, local = 2 * 64 / 16, 2 * 4
    transfer = 40 * 2 / bandwidth + 6
    assert times.exposed_ring[0, 0] == 3 * ((transfer - block - local) + 2 * (transfer - block))
    block, local, transfer = 2 * block, 2 * local, 120 * 2 / bandwidth + 6
    assert times.exposed_ring[1, 0] == 3 * ((transfer - block - local) + 2 * (transfer - block))
    assert times.compute[0, 0] == 3 * ((7 * 4 + 11) + (2 * (16 + 4) + 3 * 4 + 5))


def test_what_no_compute_hides_is_added_to_every_ring_step() -> None:
    item = loads(shared_tokens=8.0, shared_squares=64.0, degree=4.0, share=0.25, largest_share=0.25)
    waking = replace(PROFILE, links=replace(PROFILE.links, message_seconds=7.0))
    for profile, more in ((PROFILE, 0.0), (waking, 3 * 7.0)):
        times = stage_times(of_layers(profile, 3), item, has_head=False)
        plain = stage_times(of_layers(PROFILE, 3), item, has_head=False)
        np.testing.assert_allclose(times.exposed_ring, plain.exposed_ring + 3 * more)
    one = waking.cost_model().exposed_seconds(8.0, 64.0, 4) - PROFILE.cost_model().exposed_seconds(8.0, 64.0, 4)
    assert one == pytest.approx(2 * waking.spec.num_layers * 3 * 7.0)


def test_every_sequence_adds_to_every_block() -> None:
    """Four members compute four blocks of each shared sequence. Longer blocks hide more of the messages."""
    item = loads(shared_tokens=8.0, shared_squares=64.0, degree=4.0, share=0.25, largest_share=0.25)
    item = replace(item, shared_sequences=np.array([5.0]), local_sequences=np.array([3.0]), speed=np.array([2.0]))
    profile = replace(PROFILE, sequence_forward_seconds=0.5, sequence_backward_seconds=0.25)
    plain, times = (stage_times(of_layers(one, 2), item, has_head=True) for one in (PROFILE, profile))
    more = 2 * (4 * 5 + 3) / 2.0
    np.testing.assert_allclose((times.compute - plain.compute)[:, 0], [0.5 * more, 0.25 * more])
    hidden = 2 * 3 * 5 / 2.0
    np.testing.assert_allclose((plain.exposed_ring - times.exposed_ring)[:, 0], [0.5 * hidden, 0.25 * hidden])


def test_a_group_without_locals_agrees_with_the_planners_model() -> None:
    """Forward hides its ring on five ranks, and backward does not."""
    profile = replace(PROFILE, attention_forward=Curve(30.0, 3.0, 5.0), attention_backward=Curve(35.0, 6.0, 10.0))
    model = profile.cost_model()
    for degree in (1.0, 2.0, 5.0):
        shared = degree > 1
        item = loads(
            shared_tokens=30.0 * shared,
            shared_squares=500.0 * shared,
            degree=degree,
            share=1 / degree * shared,
            largest_share=1 / degree * shared,
            local_tokens=30.0 * (not shared),
            local_squares=500.0 * (not shared),
            inter_node=True,
        )
        total = stage_times(of_layers(profile, 4), item, has_head=True).total.sum()
        assert total == pytest.approx(float(model.group_seconds(30.0, 500.0, degree, True)))


def test_offload_is_exposed_beyond_compute_on_all_layers_but_two() -> None:
    item = loads(local_tokens=3.0, local_squares=5.0, offload_ratio=0.5)
    times = stage_times(of_layers(PROFILE, 4), item, has_head=False)
    layer_forward = (7 * 3 + 11) + (2 * 5 + 3 * 3 + 5)
    layer_backward = (14 * 3 + 22) + (4 * 5 + 6 * 3 + 10)
    assert times.exposed_offload[0, 0] == 2 * (0.5 * 300 / 1.0 - layer_forward)
    assert times.exposed_offload[1, 0] == 2 * max(0, 0.5 * 300 / 2.0 - layer_backward)


def test_gradient_sync_by_hand() -> None:
    vocabulary, norm = 128256 * 4096, 4096
    assert stage_parameters(PROFILE, stage=0, pipeline_parallel=1) == 4 * 1000 + 2 * vocabulary + norm
    assert stage_parameters(PROFILE, stage=0, pipeline_parallel=3) == 1000 + vocabulary + norm
    assert stage_parameters(PROFILE, stage=1, pipeline_parallel=3) == 2 * 1000
    for num_ranks, expected in ((4, 600 * 3 / 4 / 2.0 + 2 * 2 * 6), (16, 600 * 15 / 16 / 1.0 + 2 * 4 * 6), (1, 0)):
        seconds = bucket_seconds(PROFILE, 100.0, 1, num_ranks=num_ranks, ranks_per_node=8)
        assert seconds.reduce + seconds.gather == expected


@pytest.mark.parametrize("host_bytes", [np.inf, 20_000.0])
def test_equation_3_against_brute_force(host_bytes: float) -> None:
    """A grid over r: no ratio that is allowed gives fewer ranks, and no smaller one as few."""
    layers, capacity = 6, 50
    profile = replace(PROFILE, attention_forward=Curve(0.01, 0.0, 0.0), rest_forward=Curve(0.0, 10.0, 0.0))
    lengths = np.array([10, 50, 51, 120, 999, 5000, 40_000])
    rule = OffloadRule(  # which leaves room for one token's 4 layers
        profile=profile, num_layers=layers, movable_share=4 / layers, host_bytes=host_bytes + 4 * 100
    )
    degree = rule.fewest_ranks(lengths, capacity, 10**6)
    ratio = rule.ratio(lengths / degree, capacity)
    grid = np.linspace(0, 1, 20_001)
    for length, r, d in zip(lengths, ratio, degree, strict=True):
        act = 100.0 * length
        needed = np.maximum(np.ceil((layers - grid * 4) * length / (layers * capacity) - 1e-9), 1)
        exact = (layers - grid * 4) * length / (layers * capacity)
        hidden = float(profile.attention_forward(length) + profile.rest_forward(length)) >= grid * act / 1.0
        allowed = hidden & (grid * 4 * act / np.maximum(exact, 1e-9) <= host_bytes * (1 + 1e-9))
        if length <= capacity:
            assert (r, d) == (0.0, 1)
            continue
        assert d == needed[allowed].min()
        least = grid[allowed & (needed == d)].min()  # whole tokens of a slice are moved
        assert least - 1e-4 <= r <= least + 1e-4 + d / length
    assert (hidden_ratio(profile, lengths)[1:] >= hidden_ratio(profile, lengths)[:-1]).all()


def test_published_offload_figures() -> None:
    """At 256K a ratio of 1 costs nothing; at 64K it does, and a ratio of 0.5 does not (paper section 5.2)."""
    at_64k, at_256k = hidden_ratio(load_profile("figure-6"), [64 * 1024, 256 * 1024])
    assert 0.5 <= at_64k < 1
    assert at_256k >= 1


@pytest.mark.parametrize(
    ("num_layers", "num_parts", "counts"),
    [(10, 1, [10]), (10, 4, [3, 3, 3, 1]), (32, 4, [8, 9, 9, 6]), (4, 4, [1, 1, 1, 1])],
)
def test_layers_are_split_by_work_with_the_head_as_some_of_them(
    num_layers: int, num_parts: int, counts: list[int]
) -> None:
    """The head of the 7B model is worth 2.4 layers."""
    parts = stages_of(spec_of_llama("7b", num_hidden_layers=num_layers), num_parts)
    assert [sum(layer.count for layer in part) for part in parts] == counts


def test_a_bucket_costs_its_bytes_and_the_latency() -> None:
    one = bucket_seconds(PROFILE, 100.0, 5, num_ranks=4, ranks_per_node=8)
    assert one.reduce == 4 * 20 * 3 / 4 / 2.0 + 2 * 6
    assert one.gather == 2 * 20 * 3 / 4 / 2.0 + 2 * 6
    assert num_buckets(1000.0, 0) == num_buckets(1000.0, 4000) == 1
    assert num_buckets(1000.0, 3999) == 2
    assert num_buckets(1e6, 1) == 64


@pytest.mark.parametrize("seed", range(40))
def test_visible_sync_against_bucket_by_bucket(seed: int) -> None:
    """The formulas look at a few buckets only; here all of them go one after the other."""
    random = np.random.default_rng(seed)
    num_ranks, count = int(random.integers(1, 5)), int(random.integers(1, 30))
    in_front, seconds = float(random.choice([0.0, 0.1, 0.45, 1.0])), float(random.uniform(0.01, 3.0))
    starts = random.uniform(0, 5, num_ranks)
    ends = starts + random.uniform(0, 10, num_ranks)
    silent = random.random(num_ranks) < 0.6
    times = {"starts": starts, "ends": ends}

    def between(share: float, low: float, high: float) -> float:
        return 0.0 if share <= low else 1.0 if share >= high else (share - low) / (high - low)

    done = 0.0
    for bucket in range(1, count + 1):
        finished = 1.0 if bucket == count else between(bucket / count, 0.0, 1 - in_front)
        there = [s + finished * (e - s) if quiet else e for s, e, quiet in zip(starts, ends, silent, strict=True)]
        done = max(done, *there) + seconds
    reduction = visible_reduction(seconds, count, silent=silent, in_front=in_front, **times)
    assert reduction == pytest.approx(done - ends.max())
    assert seconds <= reduction + 1e-9 <= count * seconds + 2e-9

    waits = [0.0]
    for start, end in zip(starts, ends, strict=True):
        for bucket in range(count):
            waits.append((bucket + 1) * seconds - start - between(bucket / count, in_front, 1.0) * (end - start))
    gathering = visible_gathering(seconds, count, first=in_front, **times)
    assert gathering == pytest.approx(max(waits))
