"""Measures the time that the host needs for a step's report, on the first rank and on any other rank.

    python benchmarks/report.py --ranks 16384

The report is the real one (``train.reporting.metrics``). PyTorch's ``fake`` backend sends no messages, so the result is
the time that a rank spends on numbers before and after the messages. It is compared with a table of all reports on
every rank.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import fields

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from bytescale.runtime.group import RankGroup
from bytescale.train.reporting.metrics import RankFigures


def median_ms(work: Callable[[], object], rounds: int = 20) -> float:
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return 1e3 * statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=16384)
    arguments = parser.parse_args()
    names = [spec.name for spec in fields(RankFigures)]
    report = RankFigures(**{name: [1] if name.startswith("data_bytes") else 1.0 for name in names})  # type: ignore
    for rank, name in ((0, "first rank"), (1, "any other")):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=arguments.ranks)
        world = RankGroup(dist.group.WORLD)
        row = [1.0] * len(names)
        print(
            f"{name:>10} of {arguments.ranks}: report {median_ms(lambda world=world: report.of_all(world)):8.2f} ms, "
            f"a table of all reports {median_ms(lambda world=world, row=row: world.share(row)):8.2f} ms"
        )
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
