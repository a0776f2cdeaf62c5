"""Pictures in conversations: where they lie, which tokens stand for them, and what an encoder is given of them.

A picture is a file below the folder of its record's file, or lies in the record, and is then kept in the cache folder.
When text is tokenised, the header of a picture tells its size, and the model's own processor tells which tokens stand
for one of that size: it counts them, or is run on a blank picture, once a size. Pixels are read when a rank encodes the
picture.

``NAME.pictures.json`` beside a pair has the pictures of its documents. Shape letter: T tokens of a document.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import math
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bytescale.common.arrays import IntArray
from bytescale.common.atomic import whole_file, write_atomically
from bytescale.common.errors import ConfigError, DataError, typed_path
from bytescale.config.schema import CorpusConfig
from bytescale.data.sources.parquet import MOST_RECORD_BYTES
from bytescale.storage.place import Place

_ENDING = ".pictures.json"
_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
_ORIENTATION, _TURNED = 0x0112, (5, 6, 7, 8)  # of EXIF: width and height are each other's
_TRIED = ((60, 40), (300, 500))  # sizes with which it is tried whether a processor's count is all that is needed


_one_at_a_time = threading.Lock()


class Picture(NamedTuple):
    """One picture of a document. It is written as JSON."""

    name: str  # as the record has it, or a hash of its content
    path: str
    rows: int  # tokens for which an encoder gives a row each


def processor_fingerprint(tokenizer: str) -> str:
    """A text that changes with the processor beside a tokenizer; empty where there is none."""
    files = [Path(folder_of(tokenizer), name) for name in _PROCESSOR_FILES]
    found = b"\0".join(file.read_bytes() for file in files if file.is_file())
    return hashlib.blake2b(found, digest_size=8).hexdigest() if found else ""


def with_pictures(
    tokens: IntArray, weights: NDArray[np.float32], sources: Sequence[Any], config: CorpusConfig, path: Place | None
) -> tuple[IntArray, NDArray[np.float32], list[Picture]]:
    """Put the tokens that stand for pictures in the place of the words that the chat template writes for them.

    ``tokens``, ``weights`` ``[T]``: what stands for a picture gets weight 0. ``sources``: of each picture its path from
    the folder of ``path``, the record's file; its bytes, or a data URL.

    Raises ``DataError`` for a picture that cannot be read, that the processor refuses, or that no word stands for.
    """
    folder = folder_of(config.tokenizer)
    word = _processor_of(folder).image_token
    places = np.flatnonzero(tokens == _processor_of(folder).tokenizer.convert_tokens_to_ids(word))
    if len(places) != len(sources):
        raise DataError(
            f"it has {len(sources)} pictures, and the chat template writes {word!r} {len(places)} times",
            so="it would not be known where a picture is",
            fix="give each picture a part {'type': 'image'}, in a role whose pictures the chat template knows",
        )
    pictures, words, own = [], np.split(tokens, places), np.split(weights, places)
    for number, source in enumerate(sources, 1):
        name, file = _file_of(source, path, typed_path(config.cache_dir))
        ids = _standing_for(folder, *_size_of(file, name))
        pictures.append(Picture(name, str(file), _num_rows(folder, ids)))
        words[number] = np.concatenate([ids, words[number][1:]])
        own[number] = np.concatenate([np.zeros(len(ids), np.float32), own[number][1:]])
    return np.concatenate(words), np.concatenate(own), pictures


def pixels_of(picture: Picture, tokenizer: str) -> dict[str, Any]:
    """What the model's processor returns for a picture, tensors by name.

    Raises ``DataError`` if it cannot be read any more, is damaged, or other tokens stand for it than before.
    """
    from PIL import ImageOps

    try:  # as transformers.image_utils.load_image does
        image = ImageOps.exif_transpose(_opened(Path(picture.path), picture.name)).convert("RGB")
    except (OSError, ValueError, SyntaxError, EOFError, IndexError) as error:  # what Pillow raises for damage
        raise error if isinstance(error, DataError) else _unreadable(picture.name, error) from error
    item, ids = _processed(folder_of(tokenizer), image)
    if _num_rows(folder_of(tokenizer), ids) != picture.rows:
        raise DataError(
            f"picture {picture.name} has another size than when its text was tokenised",
            so="other tokens would stand for it",
            fix="touch the file that names it, so that it is tokenised again",
        )
    return item


def write_pictures(pair: Path, documents: Mapping[int, Sequence[Picture]]) -> None:
    """Write those of the documents of a pair, by the document's number, in the place of older ones."""
    if documents:
        write_atomically(pair.with_suffix(_ENDING), json.dumps(documents).encode())
    else:
        pair.with_suffix(_ENDING).unlink(missing_ok=True)


def read_pictures(pair: Path) -> dict[int, list[Picture]]:
    path = pair.with_suffix(_ENDING)
    documents = json.loads(path.read_bytes()) if path.exists() else {}
    return {int(number): [Picture(*one) for one in own] for number, own in documents.items()}


def folder_of(tokenizer: str) -> str:
    """The folder of a model, from that of its tokenizer or a file in it."""
    folder = typed_path(tokenizer)
    return str(folder if folder.is_dir() else folder.parent)


