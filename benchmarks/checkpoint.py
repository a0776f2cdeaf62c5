"""Checkpoints in format 3 beside format 2 (PyTorch's DCP): saving, restoring, the pause of a step, and planning.

    python benchmarks/checkpoint.py io          # save and restore 1 GiB, in turns
    python benchmarks/checkpoint.py pause       # of a training step while a checkpoint is written behind it
    python benchmarks/checkpoint.py plan        # 70B on 16,384 ranks: what the first and any other rank plan

Both formats run in one process and in turns, with a page cache that holds what was just written, so that it is the
formats that are compared and not the disk. ``plan`` runs the real planning code of both formats with the real layout
of Llama 70B (tp 8, pp 4) without tensors; of the 16,384 ranks, those of one HDP group are planned one by one, and the
first rank's work on what it gets from all others is done in full.
"""

from __future__ import annotations

import argparse
import json
import pickle
import shutil
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.checkpoint.meshes import Ranks
from tests.helpers.format_2 import PieceWriter, host_copies, write_format_2, written_pieces

from bytescale.checkpoint import Checkpointer, RunState
from bytescale.checkpoint import format_2_states as old
from bytescale.checkpoint.manifest import Manifest, StoredFile, layout_to_json
from bytescale.checkpoint.writing import Snapshot, layout_of
from bytescale.config import (
    Architecture,
    CheckpointConfig,
    ModelConfig,
    OptimizerConfig,
    TrainerConfig,
    resolve_architecture,
)
from bytescale.runtime import FlatParameters, Mesh, MeshShape, RankGroup, ShardedAdamW
from bytescale.train.parts import own_model

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


def optimizer_of(num_bytes: float) -> tuple[ShardedAdamW, Architecture]:
    """An optimizer whose three states take so many bytes: layers of matrices, as a model's."""
    side, num_layers = 1024, max(1, round(num_bytes / 12 / (4 * 1024**2)))
    named = [
        (f"layers.{layer}.w{number}.weight", torch.nn.Parameter(torch.randn(side, side)))
        for layer in range(num_layers)
        for number in range(4)
    ]
    mesh = Mesh.of_hdp(RankGroup(dist.group.WORLD))
    optimizer = ShardedAdamW(FlatParameters(named, 1, bucket_bytes=25 * 2**20), OptimizerConfig(), mesh)
    for parts in optimizer.states().values():
        for part in parts:
            part.normal_()
    return optimizer, resolve_architecture(ModelConfig(preset="tiny"))


def timed(action: Callable[..., object], *arguments: object) -> float:
    began = time.perf_counter()
    action(*arguments)
    return time.perf_counter() - began


def save_and_restore(folder: Path, gib: float, rounds: int) -> None:
    """Files are synced to disk by both formats."""
    optimizer, shape = optimizer_of(gib * GIB)
    size = sum(part.numel() * 4 for parts in optimizer.states().values() for part in parts)
    group = dist.group.WORLD
    checkpoints = Checkpointer(folder / "3", Ranks(optimizer.mesh), CheckpointConfig(background=False, keep=1))
    seconds: dict[str, list[float]] = {f"{what} {form}": [] for form in (2, 3) for what in ("save", "restore")}
    for number in range(rounds + 1):
        state = RunState(step=number, sampler={}, architecture=shape.as_dict(), mesh={})
        two, three = folder / "2", folder / "3" / f"step-{number:06d}"
        shutil.rmtree(two, ignore_errors=True)
        taken = {
            "save 2": timed(write_format_2, two, state, optimizer, group),
            "save 3": timed(checkpoints.save, state, optimizer),
            "restore 2": timed(old.load_states, two, optimizer, group),
            "restore 3": timed(checkpoints.restore, three, optimizer, shape.as_dict()),
        }
        for name, value in taken.items():
            seconds[name] += [value] if number else []  # the first round warms up
    print(f"{size / GIB:.2f} GiB, median of {rounds} rounds (lowest to highest)")
    for what in ("save", "restore"):
        for form in (2, 3):
            values = seconds[f"{what} {form}"]
            print(f"{what:8} format {form}  {median(values):6.2f} s  ({min(values):.2f} to {max(values):.2f})")
        ratio = median(b / a for a, b in zip(seconds[f"{what} 2"], seconds[f"{what} 3"], strict=True))
        print(f"{what:8} ratio {ratio:.2f}")


