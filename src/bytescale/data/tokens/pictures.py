"""Pictures in conversations: where they lie, which tokens stand for them, and what an encoder is given of them.

A picture is a file below the folder of its record's file, or lies in the record. When text is tokenised, the header of
a picture tells its size, and the model's own processor tells which tokens stand for one of that size: it is run on a
blank picture, once a size. Pixels are read when a rank encodes the picture (``pixels_of``).

``NAME.pictures`` lies beside a pair whose documents have pictures: the bytes of those that lay in records, then JSON
with the pictures of each document, then the length of this JSON in 8 bytes.

Shape letter: T tokens of a document.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from bytescale.common.arrays import IntArray
from bytescale.common.atomic import remove_stale_temporaries, temporary_path
from bytescale.common.errors import ConfigError, DataError, typed_path
from bytescale.data.sources.parquet import MOST_RECORD_BYTES
from bytescale.storage.place import Place

ENDING = ".pictures"
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
_ORIENTATION, _TURNED = 0x0112, (5, 6, 7, 8)  # of EXIF: width and height are each other's
_MOST_GIVEN = 64  # numbers that a processor may give beside pixels
_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """One picture of a document. It can be pickled."""

    name: str  # as the record has it, or a hash of its content
    path: str = ""  # of the file that has it
    place: tuple[int, int] | None = None  # its bytes in this file; None: all of them
    rows: int  # tokens that an encoder gives a row each
    given: Mapping[str, Any]  # what the processor tells of it beside its pixels, such as image_grid_thw
    content: bytes = b""  # of a picture in a record, before it is written

    def read(self) -> bytes:
        """Raises ``OSError``."""
        with open(self.path, "rb") as file:
            first, stop = self.place or (0, -1)
            file.seek(first)
            return file.read(stop - first if self.place else -1)


def processor_fingerprint(tokenizer: str) -> str:
    """A text that changes with the processor beside a tokenizer; empty where there is none."""
    files = [_folder_of(tokenizer) / name for name in PROCESSOR_FILES]
    found = b"\0".join(file.read_bytes() for file in files if file.is_file())
    return hashlib.blake2b(found, digest_size=8).hexdigest() if found else ""


def with_pictures(
    tokens: IntArray, weights: NDArray[np.float32], sources: Sequence[Any], tokenizer: str, path: Place | None
) -> tuple[IntArray, NDArray[np.float32], list[Picture]]:
    """Put the tokens that stand for pictures in the place of the words that the chat template writes for them.

    Args:
        tokens, weights: ``[T]``; what stands for a picture has weight 0.
        sources: of each picture what the record has for it: its path, its bytes, or a data URL.
        tokenizer: the folder with the model's processor.
        path: of the record's file.

    Raises ``DataError`` for a picture that cannot be read, that the processor refuses, or that no word stands for.
    """
    folder = str(_folder_of(tokenizer))
    word = _processor_of(folder).image_token
    places = np.flatnonzero(tokens == _processor_of(folder).tokenizer.convert_tokens_to_ids(word))
    if len(places) != len(sources):
        raise DataError(
            f"it has {len(sources)} pictures, and the chat template writes {word!r} {len(places)} times",
            so="it would not be known where a picture is",
            fix="give each picture one part {'type': 'image'}, in a role whose pictures the chat template knows",
        )
    pictures, words, own = [], np.split(tokens, places), np.split(weights, places)
    for number, source in enumerate(sources):
        found, ids = _found(source, path, folder)
        pictures.append(found)
        words[1 + number] = np.concatenate([ids, words[1 + number][1:]])
        own[1 + number] = np.concatenate([np.zeros(len(ids), np.float32), own[1 + number][1:]])
    return np.concatenate(words), np.concatenate(own), pictures


def pixels_of(picture: Picture, tokenizer: str) -> dict[str, Any]:
    """What the model's processor returns for a picture, tensors by name.

    Raises ``DataError`` if it cannot be read any more, is damaged, or has another size than when it was tokenised.
    """
    try:
        image = _opened(picture.read(), picture.name)
        made = _processed(str(_folder_of(tokenizer)), _upright(image))
    except OSError as error:
        raise _unreadable(picture.name, error) from error
    if made[1] != picture.given or made[2] != picture.rows:
        raise DataError(
            f"picture {picture.name} has another size than when its text was tokenised",
            so="other tokens would stand for it",
            fix="touch the file that names it, so that it is tokenised again",
        )
    return made[0]


def _folder_of(tokenizer: str) -> Path:
    folder = typed_path(tokenizer)
    return folder if folder.is_dir() else folder.parent


def _found(source: Any, path: Place | None, folder: str) -> tuple[Picture, IntArray]:
    """A picture, and the tokens that stand for it."""
    if isinstance(source, bytes):
        content, file, name = source, "", hashlib.blake2b(source, digest_size=16).hexdigest()
    elif isinstance(source, str) and source.startswith("data:"):
        try:
            return _found(base64.b64decode(source.partition(",")[2], validate=True), path, folder)
        except ValueError as error:
            raise _unreadable(source[:40], error) from error
    else:
        name, file, content = str(source), str(_inside(source, path)), b""
    try:
        image = _opened(content or file, name)
        width, height = image.size
        exif = image.getexif() if image.format != "PNG" or "exif" in image.info else {}
        image.close()
    except OSError as error:
        raise _unreadable(name, error) from error
    if exif.get(_ORIENTATION) in _TURNED:
        width, height = height, width
    ids, given, rows = _standing_for(folder, width, height)
    return Picture(name=name, path=file, rows=rows, given=given, content=content), ids


def _inside(source: Any, path: Place | None) -> Path:
    """The file of a picture that a record names. Raises ``DataError`` unless it lies below the record's folder."""
    what, file = "", Path()
    if not isinstance(source, str) or not source:
        what = f"a picture is {str(source)[:80]!r}, which is no path and no bytes"
    elif "://" in source:
        what = f"picture {source[:80]!r} is a URL"
    elif not isinstance(path, Path):
        what = f"picture {source!r} is a path, and its record is not in a file of this machine"
    else:
        home = path.absolute().parent.resolve()
        file = (home / source).resolve()
        if not file.is_relative_to(home) or ".." in Path(source).parts:
            what = f"picture {source!r} does not lie below {home}, the folder of its record's file"
        elif not file.is_file():
            raise _unreadable(source, FileNotFoundError("there is no such file"))
        elif file.stat().st_size > MOST_RECORD_BYTES:
            what = f"picture {source!r} has more than the {MOST_RECORD_BYTES} bytes that a record may have"
    if what:
        raise DataError(
            what,
            so="nothing but files beside the data is read",
            fix="put it into a folder beside the data and write its path from there, or its bytes into the record",
        )
    return file


