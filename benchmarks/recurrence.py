"""States of a recurrent layer on N ranks: our scan and chain, against an all-gather of what every segment does.

    python benchmarks/recurrence.py [--ranks 2,4,8,16] [--heads 4] [--width 64] [--rounds 5]

Every rank has the two segments of one document. A round finds the state before each of them: by a scan, by a chain, and
by gathering all maps everywhere and composing them there, which is what published implementations do. Bytes are those
of the busiest rank; they do not depend on the document's length. Seconds are medians of the slowest rank, with ranks as
threads of one process and messages over loopback: they show the work beside the messages, not a network.
"""

from __future__ import annotations

import argparse
import statistics
import time
from unittest.mock import patch

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bytescale.attention import Exchange, PackedAttention, select_kernel
from bytescale.parity.thread_ranks import run_ranks
from bytescale.plan import Plan, RankPlan
from bytescale.plan.plan import GroupSpec
from bytescale.plan.states import chain_is_faster
from bytescale.recurrence.cuts import GroupCuts

WAYS = ("scan", "chain", "all-gather")


def gathered(group: dist.ProcessGroup, decay: Tensor, state: Tensor) -> tuple[Tensor, int]:
    """The states before both segments, from everybody's maps, and the bytes that the rank receives."""
    own = torch.cat([decay, state], dim=-1).contiguous()
    parts = [torch.empty_like(own) for _ in range(group.size())]
    group.allgather([parts], [own]).wait()
    maps = [part[0] for part in parts] + [part[1] for part in reversed(parts)]
    before, entries = torch.zeros_like(state[0]), []
    for one in maps:
        entries.append(before)
        before = one[..., : decay.shape[-1]] @ before + one[..., decay.shape[-1] :]
    places = group.rank(), 2 * group.size() - 1 - group.rank()
    return torch.stack([entries[place] for place in places]), own.nbytes * (group.size() - 1)


def measure(way: str, num_ranks: int, heads: int, width: int, rounds: int) -> tuple[float, int]:
    """Seconds of a round, and bytes of the busiest rank."""
    plan = Plan.build(
        lengths=[64 * num_ranks],
        capacity_tokens=[64] * num_ranks,
        groups=[GroupSpec(sequences=[0], ranks=list(range(num_ranks)))],
        schedule=[[[0]]] * num_ranks,
    )

    def one_rank(group: dist.ProcessGroup) -> tuple[list[float], int, float]:
        (micro_batch,) = RankPlan.of(plan, group.rank()).micro_batches
        exchange = Exchange(group, group.rank())
        kernel = select_kernel("math", torch.device("cpu"), torch.float32)
        cuts = GroupCuts(PackedAttention(micro_batch, kernel, exchange))
        random = torch.Generator().manual_seed(group.rank())
        decay = torch.randn(2, heads, width, width, generator=random) / width
        state = torch.randn(2, heads, width, width, generator=random)
        seconds, sent = [], 0
        expected, _ = gathered(group, decay, state)
        for _ in range(rounds):
            group.barrier().wait()
            before, started = exchange.bytes_sent, time.perf_counter()
            if way == "all-gather":
                found, sent = gathered(group, decay, state)
            else:
                _, found = cuts.entry(torch.ones(1), decay, state)
                sent = exchange.bytes_sent - before
            seconds.append(time.perf_counter() - started)
        return seconds, sent, float((found - expected).abs().max())

    with patch("bytescale.recurrence.cuts.chain_is_faster", lambda *_: way == "chain"):
        results = run_ranks(num_ranks, one_rank)
    assert max(error for _, _, error in results) < 1e-3, "all ways give the same states"
    slowest = [max(times) for times in zip(*(seconds for seconds, _, _ in results), strict=True)]
    return statistics.median(slowest), max(sent for _, sent, _ in results)


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--ranks", default="2,4,8,16")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    table = Table("ranks", *(f"{way}, {what}" for way in WAYS for what in ("KiB", "ms")), "formula takes")
    num_bytes = 4 * given.heads * given.width**2
    for num_ranks in map(int, given.ranks.split(",")):
        cells = []
        for way in WAYS:
            seconds, sent = measure(way, num_ranks, given.heads, given.width, given.rounds)
            cells += [f"{sent / 1024:.0f}", f"{1e3 * seconds:.1f}"]
        chosen = "chain" if chain_is_faster(num_ranks, num_bytes, num_bytes) else "scan"
        table.add_row(str(num_ranks), *cells, chosen)
    Console().print(table)


if __name__ == "__main__":
    main()
