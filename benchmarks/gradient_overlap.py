"""Measures how much of the reduction of gradients and the gathering of parameters computation hides, on slow links.

    python benchmarks/gradient_overlap.py [--micro-batches 1 2 4] [--bucket-mib 0.5 1 2 4] [--share 0.3]

Two ranks run in two network namespaces that a virtual cable joins. `tc` limits the speed of the cable so that reduction
and gathering ("the sync") take the wanted share of a step. The benchmark needs root, `ip` and `tc`. It removes the
namespaces and the cable at the end. For every setting, three modes take turns in the same processes:

    none      The ranks send nothing, so this is computation alone.
    once      There is one reduction and one gathering between two steps.
    buckets   The reduction runs during backward, and the gathering during the next forward.

Every setting prints two lines. The line "step" has medians of the times from one update to the next. There the sync is
once - none, and the hidden share is 1 - (buckets - none) / (once - none). This needs two idle cores. The line "waiting"
has medians of the time that the rank that waits less spends waiting for gradients and parameters in a step. There the
hidden share is 1 - buckets / once. On a busy machine this line depends less on other processes.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
import torch.distributed as dist
from tests.hf.mesh_steps import rank_model
from transformers import AutoModelForCausalLM, LlamaConfig

from bytescale.attention import select_kernel
from bytescale.config.schema import OptimizerConfig
from bytescale.plan import Plan, RankPlan
from bytescale.plan.plan import GroupSpec
from bytescale.runtime.group import RankGroup
from bytescale.runtime.mesh import Mesh
from bytescale.runtime.optimizer.sharded_optimizer import ShardedOptimizer

NUM_RANKS = 2
TOKENS = 384  # of a micro-batch, which has three sequences
ADDRESS = "10.77.43.{}"
PORT = 29611
MODES = ("none", "once", "buckets")
STEPS_IN_A_ROW = 3  # the first one does not count, because the previous mode affects it


@contextmanager
def cable() -> Iterator[list[str]]:
    """Make two network namespaces with a cable between them, and yield their names."""
    names = [f"bytescale-{os.getpid()}-{rank}" for rank in range(NUM_RANKS)]
    try:
        for name in names:
            _run("ip", "netns", "add", name)
        ends = [f"bs{os.getpid()}r{rank}" for rank in range(NUM_RANKS)]
        _run("ip", "link", "add", ends[0], "netns", names[0], "type", "veth", "peer", ends[1], "netns", names[1])
        for rank, (name, end) in enumerate(zip(names, ends, strict=True)):
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "-n", name, "link", "set", end, "name", "cable")
            _run("ip", "-n", name, "addr", "add", ADDRESS.format(rank + 1) + "/24", "dev", "cable")
            _run("ip", "-n", name, "link", "set", "cable", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def limit(names: Sequence[str], bytes_per_second: float) -> None:
    """Limit the rate at which each end of the cable sends."""
    for name in names:
        rate = f"{int(8 * bytes_per_second)}bit"
        shaping = ["tbf", "rate", rate, "burst", "256kb", "latency", "400ms"]
        _run("tc", "-n", name, "qdisc", "replace", "dev", "cable", "root", *shaping)


def measured(names: Sequence[str], num_micro_batches: int, bucket_mib: float, rounds: int) -> dict[str, Seconds]:
    """Return, for the counted steps of each mode, the slower rank's time and the wait of the rank that waits less."""
    arguments = [sys.executable, __file__, "--micro-batches", str(num_micro_batches), "--bucket-mib", str(bucket_mib)]
    environment = {
        **os.environ,
        "MASTER_ADDR": ADDRESS.format(1),
        "MASTER_PORT": str(PORT),
        "GLOO_SOCKET_IFNAME": "cable",
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            ["ip", "netns", "exec", name, *arguments, "--rounds", str(rounds), "--rank", str(rank)],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, name in enumerate(names)
    ]
    try:
        outputs = [rank.communicate(timeout=540)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    of_ranks = [json.loads(output.strip().splitlines()[-1]) for output in outputs]
    steps = {mode: np.array([own[mode] for own in of_ranks]) for mode in MODES}  # [ranks, steps, 2]
    return {
        mode: Seconds(step=statistics.median(both[..., 0].max(0)), waiting=statistics.median(both[..., 1].min(0)))
        for mode, both in steps.items()
    }


def one_rank(rank: int, num_micro_batches: int, bucket_mib: float, rounds: int) -> dict[str, list[list[float]]]:
    """Train in all modes in turns. Return, for the counted steps of each mode, their seconds and the seconds waited."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=NUM_RANKS)
    trainers = {mode: Trainer(mode, num_micro_batches, bucket_mib) for mode in MODES}
    seconds: dict[str, list[list[float]]] = {mode: [] for mode in MODES}
    for _ in range(rounds + 1):  # the first round is a warm-up
        for mode, trainer in trainers.items():
            dist.barrier()
            seconds[mode] += trainer.steps(STEPS_IN_A_ROW)
    dist.destroy_process_group()
    return {mode: values[STEPS_IN_A_ROW - 1 :] for mode, values in seconds.items()}


@dataclass(frozen=True)
class Seconds:
    """Seconds of a step, and of waiting for gradients and parameters in it."""

    step: float
    waiting: float


class Trainer:
    """A model that is trained in one mode."""

    def __init__(self, mode: str, num_micro_batches: int, bucket_mib: float) -> None:
        mesh = Mesh.of_hdp(RankGroup(dist.group.WORLD))
        mesh = replace(mesh, gradients=RankGroup() if mode == "none" else RankGroup(dist.new_group()))
        torch.manual_seed(0)
        config = LlamaConfig(
            num_hidden_layers=8, hidden_size=256, num_attention_heads=4, intermediate_size=768, vocab_size=256
        )
        bucket_bytes = int(bucket_mib * 2**20) if mode == "buckets" else 0
        model = rank_model(AutoModelForCausalLM.from_config(config), mesh, bucket_bytes=bucket_bytes)
        self.mesh = mesh
        self.optimizer = ShardedOptimizer.of_config(model.parameters, OptimizerConfig(lr=1e-4), mesh)
        if mode == "buckets":
            self.optimizer.zeros[0].overlap_with(model.layers)
        self.executor = model.executor(mesh, select_kernel("auto", torch.device("cpu"), torch.float32))
        self.rank_plan = RankPlan.of(whole_sequences(num_micro_batches), mesh.hdp.rank)
        self.num_parameters = len(model.parameters.values)

    def steps(self, count: int) -> list[list[float]]:
        """Take steps. Return the times from each update to the next, and the waiting in them."""
        ends, waited = [], 0.0
        self.mesh.gradients.clock.take()
        for _ in range(count):
            self.step()
            waited += self.mesh.gradients.clock.take()()
            ends.append((time.perf_counter(), waited))
        self.optimizer.wait_for_parameters()
        return np.diff(ends, axis=0).tolist()

    def step(self) -> None:
        self.optimizer.begin_step(self.rank_plan)
        self.executor.run(
            self.rank_plan,
            [Tokens(self.mesh.hdp.rank, index) for index in range(len(self.rank_plan.micro_batches))],
            num_global_targets=NUM_RANKS * TOKENS * len(self.rank_plan.micro_batches),
            after_last_message=self.optimizer.after_last_message,
        )
        shares = self.mesh.world.share([self.optimizer.reduce_gradients()])
        self.optimizer.update(sum(row[0] for row in shares) ** 0.5, 1.0, 1e-4)


class Tokens:
    """A micro-batch of random tokens."""

    def __init__(self, rank: int, index: int) -> None:
        generator = torch.Generator().manual_seed(100 * rank + index)
        self.tokens = torch.randint(256, (TOKENS,), generator=generator)
        self.labels = torch.randint(256, (TOKENS,), generator=generator)
        self.position_ids = torch.arange(TOKENS // 3).repeat(3)
        self.weights = None


def whole_sequences(num_micro_batches: int) -> Plan:
    """Every rank has the same number of micro-batches, of three whole sequences each."""
    numbers = np.arange(NUM_RANKS * num_micro_batches * 3).reshape(NUM_RANKS, num_micro_batches, 3)
    groups, schedule = [], []
    for rank in range(NUM_RANKS):
        schedule.append([[len(groups) + index] for index in range(num_micro_batches)])
        groups += [GroupSpec(sequences=own.tolist(), ranks=[rank]) for own in numbers[rank]]
    return Plan.build(
        lengths=[TOKENS // 3] * numbers.size, capacity_tokens=[TOKENS] * NUM_RANKS, groups=groups, schedule=schedule
    )


def slow_link(fast: dict[str, Seconds], share: float) -> float:
    """Return the bytes per second at which the sync would take ``share`` of a step, by the bytes that gloo sends."""
    parameters = 8 * (4 * 256**2 + 3 * 256 * 768) + 2 * 256**2
    # gloo implements reduce-scatter as an all-reduce. Two ranks send all gradients, then half of the parameters.
    sync_bytes = 4 * parameters + 2 * parameters
    return sync_bytes / (share / (1 - share) * fast["none"].step)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--bucket-mib", type=float, nargs="+", default=[1.0, 4.0])
    parser.add_argument("--share", type=float, default=0.3)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        found = one_rank(options.rank, options.micro_batches[0], options.bucket_mib[0], options.rounds)
        print(json.dumps(found))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the cable is removed
    with cable() as names:
        print("micro-batches  bucket    link        none       once     buckets   sync share  hidden")
        for count in options.micro_batches:
            limit(names, 1e10)
            rate = slow_link(measured(names, count, options.bucket_mib[0], 3), options.share)
            limit(names, rate)
            for mib in options.bucket_mib:
                seconds = measured(names, count, mib, options.rounds)
                print_lines(f"{count:13}  {mib:4} MiB  {rate / 1e6:5.0f} MB/s", seconds)


def print_lines(setting: str, seconds: dict[str, Seconds]) -> None:
    """Print the two lines of a setting: by the times of steps, and by waiting."""
    none, once, buckets = (seconds[mode] for mode in MODES)
    sync = once.step - none.step
    lines = {
        "step": (none.step, once.step, buckets.step, sync / once.step, 1 - (buckets.step - none.step) / sync),
        "waiting": (0.0, once.waiting, buckets.waiting, once.waiting / once.step, 1 - buckets.waiting / once.waiting),
    }
    for name, (*times, share, hidden) in lines.items():
        shown = "  ".join(f"{1e3 * time:6.0f} ms" for time in times)
        print(f"{setting}  {shown}  {share:9.0%}  {hidden:6.0%}  {name}", flush=True)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()} (root, ip and tc are needed)")


if __name__ == "__main__":
    main()
