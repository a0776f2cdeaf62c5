"""Training on a full disk, which is a small tmpfs that is mounted for the test."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bytescale.checkpoint.verify import problems_of
from bytescale.common.errors import DataError
from bytescale.config.load import config_to_toml
from bytescale.data.loading.corpus import prepare_corpus
from tests.helpers.disk import grow, small_disk
from tests.train.runs import losses, on_ranks, run, small_run, with_trainer, write_corpus

MIB = 1024**2


@pytest.fixture
def disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """Of as many bytes as the test is given."""
    with small_disk(tmp_path / "disk", request.param) as folder:
        yield folder


@pytest.mark.exhaustive
@pytest.mark.parametrize("disk", [3 * MIB], indirect=True)
def test_checkpoints_until_the_disk_is_full(tmp_path: Path, disk: Path) -> None:
    """Each takes 0.5 MiB: after some, warnings; those before load, and with more room the run saves again."""
    config = on_ranks(small_run(write_corpus(tmp_path / "corpus"), disk / "run", steps=30), 2)
    config = replace(config, checkpoint=replace(config.checkpoint, every=1, keep=100))
    path = tmp_path / "run.toml"
    path.write_text(config_to_toml(config), encoding="utf-8")
    ended = subprocess.run(
        [sys.executable, "-m", "bytescale", "train", str(path)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ended.returncode == 1
    assert re.search(
        rf"bytescale train: The checkpoint step-\d+ could not be written \(The disk that holds {disk}/run/checkpoints "
        r"has [\d.]+ \w+ free, and a checkpoint takes [\d.]+ \w+\. Nothing was written\)\. The checkpoints before it",
        ended.stderr,
    ), ended.stderr
    assert len(losses(disk / "run")) == 30, "the run went on"
    assert "Traceback" not in ended.stderr
    complete = sorted((disk / "run" / "checkpoints").glob("step-*"))
    assert complete
    for checkpoint in complete:
        assert problems_of(checkpoint) == []
    grow(disk, 100 * MIB)
    whole = run(with_trainer(config, run_dir=str(tmp_path / "whole")))
    assert run(with_trainer(config, resume=True)) == whole
    assert not list((disk / "run" / "checkpoints").glob(".step-*")), "what was half written is gone"
    assert len(losses(disk / "run")) == 30


@pytest.mark.parametrize("disk", [MIB], indirect=True)
def test_a_cache_on_a_full_disk(tmp_path: Path, disk: Path) -> None:
    """Half written tokens are no corpus; with room, the same command goes on."""
    text = tmp_path / "a.txt"
    text.write_text("words " * 300_000, encoding="utf-8")
    config = replace(small_run(text, tmp_path / "run").data, sources=(str(text),), cache_dir=str(disk / "cache"))
    with pytest.raises(DataError, match=r"cannot be written .*No space left on device"):
        prepare_corpus(config)
    assert not [path for path in disk.rglob("*") if path.suffix in (".bin", ".idx", ".tmp")]
    grow(disk, 20 * MIB)
    assert prepare_corpus(config).metadata.counts.num_tokens == 1_800_001
