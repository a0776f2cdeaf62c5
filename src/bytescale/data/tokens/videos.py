"""Video files: their form, by which tokens are counted, is read without decoding; frames are decoded by PyAV."""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bytescale.common.errors import ConfigError

CONTAINERS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi"  # none of them is a list of further files or URLs
_MOST_FRAMES = 2**22  # of a file, which its header may say: 19 hours at 60 a second
_MOST_PIXELS = 2**31  # of the frames that are seen, 6 GiB of host memory; 768 frames of 1920 x 1080 have fewer


class Clip(NamedTuple):
    """The form of a video, and which of its frames a model sees.

    Attributes:
        metadata: as transformers names it (``VideoMetadata``).
        indices: of the frames that are seen.
    """

    width: int
    height: int
    num_frames: int
    fps: float | None
    indices: tuple[int, ...]

    @property
    def metadata(self) -> dict[str, Any]:
        return {
            "total_num_frames": self.num_frames, "fps": self.fps, "width": self.width, "height": self.height,
            "duration": self.num_frames / self.fps if self.fps else None, "frames_indices": list(self.indices),
        }  # fmt: skip

    def require_room(self) -> None:
        """Raise ``OSError`` where the frames that are seen are far too large, or none."""
        if not 0 < len(self.indices) * self.width * self.height <= _MOST_PIXELS:
            form = f"{len(self.indices)} frames of {self.width} x {self.height} pixels"
            raise OSError(f"{form} would be decoded, and {_MOST_PIXELS} pixels are the most")


def form_of(file: Path) -> Clip:
    """All frames of a video. Raises ``OSError`` or ``ValueError`` for what is none."""
    with _opened(file) as container:
        if not container.streams.video:
            raise OSError("there is no video in it")
        stream = container.streams.video[0]
        known = stream.frames or sum(packet.size > 0 for packet in container.demux(stream))  # Matroska does not say it
        if known > _MOST_FRAMES:
            raise OSError(f"it has {known} frames, and {_MOST_FRAMES} are the most")
        return Clip(stream.width, stream.height, known, float(stream.average_rate or 0) or None, tuple(range(known)))


def frames_of(file: Path, clip: Clip) -> NDArray[np.uint8]:
    """``[frames, height, width, 3]``. Raises ``OSError`` or ``ValueError`` for damage."""
    wanted, found = set(clip.indices), dict[int, NDArray[np.uint8]]()
    with _opened(file) as container:
        for number, frame in enumerate(itertools.islice(container.decode(video=0), max(wanted) + 1)):
            if (frame.width, frame.height) != (clip.width, clip.height):
                raise OSError(f"frame {number} has {frame.width} x {frame.height} pixels")
            if number in wanted:
                found[number] = frame.to_ndarray(format="rgb24")
    if len(found) < len(wanted):
        raise OSError(f"it ends before frame {max(wanted)}")
    return np.stack([found[index] for index in clip.indices])


def _opened(file: Path) -> AbstractContextManager[Any]:
    try:
        import av
    except ImportError as error:
        raise ConfigError("the data has video files, and PyAV is not installed", fix="pip install av") from error
    if not file.is_file():
        raise OSError("there is no such file")
    container: AbstractContextManager[Any] = av.open(str(file), options={"format_whitelist": CONTAINERS})
    return container
