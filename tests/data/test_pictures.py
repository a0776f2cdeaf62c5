"""Pictures of conversations: every form of them gives the tokens of the model's own processor; what is refused."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from bytescale.cli.main import main
from bytescale.common.errors import ConfigError, DataError
from bytescale.config.schema import DataConfig
from bytescale.data.loading.corpus import Corpus, prepare_corpus
from bytescale.data.tokens import pictures
from bytescale.data.tokens.pictures import pixels_of
from tests.train.vision import chats, draw, plain_document, vision_folder, write_chats


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vision_folder(tmp_path_factory.mktemp("model") / "qwen2_vl", "qwen2_vl")


def settings(home: Path, model: Path, source: str = "chats.jsonl", **changes: Any) -> DataConfig:
    config = DataConfig(
        sources=(str(home / source),),
        content="messages",
        tokenizer=str(model),
        cache_dir=str(home / "cache"),
        num_workers=1,
    )
    return replace(config, **changes)


def about(picture: Any, text: str = "what is this", **more: Any) -> dict[str, Any]:
    parts = [
        picture if isinstance(picture, dict) else {"type": "image", "path": picture},
        {"type": "text", "text": text},
    ]
    return {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "a thing"}], **more}


def documents(config: DataConfig) -> list[dict[str, np.ndarray]]:
    corpus = prepare_corpus(config)
    return corpus.documents(corpus.samples)


def given_with_equal_tokens(
    corpus: Corpus, model: Path, home: Path, records: Sequence[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """What plain transformers makes of each record, whose tokens and trained tokens are the corpus's."""
    for document, record in zip(corpus.documents(corpus.samples), records, strict=True):
        given, trained = plain_document(model, home, record)
        assert document["tokens"].tolist() == given["input_ids"][0].tolist()
        assert (np.roll(document["weights"], 1) != 0).tolist() == trained.tolist()
        yield given


def test_tokens_and_pixels_are_those_of_the_processor(tmp_path: Path, model: Path) -> None:
    records = chats(draw(tmp_path / "pictures"))
    write_chats(tmp_path / "chats.jsonl", records)
    corpus = prepare_corpus(settings(tmp_path, model))
    found = corpus.pictures_of(corpus.samples)
    for number, given in enumerate(given_with_equal_tokens(corpus, model, tmp_path, records)):
        pixels = [pixels_of(picture, str(model)) for picture in found.get(number, ())]
        assert sum(len(own["pixel_values"]) for own in pixels) == len(given.get("pixel_values", ()))
        if pixels:
            own = np.concatenate([one["pixel_values"].double().numpy() for one in pixels])
            np.testing.assert_array_equal(own, given["pixel_values"].numpy())
    assert corpus.metadata.num_pictures == 9


def test_all_forms_of_a_picture(tmp_path: Path, model: Path) -> None:
    """A path, bytes in several dresses, and the record's list of images: the same tokens and the same pixels."""
    (name, *_) = draw(tmp_path / "pictures", 1)
    content = (tmp_path / name).read_bytes()
    text = base64.b64encode(content).decode()
    url = f"data:image/png;base64,{text}"
    forms = [
        about(name), about({"type": "image", "image": name}), about({"type": "image", "base64": text}),
        about({"type": "image", "url": url}), about({"type": "image_url", "image_url": {"url": url}}),
        about({"type": "image", "image": {"path": name}}), about({"type": "image"}, images=[name]),
        about({"type": "image"}, images=[{"path": name}]), about(str(tmp_path / name)),
    ]  # fmt: skip
    write_chats(tmp_path / "chats.jsonl", forms)
    rows = [about({"type": "image", "image": {"bytes": content, "path": None}}) for _ in range(2)]
    rows[1]["messages"][0]["content"][0]["image"] = {"bytes": content, "path": "somewhere/else.png"}
    columns = [about({"type": "image"}, images=[{"bytes": content, "path": "x.png"}])]
    for row in (*rows, *columns):  # a column has one type
        row["messages"][1]["content"] = [{"type": "text", "text": row["messages"][1]["content"]}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(columns), tmp_path / "b.parquet")
    sources = tuple(str(tmp_path / source) for source in ("chats.jsonl", "a.parquet", "b.parquet"))
    corpus = prepare_corpus(settings(tmp_path, model, sources=sources))
    found = [own for _, own in sorted(corpus.pictures_of(corpus.samples).items())]
    assert len(found) == len(forms) + 3
    expected = pixels_of(found[0][0], str(model))["pixel_values"]
    for document, (picture,) in zip(corpus.documents(corpus.samples), found, strict=True):
        assert document["tokens"].tolist() == documents(settings(tmp_path, model))[0]["tokens"].tolist()
        np.testing.assert_array_equal(pixels_of(picture, str(model))["pixel_values"], expected)


