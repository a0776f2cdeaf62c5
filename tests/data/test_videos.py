"""Videos of conversations: of frames and of files, their tokens and pixels; what is refused."""

from __future__ import annotations

import base64
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from bytescale.cli.main import main
from bytescale.common.errors import ConfigError, DataError
from bytescale.data.loading.corpus import prepare_corpus
from bytescale.data.tokens import pictures, videos
from bytescale.data.tokens.pictures import pixels_of
from tests.data.test_pictures import about, documents, given_with_equal_tokens, settings
from tests.train.vision import (
    PicturesOfQwen,
    VideosOfQwen,
    draw,
    video_chats,
    vision_folder,
    write_chats,
    write_video,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vision_folder(tmp_path_factory.mktemp("model") / "qwen2_5_vl", "qwen2_5_vl")


def seen(**said: Any) -> dict[str, Any]:
    return about({"type": "video", **said})


@pytest.mark.parametrize("files", [False, True])
def test_tokens_and_pixels_are_those_of_the_processor(
    tmp_path: Path, model: Path, files: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if files:
        pytest.importorskip("av", reason="video files are read by PyAV: pip install av")
    records = video_chats(tmp_path, files=files)
    write_chats(tmp_path / "chats.jsonl", records)
    with monkeypatch.context() as tokenising:  # no pixel is decoded
        tokenising.setattr(pictures, "frames_of", None)
        tokenising.setattr(pictures, "_rgb", None)
        corpus = prepare_corpus(settings(tmp_path, model))
    found = corpus.pictures_of(corpus.samples)
    for number, given in enumerate(given_with_equal_tokens(corpus, model, tmp_path, records)):
        own = [pixels_of(one, str(model)) for one in found.get(number, ()) if one.kind == "video"]
        for name in ("pixel_values_videos", "video_grid_thw", "second_per_grid_ts") if own else ():
            np.testing.assert_array_equal(np.concatenate([one[name] for one in own]), given[name])


def test_all_forms_of_a_video(tmp_path: Path, model: Path) -> None:
    """Paths, bytes and the record's own list: the same tokens and the same pixels."""
    names = [name for name in draw(tmp_path / "pictures", 24) if Image.open(tmp_path / name).size == (16, 16)]
    contents = [(tmp_path / name).read_bytes() for name in names]
    in_text = [{"base64": base64.b64encode(content).decode()} for content in contents]
    forms = [
        seen(video=names), seen(path=names), seen(video=in_text), seen(video=[{"path": name} for name in names]),
        about({"type": "video"}, videos=[names]), seen(video=names, fps=2),
    ]  # fmt: skip
    write_chats(tmp_path / "chats.jsonl", forms)
    column = about({"type": "video"}, videos=[[{"bytes": content, "path": "x.png"} for content in contents]])
    column["messages"][1]["content"] = [{"type": "text", "text": "a thing"}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([column]), tmp_path / "a.parquet")
    sources = tuple(str(tmp_path / source) for source in ("chats.jsonl", "a.parquet"))
    corpus = prepare_corpus(settings(tmp_path, model, sources=sources))
    found = [own for _, own in sorted(corpus.pictures_of(corpus.samples).items())]
    assert len(found) == len(forms) + 1
    made = [pixels_of(video, str(model)) for (video,) in found]
    assert [float(one["second_per_grid_ts"][0]) for one in made] == pytest.approx([2 / 24] * 5 + [2 / 2, 2 / 24])
    for document, one in zip(corpus.documents(corpus.samples), made, strict=True):
        assert document["tokens"].tolist() == documents(settings(tmp_path, model))[0]["tokens"].tolist()
        np.testing.assert_array_equal(one["pixel_values_videos"], made[0]["pixel_values_videos"])


@pytest.mark.parametrize("end", ["mp4", "mkv", "webm", "avi"])
def test_a_file_in_a_record(tmp_path: Path, model: Path, end: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A path or its bytes, in containers that say how many frames they have, and in those that do not."""
    pytest.importorskip("av", reason="video files are read by PyAV: pip install av")
    (tmp_path / "pictures").mkdir()
    name = write_video(tmp_path / f"pictures/a.{end}", 1, "libvpx" if end == "webm" else "mpeg4")
    text = base64.b64encode((tmp_path / name).read_bytes()).decode()
    write_chats(tmp_path / "chats.jsonl", [seen(video=name), seen(url=f"data:video/{end};base64,{text}")])
    corpus = prepare_corpus(settings(tmp_path, model))
    one, two = (pixels_of(*own, str(model)) for own in corpus.pictures_of(corpus.samples).values())
    assert one["video_grid_thw"].tolist() == [[5, 4, 4]]
    np.testing.assert_array_equal(one["pixel_values_videos"], two["pixel_values_videos"])
    assert (
        main(["data", "show", str(tmp_path / "chats.jsonl"), "--content", "messages", "--tokenizer", str(model)]) == 0
    )
    assert f"video 1: {name}, 20 tokens" in capsys.readouterr().out


def _file(home: Path, content: bytes) -> None:
    (home / "a.mp4").write_bytes(content)


def _half(home: Path) -> None:
    write_video(home / "a.mp4", 0)
    _file(home, (home / "a.mp4").read_bytes()[:500])


def _long(home: Path) -> None:
    write_video(home / "a.mp4", 20)


def _sound(home: Path) -> None:
    import av

    with av.open(str(home / "a.mp4"), "w") as container:
        stream = container.add_stream("aac", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.rate = 8000
        container.mux([*stream.encode(frame), *stream.encode()])


def _list(home: Path) -> None:
    write_video(home / "b.mp4", 0)
    _file(home, b"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nb.mp4\n#EXT-X-ENDLIST\n")


WRONG: dict[str, tuple[Any, dict[str, Any], str]] = {
    "frame is missing": (None, seen(video=["a.png", "c.png"]), "picture .*/data/c.png cannot be read .there is no"),
    "frame is elsewhere": (None, seen(video=["a.png", "../c.png"]), r"picture '../c.png' does not lie below"),
    "sizes": (None, seen(video=["a.png", "b.png"]), r"video a.png, b.png cannot be read .its frames have the sizes"),
    "no frames": (None, seen(video=[]), r"'videos' is \[\], for 1 parts of type 'video'"),
    "no source": (None, seen(), r"'videos' is \[\], for 1 parts of type 'video'"),
    "one too many": (None, seen(video=["a.png"], path="a.mp4") | {"videos": ["a"]}, "'videos' is .'a'., for 1 parts"),
    "fps": (None, seen(video=["a.png"], fps=0), "'fps' of a video is 0"),
    "pictures have one file": (None, about({"type": "image", "path": ["a.png"]}), "a picture is .* which is no path"),
    "too much": (None, seen(video=["a.png"] * 200), "200 frames of 16 x 16 pixels would be decoded, and 50000 pixels"),
    "missing": (None, seen(video="a.mp4"), "video a.mp4 cannot be read .there is no such file"),
    "elsewhere": (None, seen(video="/etc/hostname"), "'/etc/hostname' does not lie below"),
    "URL": (None, seen(url="https://a.b/c.mp4"), "'https://a.b/c.mp4' is a URL"),
    "half of it": (_half, seen(video="a.mp4"), "video a.mp4 cannot be read"),
    "long": (_long, seen(video="a.mp4"), "video a.mp4 cannot be read .it has 29 frames, and 12 are the most"),
    "sound": (_sound, seen(video="a.mp4"), "video a.mp4 cannot be read .there is no video in it"),
    "list of files": (_list, seen(video="a.mp4"), "video a.mp4 cannot be read .*invalid"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_video(tmp_path: Path, model: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One message, with file and line, when the text is tokenised."""
    change, record, message = WRONG[case]
    if isinstance(record["messages"][0]["content"][0].get("video"), str):
        pytest.importorskip("av", reason="video files are read by PyAV: pip install av")
    monkeypatch.setattr(videos, "_MOST_PIXELS", 50_000)
    monkeypatch.setattr(videos, "_MOST_FRAMES", 12)
    home = tmp_path / "data"
    home.mkdir()
    Image.new("RGB", (16, 16), "red").save(home / "a.png")
    Image.new("RGB", (16, 24), "red").save(home / "b.png")
    if change is not None:
        change(home)
    write_chats(home / "chats.jsonl", [about({"type": "text", "text": "this"}), record])
    with pytest.raises(DataError, match=f"(?i)chats.jsonl:2: .*{message}"):
        prepare_corpus(settings(home, model))
    assert prepare_corpus(settings(home, model, max_corrupt_records=1)).metadata.counts.num_samples == 1


def test_a_video_that_has_changed(tmp_path: Path, model: Path) -> None:
    names = draw(tmp_path / "pictures", 1)
    write_chats(tmp_path / "chats.jsonl", [seen(video=names)])
    corpus = prepare_corpus(settings(tmp_path, model))
    (video,) = corpus.pictures_of(corpus.samples)[0]
    Image.new("RGB", (32, 32)).save(tmp_path / names[0])
    with pytest.raises(DataError, match=f"(?i)video {names[0]} has another size than when its text was tokenised"):
        pixels_of(video, str(model))


def test_a_processor_without_videos(tmp_path: Path) -> None:
    folder = vision_folder(tmp_path / "llava", "llava")
    write_chats(tmp_path / "chats.jsonl", [seen(video=draw(tmp_path / "pictures", 1))])
    with pytest.raises(DataError, match=r"(?i)it has 1 videos, and the model's processor knows none"):
        prepare_corpus(settings(tmp_path, folder))


def test_a_processor_that_looks_at_pixels(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is run on blank frames in the place of frames without numbers."""
    write_chats(tmp_path / "chats.jsonl", [seen(video=draw(tmp_path / "pictures", 1) * 3)])
    counted, plain = documents(settings(tmp_path, model)), VideosOfQwen.__call__
    devices = []

    def looks(self: VideosOfQwen, frames: Any, **options: Any) -> Any:
        devices.append(frames[0].device.type)
        assert float(frames[0].sum()) == 0
        return plain(self, frames, **options)

    pictures._of_video.cache_clear()
    monkeypatch.setattr(VideosOfQwen, "__call__", looks)
    again = documents(settings(tmp_path, model, cache_dir=str(tmp_path / "other")))
    assert devices == ["meta", "cpu"]
    assert again[0]["tokens"].tolist() == counted[0]["tokens"].tolist()


def test_tokens_of_images_that_stand_for_a_video(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in GLM-4V."""
    write_chats(tmp_path / "chats.jsonl", [seen(video=draw(tmp_path / "pictures", 1))])
    pictures._of_video.cache_clear()
    monkeypatch.setattr(PicturesOfQwen, "replace_video_token", lambda self, inputs, video_idx, **options: "<image>" * 4)
    with pytest.raises(ConfigError, match="writes other tokens than its video token"):
        prepare_corpus(settings(tmp_path, model))


def test_without_pyav(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.mp4").write_bytes(b"0")
    write_chats(tmp_path / "chats.jsonl", [seen(video="a.mp4")])
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ConfigError, match=r"PyAV is not installed\. To fix: pip install av"):
        prepare_corpus(settings(tmp_path, model))
