"""Fine-tuning on videos: losses and weights are those of plain transformers with the model's own processor."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bytescale.parity.compare import WideCasts
from tests.helpers.effort import one_of
from tests.train.runs import on_ranks, with_trainer
from tests.train.test_pictures import difference, picture_run
from tests.train.vision import video_chats, vision_folder, write_chats

RUNS = [(files, num_ranks) for files in (False, True) for num_ranks in (1, 2, 3)]


@pytest.mark.parametrize(("files", "num_ranks"), one_of(RUNS, (False, 2)))
def test_runs_equal_plain_transformers(tmp_path: Path, files: bool, num_ranks: int) -> None:
    if files:
        pytest.importorskip("av", reason="video files are read by PyAV: pip install av")
    records: list[dict[str, Any]] = video_chats(tmp_path, files=files)
    write_chats(tmp_path / "chats.jsonl", records)
    config = picture_run(tmp_path, "qwen2_5_vl", num_ranks)
    with WideCasts():  # this family rounds to fp32 in between
        assert difference(config, records) < 1e-10


WAYS: list[dict[str, Any]] = [
    {"checkpointing": "full"},
    {"pp": 2, "capacity_tokens": 100},
    {"shard": "parameters", "domain": 2},
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_ways_to_train(tmp_path: Path, way: dict[str, Any]) -> None:
    records = video_chats(tmp_path, files=False)
    write_chats(tmp_path / "chats.jsonl", records)
    config = with_trainer(picture_run(tmp_path, "qwen2_5_vl", 2), **way)
    with WideCasts():
        assert difference(config, records) < 1e-10


@pytest.mark.exhaustive
@pytest.mark.parametrize("files", [False, True])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_processors_of_transformers(tmp_path: Path, family: str, files: bool) -> None:
    """They sample frames, and Qwen3-VL's writes their times between them."""
    pytest.importorskip("torchvision", reason="transformers' processors of videos need it, for the torch that is here")
    pytest.importorskip("av", reason="video files are read by PyAV: pip install av")
    vision_folder(tmp_path / family, family, real=True)
    records = video_chats(tmp_path, files=files)
    write_chats(tmp_path / "chats.jsonl", records)
    config = picture_run(tmp_path, family, 2)
    config = replace(config, data=replace(config.data, context_length=200, batch_tokens=600))
    with WideCasts():
        assert difference(on_ranks(config, 2, 160), records) < 1e-10
