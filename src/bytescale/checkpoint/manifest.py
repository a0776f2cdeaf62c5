"""The manifest of a checkpoint: the last file that is written, and the first that is read.

A checkpoint is a folder::

    step-000050/
      tensors-00000.safetensors   what one rank wrote (``tensor_file``)
      tensors-00001.safetensors
      run_state.json              the manifest, written when every other file is on disk

The manifest holds the run's state (step, place in the data, architecture, mesh), the layout of each HDP group
(``layout``), and for each file its size, the size of its header and the header's checksum. A header holds the checksums
of the file's content, and the manifest ends with its own. So every byte that is read is covered by a checksum.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import typing
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, astuple, dataclass, field, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

from bytescale.checkpoint.disk import checksum_of
from bytescale.checkpoint.layout import Layout, LayoutEntry
from bytescale.common.errors import CheckpointError
from bytescale.common.parsing import parse_json
from bytescale.storage.filesystems import credentials_hint
from bytescale.storage.place import Place, folders_in, is_url, read_file

FORMAT = 4
"""1 stored flat buffers, 2 was PyTorch's, of version 0.1.0, and 3 had checksums of blocks; none is read any more."""
MANIFEST = "run_state.json"
_STEP_NAME = re.compile(r"step-(\d{6,})")
OLDER = "use an older checkpoint of the run (`bytescale checkpoint verify` says which are whole), or a trusted copy"

Value = TypeVar("Value")


class CheckpointDamage(CheckpointError):
    """A file of a checkpoint is missing, truncated, or not what was written."""


@dataclass(frozen=True, kw_only=True)
class RunState:
    """Everything but tensors that continuing exactly needs."""

    step: int  # optimizer updates done
    sampler: dict[str, Any]  # where the data order stands
    architecture: dict[str, Any]
    mesh: dict[str, int]  # that wrote it; for people only
    best: dict[str, float] = field(default_factory=dict)  # the lowest loss of evaluations (`train.loop.evaluation`)


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file with tensors, as its writer reported it. Sizes in bytes."""

    num_bytes: int
    header_bytes: int
    checksum: str  # of the header


@dataclass(frozen=True, kw_only=True)
class Manifest:
    state: RunState
    states: Sequence[str]
    """Names of the optimizer's states that are stored: ``master``, ``exp_avg``, ``exp_avg_sq``."""
    layouts: Sequence[Layout]
    files: Sequence[StoredFile]

    def entries(self) -> dict[str, LayoutEntry]:
        """The stored parameters by name. Of a parameter's parts, any stands for it."""
        return {entry.name: entry for layout in self.layouts for entry in layout.entries if entry.written}

    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    def to_json(self) -> bytes:
        content = {
            "format": FORMAT,
            **asdict(self.state),
            "states": list(self.states),
            "layouts": [layout_to_json(layout) for layout in self.layouts],
            "files": [astuple(file) for file in self.files],
            "companions": {},  # older versions expect it
        }
        return json.dumps({**content, "checksum": checksum_of(_canonical(content))}).encode()


def file_name(number: int) -> str:
    return f"tensors-{number:05d}.safetensors"


def step_name(step: int) -> str:
    return f"step-{step:06d}"


def steps_in(folder: Place) -> list[int]:
    """The steps of the checkpoints in a folder, in rising order. Raises ``OSError``."""
    return sorted(int(match[1]) for name in folders_in(folder) if (match := _STEP_NAME.fullmatch(name)))


def step_of(name: str) -> int:
    """Return the step of the folder of a checkpoint: the inverse of ``step_name``."""
    return int(name.removeprefix("step-"))


def read_manifest(folder: Place) -> Manifest:
    """The manifest of a checkpoint.

    Raises ``CheckpointDamage`` if its checksum is wrong, or the folder has the name of another step;
    ``CheckpointError`` if the folder is no checkpoint, or of another format.
    """
    content = _content(folder)
    rest = {name: value for name, value in content.items() if name != "checksum"}
    if content.get("checksum") != checksum_of(_canonical(rest)):
        raise damaged(folder, MANIFEST, "its content has another checksum than when it was written")
    try:
        state = typed(
            RunState, {"best": {}} | {own.name: rest[own.name] for own in fields(RunState) if own.name in rest}
        )
        files = typed(list[StoredFile], content["files"])
        manifest = Manifest(
            state=state,
            states=typed(list[str], content["states"]),
            layouts=[layout_from_json(item, len(files)) for item in typed(list[Any], content["layouts"])],
            files=files,
        )
    except (KeyError, ValueError, TypeError, IndexError) as error:
        raise damaged(folder, MANIFEST, f"it has no valid {printable(error)}") from error
    name = folder.resolve().name if isinstance(folder, Path) else folder.name
    named = _STEP_NAME.fullmatch(name)
    if named and int(named[1]) != state.step:
        raise damaged(folder, MANIFEST, f"it is of step {state.step}, and its folder is named {name}")
    return manifest