def test_pictures_that_a_camera_has_turned(tmp_path: Path, model: Path) -> None:
    image, exif = Image.new("RGB", (40, 16), "red"), Image.Exif()
    exif[0x0112] = 6
    image.save(tmp_path / "a.jpg", exif=exif)
    write_chats(tmp_path / "chats.jsonl", [about("a.jpg")])
    corpus = prepare_corpus(settings(tmp_path, model))
    (picture,) = corpus.pictures_of(corpus.samples)[0]
    assert pixels_of(picture, str(model))["image_grid_thw"].tolist() == [[1, 10, 4]]


def _broken(home: Path) -> None:
    (home / "a.png").write_bytes(b"\x89PNG\r\n\x1a\nno more")


def _link_out(home: Path) -> None:
    (home.parent / "secret.png").write_bytes((home / "a.png").read_bytes())
    (home / "a.png").unlink()
    (home / "a.png").symlink_to(home.parent / "secret.png")


def _pipe(home: Path) -> None:
    (home / "a.png").unlink()
    os.mkfifo(home / "a.png")


def _postscript(home: Path) -> None:
    (home / "a.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")


def _bomb(home: Path) -> None:
    Image.new("1", (30_000, 30_000)).save(home / "a.png")


def _narrow(home: Path) -> None:
    Image.new("RGB", (4000, 2)).save(home / "a.png")


