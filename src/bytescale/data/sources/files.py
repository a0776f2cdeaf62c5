"""Turns ``data.sources`` into a list of files.

They are listed in the order of the sources, and sorted by path inside each source. This is also the order of the
documents in the tokenised corpus, the same on every machine.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import logging
import os
import re
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, Literal, cast, get_args

from bytescale.common.errors import ConfigError, typed_path
from bytescale.common.labels import OWN_FIELDS
from bytescale.storage.filesystems import credentials_hint, guarded, open_filesystem
from bytescale.storage.place import Place, Url, has_no_folders
from bytescale.storage.retry import UnreadableError, unreadable

FileFormat = Literal["text", "python", "jsonl", "parquet", "bin"]
"""python: source code that is cut into definitions (``definitions``). Only ``python:functions`` has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """One file of the corpus as it was when the sources were listed."""

    path: Place
    format: FileFormat
    num_bytes: int
    mtime_ns: int
    named: bool = False
    """Whether a source names this very file, not a folder or a glob. Such a file is an error if it is not text; other
    files are skipped."""
    source: int = 0
    """Place in ``data.sources`` of the first source that found this file."""


def fingerprint_files(files: Iterable[SourceFile]) -> str:
    """16 hex digits that change when a file is added, removed, moved, resized or touched."""
    content = hashlib.blake2b(digest_size=8)
    for file in files:
        line = f"{file.path}\0{file.format}\0{file.num_bytes}\0{file.mtime_ns}\n"
        content.update(line.encode(errors="surrogateescape"))
    return content.hexdigest()


logger = logging.getLogger(__name__)

STDLIB_SOURCE = "python:stdlib"
FUNCTIONS_SOURCE = "python:functions"
_FORMAT_OF_ENDING: dict[str, FileFormat] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".bin": "bin",
}
_COMPRESSED = {".gz": "gunzip", ".zst": "zstd -d", ".bz2": "bunzip2", ".xz": "unxz"}
"""Endings of compressed files, and what undoes it."""
_METADATA = ".meta.json"
"""Ending of the metadata of a pair of tokens (``data.tokens.indexed``)."""
_NOT_STDLIB = {"site-packages", "dist-packages"}
_TESTS = {"test", "tests", "idle_test"}
_WHOLE_MODULES = 8
"""One of so many modules stays whole: the long tail."""
_DEFINITION = re.compile(r"\n\n+(?=(?: {4})?(?:@|class |def |async def ))")


def definitions(module: str) -> list[str]:
    """Return the functions, methods and heads of classes of a module, or the whole of it if its checksum says so."""
    whole = zlib.crc32(module.encode()) % _WHOLE_MODULES == 0
    return [module] if whole else _DEFINITION.split(module)


def expand_sources(sources: Sequence[str], file_format: str = "auto", fields: Sequence[str] = ()) -> list[SourceFile]:
    """List the files that ``sources`` name, in corpus order. Each file is listed once.

    Args:
        sources: folders (searched recursively, without hidden entries), files, globs (``**`` is allowed), URLs of any
            of these that fsspec can open, ``python:stdlib`` (the interpreter's standard library), or
            ``python:functions`` (the same without tests, mostly cut into functions).
        file_format: ``auto`` decides by the ending of each file. Any other value is the format of every file.
        fields: names of fields (``data.fields``), besides ``OWN_FIELDS``. Their pairs in folders are no sources.

    Raises ``ConfigError`` if there is no source, or a source does not exist or matches no file; ``DataError`` if a file
    cannot be examined, or a URL cannot be reached.
    """
    if not sources:
        raise ConfigError("data.sources is empty", so="there is no text", fix="name a folder, file or glob")
    files: dict[Place, SourceFile] = {}
    for number, source in enumerate(sources):
        found = 0
        beside = (_METADATA, *(f".{name}.bin" for name in (*OWN_FIELDS, *fields)))
        for file in _files_of(source, file_format, beside):
            found += 1
            if file.path in files:
                logger.info("%s is matched twice by data.sources; it is read once", file.path)
            else:
                files[file.path] = replace(file, source=number)
        if not found:
            raise ConfigError(
                f"data source {source!r} matches no file", so="it adds no text", fix="mend the path or glob"
            )
    return list(files.values())


