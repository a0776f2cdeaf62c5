"""Reads tensors of a checkpoint that any mesh has written: into an optimizer's states, or whole ones."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bytescale.checkpoint.agree import together
from bytescale.checkpoint.layout import Box, Layout, LayoutEntry
from bytescale.checkpoint.manifest import MANIFEST, RunState, damaged, file_name, read_manifest
from bytescale.checkpoint.tensor_file import TensorFile, piece_name
from bytescale.checkpoint.writing import DTYPES, RankStates, bytes_of
from bytescale.common.errors import CheckpointError
from bytescale.runtime.optimizer.sharded_optimizer import ShardedOptimizer
from bytescale.storage.place import Place, is_url, place_at

_OPEN_FILES = 64
"""Headers that are kept in memory."""
_JOINED_BYTES = 64 * 2**20
"""Neighbours behind a URL are read together up to so many bytes. On a disk there is nothing to gain."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A rectangle of a parameter's state, and the tensor of its sizes that takes it."""

    state: str
    parameter: str
    box: Box
    target: Tensor


@dataclass(frozen=True, slots=True)
class _Request:
    """What a wanted rectangle shares with a stored one, and the view that takes it."""

    stored: Box
    shared: Box
    target: Tensor


class CheckpointReader:
    """Reads tensors of one checkpoint. Raises ``CheckpointError`` for what is not there or is damaged."""

    def __init__(self, place: str | Place) -> None:
        self.folder = place_at(place)
        self.manifest = read_manifest(self.folder)
        self.state = self.manifest.state
        """What the checkpoint says of itself."""
        self._holders: dict[str, list[tuple[Layout, LayoutEntry]]] = defaultdict(list)
        for layout in self.manifest.layouts:
            for entry in layout.entries:
                if entry.written:
                    self._holders[entry.name].append((layout, entry))
        self._open = lru_cache(_OPEN_FILES)(
            lambda number: TensorFile(self.folder, file_name(number), self.manifest.files[number])
        )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor, by the name ``state.parameter``."""
        whole = {name: held[0][1].shape for name, held in self._holders.items()}
        return {f"{state}.{name}": shape for state in self.manifest.states for name, shape in whole.items()}

    def read(self, name: str) -> Tensor:
        """A whole tensor by the name ``state.parameter``, in the dtype in which it is stored."""
        state, _, parameter = name.partition(".")
        shape = self._holders_of(parameter)[0][1].shape
        box = (tuple(0 for _ in shape), shape)
        with self._consistent():
            if (first := next(self._sources(parameter, box), None)) is None:
                raise KeyError(name)
            number, stored, _ = first
            target = torch.empty(shape, dtype=_dtype_of(self._open(number), piece_name(state, parameter, stored)))
        self.fill([Wanted(state, parameter, box, target)])
        return target

    @contextmanager
    def _consistent(self) -> Iterator[None]:
        """Raise ``CheckpointDamage`` where files do not have what the manifest says of them: somebody has forged it."""
        try:
            yield
        except LookupError as error:
            raise damaged(self.folder, MANIFEST, f"its files have something else ({error!r})") from error

    def fill(self, wanted: Sequence[Wanted]) -> None:
        """Fill every target. Files are read one after the other, each from its start to its end."""
        requests: dict[int, dict[str, list[_Request]]] = defaultdict(lambda: defaultdict(list))
        for one in wanted:
            if one.state not in self.manifest.states:
                raise self._lacks(f"{one.state}.{one.parameter}")
            found = 0
            for number, stored, shared in self._sources(one.parameter, one.box):
                target = one.target[slices_in(shared, one.box)]
                requests[number][piece_name(one.state, one.parameter, stored)].append(_Request(stored, shared, target))
                found += math.prod(shared[1])
            if found != math.prod(one.box[1]):
                raise self._lacks(f"a part of {one.state}.{one.parameter}")
        with self._consistent():
            for number in sorted(requests):
                self._serve(self._open(number), requests[number])

    def _serve(self, file: TensorFile, requests: dict[str, list[_Request]]) -> None:
        for span in file.spans(requests, _JOINED_BYTES if is_url(self.folder) else 0):
            own = requests[span[0]]
            if len(span) == len(own) == 1 and _takes_bytes(file, span[0], own[0]):
                list(file.read(span, bytes_of(own[0].target)))
                continue
            for piece, content in file.read(span):
                for request in requests[piece]:
                    stored = torch.frombuffer(content, dtype=_dtype_of(file, piece)).view(request.stored[1])
                    request.target.copy_(stored[slices_in(request.shared, request.stored)])

    def _sources(self, parameter: str, box: Box) -> Iterator[tuple[int, Box, Box]]:
        for layout, entry in self._holders_of(parameter):
            yield from layout.overlapping(entry, box)

    def _holders_of(self, parameter: str) -> list[tuple[Layout, LayoutEntry]]:
        if parameter not in self._holders:
            raise self._lacks(parameter)
        return self._holders[parameter]

    def _lacks(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"the checkpoint {self.folder} has no {what}", fix="name a complete checkpoint of this model"
        )


def load_states(
    place: str | Place,
    optimizer: ShardedOptimizer,
    architecture: dict[str, Any],
    group: dist.ProcessGroup,
    *,
    only: Sequence[str] | None = None,
) -> RunState:
    """Fill this rank's parts of the states, or ``only`` some of them. All ranks of ``group`` call it.

    Raises ``CheckpointError`` on every rank when a rank could not read what it needs, or the checkpoint is of another
    model than ``architecture``. States may be partly filled.
    """
    with together(group):
        reader = CheckpointReader(place)
        check_same_model(place, reader.state.architecture, architecture)
        if only is None and reader.state.step:
            optimizer.require_states()
        reader.fill([one for one in wanted_by(optimizer) if only is None or one.state in only])
    return reader.state


def wanted_by(optimizer: ShardedOptimizer) -> list[Wanted]:
    """This rank's parts of all states."""
    parts = RankStates.of(optimizer).parts()
    return [Wanted(state, piece.entry.name, piece.box, target) for state, piece, target in parts]


def check_same_model(place: str | Place, there: dict[str, Any], here: dict[str, Any]) -> None:
    """Raise ``CheckpointError`` when two architectures differ, with what differs."""
    if isinstance(there.get("config_json"), dict) and isinstance(here.get("config_json"), dict):
        there, here = there | there["config_json"], here | here["config_json"]
    different = [
        f"{key} {there.get(key)} there, {here.get(key)} here"
        for key in sorted({*there, *here} - {"config_json"})
        if there.get(key) != here.get(key)
    ]
    if different:
        raise CheckpointError(
            f"{place} is a checkpoint of another model ({'; '.join(different)})",
            so="its weights do not fit",
            fix="resume with the config.toml of its run folder, or start a new run",
        )


def slices_in(inner: Box, outer: Box) -> tuple[slice, ...]:
    """Where ``inner`` lies in the rectangle ``outer`` around it."""
    return tuple(slice(a - b, a - b + n) for a, b, n in zip(inner[0], outer[0], inner[1], strict=True))


def _takes_bytes(file: TensorFile, piece: str, request: _Request) -> bool:
    """Whether the file's bytes can be read straight into the target's memory."""
    target = request.target
    is_plain = target.device.type == "cpu" and target.is_contiguous()
    return is_plain and request.shared == request.stored and target.dtype == _dtype_of(file, piece)


def _dtype_of(file: TensorFile, piece: str) -> torch.dtype:
    return DTYPES[file.tensors[piece].dtype]