def _file_of(source: Any, path: Place | None, cache_dir: Path) -> tuple[str, Path]:
    """Name and file of a picture. Raises ``DataError`` unless it lies in the record or below the record's folder."""
    what, content = "", source if isinstance(source, bytes) else None
    if isinstance(source, str) and source.startswith("data:"):
        try:
            content = base64.b64decode(source.partition(",")[2], validate=True)
        except ValueError as error:
            raise _unreadable(source[:40], error) from error
    if content is not None:
        name = hashlib.blake2b(content, digest_size=16).hexdigest()
        file = cache_dir.absolute() / "pictures" / name[:2] / name
        if not file.is_file() or file.stat().st_size != len(content):
            file.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(file) as temporary:
                temporary.write_bytes(content)
        return name, file
    if not isinstance(source, str) or "\0" in source:
        what = f"a picture is {str(source)[:80]!r}, which is no path and no bytes"
    elif "://" in source:
        what = f"picture {source[:80]!r} is a URL"
    elif not isinstance(path, Path):
        what = f"picture {source!r} is a path, and its record is not in a file of this machine"
    else:
        home = path.absolute().parent.resolve()
        file = (home / source).resolve()
        if file.is_relative_to(home) and ".." not in Path(source).parts:
            return source, file
        what = f"picture {source!r} does not lie below {home}, the folder of its record's file"
    raise DataError(
        what,
        so="nothing but files beside the data is read",
        fix="put it into a folder beside the data and write its path from there, or its bytes into the record",
    )


def _size_of(file: Path, name: str) -> tuple[int, int]:
    """Width and height, by the header. Raises ``DataError``."""
    with _opened(file, name) as image:
        exif = image.getexif() if image.format != "PNG" or "exif" in image.info else {}
        width, height = image.size
        return (height, width) if exif.get(_ORIENTATION) in _TURNED else (width, height)


def _opened(file: Path, name: str) -> Any:
    """A picture of which only the header is read. Raises ``DataError`` for what is none, or is far too large."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ConfigError("the data has pictures, and Pillow is not installed", fix="pip install pillow") from error
    try:
        if not file.is_file():
            raise OSError("there is no such file")
        if file.stat().st_size > MOST_RECORD_BYTES:
            raise OSError(f"it has more than the {MOST_RECORD_BYTES} bytes that a record may have")
        image: Any = Image.open(file, formats=_FORMATS)
        if image.width * image.height > (Image.MAX_IMAGE_PIXELS or math.inf):
            raise Image.DecompressionBombError(f"it has more than {Image.MAX_IMAGE_PIXELS} pixels")
    except (OSError, ValueError, SyntaxError, TypeError, OverflowError, Image.DecompressionBombError) as error:
        raise _unreadable(name, error) from error
    return image


def _unreadable(name: str, error: Exception) -> DataError:
    return DataError(
        f"picture {name} cannot be read ({' '.join(str(error).split())[:200] or type(error).__name__})",
        so="nothing could stand in its place",
        fix=f"mend it, or delete its record; known are {', '.join(_FORMATS)}",
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


def _processed(folder: str, image: Any) -> tuple[dict[str, Any], IntArray]:
    """What is made of a picture: tensors, and the tokens that stand for it. Raises ``DataError`` for one it refuses."""
    processor = _processor_of(folder)
    options = {"add_special_tokens": False, "return_tensors": "pt"}
    try:
        with _one_at_a_time:  # the tokenizer of one, which two threads must not use at once
            made = processor(text=[processor.image_token], images=[[image]], **options)
    except Exception as error:  # whatever a processor does not take
        raise DataError(
            f"the model's processor refuses a picture of {image.width} x {image.height} pixels "
            f"({' '.join(str(error).split())[:200]})",
            so="the model could not see it",
            fix="resize the picture, or leave its record out",
        ) from error
    texts = {"input_ids", "token_type_ids", "mm_token_type_ids", *processor.tokenizer.model_input_names}
    item = {name: value for name, value in made.items() if name not in texts}
    return item, np.asarray(made["input_ids"][0], dtype=np.int64)


def _row_id(folder: str) -> int:
    """The token that gets a row of an encoder."""
    processor = _processor_of(folder)
    return int(getattr(processor, "image_token_id", processor.tokenizer.convert_tokens_to_ids(processor.image_token)))


def _num_rows(folder: str, ids: IntArray) -> int:
    return int((ids == _row_id(folder)).sum())


@functools.lru_cache(maxsize=2**14)
def _standing_for(folder: str, width: int, height: int) -> IntArray:
    """The tokens that stand for any picture of a size."""
    count = _counted(folder, width, height) if _only_counts(folder) else None
    return _of_blank(folder, width, height) if count is None else np.full(count, _row_id(folder))


def _of_blank(folder: str, width: int, height: int) -> IntArray:
    from PIL import Image

    return _processed(folder, Image.new("RGB", (width, height)))[1]


def _counted(folder: str, width: int, height: int) -> int | None:
    """How many tokens stand for a picture of a size, by the processor's own count; None: it does not tell."""
    try:
        found = _processor_of(folder)._get_num_multimodal_tokens(image_sizes=[(height, width)])
        return int(found["num_image_tokens"][0])
    except Exception:  # whatever a processor does not count; it is asked about a blank picture instead
        return None


@functools.lru_cache(maxsize=2)
def _only_counts(folder: str) -> bool:
    """Whether nothing but so many equal tokens stands for a picture, as the processor counts them."""
    return all(
        _of_blank(folder, *size).tolist() == [_row_id(folder)] * (_counted(folder, *size) or 0) for size in _TRIED
    )
