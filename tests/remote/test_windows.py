"""A corpus that servers tokenise while training runs: larger than one window of the shuffle."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from bytescale.common.errors import CheckpointError, DataError
from bytescale.config.schema import DataConfig
from bytescale.data.loading.corpus import plan_shards, prepare_corpus
from bytescale.data.loading.loader import StepData
from bytescale.data.order.epoch import SampleStream
from bytescale.data.remote import served_corpus
from bytescale.data.tokens import shards
from tests.data.support import write_jsonl
from tests.remote.support import (
    assert_same_data,
    feeds,
    kill_minus_9,
    numbered_config,
    pid_of,
    planner_for,
    servers,
    take_steps,
)

pytestmark = pytest.mark.usefixtures("ray_joined")

NUM_SHARDS = 16


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DataConfig:
    """5 MiB of text in 16 shards, shuffled 1 MiB at a time; a letter a token, 80 batches an epoch."""
    monkeypatch.setattr(shards, "SHARD_BYTES", 256 * 1024)
    dice = np.random.default_rng(0)
    for number in range(NUM_SHARDS):
        texts = ["".join(dice.choice(list("abcde "), int(size))) for size in dice.integers(50, 4000, 165)]
        write_jsonl(tmp_path / f"{number:02d}.jsonl", [{"text": text} for text in texts])
    sources = (str(tmp_path / "*.jsonl"),)
    return numbered_config(tmp_path, sources=sources, shuffle_window_mib=1, batch_tokens=64 * 1024, servers=2)


def num_tokenised(folder: Path) -> int:
    return len(list((folder / "cache/tokens").rglob("*.idx")))


def samples_of(steps: list[list[StepData]]) -> list[int]:
    """Samples that somebody was given something of, step by step."""
    found = []
    for ranks in steps:
        segments = [mb.segment_samples for data in ranks for mb in data.micro_batches]
        found.extend(np.unique(np.concatenate(segments)).tolist())
    return found


@pytest.mark.exhaustive
def test_training_starts_when_the_first_window_is_tokenised(tmp_path: Path, config: DataConfig) -> None:
    with feeds(config, "ray", 1) as (loader,):
        assert num_tokenised(tmp_path) == 0
        assert loader.metadata.vocab_size == 257
        state = loader.state_dict()
        assert 0 < num_tokenised(tmp_path) < NUM_SHARDS  # the window, and what was expected since
        metadata = loader.metadata
        assert 3 <= metadata.num_parts_read < NUM_SHARDS
        assert state["shuffle_window"] == "1 MiB"
        _, state = take_steps([loader], 3)
        assert loader.metadata.num_parts_read < NUM_SHARDS
        # The whole epoch: every shard when its window comes.
        _, state = take_steps([loader], 82, state=state)
        assert state["epoch"] == 1
        assert loader.metadata == prepare_corpus(config).metadata
        assert num_tokenised(tmp_path) == NUM_SHARDS


@pytest.mark.exhaustive
def test_an_epoch_of_windows_through_kills_and_over_other_ranks(tmp_path: Path, config: DataConfig) -> None:
    """3 ranks with two servers, then 2 ranks with one, each through kill -9 of all servers: the local loader's data."""
    dice = random.Random(5)
    state, taken = None, []
    for num_ranks, num_servers, num_steps in ((3, 2, 40), (2, 1, 45)):
        settings = numbered_config(
            tmp_path,
            **{name: getattr(config, name) for name in ("sources", "shuffle_window_mib")},
            batch_tokens=config.batch_tokens,
            servers=num_servers,
        )
        with feeds(settings, "ray", num_ranks) as opened:
            victims = dict(zip(dice.sample(range(num_steps), 4), servers(opened[0]) * 4, strict=False))

            def kill_sometimes(step: int, victims: dict = victims) -> None:
                if step in victims:
                    kill_minus_9(victims[step])

            steps, after = take_steps(opened, num_steps, state=state, before_step=kill_sometimes)
        with feeds(settings, "local", num_ranks) as local:
            expected, expected_after = take_steps(local, num_steps, state=state)
        assert after == expected_after
        for ours, theirs in zip(steps, expected, strict=True):
            for mine, other in zip(ours, theirs, strict=True):
                assert_same_data(mine, other)
        taken.extend(samples_of(steps))
        state = after
    corpus = prepare_corpus(config)
    assert state is not None
    assert state["epoch"] == 1
    # Every sample once, and again what the second epoch has begun with.
    stream = SampleStream(corpus.index, np.arange(NUM_SHARDS), 1, config.shuffle_seed)
    begun: list[int] = []
    for window in range(state["window"] + 1):
        stream.enter(1, window)
        stop = state["position"] if window == state["window"] else None
        begun.extend(stream.samples[stream.order[:stop]].name.tolist())
    assert Counter(taken) == Counter(corpus.samples.name.tolist()) + Counter(begun)


