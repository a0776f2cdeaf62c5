"""Measures the remote loader: its rate, what each rank reads, and what planning costs a rank.

    .venv/bin/python benchmarks/loader.py rate     # tokens/s of the loader alone, against what a run consumed
    .venv/bin/python benchmarks/loader.py bytes    # bytes, memory and CPU of 8 ranks, also if each reads whole batches
    .venv/bin/python benchmarks/loader.py plan     # batches of 32M tokens for 1024 and 16384 ranks, planned by one
    .venv/bin/python benchmarks/loader.py start    # time until the first step, with and without a filled cache
    .venv/bin/python benchmarks/loader.py index    # what one process keeps of each of 10M documents, without Ray

The first four start their own Ray on loopback and end it. Results: docs/benchmarks/data.md, ``Remote dataloader``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import psutil

from bytescale.common.atomic import write_atomically
from bytescale.config.presets import PRESETS
from bytescale.config.schema import DataConfig, PlannerConfig
from bytescale.cost.cluster import Cluster
from bytescale.cost.profile import Profile
from bytescale.data.length_distributions import sample_lengths
from bytescale.data.loading.corpus import prepare_corpus
from bytescale.data.loading.loader import Reader
from bytescale.data.open import opened_loader
from bytescale.data.order.batches import BatchSampler
from bytescale.data.tokens.pairs import IndexedWriter, MetadataGatherer
from bytescale.plan import RankPlan
from bytescale.plan.plan import PREFETCH_STEPS
from bytescale.planner.verified import VerifiedPlanner
from bytescale.train.parts.describe import spec_of_content

MIB = 1024**2
_CONTEXT = 131072  # of the comparison of bytes


def planner_for(num_ranks: int, capacity_tokens: int) -> VerifiedPlanner:
    cost = Profile.from_flops(spec_of_content(PRESETS["7b"]), flops_per_second=1e14).cost_model()
    return VerifiedPlanner(PlannerConfig(), Cluster.uniform(num_ranks, capacity_tokens), cost)


def write_corpus(prefix: Path, num_tokens: int, context_length: int) -> None:
    """Write a ``.bin`` of random tokens. Its documents have the lengths of the paper's GitHub set."""
    random = np.random.default_rng(0)
    lengths = sample_lengths("github", num_tokens, seed=0, max_length=context_length)
    gatherer = MetadataGatherer(np.dtype("<u2"))
    with IndexedWriter(prefix.with_suffix(".bin"), np.dtype("<u2")) as writer:
        for run in np.array_split(lengths, 32):
            tokens = random.integers(0, 50000, int(run.sum())).astype("<u2")
            writer.add_documents(tokens, run)
            gatherer.add(tokens)
        writer.commit(gatherer.finish(lengths).to_json())


def config_for(folder: Path, *, context_length: int, batch_tokens: int) -> DataConfig:
    return DataConfig(
        sources=(str(folder / "corpus.bin"),),
        context_length=context_length,
        batch_tokens=batch_tokens,
        cache_dir=str(folder / "cache"),
        loader="ray",
    )


def reader_of(rank: int, num_ranks: int, folder: Path) -> Reader:
    """One of several processes. What the first tells the others lies in ``folder``."""
    paths = (folder / f"told-{number}.json" for number in itertools.count())

    def tell(items: list[Any]) -> None:
        path = next(paths)
        if rank == 0:
            write_atomically(path, json.dumps(items).encode())
        while not path.exists():
            time.sleep(0.01)
        items[:] = json.loads(path.read_text(encoding="utf-8"))

    return Reader(hdp_rank=rank, num_processes=num_ranks, is_first=rank == 0, broadcast=tell)


# rate: one rank takes all tokens as fast as they come.


def rate(folder: Path) -> None:
    for name, context, batch, steps in (("16K batches", 8192, 16384, 200), ("1M batches", 131072, MIB, 25)):
        write_corpus(folder / "corpus", 32 * MIB, context)
        config = config_for(folder, context_length=context, batch_tokens=batch)
        planner = planner_for(1, context)
        with (
            tempfile.TemporaryDirectory() as told,
            opened_loader(config, reader_of(0, 1, Path(told))) as loader,
            loader.open(planner, steps + 3) as taken,
        ):
            for _ in range(3):
                next(taken)
            started = time.perf_counter()
            num_tokens = sum(data.plan.num_tokens for data in taken)
            seconds = time.perf_counter() - started
        print(
            f"{name}: remote loader {num_tokens / seconds / 1e6:.2f}M tokens/s ({1e3 * seconds / steps:.1f} ms a step)"
        )


