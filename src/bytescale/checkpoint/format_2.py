"""Reading a checkpoint of torch.distributed.checkpoint (DCP) without running anything that it contains.

DCP keeps the names, shapes and places of all tensors in the file ``.metadata``, which is a pickle. A pickle may name
any function, and ordinary unpickling calls it. Here a pickle is read in two steps. First, an unpickler accepts the
names of DCP's own metadata classes and refuses every other name; even those classes are replaced by records that only
keep what they are given. Then DCP's objects are built from the records, and every field is checked.

The tensors themselves are read by ``torch.load(weights_only=True)``, PyTorch's own restricted unpickler.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from bytescale.common.errors import BytescaleError, CheckpointError, problem

METADATA_FILE = ".metadata"
_OLDER = "use an older checkpoint of the run, or a copy from a source that you trust"


class TensorPlanner(DefaultLoadPlanner):
    """DCP's own planner, for tensors alone: DCP would unpickle any other object without restrictions."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Refuse. ``read_metadata`` has refused such a checkpoint before, with the name of its folder."""
        raise CheckpointError(
            problem(
                f"the checkpoint keeps {read_item.dest_index.fqn} as a pickled object, not as a tensor",
                so="reading it could run code that the object contains, so it was not read",
                fix=_OLDER,
            )
        )


def load_tensors(
    folder: Path,
    tensors: dict[str, Any],
    *,
    planner: TensorPlanner,
    group: dist.ProcessGroup | None = None,
    metadata: Metadata | None = None,
) -> None:
    """Fill ``tensors`` from the checkpoint in ``folder``: the only way by which tensors of a checkpoint are read.

    Args:
        group: of all ranks, which all call this; None: this process reads alone.
        metadata: of ``folder``, where ``read_metadata`` was called before.

    Raises:
        CheckpointError: on every rank, when a rank could not read what it needs.
    """
    reader = _Reader(folder, metadata)
    try:
        dcp.load(tensors, storage_reader=reader, planner=planner, process_group=group, no_dist=group is None)
    except CheckpointException as error:
        _, (cause, _) = min(error.failures.items())
        if isinstance(cause, BytescaleError):
            raise CheckpointError(str(cause)) from error
        lines = str(cause).strip().splitlines() or [""]
        raise CheckpointError(
            problem(
                f"the tensors of {folder} could not be read ({type(cause).__name__}: {lines[0]})",
                so="the checkpoint is damaged or incomplete, and it is not used",
                fix=_OLDER,
            )
        ) from error


def read_metadata(folder: Path) -> Metadata:
    """Names, shapes and places of the tensors in ``folder``. Nothing that the file names is called.

    Raises:
        CheckpointError: the file is missing or damaged, names anything but DCP's own metadata classes, has an object
            that is no tensor, or places a tensor outside of ``folder``.
    """
    path = folder / METADATA_FILE
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(
            problem(f"{folder} has no weights ({error})", fix="name a complete checkpoint")
        ) from error
    try:
        return _metadata(_Unpickler(io.BytesIO(content)).load())
    except _RefusedName as error:
        raise CheckpointError(
            problem(
                f"{path} names {_printable(error)}, which no checkpoint of bytescale does",
                so="the file may have been made to run code on this machine, so nothing of it was called or loaded",
                fix=_OLDER,
            )
        ) from error
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise CheckpointError(
            problem(
                f"{path} is no metadata of a checkpoint: {_printable(error) or type(error).__name__}",
                so="the checkpoint is damaged or was not written by bytescale, and nothing of it was loaded",
                fix=_OLDER,
            )
        ) from error


def _printable(error: Exception) -> str:
    """What a stranger's file says, without characters that would steer a terminal."""
    return str(error)[:200].encode("unicode_escape").decode()


class _Reader(FileSystemReader):
    """DCP's reader of folders, with our way of reading metadata."""

    def __init__(self, folder: Path, metadata: Metadata | None) -> None:
        super().__init__(str(folder))
        self._folder = folder
        self._metadata = metadata
        self._refusal: CheckpointError | None = None

    def read_metadata(self) -> Metadata:
        # When this raises, DCP logs a stack trace and looks for other files: the error waits for the next call.
        try:
            return self._metadata or read_metadata(self._folder)
        except CheckpointError as error:
            self._refusal = error
            return Metadata(state_dict_metadata={}, storage_data={})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if self._refusal is not None:
            raise self._refusal
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)


class _RefusedName(pickle.UnpicklingError):
    """The name of something that is no part of a checkpoint."""


class _Record:
    """Stands for an object of a pickle: it keeps what the pickle gives it, and does nothing."""

    arguments: tuple[object, ...]
    state: object = None

    def __new__(cls, *arguments: object) -> _Record:
        record = super().__new__(cls)
        record.arguments = arguments
        return record

    def __setstate__(self, state: object) -> None:
        self.state = state


