"""Checkpoints: saving, restoring, the pause of a step, and planning.

    python benchmarks/checkpoint.py io          # save and restore 1 GiB
    python benchmarks/checkpoint.py pause       # of a training step while a checkpoint is written behind it
    python benchmarks/checkpoint.py plan        # 70B on 16,384 ranks: what the first and any other rank plan

The page cache holds what was just written, so that the code is measured and not the disk. ``plan`` runs the real
planning code with the real layout of Llama 70B (tp 8, pp 4) without tensors, for one rank and for the first.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

sys.path.insert(0, str(Path(__file__).parents[1]))


from bytescale.checkpoint.checkpointer import Checkpointer
from bytescale.checkpoint.manifest import Manifest, RunState, StoredFile, layout_to_json
from bytescale.checkpoint.writing import RankStates, layout_of
from bytescale.config.schema import CheckpointConfig, OptimizerConfig
from bytescale.cost.gradient_sync import BUCKET_BYTES
from bytescale.hf.model.counting import OnMeta
from bytescale.hf.model.decoder import HFDecoder
from bytescale.hf.model.parallelize import parallelize
from bytescale.hf.model.tensor_parallel import planned_cuts
from bytescale.runtime.group import RankGroup
from bytescale.runtime.mesh import Mesh, MeshShape
from bytescale.runtime.optimizer.flat import FlatParameters, Range
from bytescale.runtime.optimizer.sharded_optimizer import ShardedOptimizer

GIB = 2**30
STATES = ("master", "exp_avg", "exp_avg_sq")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["io", "pause", "plan"])
    parser.add_argument("--gib", type=float, default=1.0, help="size of a checkpoint")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to write; default: the system's temporary folder")
    options = parser.parse_args()
    if options.what == "plan":
        planning()
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        {"io": save_and_restore, "pause": pauses}[options.what](Path(folder), options.gib, options.rounds)
    dist.destroy_process_group()


def optimizer_of(num_bytes: float) -> ShardedOptimizer:
    """An optimizer whose three states take so many bytes: layers of matrices, as a model's."""
    side, num_layers = 1024, max(1, round(num_bytes / 12 / (4 * 1024**2)))
    named = [
        (f"layers.{layer}.w{number}.weight", torch.nn.Parameter(torch.randn(side, side)))
        for layer in range(num_layers)
        for number in range(4)
    ]
    mesh = Mesh.of_hdp(RankGroup(dist.group.WORLD))
    optimizer = ShardedOptimizer.of_config(FlatParameters(named, 1, bucket_bytes=25 * 2**20), OptimizerConfig(), mesh)
    optimizer.require_states()
    for ranges in optimizer.states(optimizer.zeros[0]).values():
        for own in ranges:
            own.values.normal_()
    return optimizer


def timed(action: Callable[..., object], *arguments: object) -> float:
    began = time.perf_counter()
    action(*arguments)
    return time.perf_counter() - began


def saved(checkpoints: Checkpointer, state: RunState, optimizer: ShardedOptimizer) -> None:
    """Write a checkpoint, and wait until it is there."""
    checkpoints.save(state, optimizer)
    checkpoints.finish()


def save_and_restore(folder: Path, gib: float, rounds: int) -> None:
    """Files are synced to disk."""
    optimizer = optimizer_of(gib * GIB)
    size = sum(own.values.numel() * 4 for ranges in optimizer.states(optimizer.zeros[0]).values() for own in ranges)
    checkpoints = Checkpointer(folder, optimizer.mesh.world.group, CheckpointConfig(keep=1))
    seconds: dict[str, list[float]] = {"save": [], "restore": []}
    for number in range(1, rounds + 2):
        state = RunState(step=number, sampler={}, architecture={}, mesh={})
        taken = {
            "save": timed(saved, checkpoints, state, optimizer),
            "restore": timed(checkpoints.restore, folder / f"step-{number:06d}", optimizer, {}),
        }
        for name, value in taken.items():
            seconds[name] += [value] if number > 1 else []  # the first round warms up
    print(f"{size / GIB:.2f} GiB, median of {rounds} rounds (lowest to highest)")
    for what, values in seconds.items():
        print(f"{what:8} {median(values):6.2f} s  ({min(values):.2f} to {max(values):.2f})")