@pytest.mark.exhaustive
def test_a_resumed_run_reads_the_window_it_stands_in_alone(tmp_path: Path, config: DataConfig) -> None:
    with feeds(config, "local", 1) as local:
        _, state = take_steps(local, 40)
    assert state["window"] > 0
    elsewhere = tmp_path / "elsewhere"
    settings = numbered_config(elsewhere, sources=config.sources, shuffle_window_mib=1, batch_tokens=64 * 1024)
    with feeds(settings, "ray", 2) as opened, feeds(config, "local", 2) as local:
        ours, _ = take_steps(opened, 3, state=state)
        metadata = opened[0].metadata
        assert metadata.num_parts_read < NUM_SHARDS
        theirs, _ = take_steps(local, 3, state=state)
        for left, right in zip(ours, theirs, strict=True):
            for mine, other in zip(left, right, strict=True):
                assert_same_data(mine, other)


@pytest.mark.exhaustive
def test_a_step_may_wait_for_its_text_for_longer_than_an_answer_may_take(
    tmp_path: Path, config: DataConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Servers that take their time for the second window: the run says what it waits for, and goes on."""
    monkeypatch.setattr(served_corpus, "ANSWER_SECONDS", 20.0)
    index = prepare_corpus(replace(config, cache_dir=str(tmp_path / "elsewhere"))).index
    first, second, *_ = SampleStream(index, np.arange(NUM_SHARDS), 1, config.shuffle_seed).windows(0)
    names = [shard.name for shard in plan_shards(config)[0]]
    steps_of_first = int(index.part_bytes[first].sum() / index.part_bytes.sum() * 80)
    go_on = tmp_path / "go-on"

    def let_go_late() -> None:
        """Once the run has said that it waits, let it wait for longer than an answer may take."""
        while "waiting for servers to tokenise" not in caplog.text:
            time.sleep(0.1)
        time.sleep(21.0)
        go_on.touch()

    with feeds(config, "ray", 1) as (loader,):
        for server in servers(loader):
            ray.get(server.__ray_call__.remote(hold_back, {names[part] for part in second}, go_on))
        threading.Thread(target=let_go_late, daemon=True).start()
        steps, _ = take_steps([loader], steps_of_first + 4)
    assert max(ranks[0].times.wait_seconds for ranks in steps) > 20.0
    assert "waiting for servers to tokenise" in caplog.text


def hold_back(server: Any, names: set[str], until: Path) -> None:
    """From here on, in its process, these shards are not tokenised before there is a file."""
    reader = type(server._reader)
    prepare = reader.prepare

    def late_prepare(self: Any, wanted: Any, *settings: Any) -> None:
        while names & {shard.name for shard in wanted} and not until.exists():
            time.sleep(0.1)
        prepare(self, wanted, *settings)

    reader.prepare = late_prepare


@pytest.mark.exhaustive
def test_a_file_that_is_broken_ends_the_run_on_all_ranks_when_its_window_comes(
    tmp_path: Path, config: DataConfig
) -> None:
    """And one that was broken only when it was expected, which nobody needed then, does not."""
    index = prepare_corpus(replace(config, cache_dir=str(tmp_path / "elsewhere"))).index
    windows = SampleStream(index, np.arange(NUM_SHARDS), 1, config.shuffle_seed).windows(0)
    paths = [shard.units[0].files[0].path for shard in plan_shards(config)[0]]
    passing, lasting = paths[windows[1][0]], paths[windows[2][0]]
    whole = {path: path.read_bytes() for path in (passing, lasting)}
    for path in whole:
        path.write_bytes(b"#" + whole[path][1:])
    with feeds(config, "ray", 3) as opened:
        state = opened[0].state_dict()
        ray.get([pid_of(server) for server in servers(opened[0])])
        time.sleep(3.0)  # they have failed by now
        passing.write_bytes(whole[passing])
        while state["window"] == 0:
            _, state = take_steps(opened, 1, state=state)
        with pytest.raises(DataError, match=rf"{lasting.name}:1 is not JSON"):
            take_steps(opened, 60, state=state)
        for loader in opened[1:]:
            loader.load_state_dict(state)
            with (
                loader.open(planner_for(3), None) as steps,
                pytest.raises(DataError, match=rf"{lasting.name}:1 is not JSON"),
            ):
                deque(steps)


@pytest.mark.exhaustive
def test_texts_of_the_window_that_have_changed(tmp_path: Path, config: DataConfig) -> None:
    """The same sizes, another letter: found before anything is trained on."""
    with feeds(config, "local", 1) as local:
        state = local[0].state_dict()
    for path in tmp_path.glob("*.jsonl"):
        path.write_text(path.read_text().replace("a", "f"))
    with feeds(config, "ray", 1) as (loader,), pytest.raises(CheckpointError, match="made with other texts"):
        loader.load_state_dict(state)
