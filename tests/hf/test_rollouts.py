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
from bytescale.hf.batch.rollouts import read_rollouts, rollout_documents, whole_trajectories
from bytescale.planner.prefixes import Prefixes

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


def test_none_is_nothing_as_a_null_of_a_file_is() -> None:
    """Without a prompt, and with the keys of other trajectories."""
    rest = {name: value for name, value in AGENT.items() if name != "prompt"}
    (ours,), (theirs,) = (
        rollout_documents([one]) for one in ({**dict.fromkeys(["prompt", "id", "parent_id", "tokens"]), **rest}, rest)
    )
    assert ours["tokens"].tolist() == theirs["tokens"].tolist() == [7, 8, 20, 21, 22, 9]


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
        ({"reward": None}, "Trajectory 1 has no reward"),
        ({"logprobs": [-1.0, -2.0]}, r"has 1 tokens and the log-probabilities \[-1.0, -2.0\] \(2\)"),
        ({"logprobs": None}, "the log-probabilities None"),
        ({"advantage": [1.0, 2.0]}, "has 2 advantages for the 1 tokens of the policy"),
    ],
)
def test_bad_trajectories(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        rollout_documents([AGENT, {**SHORT, **changes}])


TASK: dict[str, Any] = {"id": "task", "prompt": [5, 6]}
FIRST: dict[str, Any] = {"id": 1, "parent_id": "task", "turns": AGENT["turns"][:2]}
BRANCHES: list[dict[str, Any]] = [
    {"id": "a", "parent_id": 1, "turns": AGENT["turns"][2:], "reward": 1.0},
    TASK,
    {"parent_id": "1", "tokens": [30, 31], "logprobs": [-0.1, -0.2], "reward": 0.0},
    FIRST,
    {"parent_id": "a", "prompt": [5, 6, 7, 8, 20, 21, 22, 9, 40], "tokens": [3], "logprobs": [-3.0], "reward": 2.0},
]


def test_branches_go_on_from_their_parents(tmp_path: Path) -> None:
    """In files in any order, as in memory: trajectories that repeat what they begin with, and what they share."""
    before: dict[str, Any] = {"prompt": [5, 6], "group": "task"}
    wanted = rollout_documents(
        [
            {**AGENT, **before},
            {**before, "turns": [*AGENT["turns"][:2], BRANCHES[2]], "reward": 0.0},
            {**BRANCHES[4], "group": "task", "parent_id": None},
        ]
    )
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(one) + "\n" for one in BRANCHES), encoding="utf-8")
    named = [{**one, **{name: str(one[name]) for name in ("id", "parent_id") if name in one}} for one in BRANCHES]
    keys = {key for one in named for key in one}
    rows = [{**dict.fromkeys(keys), **one} for one in named]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "b.parquet")
    for found in (BRANCHES, list(read_rollouts(tmp_path / "a.jsonl")), list(read_rollouts(tmp_path / "b.parquet"))):
        ours = rollout_documents(found)
        assert len(ours) == 3
        for document, theirs in zip(ours, wanted, strict=True):
            for key, value in theirs.items():
                assert torch.equal(torch.as_tensor(document[key]), torch.as_tensor(value)), key
    # Rows are shared where all that a loss looks at is equal: beyond the prompt, the turns of a common parent.
    rows = [torch.stack([one["tokens"].double(), one["old_logprobs"]], dim=1).numpy() for one in wanted[:2]]
    assert Prefixes.of([own.tobytes() for own in rows], 16).common.tolist() == [0, 6]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"parent_id": "b", "tokens": [1], "reward": 0.0}, "a.jsonl:6 goes on from 'b', and no record has this id"),
        ({"id": "a", "tokens": [1], "reward": 0.0}, r"a.jsonl:6 has the id 'a', as has .*a.jsonl:1"),
        (
            {"id": "c", "parent_id": "c", "tokens": [1], "reward": 0.0},
            "a.jsonl:6 goes on from 'c', and its parents go on from each",
        ),
        (
            {"parent_id": "a", "prompt": [5, 6, 7, 9], "reward": 0.0},
            "a.jsonl:6 goes on from 'a', but does not begin with its 8 tokens",
        ),
        (
            {"parent_id": "a", "prompt": [5, 6, 7], "reward": 0.0},
            "a.jsonl:6 goes on from 'a', but does not begin with its 8 tokens",
        ),
        ({"id": "c", "parent_id": "a", "tokens": [1]}, "a.jsonl:6 has no reward, and no branch goes on from it"),
    ],
)
def test_bad_parents(tmp_path: Path, record: dict[str, Any], message: str) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(one) + "\n" for one in [*BRANCHES, record]), encoding="utf-8")
    with pytest.raises(DataError, match=message):
        list(read_rollouts(tmp_path / "a.jsonl"))


def test_cycles_of_several_and_long_chains() -> None:
    ring = [{"id": n, "parent_id": (n + 1) % 3, "tokens": [n], "logprobs": [-1.0], "reward": 1.0} for n in range(3)]
    with pytest.raises(DataError, match="Trajectory 0 goes on from 1, and its parents go on from each other"):
        rollout_documents(ring)
    chain = [{**ring[0], "id": n, "parent_id": n - 1 if n else None} for n in reversed(range(2000))]
    longest, *_, second, first = whole_trajectories(chain, str)
    assert len(longest["turns"]) == 2000
    assert len(second["turns"]) == 2
    assert first["tokens"] == [0]