def _records(module: str, *names: str) -> dict[tuple[str, str], type[_Record]]:
    return {(module, name): type(name, (_Record,), {}) for name in names}


_RECORDS = {
    **_records(
        dcp_metadata.__name__,
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "TensorProperties",
        "ChunkStorageMetadata",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    ),
    **_records("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    **_records("torch.serialization", "_get_layout"),
    **_records("pathlib", "PosixPath", "WindowsPath"),
    **_records("pathlib._local", "PosixPath", "WindowsPath"),  # Python 3.13
}
_DTYPES = {name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "float64")}


class _Unpickler(pickle.Unpickler):
    """Knows the names that DCP writes, and refuses every other."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _RECORDS:
            return _RECORDS[module, name]
        if module == "torch" and name == "Size":
            return torch.Size
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        raise _RefusedName(f"{module}.{name}")


def _metadata(record: object) -> Metadata:
    """What the planner left for itself, and paths of the writing machine, are not taken over: reading needs neither."""
    fields = _fields(record, "Metadata")
    tensors = {_text(name): _tensor(_text(name), entry) for name, entry in _dict(fields["state_dict_metadata"]).items()}
    places = {_index(index): _place(place) for index, place in _dict(fields["storage_data"]).items()}
    for name, tensor in tensors.items():
        for chunk in tensor.chunks:
            if MetadataIndex(name, chunk.offsets) not in places:
                raise ValueError(f"it has no place for the part of {name} at {tuple(chunk.offsets)}")
    # DCP's type of the dictionary has objects that are no tensors in it, too.
    known: dict[str, Any] = dict(tensors)
    return Metadata(state_dict_metadata=known, storage_data=places, storage_meta=StorageMeta())


def _tensor(name: str, record: object) -> TensorStorageMetadata:
    if type(record).__name__ == "BytesStorageMetadata":
        raise ValueError(f"it calls {name} a pickled object, where checkpoints of bytescale have tensors alone")
    fields = _fields(record, "TensorStorageMetadata")
    chunks = fields["chunks"]
    if type(chunks) is not list:
        raise ValueError(f"the parts of {name} are no list")
    size, parts = _size(fields["size"]), [_chunk(part) for part in chunks]
    if sum(part.sizes.numel() for part in parts) != size.numel():
        raise ValueError(f"the parts of {name} are not the whole of it")
    return TensorStorageMetadata(properties=_properties(fields["properties"]), size=size, chunks=parts)


def _properties(record: object) -> TensorProperties:
    state = _record(record, "TensorProperties").state
    if type(state) is not tuple or len(state) != 5 or not isinstance(state[0], torch.dtype):
        raise ValueError("a tensor has no dtype")
    dtype, layout, _, memory_format, _ = state
    layout_name = _record(layout, "_get_layout").arguments
    encoding = _record(memory_format, "_MEM_FORMAT_ENCODING").arguments
    if layout_name != ("torch.strided",) or encoding != (0,):
        raise ValueError("a tensor is not dense and contiguous")
    return TensorProperties(dtype=dtype)


def _chunk(record: object) -> ChunkStorageMetadata:
    fields = _fields(record, "ChunkStorageMetadata")
    return ChunkStorageMetadata(offsets=_size(fields["offsets"]), sizes=_size(fields["sizes"]))


def _index(record: object) -> MetadataIndex:
    fields = _fields(record, "MetadataIndex")
    index = fields["index"]
    return MetadataIndex(_text(fields["fqn"]), _size(fields["offset"]), None if index is None else _count(index))


def _place(record: object) -> _StorageInfo:
    fields = _fields(record, "_StorageInfo")
    path = _text(fields["relative_path"])
    if path in ("", ".", "..") or "/" in path or "\\" in path:
        raise ValueError(f"it places a tensor in {path!r}, which is no file of the checkpoint's folder")
    if fields.get("transform_descriptors"):
        raise ValueError(f"{path} is compressed or changed in a way that bytescale never writes")
    return _StorageInfo(relative_path=path, offset=_count(fields["offset"]), length=_count(fields["length"]))


def _record(value: object, name: str) -> _Record:
    if not isinstance(value, _Record) or type(value).__name__ != name:
        raise ValueError(f"it has {type(value).__name__} where {name} is expected")
    return value


def _fields(record: object, name: str) -> Mapping[str, object]:
    return _dict(_record(record, name).state)


def _dict(value: object) -> dict[Any, object]:
    if type(value) is not dict:
        raise ValueError(f"it has {type(value).__name__} where a dictionary is expected")
    return value


def _text(value: object) -> str:
    if type(value) is not str:
        raise ValueError(f"it has {type(value).__name__} where a name is expected")
    return value


def _count(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"it has {value!r} where a number from 0 is expected")
    return value


def _size(value: object) -> torch.Size:
    if type(value) is not torch.Size:
        raise ValueError(f"it has {type(value).__name__} where a shape is expected")
    return torch.Size([_count(length) for length in value])
