"""The trainer's plans, and those of ``bytescale plan``, leave room for the pictures of a batch."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from bytescale.cli.main import main
from bytescale.config.load import config_to_toml
from bytescale.hf.loop import pictures
from bytescale.hf.loop.pictures import PictureLoader
from tests.helpers.effort import one_of
from tests.train.runs import with_trainer
from tests.train.test_pictures import difference, picture_run, said_of
from tests.train.vision import chats, draw

TOO_LITTLE, ENOUGH = 0.003, 0.0045  # GiB; text alone has room in both


@pytest.mark.parametrize("pp", one_of([1, 2], 1))
def test_a_run_leaves_room_for_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pp: int) -> None:
    """Smaller micro-batches train to the same weights; what does not fit is an error, and no killed process."""
    config = with_trainer(picture_run(tmp_path, "qwen2_vl", pp), capacity_tokens=0, pp=pp)
    config, little = (replace(config, memory=replace(config.memory, device_gib=room)) for room in (ENOUGH, TOO_LITTLE))
    assert difference(config, chats(draw(tmp_path / "pictures"))) < 1e-10
    said, *others = said_of(with_trainer(little, run_dir=str(tmp_path / "little")))
    assert [said] * (pp - 1) == others
    assert re.search(r"he pictures of a batch need .* beside .* that a rank may use. Training would run out", said)
    monkeypatch.setattr(PictureLoader, "_planner_of", lambda self, planner, batch: planner)  # a planted fault
    assert said_of(with_trainer(little, run_dir=str(tmp_path / "nothing"))) == [""] * pp


def test_the_command_plan_knows_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = with_trainer(picture_run(tmp_path, "qwen2_vl", 1), capacity_tokens=0)
    config = replace(config, memory=replace(config.memory, device_gib=ENOUGH))
    (tmp_path / "run.toml").write_text(config_to_toml(config), encoding="utf-8")

    def said() -> tuple[int, str]:
        assert main(["plan", str(tmp_path / "run.toml"), "--planners", "adaptive"]) == 0
        text = capsys.readouterr().out
        return int(re.findall(r"on 1 ranks of (\d+) tokens", text)[0]), text

    beside, text = said()
    assert re.search(r"of the fullest micro-batch .* pictures 1.* MiB", text)
    assert re.search(r"pictures: .* of encoders before the text and .* behind it, \d+% of the step", text)
    monkeypatch.setattr(pictures, "memory_of_pictures", lambda *args, **options: (0.0, 0.0))
    assert said()[0] > beside