def _content(folder: Place) -> dict[str, Any]:
    """What the manifest holds. Raises ``CheckpointError`` unless it is of this format."""
    try:
        content = parse_json(read_file(folder / MANIFEST))
        if type(content) is not dict:
            raise ValueError(f"{MANIFEST} is no JSON object")
        found = content.get("format", 1)
        if found != FORMAT:
            newer = isinstance(found, int) and found > FORMAT
            raise ValueError(
                f"it has format {found}, and this version reads {FORMAT}"
                + ("; a newer version of bytescale wrote it" if newer else "")
            )
        return content
    except FileNotFoundError as error:
        what = f"the folder {folder} is not a checkpoint of bytescale: it has no {MANIFEST}"
        raise CheckpointError(what, fix=_NAME_A_CHECKPOINT) from error
    except OSError as error:
        raise unreachable(error, folder) from error
    except ValueError as error:
        what = f"the folder {folder} is not a checkpoint of bytescale: {printable(error)}"
        raise CheckpointError(what, fix=_NAME_A_CHECKPOINT) from error


_NAME_A_CHECKPOINT = "name a folder checkpoints/step-*"


def damaged(folder: Place, name: str, what: str) -> CheckpointDamage:
    """The error for a file that is not what was written."""
    return CheckpointDamage(f"the checkpoint {folder} is damaged: {name}: {what}", so="none of it is used", fix=OLDER)


def unreachable(error: OSError, place: object) -> CheckpointError:
    """The error for a store, or a disk, that does not give or take a file."""
    where = error.filename or place
    fix = "mend it, then run the same command again"
    if is_url(where):
        fix = (
            f"check the URL, the network and the credentials{credentials_hint(str(where))}, then run the same command "
            "again"
        )
    return CheckpointError(f"{where} cannot be reached ({error.strerror or error})", fix=fix)


def printable(text: object) -> str:
    """What a stranger's file says, without characters that would steer a terminal."""
    return str(text)[:200].encode("unicode_escape").decode()


def _canonical(content: dict[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


_NO_DOMAIN = {"domain": 1, "domain_start": 0}


def layout_to_json(layout: Layout) -> dict[str, Any]:
    """Plain lists, some 100 bytes a parameter."""
    columns = [spec.name for spec in fields(LayoutEntry)]
    own = {spec.name: getattr(layout, spec.name) for spec in fields(layout)}
    if layout.domain == 1:  # as before there were domains
        own = {name: value for name, value in own.items() if name not in _NO_DOMAIN}
    return own | {"entries": [[getattr(entry, name) for name in columns] for entry in layout.entries]}


def layout_from_json(content: Any, num_files: int) -> Layout:
    """The inverse of ``layout_to_json``. Raises ``ValueError`` for anything else."""
    layout = typed(Layout, _NO_DOMAIN | content)
    if not (layout.num_shards and layout.stride and layout.most_elements and layout.domain):
        raise ValueError("number of at least 1")
    if layout.file_of(layout.num_shards - 1) >= num_files:
        raise ValueError("number of files")
    if layout.num_shards % layout.domain:
        raise ValueError("division of shards")
    starts = [entry.start for entry in layout.entries]
    if starts != sorted(starts) or len(layout.bounds) < 2 or list(layout.bounds) != sorted(set(layout.bounds)):
        raise ValueError("order of parameters and buckets")
    if any((b - a) % layout.num_shards for a, b in itertools.pairwise(layout.bounds)):
        raise ValueError("division of buckets")
    if layout.entries and layout.entries[-1].stop > layout.bounds[-1]:
        raise ValueError("size of buckets")
    for entry in layout.entries:
        if any(a + n > whole for a, n, whole in zip(entry.offsets, entry.sizes, entry.shape, strict=True)):
            raise ValueError(f"part of {entry.name}")
        if math.prod(entry.shape) > 2**62:
            raise ValueError(f"shape of {entry.name}")
    return layout


def typed(hint: type[Value], value: Any) -> Value:
    """Return ``value``, which JSON held, as a ``hint``: a dataclass, a list, tuple or dictionary, or a plain type.

    A dataclass is an object with the names of its fields, or a list of their values. Whole numbers are at least 0.
    Raises ``ValueError`` for anything else.
    """
    return cast(Value, _reader(cast(Hashable, hint))(value))


@cache
def _reader(hint: Any) -> Callable[[Any], Any]:
    """What ``typed`` does for a hint. It is made once: a manifest has 100,000s of values."""
    kind, inner = typing.get_origin(hint) or hint, typing.get_args(hint)
    known = {tuple: (list,), float: (int, float)}.get(kind, (kind,))
    own = [_reader(one) for one in inner if one is not ...]
    named = {name: _reader(one) for name, one in typing.get_type_hints(hint).items()} if is_dataclass(hint) else {}

    def of_fields(value: Any) -> Any:
        content = dict(zip(named, value, strict=True)) if type(value) is list else value
        if type(content) is not dict or content.keys() != named.keys():
            raise ValueError(f"{kind.__name__} (it has {value!r})")
        return kind(**{name: read(content[name]) for name, read in named.items()})

    def of_plain(value: Any) -> Any:
        if type(value) not in known:
            raise ValueError(f"{kind.__name__} (it has {value!r})")
        if kind is int and value < 0:
            raise ValueError(f"number of at least 0 (it has {value})")
        if kind is dict and inner:
            return {own[0](key): own[1](item) for key, item in value.items()}
        if kind is list or inner[1:] == (...,):
            return kind(map(own[0], value))
        if kind is tuple:
            return tuple(read(item) for read, item in zip(own, value, strict=True))
        return value

    return of_fields if named else of_plain if kind is not Any else lambda value: value
