"""Optimizers with known states on small meshes of threads, to be saved on one mesh and restored on another."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from bytescale.checkpoint.checkpointer import Checkpointer
from bytescale.checkpoint.manifest import RunState
from bytescale.checkpoint.reading import Wanted, wanted_by
from bytescale.config.architecture import Architecture
from bytescale.config.schema import CheckpointConfig, OptimizerConfig
from bytescale.runtime.mesh import Mesh, MeshShape
from bytescale.runtime.optimizer.sharded_optimizer import ShardedOptimizer
from bytescale.train.parts.own_model import build_own_model
from tests.helpers.ranks import run_mesh
from tests.helpers.steps import small_shape

Result = TypeVar("Result")
STATES = ("master", "exp_avg", "exp_avg_sq")
SHAPE = small_shape(vocab_size=64, hidden_size=16, num_heads=4, num_kv_heads=2, ffn_hidden_size=24)


def make_optimizer(mesh: Mesh, shape: Architecture = SHAPE, bucket_bytes: int = 1500) -> ShardedOptimizer:
    model = build_own_model(
        shape,
        mesh,
        dtype=torch.float32,
        seed=0,
        bucket_bytes=bucket_bytes if mesh.hdp.size > 1 else 0,
    )
    optimizer = ShardedOptimizer.of_config(model.parameters, OptimizerConfig(), mesh)
    optimizer.require_states()
    return optimizer


def whole_state(state: str, name: str, shape: tuple[int, ...], step: int) -> Tensor:
    """What a parameter's state is after ``step``, on any mesh."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{state}.{name}".encode()) + step)
    return torch.randn(shape, generator=generator)


def shapes(optimizer: ShardedOptimizer) -> dict[str, tuple[int, ...]]:
    return {entry.name: tuple(entry.cut.shape) for entry in optimizer.zeros[0].parameters.entries}


def expected(optimizer: ShardedOptimizer, part: Wanted, step: int) -> Tensor:
    whole = whole_state(part.state, part.parameter, shapes(optimizer)[part.parameter], step)
    return whole[tuple(slice(a, a + n) for a, n in zip(*part.box, strict=True))]


def set_states(optimizer: ShardedOptimizer, step: int) -> None:
    for part in wanted_by(optimizer):
        part.target.copy_(expected(optimizer, part, step))


def assert_states(optimizer: ShardedOptimizer, step: int) -> None:
    for part in wanted_by(optimizer):
        assert torch.equal(part.target, expected(optimizer, part, step)), (part.state, part.parameter, part.box)


def run_state(step: int, shape: Architecture = SHAPE) -> RunState:
    return RunState(step=step, sampler={"place": step * 7}, architecture=shape.as_dict(), mesh={"hdp": 1})


def with_checkpointer(
    mesh: MeshShape,
    folder: Path,
    work: Callable[[Checkpointer, ShardedOptimizer], Result],
    /,
    *,
    shape: Architecture = SHAPE,
    **config: object,
) -> list[Result]:
    """``work`` on every rank of a mesh of threads."""

    def one_rank(own: Mesh) -> Result:
        settings = CheckpointConfig(**{"background": False, **config})  # type: ignore[arg-type]
        assert own.world.group is not None
        return work(Checkpointer(folder, own.world.group, settings), make_optimizer(own, shape))

    return run_mesh(mesh, one_rank, timeout_seconds=60)


def save(mesh: MeshShape, folder: Path, *steps: int, shape: Architecture = SHAPE, **options: object) -> None:
    """Checkpoints after these steps, by all ranks of a mesh."""

    def work(checkpoints: Checkpointer, optimizer: ShardedOptimizer) -> None:
        for step in steps:
            set_states(optimizer, step)
            checkpoints.save(run_state(step, shape), optimizer)
        checkpoints.finish()

    with_checkpointer(mesh, folder, work, shape=shape, **options)  # type: ignore[arg-type]


def restore(mesh: MeshShape, folder: Path, shape: Architecture = SHAPE, name: str = "") -> int:
    """The newest checkpoint (or ``name``) on every rank of a mesh, compared bit for bit. Returns its step."""

    def work(checkpoints: Checkpointer, optimizer: ShardedOptimizer) -> int:
        path = folder / name if name else checkpoints.newest()
        assert path is not None, "there is a checkpoint"
        state = checkpoints.restore(path, optimizer, shape.as_dict())
        assert state.sampler == {"place": state.step * 7}
        assert_states(optimizer, state.step)
        return state.step

    (step,) = set(with_checkpointer(mesh, folder, work, shape=shape))
    return step
