"""The manifest of a checkpoint: the last file that is written, and the first that is read.

A checkpoint is a folder::

    step-000050/
      tensors-00000.safetensors   what one rank wrote (``tensor_file``)
      tensors-00001.safetensors
      run_state.json              the manifest, written when every other file is on disk

The manifest holds the run's state (step, place in the data, architecture, mesh), the layout of each flat buffer
(``layout``), and for each file its size, the size of its header and the header's checksum. A header holds the checksums
of the file's content, and the manifest ends with its own. So every byte that is read is covered by a checksum.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from operator import add, le
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from bytescale.checkpoint.layout import Layout, LayoutEntry
from bytescale.common.errors import CheckpointError
from bytescale.common.parsing import parse_json
from bytescale.storage.filesystems import credentials_hint
from bytescale.storage.place import Place, folders_in, is_url, read_file

FORMAT = 5
"""2, of version 0.1.0, was PyTorch's; 1, 3 and 4 were never released. None of them is read any more."""
MANIFEST = "run_state.json"
_STEP_NAME = re.compile(r"step-(\d{6,})")
OLDER = "use an older checkpoint of the run (`bytescale checkpoint verify` says which are whole), or a trusted copy"


class CheckpointDamage(CheckpointError):
    """A file of a checkpoint is missing, truncated, or not what was written."""


@dataclass(frozen=True, kw_only=True)
class RunState:
    """Everything but tensors that continuing exactly needs."""

    step: int  # optimizer updates done
    sampler: dict[str, Any]  # where the data order stands
    architecture: dict[str, Any]
    mesh: dict[str, int]  # that wrote it; for people only
    numbers: dict[str, float] = field(default_factory=dict)  # states of the optimizer that are single numbers
    best: dict[str, float] = field(default_factory=dict)  # the lowest loss of evaluations (`train.loop.evaluation`)


class StoredFile(NamedTuple):
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

    def to_json(self) -> bytes:
        content = {
            "format": FORMAT,
            **asdict(self.state),
            "states": list(self.states),
            "layouts": [layout_to_json(layout) for layout in self.layouts],
            "files": list(self.files),
        }
        return json.dumps({**content, "checksum": checksum_of(_canonical(content))}).encode()


_MOST_HEADER_BYTES = 2**28
"""A header has some 150 bytes for a tensor."""


def checksum_of(content: bytes | bytearray | memoryview) -> str:
    """XXH3 in 64 bits, as hex digits. It finds accidents, not forgeries: what a stranger wrote runs no code anyway."""
    return xxhash.xxh3_64_hexdigest(content)


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
    if content.pop("checksum", None) != checksum_of(_canonical(content)):
        raise damaged(folder, MANIFEST, "its content has another checksum than when it was written")
    try:
        manifest = _manifest_of(content)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise damaged(folder, MANIFEST, f"it describes no checkpoint ({printable(error)})") from error
    state = manifest.state
    name = folder.resolve().name if isinstance(folder, Path) else folder.name
    named = _STEP_NAME.fullmatch(name)
    if named and int(named[1]) != state.step:
        raise damaged(folder, MANIFEST, f"it is of step {state.step}, and its folder is named {name}")
    return manifest


def _manifest_of(content: dict[str, Any]) -> Manifest:
    """Raises ``AttributeError``, ``KeyError``, ``TypeError`` or ``ValueError`` for what no run has written.

    What is read later may rely on it: files have the bytes that tensors need, and parts lie inside of their tensors.
    """
    manifest = Manifest(
        state=RunState(**{own.name: content[own.name] for own in fields(RunState)}),
        states=content["states"],
        layouts=list(map(layout_from_json, content["layouts"])),
        files=[StoredFile(*row) for row in content["files"]],
    )
    state, total = manifest.state, sum(file.num_bytes for file in manifest.files)
    right = {
        "its step": _is_number(state.step),
        "its state": all(isinstance(own, dict) for own in (state.sampler, state.architecture, state.mesh, state.best)),
        "its states": all(isinstance(own, str) for own in manifest.states),
        "its files": all(
            _is_number(file.num_bytes, file.header_bytes) and file.header_bytes <= _MOST_HEADER_BYTES
            for file in manifest.files
        ),
        "its layouts": all(
            _is_number(*own.bounds, *own.files, own.most_elements)
            and len(own.bounds) > 1
            and list(own.bounds) == sorted({0, *own.bounds})
            and len({*own.files}) == len(own.files) > 0
            and max(own.files) < len(manifest.files)
            and own.bounds[-1] <= total
            for own in manifest.layouts
        ),
        "its parts": all(
            isinstance(entry.name, str)
            and _is_number(entry.start, *entry.shape, *entry.offsets, *entry.sizes)
            and len(entry.shape) == len(entry.offsets) == len(entry.sizes)
            and entry.start + math.prod(entry.sizes) <= layout.bounds[-1]
            and math.prod(entry.shape) <= total
            and all(map(le, map(add, entry.offsets, entry.sizes), entry.shape))
            for layout in manifest.layouts
            for entry in layout.entries
        ),
    }
    if wrong := [what for what, is_right in right.items() if not is_right]:
        raise ValueError(wrong[0])
    return manifest


def _is_number(*values: object) -> bool:
    return all(isinstance(value, int) and not isinstance(value, bool) and value >= 0 for value in values)


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


def layout_to_json(layout: Layout) -> dict[str, Any]:
    """As JSON, plain lists: some 100 bytes a parameter."""
    return {spec.name: getattr(layout, spec.name) for spec in fields(layout)}


def layout_from_json(content: dict[str, Any]) -> Layout:
    """The inverse of ``layout_to_json``."""
    entries = [
        LayoutEntry(name, tuple(shape), tuple(offsets), tuple(sizes), start, written)
        for name, shape, offsets, sizes, start, written in content["entries"]
    ]
    return Layout(tuple(entries), tuple(content["bounds"]), tuple(content["files"]), content["most_elements"])
