"""Optimizers with known states on small meshes of threads, to be saved on one mesh and restored on another."""

from __future__ import annotations

import copy
import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from bytescale.checkpoint.checkpointer import Checkpointer
from bytescale.checkpoint.manifest import RunState
from bytescale.checkpoint.reading import Wanted, wanted_by
from bytescale.common.cut import Cut
from bytescale.config.description import ModelDescription
from bytescale.config.schema import CheckpointConfig, OptimizerConfig
from bytescale.hf.model.decoder import HFDecoder
from bytescale.hf.model.parallelize import parallelize
from bytescale.parity import small_model
from bytescale.runtime.mesh import Mesh, MeshShape
from bytescale.runtime.optimizer.flat import FlatParameters
from bytescale.runtime.optimizer.sharded_optimizer import ShardedOptimizer
from tests.helpers.ranks import run_mesh

Result = TypeVar("Result")
STATES = ("master", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Family:
    """A small decoder of transformers."""

    name: str
    tied: bool = False

    def as_dict(self) -> dict[str, Any]:
        """What a checkpoint says of the model."""
        return ModelDescription(content=_content_of(self)).as_dict()

    def model(self) -> Any:
        sizes = {"vocab_size": 64, "hidden_size": 16, "head_dim": 4, "intermediate_size": 24}
        return small_model(self.name, dtype=torch.float32, tie_word_embeddings=self.tied, **sizes)


SHAPE, TIED, MIXTURE = Family("llama"), Family("llama", tied=True), Family("mixtral")


@cache
def _content_of(shape: Family) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(shape.model().config.to_json_string(use_diff=False))
    return content


@cache
def cuts_of(shape: Family, tp: int, pp: int) -> dict[tuple[int, int], dict[str, Cut]]:
    """Which parts of which parameters a rank of a stage has, by stage and tensor-parallel rank."""
    model = shape.model()

    def one_rank(mesh: Mesh) -> tuple[tuple[int, int], dict[str, Cut]]:
        own = parallelize(HFDecoder(copy.deepcopy(model)), mesh)
        return (mesh.stage, mesh.tp.rank), {name: own.cuts[name] for name, _ in own.named}

    return dict(run_mesh(MeshShape(1, tp=tp, pp=pp), one_rank))


def make_optimizer(mesh: Mesh, shape: Family = SHAPE, bucket_bytes: int = 1500) -> ShardedOptimizer:
    """Of parameters that are zero. ``cuts_of`` is to be called before, outside of ranks."""
    cuts = cuts_of(shape, mesh.tp.size, mesh.shape.pp)[mesh.stage, mesh.tp.rank]
    named = [(name, nn.Parameter(torch.zeros(cut.part_shape))) for name, cut in cuts.items()]
    bucket_bytes = bucket_bytes if mesh.hdp.size > 1 else 0
    parameters = FlatParameters(named, mesh.hdp.size, cuts, bucket_bytes=bucket_bytes)
    optimizer = ShardedOptimizer.of_config(parameters, OptimizerConfig(), mesh)
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


def run_state(step: int, shape: Family = SHAPE) -> RunState:
    return RunState(step=step, sampler={"place": step * 7}, architecture=shape.as_dict(), mesh={"hdp": 1})


class Waiting(Checkpointer):
    """Every checkpoint is there, or has failed, when ``save`` returns."""

    def save(self, state: RunState, optimizer: ShardedOptimizer) -> None:
        super().save(state, optimizer)
        self._settle()


def with_checkpointer(
    mesh: MeshShape,
    folder: Path,
    work: Callable[[Checkpointer, ShardedOptimizer], Result],
    /,
    *,
    shape: Family = SHAPE,
    **config: object,
) -> list[Result]:
    """``work`` on every rank of a mesh of threads."""
    cuts_of(shape, mesh.tp, mesh.pp)

    def one_rank(own: Mesh) -> Result:
        settings = CheckpointConfig(**config)  # type: ignore[arg-type]
        assert own.world.group is not None
        return work(Waiting(folder, own.world.group, settings), make_optimizer(own, shape))

    return run_mesh(mesh, one_rank, timeout_seconds=60)


def save(mesh: MeshShape, folder: Path, *steps: int, shape: Family = SHAPE, **options: object) -> None:
    """Checkpoints after these steps, by all ranks of a mesh."""

    def work(checkpoints: Checkpointer, optimizer: ShardedOptimizer) -> None:
        for step in steps:
            set_states(optimizer, step)
            checkpoints.save(run_state(step, shape), optimizer)
        checkpoints.finish()

    with_checkpointer(mesh, folder, work, shape=shape, **options)  # type: ignore[arg-type]


def restore(mesh: MeshShape, folder: Path, shape: Family = SHAPE, name: str = "") -> int:
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
