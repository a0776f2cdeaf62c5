"""Settings of ``[checkpoint]`` in whole runs: what is kept, exported, and put elsewhere."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers

from bytescale.common.errors import ConfigError
from bytescale.config.load import load_config
from bytescale.config.schema import Config
from bytescale.hf.files.export import export_checkpoint
from bytescale.train.loop.trainer import train
from bytescale.train.origin import keep_origin
from tests.train.runs import on_ranks, run, small_run, with_trainer, write_corpus


def with_checkpoints(config: Config, **changes: object) -> Config:
    return replace(config, checkpoint=replace(config.checkpoint, **changes))


def test_kept_for_ever_and_exported(tmp_path: Path) -> None:
    """A checkpoint every step, of which every third is kept; and a folder with what belongs to its tokenizer."""
    config = on_ranks(small_run(write_corpus(tmp_path / "corpus"), tmp_path / "run", steps=7), 2)
    run(with_checkpoints(config, every=1, keep=1, keep_every=3))
    folder = tmp_path / "run"
    names = ["step-000003", "step-000006", "step-000007"]
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == names
    run_config = load_config(folder / "config.toml")
    export_checkpoint(folder / "checkpoints" / "step-000006", tmp_path / "later", run_config=run_config)

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "<eos>": 2}, unk_token="b"))
    words.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}', encoding="utf-8")
    (tmp_path / "chat.jinja").write_text("{{ messages }}", encoding="utf-8")
    data = replace(run_config.data, chat_template=str(tmp_path / "chat.jinja"))
    keep_origin(tmp_path / "origin", replace(run_config, data=data), str(tmp_path / "tokenizer.json"))
    export_checkpoint(
        folder / "checkpoints" / "step-000006", tmp_path / "ends", run_config=run_config, origin=tmp_path / "origin"
    )
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "ends" / name).read_text(encoding="utf-8"))["eos_token_id"] == 2
    assert (tmp_path / "ends" / "chat_template.jinja").read_text(encoding="utf-8") == "{{ messages }}"
    assert (tmp_path / "ends" / "tokenizer_config.json").is_file()
    later = json.loads((tmp_path / "later" / "generation_config.json").read_text(encoding="utf-8"))
    assert later.get("eos_token_id") is None, "what no run has kept is not known"


@pytest.mark.exhaustive
def test_checkpoints_in_another_folder(tmp_path: Path) -> None:
    """The run goes on from there; another run is refused, before it has changed anything."""
    config = on_ranks(small_run(write_corpus(tmp_path / "corpus"), tmp_path / "run", steps=2), 2)
    config = with_checkpoints(config, folder=str(tmp_path / "elsewhere"))
    run(config)
    assert (tmp_path / "elsewhere" / "step-000002").is_dir()
    assert len(run(with_trainer(config, resume=True, steps=4))) == 4
    before = sorted((tmp_path / "elsewhere").rglob("*"))
    other = on_ranks(with_trainer(config, run_dir=str(tmp_path / "other")), 1)
    with pytest.raises(ConfigError, match="Another run writes its checkpoints into"):
        train(other, print_line=lambda line: None)
    assert sorted((tmp_path / "elsewhere").rglob("*")) == before