def _opened(file: str | bytes, name: str) -> Any:
    """A picture of which only the header is read. Raises ``DataError``, and ``OSError`` for one that is damaged."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ConfigError("the data has pictures, and Pillow is not installed", fix="pip install pillow") from error
    try:
        image: Any = Image.open(io.BytesIO(file) if isinstance(file, bytes) else file, formats=_FORMATS)
        size = float(image.width * image.height)
    except Image.DecompressionBombError:
        size = math.inf
    except (ValueError, SyntaxError, TypeError, OverflowError) as error:
        raise _unreadable(name, error) from error
    if size > (Image.MAX_IMAGE_PIXELS or math.inf):
        raise DataError(
            f"picture {name} has more than {Image.MAX_IMAGE_PIXELS} pixels",
            so="it could fill the memory",
            fix="make it smaller (PIL.Image.MAX_IMAGE_PIXELS is the limit)",
        )
    return image


def _upright(image: Any) -> Any:
    """The pixels, as ``transformers.image_utils.load_image`` gives them. Raises ``OSError`` for damaged ones."""
    from PIL import ImageOps

    try:
        return ImageOps.exif_transpose(image).convert("RGB")
    except (ValueError, SyntaxError, EOFError, IndexError) as error:  # what Pillow raises for some damage
        raise OSError(str(error)) from error


def _unreadable(name: str, error: Exception) -> DataError:
    why = getattr(error, "strerror", None) or " ".join(str(error).split())[:200] or type(error).__name__
    return DataError(
        f"picture {name} cannot be read ({why})",
        so="nothing could stand in its place",
        fix=f"mend or delete its record; known are {', '.join(_FORMATS)}",
    )


@functools.lru_cache(maxsize=2)
def _processor_of(folder: str) -> Any:
    """The processor of a model's folder, of which no code is run. Raises ``ConfigError`` where there is none."""
    try:
        from transformers import AutoProcessor

        processor: Any = AutoProcessor.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        if getattr(processor, "image_token", None) and hasattr(processor, "image_processor"):
            return processor
        why = f"it has a {type(processor).__name__}, which knows no pictures"
    except Exception as error:  # whatever its files make of transformers
        why = " ".join(str(error).split())[:300]
    raise ConfigError(
        f"the data has pictures, and {folder} has no processor for them ({why})",
        so="it is not known which tokens stand for a picture",
        fix="begin with the folder of a vision-language model, with its processor_config.json; what the message names "
        "may have to be installed (pip install torchvision)",
    )


