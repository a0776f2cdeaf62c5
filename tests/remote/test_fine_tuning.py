"""Fine-tuning on the remote loader: kill -9 and resume on other ranks give the losses of one undisturbed local run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bytescale.config.schema import Config
from tests.train.runs import interrupt, losses, metrics, on_ranks, run, with_trainer
from tests.train.test_fine_tuning import chat_run, tokens_run
from tests.train.test_shared_prefixes import pair


def weighted_run(tmp_path: Path, name: str, kind: str) -> Config:
    """Conversations with losses per sequence, or tokens with real-valued weights and labels of their own."""
    if kind == "messages":
        return chat_run(tmp_path, name, "sequence")
    config = with_trainer(tokens_run(tmp_path, name, "weight"), steps=4)
    return replace(config, checkpoint=replace(config.checkpoint, every=1))


@pytest.mark.exhaustive
@pytest.mark.forks_ranks
@pytest.mark.parametrize("kind", ["messages", "tokens"])
def test_killed_and_resumed_on_other_ranks(
    tmp_path: Path, ray_address: str, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    expected = run(on_ranks(weighted_run(tmp_path, "whole", kind), 2, 128))
    config = on_ranks(weighted_run(tmp_path, "killed", kind), 2, 128)
    monkeypatch.setenv("RAY_ADDRESS", ray_address)
    killed = replace(config, data=replace(config.data, loader="ray", servers=2))
    interrupt(killed, after_step=2)
    run(with_trainer(on_ranks(killed, 3, 128), resume=True))
    assert losses(tmp_path / "killed") == pytest.approx(expected, rel=1e-10)


@pytest.mark.exhaustive
@pytest.mark.forks_ranks
def test_prefixes_are_shared_by_rows_that_servers_send(
    tmp_path: Path, ray_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    apart, shared = pair(tmp_path, 2, loss_per="sequence")
    monkeypatch.setenv("RAY_ADDRESS", ray_address)
    data = replace(shared.data, loader="ray", servers=2)
    assert run(replace(shared, data=data)) == pytest.approx(run(apart), rel=1e-8)
    rows, tokens = ([line["num_tokens"] for line in metrics(tmp_path / name)] for name in ("shared", "apart"))
    assert sum(rows) < 0.7 * sum(tokens)
