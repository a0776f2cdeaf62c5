"""Pictures and videos in conversations: where they lie, which tokens stand for them, what an encoder is given of them.

A picture is a file below the folder of its record's file, or lies in the record, and is then kept in the cache folder.
When text is tokenised, the header of a picture tells its size, and the model's own processor tells which tokens stand
for one of that size: it counts them, or is run on a blank picture, once a size. Pixels are read when a rank encodes the
picture. A video is such a file (``videos``), or a list of pictures of one size.

``NAME.pictures.json`` beside a pair has the pictures of its documents. Shape letter: T tokens of a document.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import json
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bytescale.common.arrays import IntArray
from bytescale.common.atomic import whole_file, write_atomically
from bytescale.common.errors import ConfigError, DataError, typed_path
from bytescale.config.schema import CorpusConfig
from bytescale.data.sources.parquet import MOST_RECORD_BYTES
from bytescale.data.tokens.messages import Source
from bytescale.data.tokens.videos import CONTAINERS, Clip, form_of, frames_of
from bytescale.storage.place import Place

_ENDING = ".pictures.json"
_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
_ORIENTATION, _TURNED = 0x0112, (5, 6, 7, 8)  # of EXIF: width and height are each other's
_TRIED = ((60, 40), (300, 500))  # sizes with which it is tried whether a processor's count is all that is needed


_one_at_a_time = threading.Lock()


class Picture(NamedTuple):
    """One picture or video of a document. It is written as JSON."""

    name: str  # as the record has it, or a hash of its content
    path: str | list[str]  # a list: pictures that are a video's frames
    rows: int  # tokens for which an encoder gives a row each
    kind: str = "image"
    frames: int = 1  # each of which an encoder sees by itself
    fps: float | None = None  # of a list of frames


def processor_fingerprint(tokenizer: str) -> str:
    """A text that changes with the processor beside a tokenizer; empty where there is none."""
    files = [Path(folder_of(tokenizer), name) for name in _PROCESSOR_FILES]
    found = b"\0".join(file.read_bytes() for file in files if file.is_file())
    return hashlib.blake2b(found, digest_size=8).hexdigest() if found else ""


def with_pictures(
    tokens: IntArray, weights: NDArray[np.float32], sources: Sequence[Source], config: CorpusConfig, path: Place | None
) -> tuple[IntArray, NDArray[np.float32], list[Picture]]:
    """Put the tokens that stand for pictures in the place of the words that the chat template writes for them.

    ``tokens``, ``weights`` ``[T]``: what stands for a picture gets weight 0. ``path``: the record's file.

    Raises ``DataError`` for a picture that cannot be read, that the processor refuses, or that no word stands for.
    """
    folder = folder_of(config.tokenizer)
    processor = _processor_of(folder)
    words = {
        kind: getattr(processor, f"{kind}_token", None) if getattr(processor, f"{kind}_processor", None) else None
        for kind in ("image", "video")
    }
    ids = {processor.tokenizer.convert_tokens_to_ids(word): kind for kind, word in words.items() if word}
    places = np.flatnonzero(np.isin(tokens, list(ids)))
    there = [ids[token] for token in tokens[places].tolist()]
    for kind, word in words.items():
        if (count := sum(source.kind == kind for source in sources)) != there.count(kind):
            written = f"chat template writes {word!r} {there.count(kind)} times" if word else "processor knows none"
            raise DataError(
                f"it has {count} {kind}s, and the model's {written}",
                so=f"it would not be known where {'an image' if kind == 'image' else 'a video'} is",
                fix=f"give each a part {{'type': {kind!r}}}, in a role whose {kind}s the chat template knows",
            )
    pictures, pieces, own = [], np.split(tokens, places), np.split(weights, places)
    rest = {kind: iter([source for source in sources if source.kind == kind]) for kind in words}
    for number, kind in enumerate(there, 1):
        picture, stand_for = _picture(folder, next(rest[kind]), path, typed_path(config.cache_dir))
        pictures.append(picture)
        pieces[number] = np.concatenate([stand_for, pieces[number][1:]])
        own[number] = np.concatenate([np.zeros(len(stand_for), np.float32), own[number][1:]])
    return np.concatenate(pieces), np.concatenate(own), pictures


def _picture(folder: str, source: Source, path: Place | None, cache_dir: Path) -> tuple[Picture, IntArray]:
    """A picture or a video, and the tokens that stand for it. Raises ``DataError``."""
    is_list = source.kind == "video" and isinstance(source.content, list)
    files = [_file_of(one, path, cache_dir) for one in (source.content if is_list else [source.content])]
    name, paths = ", ".join(name for name, _ in files), [str(file) for _, file in files]
    if source.kind == "image":
        ids = _standing_for(folder, *_size_of(files[0][1], name))
        return Picture(name, paths[0], _num_rows(folder, ids)), ids
    picture = Picture(name, paths if is_list else paths[0], 0, "video", fps=source.fps)
    ids, frames = _of_video(folder, _clip_of(folder, picture))
    if not (rows := _num_rows(folder, ids, "video")):
        raise ConfigError(
            f"the data has videos, and the processor in {folder} writes other tokens than its video token for them",
            so="it would not be known which tokens stand for a video",
            fix="leave videos out, or take a model whose videos have tokens of their own (Qwen-VL)",
        )
    return picture._replace(rows=rows, frames=frames), ids


def pixels_of(picture: Picture, tokenizer: str) -> dict[str, Any]:
    """What the model's processor returns for a picture, tensors by name.

    Raises ``DataError`` if it cannot be read any more, is damaged, or other tokens stand for it than before.
    """
    folder, path, clip = folder_of(tokenizer), picture.path, None
    if picture.kind == "image":
        pixels = _rgb(Path(str(path)), picture.name)
    else:
        clip = _clip_of(folder, picture)
        with _readable(picture.name, "video"):
            frames = [np.asarray(_rgb(Path(one), one)) for one in path] if isinstance(path, list) else None
            pixels = frames_of(Path(str(path)), clip) if frames is None else np.stack(frames)
    item, ids = _processed(folder, pixels, clip)
    if _num_rows(folder, ids, picture.kind) != picture.rows:
        raise DataError(
            f"{picture.kind} {picture.name} has another size than when its text was tokenised",
            so="other tokens would stand for it",
            fix="touch the file that names it, so that it is tokenised again",
        )
    return item


def _rgb(file: Path, name: str) -> Any:
    from PIL import ImageOps

    with _readable(name):  # as transformers.image_utils.load_image does
        return ImageOps.exif_transpose(_opened(file, name)).convert("RGB")


def _clip_of(folder: str, video: Picture) -> Clip:
    """The form of a video, and which frames the processor takes; no pixels are decoded. Raises ``DataError``."""
    with _readable(video.name, "video"):
        if isinstance(video.path, list):
            sizes = {_size_of(Path(path), path) for path in video.path}
            if len(sizes) > 1:
                raise ValueError(f"its frames have the sizes {sorted(sizes)}")
            clip = Clip(*sizes.pop(), len(video.path), video.fps, tuple(range(len(video.path))))
        else:
            clip = form_of(Path(video.path))
            own = _processor_of(folder).video_processor
            if own.do_sample_frames:  # as VideoProcessorMixin.preprocess does
                from transformers.video_utils import VideoMetadata

                options = {name: getattr(own, name, None) for name in own.valid_kwargs.__annotations__}
                indices = own.sample_frames(metadata=VideoMetadata(**clip.metadata), **options)
                clip = clip._replace(indices=tuple(int(index) for index in indices))
        clip.require_room()
        return clip


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
        with _readable(source[:40]):
            content = base64.b64decode(source.partition(",")[2], validate=True)
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
    with _readable(name):
        if not file.is_file():
            raise OSError("there is no such file")
        if file.stat().st_size > MOST_RECORD_BYTES:
            raise OSError(f"it has more than the {MOST_RECORD_BYTES} bytes that a record may have")
        image: Any = Image.open(file, formats=_FORMATS)
        if image.width * image.height > (Image.MAX_IMAGE_PIXELS or math.inf):
            raise OSError(f"it has more than {Image.MAX_IMAGE_PIXELS} pixels")
        return image


@contextlib.contextmanager
def _readable(name: str, kind: str = "picture") -> Iterator[None]:
    """Raise ``DataError`` for whatever a decoder raises for damage."""
    try:
        yield
    except (ConfigError, DataError, MemoryError):
        raise
    except Exception as error:
        known = CONTAINERS if kind == "video" else ", ".join(_FORMATS)
        raise DataError(
            f"{kind} {name} cannot be read ({' '.join(str(error).split())[:200] or type(error).__name__})",
            so="nothing could stand in its place",
            fix=f"mend it, or delete its record; known are {known}",
        ) from error


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


def _processed(folder: str, pixels: Any, clip: Clip | None = None) -> tuple[dict[str, Any], IntArray]:
    """What is made of a picture, or of the frames of a clip: tensors, and the tokens that stand for it.

    Raises ``DataError`` for one that the processor refuses.
    """
    processor = _processor_of(folder)
    options: dict[str, Any] = {"add_special_tokens": False, "return_tensors": "pt"}
    if clip is None:
        form, options = f"a picture of {pixels.width} x {pixels.height} pixels", {**options, "images": [[pixels]]}
    else:
        form = f"{len(clip.indices)} frames of {clip.width} x {clip.height} pixels"
        options |= {"videos": [pixels], "video_metadata": [clip.metadata], "do_sample_frames": False}
    try:
        with _one_at_a_time:  # the tokenizer of one, which two threads must not use at once
            made = processor(text=[processor.image_token if clip is None else processor.video_token], **options)
    except Exception as error:  # whatever a processor does not take
        raise DataError(
            f"the model's processor refuses {form} ({' '.join(str(error).split())[:200]})",
            so="the model could not see it",
            fix="resize it, or leave its record out",
        ) from error
    texts = {"input_ids", "token_type_ids", "mm_token_type_ids", *processor.tokenizer.model_input_names}
    item = {name: value for name, value in made.items() if name not in texts}
    return item, np.asarray(made["input_ids"][0], dtype=np.int64)


def _row_id(folder: str, kind: str = "image") -> int:
    """The token that gets a row of an encoder."""
    processor = _processor_of(folder)
    word = getattr(processor, f"{kind}_token")
    return int(getattr(processor, f"{kind}_token_id", processor.tokenizer.convert_tokens_to_ids(word)))


def _num_rows(folder: str, ids: IntArray, kind: str = "image") -> int:
    return int((ids == _row_id(folder, kind)).sum())


@functools.lru_cache(maxsize=2**10)
def _of_video(folder: str, clip: Clip) -> tuple[IntArray, int]:
    """The tokens that stand for any video of a form, and the frames of which an encoder sees each by itself."""
    from transformers import BatchFeature

    pixel = BatchFeature({"frames": np.zeros((1, 3, 1, 1), np.uint8)}, tensor_type="pt")["frames"]
    shape = len(clip.indices), 3, clip.height, clip.width
    try:
        item, ids = _processed(folder, pixel.to("meta").expand(shape), clip)  # no pixels are made
    except DataError:  # it looks at them
        item, ids = _processed(folder, pixel.expand(shape), clip)
    grid = item.get("video_grid_thw")
    return ids, len(clip.indices) if grid is None else int(grid[0, 0])


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