def pauses(folder: Path, gib: float, rounds: int) -> None:
    """A step of matrix products again and again; how long the step with a checkpoint behind it takes."""
    optimizer = optimizer_of(gib * GIB)
    matrix = torch.randn(1024, 1024)
    checkpoints = Checkpointer(folder, optimizer.mesh.world.group, CheckpointConfig(keep=1))

    def step() -> None:
        for _ in range(12):
            torch.mm(matrix, matrix)

    alone = median(timed(step) for _ in range(20))
    print(f"a step alone: {alone * 1e3:.0f} ms; {gib} GiB, median of {rounds}")
    stops, slower = [], []
    for number in range(1, rounds + 2):
        state = RunState(step=number, sampler={}, architecture={}, mesh={})
        stops.append(timed(checkpoints.save, state, optimizer))
        lasted, steps = 0.0, 0
        while checkpoints._pending is not None:
            lasted, steps = lasted + timed(step), steps + 1
            checkpoints.poll()
        slower.append(lasted - steps * alone)
    checkpoints.finish()
    print(
        f"training stops for {median(stops[1:]) * 1e3:.0f} ms, and loses "
        f"{median(slower[1:]) * 1e3:.0f} ms until the files are there"
    )


def meta_rank(config: LlamaConfig, mesh: MeshShape, rank: int) -> tuple[FlatParameters, Mesh]:
    """The flat buffers of one of 16,384 ranks, a first one of tensor parallelism, without memory."""

    class Group(RankGroup):
        def __init__(self, number: int, size: int) -> None:
            super().__init__(None, device=torch.device("meta"))
            self.rank, self.size = number, size

    stage, hdp, tp = mesh.coordinates(rank)
    world, own = Group(rank, mesh.size), Group(hdp, mesh.hdp)
    of_rank = Mesh(
        shape=mesh,
        stage=stage,
        world=world,
        hdp=own,
        node=own,
        gradients=own,
        domain=Group(0, 1),
        replicas=own,
        tp=Group(tp, mesh.tp),
        forward=(),
        backward=(),
    )
    assert tp == 0, "of the other ranks, the parts are as large"
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with OnMeta():
        decoder = HFDecoder(model)
        cuts = planned_cuts(decoder, mesh.tp)
        names = [name for name, _ in parallelize(decoder, None, stage=(stage, mesh.pp)).named]
    with torch.device("meta"):
        named = [(name, nn.Parameter(torch.empty(cuts[name].part_shape, dtype=torch.bfloat16))) for name in names]
    return FlatParameters(named, mesh.hdp, cuts, bucket_bytes=BUCKET_BYTES), of_rank


def planning() -> None:
    config = LlamaConfig(
        num_hidden_layers=80, hidden_size=8192, intermediate_size=28672, num_attention_heads=64,
        num_key_value_heads=8, vocab_size=128256,
    )  # fmt: skip
    mesh = MeshShape(hdp=512, tp=8, pp=4)
    print(
        f"70B on {mesh.size} ranks: pp {mesh.pp}, hdp {mesh.hdp}, tp {mesh.tp}; one rank is measured, the first twice"
    )
    flat, of_rank = meta_rank(config, mesh, rank=mesh.rank(1, 3, 0))
    places = flat.shards(of_rank.hdp.rank)
    parts = [Range(place.start, torch.empty(place.stop - place.start, device="meta")) for place in places]

    # A rank lists its rectangles; the first rank puts layouts and files together.
    def own() -> int:
        layout = layout_of(flat, of_rank)
        return len(RankStates(of_rank.world.rank, [layout], [dict.fromkeys(STATES, parts)]).tensors())

    count, seconds, peak = measured(own)
    print(f"any rank: {count} rectangles, {seconds:.3f} s, {peak / 2**20:.1f} MiB")
    layout = layout_of(flat, of_rank)

    def first() -> int:
        files = [StoredFile(51 * 2**20, 9000, f"{number:016x}") for number in range(mesh.size)]
        layouts = [layout] * (mesh.tp * mesh.pp)
        received = [json.dumps(layout_to_json(one)) for one in layouts]
        state = RunState(step=1, sampler={}, architecture=config.to_dict(), mesh={})
        return len(Manifest(state=state, states=STATES, layouts=layouts, files=files).to_json()) + len(received)

    size, seconds, peak = measured(first)
    sent = sum(len(json.dumps(layout_to_json(layout))) for _ in range(mesh.tp * mesh.pp)) + mesh.size * 40
    print(
        f"the first rank besides: manifest of {size / 2**20:.2f} MiB, {seconds:.3f} s, "
        f"{peak / 2**20:.1f} MiB; it receives {sent / 2**20:.2f} MiB"
    )


def measured(action: Callable) -> tuple:
    """Result, seconds without and peak bytes with the tracing of memory."""
    seconds = timed(action)
    tracemalloc.start()
    result = action()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return result, seconds, peak


if __name__ == "__main__":
    main()