# bytes: eight ranks read in three ways, each in its own process.


def bytes_read(folder: Path) -> None:
    from bytescale.data.remote.ray_cluster import ray_cluster

    write_corpus(folder / "corpus", 24 * MIB, _CONTEXT)
    print("way     first step   bytes a rank and step   CPU a rank and step   private memory a rank (beyond imports)")
    for way in ("spmd", "local", "ray"):
        with ray_cluster(8) as address, tempfile.TemporaryDirectory() as told:
            arguments = [sys.executable, __file__, "one-rank", "--folder", str(folder), "--told", told, "--way", way]
            environment = {**os.environ, "RAY_ADDRESS": address}
            ranks = [
                subprocess.Popen([*arguments, "--rank", str(rank)], stdout=subprocess.PIPE, text=True, env=environment)
                for rank in range(8)
            ]
            rows = np.array([list(map(float, rank.communicate(timeout=300)[0].split())) for rank in ranks])
        first, read, cpu, memory = rows.mean(axis=0)
        print(
            f"{way:6} {first:>9.2f} s   {read / MIB:>17.3f} MiB  {1e3 * cpu:>17.1f} ms   {memory / MIB:>10.1f} MiB",
            flush=True,
        )


def one_rank(folder: Path, told: Path, way: str, rank: int) -> None:
    """Run eight steps of one rank. Print seconds to the first, bytes and CPU of each, and the private memory gained."""
    from bytescale.data.remote.ray_cluster import connect

    steps = 8
    config = config_for(folder, context_length=_CONTEXT, batch_tokens=MIB)
    planner = planner_for(8, _CONTEXT // 4)
    if way == "ray":
        connect(os.environ["RAY_ADDRESS"])
    before, started, read = psutil.Process().memory_full_info().uss, time.perf_counter(), 0
    first = busy = 0.0
    if way == "spmd":  # reads whole batches, as many steps ahead as the others, and cuts its slices from them
        corpus = prepare_corpus(config)
        sampler = BatchSampler(corpus.index, config)
        held: deque[list[dict[str, np.ndarray]]] = deque(maxlen=PREFETCH_STEPS + 1)
        for step in range(steps):
            batch = sampler.next_batch()
            RankPlan.of(planner(batch.lengths), rank)
            held.append(corpus.documents(batch.samples, ()))
            read += 2 * batch.num_tokens
            if step == 0:
                first, busy = time.perf_counter() - started, time.process_time()
        memory = psutil.Process().memory_full_info().uss - before
    else:
        reader = reader_of(rank, 8, told)
        with opened_loader(replace(config, loader=way), reader) as loader, loader.open(planner, steps) as taken:
            for data in taken:
                read += data.times.bytes_read
                if data.step == 0:
                    first, busy = time.perf_counter() - started, time.process_time()
            memory = psutil.Process().memory_full_info().uss - before
            time.sleep(15 if rank == 0 and way == "ray" else 0)  # if the first rank ended, all would end
    print(first, read / steps, (time.process_time() - busy) / (steps - 1), memory)


# plan: one rank of large clusters; each of its node does the same.


def plan(folder: Path) -> None:
    steps = 6
    write_corpus(folder / "corpus", 200 * MIB, 2 * MIB)
    config = replace(config_for(folder, context_length=2 * MIB, batch_tokens=32 * MIB), loader="local")
    print("ranks   planned, verified and cut   CPU a step, with its slices read")
    for num_ranks in (1024, 16384):
        with tempfile.TemporaryDirectory() as told, opened_loader(config, reader_of(0, 1, Path(told))) as loader:
            taken = loader.steps(planner_for(num_ranks, 8192), steps)
            next(taken)
            busy = time.process_time()
            seconds = [data.times.planning_seconds for data in taken]
            spent = (time.process_time() - busy) / (steps - 1)
        print(f"{num_ranks:6}   {1e3 * np.median(seconds):>21.0f} ms   {1e3 * spent:>7.0f} ms", flush=True)


# start: the time until the first step, when servers have to tokenise and when the cache is filled.


def start(folder: Path) -> None:
    from bytescale.data.remote.ray_cluster import ray_cluster

    random = np.random.default_rng(0)
    vocabulary = ["".join(random.choice(list("etaoinshrdlu"), length)) for length in random.integers(2, 10, 20_000)]
    with (folder / "text.jsonl").open("w", encoding="utf-8") as file:
        for length in sample_lengths("github", 20 * MIB, seed=0, max_length=131072).tolist():
            file.write(json.dumps({"text": " ".join(random.choice(vocabulary, max(1, length)))}) + "\n")
    num_bytes = (folder / "text.jsonl").stat().st_size
    print(
        f"{num_bytes / MIB:.0f} MiB of JSONL   tokenizer   window   first time   from the cache   shards read by then"
    )
    for tokenizer, window_mib in (("bytes", 256), ("bytes", 32), ("bpe", 256), ("bpe", 32)):
        config = replace(
            config_for(folder, context_length=131072, batch_tokens=MIB),
            sources=(str(folder / "text.jsonl"),),
            tokenizer=tokenizer,
            over_length="split",
            shuffle_window_mib=window_mib,
            cache_dir=str(folder / f"cache-{tokenizer}-{window_mib}"),
        )
        seconds = []
        with ray_cluster(2) as address, mock.patch.dict(os.environ, RAY_ADDRESS=address):
            for _ in ("first", "second"):
                started = time.perf_counter()
                with (
                    tempfile.TemporaryDirectory() as told,
                    opened_loader(config, reader_of(0, 1, Path(told))) as loader,
                    loader.open(planner_for(1, 131072), 1) as taken,
                ):
                    next(taken)
                    seconds.append(time.perf_counter() - started)
                    facts = loader.metadata
        read = f"{facts.num_parts_read} of {facts.num_parts}"
        print(
            f"{'':15} {tokenizer:>12} {window_mib:>8}   {seconds[0]:>8.1f} s   {seconds[1]:>12.1f} s   {read:>12}",
            flush=True,
        )


# index: one process opens a corpus of tiny documents and draws batches. Pages of files are shared by all processes.


def index(folder: Path) -> None:
    count = 10_000_000
    lengths = np.random.default_rng(0).integers(2, 15, count)
    gatherer = MetadataGatherer(np.dtype("<u2"))
    with IndexedWriter(folder / "corpus.bin", np.dtype("<u2")) as writer:
        for run in np.array_split(lengths, 32):
            tokens = np.arange(run.sum()).astype("<u2")
            writer.add_documents(tokens, run)
            gatherer.add(tokens)
        writer.commit(gatherer.finish(lengths).to_json())
    config = replace(config_for(folder, context_length=8192, batch_tokens=65536), loader="local")
    for watched in (False, True):
        code = f"from benchmarks.loader import opened; opened({config!r}, {count}, {watched})"
        subprocess.run([sys.executable, "-c", f"from bytescale.config.schema import DataConfig; {code}"], check=True)


def opened(config: DataConfig, count: int, watched: bool) -> None:
    """Print the bytes of a document that are kept, and the most of them until then; or seconds, of the CPU."""

    def anonymous() -> int:
        found = re.search(r"Anonymous: +(\d+) kB", Path("/proc/self/smaps_rollup").read_text(encoding="ascii"))
        return int(found[1]) * 1024 if found else 0

    before, peak, ended = anonymous(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not ended.wait(0.005):
            peak = max(peak, anonymous())

    thread, started = threading.Thread(target=watch), time.process_time()
    if watched:
        thread.start()
    sampler = BatchSampler(prepare_corpus(config).index, config)
    first = time.process_time() - started
    for _ in range(200):
        sampler.next_batch()
    ended.set()
    if watched:
        thread.join()
        print(
            f"{(anonymous() - before) / count:.1f} bytes of a document are kept, {(peak - before) / count:.1f} at most"
        )
    else:
        batch = (time.process_time() - started - first) / 200
        print(f"{count} documents: {first:.2f} CPU s to open, {1e3 * batch:.2f} CPU ms to draw a batch of 8,200")


WAYS: dict[str, Callable[[Path], None]] = {
    "rate": rate,
    "bytes": bytes_read,
    "plan": plan,
    "start": start,
    "index": index,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=[*WAYS, "one-rank"])
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--told", type=Path)
    parser.add_argument("--way", choices=["spmd", "local", "ray"], default="ray")
    parser.add_argument("--rank", type=int, default=0)
    options = parser.parse_args()
    if options.what == "one-rank":
        one_rank(options.folder, options.told, options.way, options.rank)
        return
    with tempfile.TemporaryDirectory(prefix="bytescale-loader-") as folder:
        WAYS[options.what](Path(folder))


if __name__ == "__main__":
    main()
