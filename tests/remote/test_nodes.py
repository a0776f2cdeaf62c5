"""Several nodes: raylets of one Ray on loopback, each with its own shared memory and its own workers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from bytescale.config.load import config_to_toml
from bytescale.data.loading.corpus import prepare_corpus
from bytescale.data.loading.loader import Loader
from bytescale.data.open import opened_loader
from bytescale.data.remote.ray_cluster import connect
from tests.remote.support import (
    assert_same_data,
    count_tokens,
    numbered_config,
    planner_for,
    reader_of,
    servers,
    write_numbered_corpus,
)
from tests.remote.test_runs import assert_every_token_was_given_once, ray_config, steps_done, wait_until
from tests.train.runs import losses, on_ranks, run, small_run, write_corpus

HOLD_NODES = """
import sys
import time
import bytescale.data.remote
from ray.cluster_utils import Cluster

settings = dict(num_cpus=2, object_store_memory=80 * 1024**2, node_ip_address="127.0.0.1")
noticed = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 4}
head = {**settings, "include_dashboard": False, "_system_config": noticed}
cluster = Cluster(initialize_head=True, head_node_args=head)
second = cluster.add_node(**settings)
time.sleep(2)  # until raylets know each other; before, Ray places soft affinities anywhere
print(cluster.address, flush=True)
for line in sys.stdin:
    cluster.remove_node(second, allow_graceful=False)
    print("removed", flush=True)
cluster.shutdown()
"""


@dataclass
class TwoNodes:
    """Two nodes of two CPUs."""

    holder: subprocess.Popen[str]
    address: str


@pytest.fixture(scope="module")
def nodes() -> Iterator[TwoNodes]:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD_NODES],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    try:
        address = holder.stdout.readline().strip()
        assert address.startswith("127.0.0.1:"), f"Ray did not start: {address!r}"
        yield TwoNodes(holder, address)
    finally:
        holder.stdin.close()
        holder.wait(60)


def node_of(actor: Any) -> str:
    return ray.get(actor.__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id()), timeout=600)


@pytest.mark.exhaustive
def test_every_node_has_its_servers(nodes: TwoNodes, tmp_path: Path) -> None:
    """Two servers a node; a rank on either node gets what the local loader reads."""
    write_numbered_corpus(tmp_path / "numbers")
    config = numbered_config(tmp_path, servers=2, loader="ray")
    told: list[list[Any]] = []
    connect(nodes.address)
    try:
        with opened_loader(config, reader_of(0, 2, told)) as first:
            living = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
            assert Counter(map(node_of, servers(first))) == dict.fromkeys(living, 2)
            assert len(living) == 2

            def second_rank() -> tuple[str, list[Any]]:
                with (
                    opened_loader(config, reader_of(1, 2, told)) as loader,
                    loader.open(planner_for(2), stop_step=5) as steps,
                ):
                    return ray.get_runtime_context().get_node_id(), list(steps)

            elsewhere = next(node for node in living if node != ray.get_runtime_context().get_node_id())
            place = NodeAffinitySchedulingStrategy(elsewhere, soft=False)
            there = ray.remote(second_rank).options(scheduling_strategy=place, num_cpus=0).remote()
            with first.open(planner_for(2), stop_step=5) as steps:
                mine = list(steps)
            node, theirs = ray.get(there, timeout=600)
            assert node == elsewhere
        corpus = prepare_corpus(config)
        for rank, remote in ((0, mine), (1, theirs)):
            with Loader(corpus, config, rank).open(planner_for(2), stop_step=5) as local:
                for ours, expected in zip(remote, local, strict=True):
                    assert_same_data(ours, expected)
        assert max(count_tokens([[data] for data in mine + theirs]).values()) <= 2  # no epoch is that short
    finally:
        ray.shutdown()


@pytest.mark.exhaustive
@pytest.mark.parametrize("loader", ["local", "ray"])
def test_ray_train_goes_on_when_a_worker_was_killed(nodes: TwoNodes, tmp_path: Path, loader: str) -> None:
    """examples/ray_train.py: 3 workers on 2 nodes have the losses of ``bytescale train``, and take every token once."""
    write_corpus(tmp_path / "corpus")
    config = ray_config(tmp_path, tmp_path / "run")
    config = replace(config, data=replace(config.data, loader=loader))
    path = tmp_path / "run.toml"
    path.write_text(config_to_toml(config), encoding="utf-8")
    started = subprocess.Popen(
        [
            sys.executable,
            str(Path(__file__).parents[2] / "examples" / "ray_train.py"),
            str(path),
            "--max-restarts",
            "1",
        ],
        env={**os.environ, "RAY_ADDRESS": nodes.address, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        wait_until(lambda: steps_done(config) >= 3 or started.poll() is not None)
        processes = psutil.Process(nodes.holder.pid).children(recursive=True)
        workers = [process for process in processes if "ray::RayTrainWorker" in " ".join(process.cmdline())]
        assert len(workers) == 3, started.communicate()[0] if started.poll() is not None else workers
        workers[0].kill()
        output, _ = started.communicate(timeout=600)
    finally:
        started.kill()
    assert started.returncode == 0, output
    whole = on_ranks(small_run(tmp_path / "corpus", tmp_path / "whole", steps=config.trainer.steps), 3, 128)
    assert losses(tmp_path / "run") == pytest.approx(run(whole), rel=1e-6)
    assert "resuming after step" in (tmp_path / "run" / "log.txt").read_text(encoding="utf-8")
    assert_every_token_was_given_once(config, config.trainer.steps)
