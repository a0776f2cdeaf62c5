"""Rollouts as data: turns, masks, groups and advantages, from memory and from files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch

from bytescale.common.errors import DataError
from bytescale.hf.batch.rollouts import read_rollouts, rollout_documents

AGENT: dict[str, Any] = {
    "prompt": [5, 6],
    "turns": [
        {"tokens": [7, 8], "logprobs": [-0.5, -1.5], "trained": True},
        {"tokens": [20, 21, 22], "logprobs": None, "trained": False},
        {"tokens": [9], "logprobs": [-2.5], "trained": True},
    ],
    "reward": 1.0,
    "group": "a",
}
SHORT: dict[str, Any] = {
    "prompt": [5, 6],
    "tokens": [3],
    "logprobs": [-0.25],
    "reward": 0.0,
    "group": "a",
}


def test_turns_become_weights_and_log_probabilities_of_the_next_token() -> None:
    agent, short = rollout_documents([AGENT, SHORT], normalise=False)
    assert agent["tokens"].tolist() == [5, 6, 7, 8, 20, 21, 22, 9]
    assert agent["weights"].tolist() == [0, 1, 1, 0, 0, 0, 1, 0]
    assert agent["old_logprobs"].tolist() == [0, -0.5, -1.5, 0, 0, 0, -2.5, 0]
    assert agent["advantage"].tolist() == [0, 0.5, 0.5, 0, 0, 0, 0.5, 0]
    assert short["advantage"].tolist() == [0, -0.5, 0]
    assert (agent["group"], short["group"]) == (0, 0)
    normal, _ = rollout_documents([AGENT, SHORT])
    assert float(normal["advantage"][1]) == pytest.approx(0.5 / (0.5**0.5 + 1e-4))


def test_advantages_that_are_given_are_kept() -> None:
    of_tokens, of_document = rollout_documents([{**AGENT, "advantage": [1.0, 2.0, 3.0]}, {**SHORT, "advantage": 7.0}])
    assert of_tokens["advantage"].tolist() == [0, 1, 2, 0, 0, 0, 3, 0]
    assert of_document["advantage"].tolist() == [0, 7, 0]


def test_files_hold_what_memory_holds(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(one) + "\n" for one in (AGENT, SHORT)), encoding="utf-8")
    rows = [{"turns": None, "tokens": None, "logprobs": None, **one} for one in (AGENT, SHORT)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "b.parquet")
    wanted = rollout_documents([AGENT, SHORT])
    for name in ("a.jsonl", "b.parquet"):
        for ours, theirs in zip(rollout_documents(list(read_rollouts(tmp_path / name))), wanted, strict=True):
            assert ours.keys() == theirs.keys()
            for key, value in theirs.items():
                assert torch.equal(torch.as_tensor(ours[key]), torch.as_tensor(value)), key


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward": float("nan")}, "The reward of trajectory 1 is nan"),
        ({"reward": None}, "The reward of trajectory 1 is None"),
        ({"logprobs": [-1.0, -2.0]}, r"has 1 tokens and the log-probabilities \[-1.0, -2.0\] \(2\)"),
        ({"logprobs": None}, "the log-probabilities None"),
        ({"advantage": [1.0, 2.0]}, "has 2 advantages for the 1 tokens of the policy"),
    ],
)
def test_bad_trajectories(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        rollout_documents([AGENT, {**SHORT, **changes}])