def pauses(folder: Path, gib: float, rounds: int) -> None:
    """A step of matrix products again and again; how long the step with a checkpoint behind it takes."""
    optimizer, shape = optimizer_of(gib * GIB)
    matrix = torch.randn(1024, 1024)
    checkpoints = Checkpointer(folder / "3", Ranks(optimizer.mesh), CheckpointConfig(keep=1))

    def step() -> None:
        for _ in range(12):
            torch.mm(matrix, matrix)

    def new(number: int) -> None:
        checkpoints.save(RunState(step=number, sampler={}, architecture=shape.as_dict(), mesh={}), optimizer)

    thread = ThreadPoolExecutor(max_workers=1)

    def before(number: int) -> None:

        target = folder / "2" / str(number)
        shutil.rmtree(folder / "2", ignore_errors=True)
        target.mkdir(parents=True)
        pieces = written_pieces(optimizer, host_copies(optimizer))
        pending.append(
            thread.submit(
                dcp.save, pieces, checkpoint_id=str(target), planner=PieceWriter(), process_group=dist.group.WORLD
            )
        )

    pending: list = []
    alone = median(timed(step) for _ in range(20))
    print(f"a step alone: {alone * 1e3:.0f} ms; {gib} GiB, median of {rounds}")
    for name, save, wait in (
        ("format 2", before, lambda: pending.pop().result()),
        ("format 3", new, checkpoints.finish),
    ):
        stops, slower = [], []
        for number in range(1, rounds + 2):
            stops.append(timed(save, number))
            lasted, steps = 0.0, 0
            while not (pending[0].done() if pending else checkpoints._pending is None):
                lasted, steps = lasted + timed(step), steps + 1
                checkpoints.poll()
            wait()
            slower.append(lasted - steps * alone)
        print(
            f"{name}: training stops for {median(stops[1:]) * 1e3:.0f} ms, and loses "
            f"{median(slower[1:]) * 1e3:.0f} ms until the files are there"
        )


def meta_rank(shape: Architecture, mesh: MeshShape, rank: int) -> ShardedAdamW:
    """The flat buffers and the optimizer of one of 16,384 ranks, without memory."""

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
        tp=Group(tp, mesh.tp),
        forward=(),
        backward=(),
    )
    own_model.initial_values = lambda name, cut, *_: torch.empty(cut.part_shape, device="meta")  # type: ignore
    model = own_model.build_own_model(
        shape,
        of_rank,
        virtual_stages=1,
        dtype=torch.bfloat16,
        seed=0,
        bucket_bytes=int(TrainerConfig().gradient_bucket_mib * 2**20),
    )

    class Optimizer:
        parameters, mesh, hdp, tied_head = model.parameters, of_rank, own, None

        def states(self) -> dict[str, list[torch.Tensor]]:
            parts = [
                torch.empty(place.stop - place.start, device="meta") for place in model.parameters.shards(own.rank)
            ]
            return dict.fromkeys(STATES, parts)

    return Optimizer()  # type: ignore[return-value]


def planning() -> None:
    shape = resolve_architecture(ModelConfig(preset="70b"))
    mesh = MeshShape(hdp=512, tp=8, pp=4)
    print(
        f"70B on {mesh.size} ranks: pp {mesh.pp}, hdp {mesh.hdp}, tp {mesh.tp}; one rank is measured, the first twice"
    )
    optimizer = meta_rank(shape, mesh, rank=mesh.rank(1, 3, 2))

    # 1. Format 3: a rank lists its rectangles; the first rank puts layouts and files together.
    def own() -> int:
        layout = layout_of(optimizer)
        return len(Snapshot(layout, optimizer.hdp.rank, optimizer.states()).tensors())

    count, seconds, peak = measured(own)
    print(f"format 3, any rank: {count} rectangles, {seconds:.3f} s, {peak / 2**20:.1f} MiB")
    layout = layout_of(optimizer)

    def first() -> int:
        files = [StoredFile(51 * 2**20, 9000, 2**63 - number) for number in range(mesh.size)]
        layouts = [layout] * (mesh.tp * mesh.pp)
        received = [json.dumps(layout_to_json(one)) for one in layouts]
        state = RunState(step=1, sampler={}, architecture=shape.as_dict(), mesh={})
        return len(Manifest(state=state, states=STATES, layouts=layouts, files=files).to_json()) + len(received)

    size, seconds, peak = measured(first)
    sent = sum(len(json.dumps(layout_to_json(layout))) for _ in range(mesh.tp * mesh.pp)) + mesh.size * 40
    print(
        f"format 3, the first rank besides: manifest of {size / 2**20:.2f} MiB, {seconds:.3f} s, "
        f"{peak / 2**20:.1f} MiB; it receives {sent / 2**20:.2f} MiB"
    )

    # 2. Format 2: a rank makes its plan; the first rank gets all of them, and every rank's part back.
    def own_plan() -> object:
        planner = PieceWriter()
        planner.set_up_planner(written_pieces(optimizer, optimizer.states()), is_coordinator=False)
        return planner.create_local_plan()

    plan, seconds, peak = measured(own_plan)
    text = pickle.dumps(plan)
    print(f"format 2, any rank: {len(plan.items)} items, {seconds:.3f} s, {peak / 2**20:.1f} MiB")

    def all_plans(num_ranks: int) -> Callable[[], int]:
        def work() -> int:
            plans = [pickle.loads(text) for _ in range(num_ranks)]  # as gather_object makes them
            plans, metadata = create_default_global_save_plan(plans)
            return len(pickle.dumps(metadata))

        return work

    for num_ranks in (32, 128):  # of 16,384: time and memory are linear in the ranks
        size, seconds, peak = measured(all_plans(num_ranks))
        factor = mesh.size / num_ranks
        print(
            f"format 2, the first rank with the plans of {num_ranks} ranks: {seconds:.2f} s, {peak / 2**20:.0f} MiB; "
            f"times {factor:.0f}: {seconds * factor:.0f} s, {peak * factor / GIB:.1f} GiB; metadata of "
            f"{size * factor / 2**20:.0f} MiB, it receives {len(text) * mesh.size / GIB:.2f} GiB"
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