def _files_of(source: str, file_format: str, beside: tuple[str, ...]) -> Iterator[SourceFile]:
    """Yield the files of a source, but not those with endings ``beside`` a ``.bin``, nor its unnamed ``.idx``."""
    is_url = "://" in source
    found: Iterable[tuple[Place, bool, Any]] = _expand_url(source) if is_url else _paths_of(source)
    file_format = "python" if source == FUNCTIONS_SOURCE else file_format
    try:
        for path, named, info in found:
            if path.suffix == ".idx" and file_format in ("auto", "bin"):
                path, info, is_left_out = path.with_suffix(".bin"), None, not named
            else:
                is_left_out = not named and any(_belongs_to_pair(path, ending) for ending in beside)
            if is_left_out:
                continue
            if isinstance(path, Url):
                num_bytes, version = path.describe(info)
            else:
                num_bytes, version = (status := path.stat()).st_size, status.st_mtime_ns
            if file_format not in ("auto", *get_args(FileFormat)):
                raise ConfigError(f"data.format is {file_format!r}", fix="use auto, text, jsonl, parquet or bin")
            ending = path.suffix.lower()
            if ending in _COMPRESSED and PurePosixPath(path.name).with_suffix("").suffix.lower() in _FORMAT_OF_ENDING:
                raise ConfigError(
                    f"{path} is compressed",
                    so="its records could not be read a range at a time, and so not in parallel",
                    fix=f"decompress it ({_COMPRESSED[ending]} {path}), or leave it out of data.sources",
                )
            known = _FORMAT_OF_ENDING.get(ending, "text")
            kind = known if file_format == "auto" else cast(FileFormat, file_format)
            yield SourceFile(path=path.absolute(), format=kind, num_bytes=num_bytes, mtime_ns=version, named=named)
    except OSError as error:
        if not is_url:
            raise unreadable(error, source) from error
        raise UnreadableError(
            f"data source {source!r} cannot be reached ({error.strerror or error})",
            so="its text would be missing",
            fix="check the URL, the network and the credentials" + credentials_hint(source),
        ) from error


def _belongs_to_pair(path: Place, ending: str) -> bool:
    if isinstance(path, Url):
        return str(path).endswith(ending)
    return path.name.endswith(ending) and path.with_name(path.name.removesuffix(ending) + ".bin").exists()


def _expand_url(source: str) -> Iterator[tuple[Url, bool, Mapping[str, Any] | None]]:
    """Yield the files of a URL, sorted: each, whether ``source`` names this very file, and its entry in a listing."""
    system, path = open_filesystem(source)
    if has_no_folders(source):
        yield Url(source), True, None
        return
    if "?" in source and "?" not in path:
        raise ConfigError(
            f"data source {source!r}: its file system reads everything behind ? as options",
            so="the whole folder would be read",
            fix="use * or [abc] instead of ?",
        )
    guarded(source, system.invalidate_cache)  # an earlier listing may be out of date
    if glob.has_magic(path):
        found = guarded(source, lambda: system.glob(path, detail=True))
        folder = re.split(r"[*?\[]", path)[0].rpartition("/")[0]
        files = {name: info for name, info in found.items() if info["type"] == "file" and not _is_hidden(name, folder)}
    else:
        info = guarded(source, lambda: system.info(path))
        if info["type"] == "file":
            yield Url(source), True, info
            return
        found = guarded(source, lambda: system.find(path, detail=True))
        files = {name: info for name, info in found.items() if not _is_hidden(name, path)}
        if not found:
            raise FileNotFoundError(errno.ENOENT, "no such file or folder", source)
    yield from ((Url(_url_of(name, system, source, path)), False, files[name]) for name in sorted(files))


def _url_of(name: str, system: Any, source: str, path: str) -> str:
    """Return the URL of ``name``, a path from a listing of ``source``, which the file system calls ``path``.

    Some file systems (webhdfs, hdfs, sftp) leave the host out of their paths, so it is taken from ``source``.
    """
    scheme, _, rest = source.partition("://")
    host, _, behind = rest.partition("/")
    if "::" in source or not host or path.strip("/") != behind.strip("/"):
        return str(system.unstrip_protocol(name))
    return f"{scheme}://{host}/{name.lstrip('/')}"


def _is_hidden(name: str, folder: str) -> bool:
    inside = name.strip("/").removeprefix(folder.strip("/"))
    return any(part.startswith(".") for part in PurePosixPath(inside).parts)


def _paths_of(source: str) -> Iterator[tuple[Path, bool, None]]:
    """Yield the paths of a source on this machine, as ``_expand_url``."""
    if source in (STDLIB_SOURCE, FUNCTIONS_SOURCE):
        left_out = _NOT_STDLIB | _TESTS if source == FUNCTIONS_SOURCE else _NOT_STDLIB
        stdlib = Path(sysconfig.get_paths()["stdlib"])
        yield from ((path, False, None) for path in _walk(stdlib, left_out.__contains__) if path.suffix == ".py")
        return
    if source.startswith("python:"):
        fix = f"did you mean {STDLIB_SOURCE!r} or {FUNCTIONS_SOURCE!r}?"
        raise ConfigError(f"data source {source!r} does not exist", fix=fix)
    path = typed_path(source)
    if path.is_dir():
        yield from ((inner, False, None) for inner in _walk(path, lambda name: name.startswith(".")))
    elif path.is_file():
        yield path, True, None
    elif glob.has_magic(source):
        for match in sorted(glob.glob(str(path), recursive=True)):
            if Path(match).is_file():
                yield Path(match), False, None
    else:
        raise ConfigError(
            f"data source {source!r} does not exist as a file or folder (looked in {Path.cwd()})",
            fix=f"name a folder, a file, a glob or {STDLIB_SOURCE!r}",
        )


def _walk(folder: Path, is_left_out: Callable[[str], bool]) -> Iterator[Path]:
    """Yield the files below ``folder``, sorted. Links to folders are not followed; broken links are left out."""
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name != "__pycache__" and not is_left_out(name))
        paths = (Path(parent, name) for name in sorted(names) if not is_left_out(name))
        yield from (path for path in paths if path.is_file())