def _processed(folder: str, image: Any) -> tuple[dict[str, Any], dict[str, Any], int, IntArray]:
    """What is made of a picture: all tensors, what beside pixels, rows of the encoder, and tokens that stand for it."""
    processor = _processor_of(folder)
    try:
        made = processor(text=[processor.image_token], images=[[image]], add_special_tokens=False, return_tensors="pt")
    except Exception as error:  # whatever a processor does not take
        raise DataError(
            f"the model's processor refuses a picture of {image.width} x {image.height} pixels "
            f"({' '.join(str(error).split())[:200]})",
            so="the model could not see it",
            fix="resize the picture, or leave its record out",
        ) from error
    ids = np.asarray(made["input_ids"][0], dtype=np.int64)
    texts = {
        "input_ids",
        "attention_mask",
        "token_type_ids",
        "mm_token_type_ids",
        *processor.tokenizer.model_input_names,
    }
    item = {name: value for name, value in made.items() if name not in texts}
    given = {
        name: value.tolist()
        for name, value in item.items()
        if not name.startswith("pixel") and value.numel() <= _MOST_GIVEN
    }
    word = processor.tokenizer.convert_tokens_to_ids(processor.image_token)
    rows = int((ids == getattr(processor, "image_token_id", word)).sum())
    return item, given, rows, ids


@functools.lru_cache(maxsize=2**14)
def _standing_for(folder: str, width: int, height: int) -> tuple[IntArray, dict[str, Any], int]:
    """Tokens that stand for a picture of a size, what the processor gives beside pixels, and the encoder's rows."""
    from PIL import Image

    _, given, rows, ids = _processed(folder, Image.new("RGB", (width, height)))
    return ids, given, rows


@dataclass
class PictureWriter:
    """Writes the pictures of a pair. Leaving the ``with`` block without ``commit`` leaves nothing."""

    pair: Path
    num_pictures: int = 0
    _documents: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    _file: IO[bytes] | None = None  # none for text alone

    def add(self, number: int, pictures: Sequence[Picture]) -> None:
        """Of document ``number`` of the pair."""
        found = self._documents.setdefault(number, [])
        for picture in pictures:
            entry = {**asdict(picture), "place": None}
            if content := entry.pop("content"):
                entry["place"] = self._append(content)
            found.append(entry)
        self.num_pictures += len(pictures)

    @property
    def digest(self) -> bytes:
        """Changes with the pictures of the documents, not with their folder; empty without pictures."""
        names = {number: [one["name"] for one in own] for number, own in self._documents.items()}
        return json.dumps(names).encode() if names else b""

    def commit(self) -> None:
        final = self.pair.with_suffix(ENDING)
        if not self._documents:
            final.unlink(missing_ok=True)
            return
        index = json.dumps(self._documents).encode()
        self._append(index + len(index).to_bytes(_LENGTH_BYTES, "little"))
        assert self._file is not None, "it was written to"
        self._file.close()
        temporary_path(final).replace(final)

    def _append(self, content: bytes) -> tuple[int, int]:
        """Returns where it begins and ends. Raises ``DataError`` if the disk is full."""
        final = self.pair.with_suffix(ENDING)
        try:
            if self._file is None:
                remove_stale_temporaries(final)
                self._file = temporary_path(final).open("wb")
            start = self._file.tell()
            self._file.write(content)
            self._file.flush()
        except OSError as error:
            raise DataError(f"{final} cannot be written ({error})", fix="make room or choose another folder") from error
        return start, start + len(content)

    def __enter__(self) -> PictureWriter:
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._file.close()
            temporary_path(self.pair.with_suffix(ENDING)).unlink(missing_ok=True)


def read_pictures(pair: Path) -> dict[int, list[Picture]]:
    """The pictures of the documents of a pair, by the document's number."""
    path = pair.with_suffix(ENDING)
    if not path.exists():
        return {}
    with path.open("rb") as file:
        file.seek(-_LENGTH_BYTES, 2)
        length = int.from_bytes(file.read(), "little")
        file.seek(-_LENGTH_BYTES - length, 2)
        documents = json.loads(file.read(length))
    return {
        int(number): [
            Picture(**{**one, "path": one["path"] or str(path), "place": one["place"] and tuple(one["place"])})
            for one in own
        ]
        for number, own in documents.items()
    }
