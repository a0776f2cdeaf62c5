"""A loop of one's own on the remote loader: the losses and fields of the local one, also after kill -9."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.data.support import write_jsonl
from tests.hf.test_loaded import killed_and_resumed, records, settings, trained


@pytest.mark.exhaustive
@pytest.mark.forks_ranks
def test_killed_and_resumed_on_other_ranks(tmp_path: Path, ray_address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The records are read by servers of a Ray that outlives the killed ranks."""
    config = settings(tmp_path, write_jsonl(tmp_path / "a.jsonl", records()))
    losses, _, seen = trained(tmp_path, 2, config)
    monkeypatch.setenv("RAY_ADDRESS", ray_address)
    remote = replace(config, loader="ray", servers=2)
    found, other = killed_and_resumed(tmp_path / "saved", remote)
    assert found == pytest.approx(losses[2:], rel=1e-10)
    assert other == seen