WRONG: dict[str, tuple[Any, dict[str, Any], str]] = {
    "missing": (None, about("b.png"), "picture b.png cannot be read .there is no such file"),
    "broken": (_broken, about("a.png"), "picture a.png cannot be read .cannot identify image file"),
    "above": (None, about("../a.png"), r"picture '../a.png' does not lie below .*, the folder of its record's file"),
    "through": (None, about("x/../../a.png"), "does not lie below"),
    "absolute": (None, about("/etc/hostname"), "picture '/etc/hostname' does not lie below"),
    "link": (_link_out, about("a.png"), "picture 'a.png' does not lie below"),
    "pipe": (_pipe, about("a.png"), "picture a.png cannot be read .there is no such file"),
    "URL": (
        None,
        about("https://a.b/c.png"),
        "picture 'https://a.b/c.png' is a URL. Nothing but files beside the data",
    ),
    "format": (_postscript, about("a.png"), "picture a.png cannot be read .cannot identify"),
    "bomb": (_bomb, about("a.png"), "picture a.png cannot be read .*pixels"),
    "refused": (_narrow, about("a.png"), "processor refuses a picture of 4000 x 2 pixels .*aspect ratio"),
    "number": (None, about(3), "a picture is '3', which is no path and no bytes"),
    "base64": (None, about({"type": "image", "base64": "?"}), "cannot be read"),
    "none": (None, about({"type": "image"}), "'images' is .., for 1 parts of type 'image'"),
    "one too many": (None, about("a.png", images=["a.png"]), "'images' is .'a.png'., for 1 parts of type 'image'"),
    "sound": (None, about({"type": "audio", "path": "a"}), "has a part of type 'audio'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_picture(tmp_path: Path, model: Path, case: str) -> None:
    """One message, with file and line, when the text is tokenised."""
    change, record, message = WRONG[case]
    home = tmp_path / "data"
    home.mkdir()
    Image.new("RGB", (16, 16), "red").save(home / "a.png")
    if change is not None:
        change(home)
    write_chats(home / "chats.jsonl", [about({"type": "text", "text": "this"}), record])
    with pytest.raises(DataError, match=f"(?i)chats.jsonl:2: .*{message}"):
        prepare_corpus(settings(home, model))
    left_out = prepare_corpus(settings(home, model, max_corrupt_records=1))
    assert left_out.metadata.counts.num_samples == 1


def test_a_template_that_leaves_pictures_out(tmp_path: Path, model: Path) -> None:
    write_chats(tmp_path / "chats.jsonl", [about(draw(tmp_path / "pictures", 1)[0])])
    template = (
        "{% for m in messages %}<s>{{ m.role + ' ' }}{{ m.content if m.content is string else m.content[1].text }}</s>"
    )
    (tmp_path / "text.jinja").write_text(template + "{% endfor %}")
    with pytest.raises(DataError, match=r"(?i)has 1 images, and the model's chat template writes '<image>' 0 times"):
        prepare_corpus(settings(tmp_path, model, chat_template=str(tmp_path / "text.jinja")))


def test_words_that_only_look_like_a_picture(tmp_path: Path, model: Path) -> None:
    """A user's <image> is text."""
    write_chats(tmp_path / "chats.jsonl", [about(draw(tmp_path / "pictures", 1)[0], "this <image> is")])
    assert prepare_corpus(settings(tmp_path, model)).metadata.num_pictures == 1


def test_documents_that_would_be_cut(tmp_path: Path, model: Path) -> None:
    write_chats(tmp_path / "chats.jsonl", [about({"type": "text", "text": "this"}), about(draw(tmp_path / "p", 1)[0])])
    with pytest.raises(
        DataError, match=r"chats.jsonl:2: it has \d+ tokens with those of its pictures.*context_length is 12"
    ):
        prepare_corpus(settings(tmp_path, model, context_length=12))
    dropped = prepare_corpus(settings(tmp_path, model, context_length=12, over_length="drop"))
    assert dropped.metadata.counts.num_dropped == 1


def test_a_picture_that_has_changed(tmp_path: Path, model: Path) -> None:
    """Found when its pixels are read; a new line in the record's file makes its tokens anew."""
    (name, *_) = draw(tmp_path / "pictures", 1)
    write_chats(tmp_path / "chats.jsonl", [about(name)])
    corpus = prepare_corpus(settings(tmp_path, model))
    (picture,) = corpus.pictures_of(corpus.samples)[0]
    Image.new("RGB", (64, 64)).save(tmp_path / name)
    with pytest.raises(DataError, match=f"(?i){name} has another size than when its text was tokenised"):
        pixels_of(picture, str(model))


def test_who_knows_text_alone_says_so(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_chats(tmp_path / "chats.jsonl", [about(draw(tmp_path / "pictures", 1)[0])])
    with pytest.raises(DataError, match=r"(?i)the data has pictures, and data.share_prefixes knows"):
        prepare_corpus(settings(tmp_path, model, share_prefixes=True))
    with pytest.raises(DataError, match=r"(?i)the data has pictures, and data.loader knows"):
        prepare_corpus(settings(tmp_path, model, loader="ray"))
    common = ["--content", "messages", "--tokenizer", str(model)]
    assert main(["data", "tokenize", str(tmp_path / "chats.jsonl"), "--output", str(tmp_path / "out"), *common]) == 2
    assert "a .bin and .idx pair knows text alone" in capsys.readouterr().err
    text_alone = tmp_path / "text"
    text_alone.mkdir()
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (text_alone / file).write_bytes((model / file).read_bytes())
    with pytest.raises(ConfigError, match=f"(?i)the data has pictures, and {text_alone} has no processor for them"):
        prepare_corpus(settings(tmp_path, text_alone))


def test_a_processor_runs_once_a_size(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts tokens, or is run on blank pictures: no pixel is read while text is tokenised. Text needs none."""
    write_chats(tmp_path / "chats.jsonl", [about(name) for name in draw(tmp_path / "pictures", 24)])
    pictures._standing_for.cache_clear()
    monkeypatch.setattr(pictures, "pixels_of", None)
    counted = documents(settings(tmp_path, model))
    assert pictures._standing_for.cache_info().misses == 12
    assert pictures._only_counts(str(model))
    pictures._standing_for.cache_clear()
    monkeypatch.setattr(pictures, "_only_counts", lambda folder: False)
    blank = documents(settings(tmp_path, model, cache_dir=str(tmp_path / "other")))
    assert [own["tokens"].tolist() for own in blank] == [own["tokens"].tolist() for own in counted]
    monkeypatch.setattr(pictures, "_processor_of", None)
    write_chats(tmp_path / "text.jsonl", [about({"type": "text", "text": "this"})])
    assert prepare_corpus(settings(tmp_path, model, "text.jsonl")).metadata.num_pictures == 0
