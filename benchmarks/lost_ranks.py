"""What it costs to go on without ranks that die, and what it saves.

    python benchmarks/lost_ranks.py cost       # steps with and without copies of states, in turns, on 4 loopback ranks
    python benchmarks/lost_ranks.py stall      # from a death to the next micro-batch, on 8 loopback ranks
    python benchmarks/lost_ranks.py effective  # 16,384 ranks, one of which dies every hour: a model, not measured

``effective`` compares, for each way to go on, the share of time that trains. A death costs the work that is done again
and the seconds until training goes on, and checkpoints cost something all the time.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import statistics
import sys
import tempfile
import time
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent))

from bytescale import HDP
from bytescale.common.errors import RanksLost
from bytescale.hf.files.folder import make_model

SHAPE = {
    "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4,
    "num_key_value_heads": 4, "intermediate_size": 688, "vocab_size": 512,
}  # fmt: skip


def attached(rank: int, size: int, file: str, copies: bool) -> tuple[HDP, Any]:
    torch.set_num_threads(1)
    store = dist.FileStore(file, size)
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", store=dist.PrefixStore("w", store), rank=rank, world_size=size, timeout=limit)
    model = make_model(SHAPE, torch.float32, seed=0)
    hdp = HDP(model, capacity_tokens=1024)
    hdp.adamw(lr=1e-3)
    if copies:
        hdp.keep_copies(store=store)
    return hdp, model


def loss_of(micro: Any, model: Any) -> torch.Tensor:
    return -(micro.logprobs(model) * (micro.labels != -100)).sum()


def step(hdp: HDP, model: Any, batch: list[dict[str, Any]]) -> float:
    """Seconds of a step."""
    began, total = time.perf_counter(), sum(len(document["tokens"]) for document in batch)
    for micro in hdp.plan(batch, shift_labels=True):
        (loss_of(micro, model) / total).backward()
    hdp.step()
    return time.perf_counter() - began


def batch_of(tokens: int) -> list[dict[str, Any]]:
    return [{"tokens": torch.randint(2, 512, (512,))} for _ in range(tokens // 512)]


def cost(arguments: argparse.Namespace) -> None:
    """Steps with and without copies take turns: one process group, whose optimizer has its copies taken away."""

    def one_rank(rank: int, file: str, answers: Any) -> None:
        hdp, model = attached(rank, arguments.ranks, file, copies=True)
        sharded = hdp.sharded()
        calls = [*sharded.before_norm, *sharded.behind_update]
        copies: Any = calls[0].__self__  # type: ignore[attr-defined]
        torch.manual_seed(0)
        seconds: dict[bool, list[float]] = {True: [], False: []}
        for number in range(2 * arguments.steps):
            with_copies = number % 2 == 0
            sharded.before_norm[:], sharded.behind_update[:] = ([calls[0]], [calls[1]]) if with_copies else ([], [])
            seconds[with_copies].append(step(hdp, model, batch_of(arguments.tokens)))
            copies.finish()
        answers.put((rank, seconds, copies.num_bytes, sum(p.numel() for p in model.parameters())))

    _, seconds, num_bytes, numbers = first_of(run(arguments.ranks, one_rank))
    ratios = [own / other for own, other in zip(seconds[True][2:], seconds[False][2:], strict=True)]
    print(
        f"{numbers / 1e6:.1f}M parameters on {arguments.ranks} ranks, {arguments.tokens} tokens a step: "
        f"{statistics.median(seconds[True]):.3f} s with copies, {statistics.median(seconds[False]):.3f} s without; "
        f"median of the ratios {statistics.median(ratios):.3f}; {num_bytes / 1e6:.1f} MB sent by a rank and step"
    )


def stall(arguments: argparse.Namespace) -> None:
    """Rank after rank is killed behind a forward; the others tell when their next one begins."""

    def one_rank(rank: int, file: str, answers: Any) -> None:
        hdp, model = attached(rank, arguments.ranks, file, copies=True)
        torch.manual_seed(0)
        died, stalls = 0.0, []
        while hdp.num_updates < arguments.steps:
            try:
                for micro in hdp.plan(batch_of(arguments.tokens), shift_labels=True):
                    if died:
                        stalls.append(time.time() - died)
                        died = 0.0
                    loss = loss_of(micro, model)
                    if hdp.num_updates == 2 * (rank + 1) and rank < arguments.ranks // 2:
                        Path(f"{file}.died").write_text(str(time.time()))
                        os.kill(os.getpid(), signal.SIGKILL)
                    (loss / arguments.tokens).backward()
                hdp.step()
            except RanksLost:
                died = float(Path(f"{file}.died").read_text())
                hdp.recover()
        answers.put((rank, stalls))

    _, stalls = first_of(run(arguments.ranks, one_rank, lost=arguments.ranks // 2))
    shown = ", ".join(f"{seconds:.2f}" for seconds in stalls)
    print(f"{arguments.ranks} ranks, {len(stalls)} deaths: {shown} s from a death to the next micro-batch")


def run(size: int, one_rank: Any, lost: int = 0) -> list[Any]:
    context = get_context("fork")
    answers, file = context.Queue(), tempfile.mktemp()
    ranks = [context.Process(target=one_rank, args=(rank, file, answers), daemon=True) for rank in range(size)]
    for rank in ranks:
        rank.start()
    return [answers.get(timeout=900) for _ in range(size - lost)]


def first_of(answers: list[Any]) -> Any:
    return min(answers, key=lambda answer: answer[0])


def effective(arguments: argparse.Namespace) -> None:
    """The share of time that trains, for ``--ranks-simulated`` ranks and ``--deaths-per-hour``."""
    between = 3600.0 / arguments.deaths_per_hour
    a_step, ranks = arguments.step_seconds, arguments.ranks_simulated
    rows = [
        ("copies of states, N - 1 ranks go on", 0.0, arguments.stall_seconds, a_step / 2, 1.0 / ranks),
        ("a replica of 64 ranks is left out", 0.0, 180.0, a_step / 2, 64.0 / ranks),
    ]
    # Young's interval between checkpoints, of which each stops training for so long.
    interval = math.sqrt(2 * arguments.checkpoint_seconds * between)
    rows.append(("restart from checkpoints", arguments.checkpoint_seconds / interval,
                 arguments.restart_seconds, interval / 2, 0.0))  # fmt: skip
    for name, always, stands_still, again, missing in rows:
        # Of the ranks that are missing, one hour long, as many work less.
        share = (1.0 - always) * (1.0 - (stands_still + again) / between) * (1.0 - missing)
        print(f"{name:<40} {100 * share:6.2f} % of the time trains")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["cost", "stall", "effective"])
    parser.add_argument("--ranks", type=int, default=0, help="4 for cost, 8 for stall")
    parser.add_argument("--steps", type=int, default=0, help="20 for cost, 12 for stall")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--ranks-simulated", type=int, default=16384)
    parser.add_argument("--deaths-per-hour", type=float, default=1.0)
    parser.add_argument("--step-seconds", type=float, default=30.0)
    parser.add_argument("--stall-seconds", type=float, default=60.0, help="to agree, connect NCCL and build the job")
    parser.add_argument("--checkpoint-seconds", type=float, default=5.0, help="that one stops training")
    parser.add_argument("--restart-seconds", type=float, default=600.0)
    arguments = parser.parse_args()
    arguments.ranks = arguments.ranks or (8 if arguments.what == "stall" else 4)
    arguments.steps = arguments.steps or (12 if arguments.what == "stall" else 20)
    {"cost": cost, "stall": stall, "effective": effective}[arguments.what](arguments)


if __name__ == "__main__":
    main()
