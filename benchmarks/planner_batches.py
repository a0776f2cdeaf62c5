"""Batches that the planner benchmarks share: drawn from length distributions, or random ones with modelled links."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from bytescale.common.arrays import IntArray
from bytescale.cost.cluster import Cluster
from bytescale.cost.model import CostModel
from bytescale.cost.profile import Profile
from bytescale.cost.profile_file import load_profile
from bytescale.data.length_distributions import sample_lengths
from bytescale.simulator import ClusterConfig

FloatArray = NDArray[np.float64]
RANKS_PER_NODE = 8


def sample(data: str, num_tokens: int, seed: int, max_length: int) -> NDArray[np.int64]:
    """Lengths of the distribution ``NAME`` or ``NAME@LOWEST EDGE``."""
    name, _, edge = data.partition("@")
    return sample_lengths(name, num_tokens, seed, max_length, lowest_edge=int(edge) if edge else None)


def cost_model(name: str) -> CostModel:
    if name == "ideal":
        return CostModel.from_work()
    return load_profile(name).cost_model(ranks_per_node=RANKS_PER_NODE)


def random_batch(seed: int) -> tuple[IntArray, Cluster, CostModel]:
    """Draw 1 to 300 ranks with modelled links, and 1 to 3000 sequences of one of three kinds of lengths."""
    random = np.random.default_rng(10_000 + seed)
    num_ranks = int(np.exp(random.uniform(0, np.log(300))))
    count = int(np.exp(random.uniform(0, np.log(3000))))
    capacity = int(random.choice([512, 2048, 8192]))
    room = num_ranks * capacity
    lengths = np.clip(_random_lengths(random, count, capacity, room), 1, room).astype(np.int64)
    return lengths, *_cluster_and_cost(random, num_ranks, capacity, (0.1, 0.25, 0.5, 1.0, 2.0))


def random_wide_batch(seed: int) -> tuple[IntArray, Cluster, CostModel]:
    """Draw 500 to 3000 ranks with modelled links, and 10 to 3000 sequences."""
    random = np.random.default_rng(20_000 + seed)
    num_ranks, capacity = int(random.integers(500, 3001)), int(random.choice([512, 2048, 8192]))
    count = int(np.exp(random.uniform(np.log(10), np.log(3000))))
    lengths = np.clip(_random_lengths(random, count, capacity, num_ranks * capacity), 1, num_ranks * capacity)
    return lengths.astype(np.int64), *_cluster_and_cost(random, num_ranks, capacity, (0.1, 0.25, 0.5, 1.0, 2.0))


def random_grid_batch(seed: int) -> tuple[IntArray, Profile, ClusterConfig]:
    """Draw 4 to 3000 ranks with links from a tenth to ten times the case study's, and H = G to H = 32 G."""
    random = np.random.default_rng(30_000 + seed)
    num_ranks, capacity = int(np.exp(random.uniform(np.log(4), np.log(3000)))), 8192
    count = int(np.exp(random.uniform(np.log(4), np.log(3000))))
    study = load_profile("case-study")
    (layer,) = study.spec.layers
    heads = replace(layer, key_numbers=256.0 * int(random.choice([1, 4, 8, 32])))
    near, far, latency = 10 ** random.uniform(-1, 1, 3)
    links = replace(
        study.links,
        intra_node_bytes_per_second=near * study.links.intra_node_bytes_per_second,
        inter_node_bytes_per_second=far * study.links.inter_node_bytes_per_second,
        latency_seconds=latency * study.links.latency_seconds,
        message_seconds=float(random.choice([0.0, 0.1])) * study.links.latency_seconds,
    )
    profile = replace(study.scaled_to(replace(study.spec, layers=(heads,)), tensor_parallel=1), links=links)
    lengths = np.clip(_random_lengths(random, count, capacity, num_ranks * capacity), 1, num_ranks * capacity)
    node = int(random.choice([1, 4, 8]))
    devices = ClusterConfig(num_gpus=num_ranks, gpus_per_node=node)
    return lengths.astype(np.int64), profile, devices


def random_small_batch(seed: int) -> tuple[IntArray, Cluster, CostModel]:
    """Draw 2 to 8 ranks with modelled links, and 2 to 12 sequences."""
    random = np.random.default_rng(seed)
    num_ranks, count, capacity = int(random.integers(2, 9)), int(random.integers(2, 13)), 1024
    lengths = np.exp(random.uniform(np.log(64), np.log(num_ranks * capacity), count)).astype(np.int64)
    return lengths, *_cluster_and_cost(random, num_ranks, capacity, (0.0, 0.25, 0.5, 1.0, 2.0))


def _random_lengths(random: np.random.Generator, count: int, capacity: int, room: int) -> FloatArray | IntArray:
    kinds = (
        lambda: np.exp(random.uniform(np.log(16), np.log(room), count)),
        lambda: capacity / 8 * (1 + random.pareto(1.0 + random.random(), count)),
        lambda: random.integers(1, random.integers(2, 2 * capacity + 2), count),
    )
    return kinds[random.integers(3)]()  # type: ignore[no-any-return, operator]


def _cluster_and_cost(
    random: np.random.Generator, num_ranks: int, capacity: int, ring_over_block: tuple[float, ...]
) -> tuple[Cluster, CostModel]:
    """A full rank's block of attention takes C^2, the rest 3 C^2; a transfer across nodes so many times the block."""
    node = int(random.choice([2, 4, 8]))
    cost = CostModel(
        attention_seconds_per_pair=1.0,
        token_seconds=3.0 * capacity,
        micro_batch_seconds=float(random.choice([0, 0.005, 0.02])) * 4 * capacity**2,
        ring_bytes_per_token=float(random.choice(ring_over_block)) * capacity,
        ring_step_seconds=float(random.choice([0, 0.005, 0.02])) * capacity**2,
        intra_node_bytes_per_second=float(random.choice([1, 4, 10])),
        inter_node_bytes_per_second=1.0,
        ranks_per_node=node,
    )
    return Cluster.uniform(num_ranks, capacity), cost
