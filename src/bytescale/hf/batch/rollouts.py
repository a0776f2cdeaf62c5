"""Rollouts as data: trajectories with turns, several per prompt, as documents of a loop of one's own.

A trajectory is a mapping, as a line of a JSONL file or a row of a Parquet file has it::

    {"prompt": [5, 17, 9], "turns": [{"tokens": [3, 8], "logprobs": [-0.1, -2.0]},
                                     {"tokens": [40, 41], "trained": false},
                                     {"tokens": [7, 1], "logprobs": [-0.3, -0.2]}], "reward": 1.0, "group": "p17"}

The policy has written the turns; those with ``trained: false``, such as results of tools, it has only read.
``tokens`` may stand in place of ``turns`` for a trajectory of one turn, with ``logprobs`` beside it.

Documents have the numbers of a token at the row that predicts it, as ``labels`` are: ``weights`` are 1 where the policy
wrote the next token, and ``old_logprobs`` are what it gave this token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bytescale.common.errors import DataError
from bytescale.data.sources.files import expand_sources
from bytescale.data.sources.readers import ReadCounts
from bytescale.data.sources.records import RecordKind, iter_records, plan_units


def rollout_documents(trajectories: Sequence[Mapping[str, Any]], *, normalise: bool = True) -> list[dict[str, Any]]:
    """Documents for ``hdp.plan``, in the order of ``trajectories``.

    Each has ``tokens``, ``weights``, ``old_logprobs``, ``reward``, ``advantage`` and ``group``, the same number for all
    trajectories of a prompt: labels for ``together``.

    Args:
        trajectories: see above. An ``advantage``, a number or one for each token that the policy wrote, is kept. Where
            it is missing it is the reward minus the mean of its group.
        normalise: whether this difference is divided by the group's standard deviation (GRPO), or not (Dr. GRPO).

    Raises ``DataError`` for rewards or log-probabilities that are not finite or missing, and log-probabilities that are
    not as many as the tokens.
    """
    documents = [_document(trajectory, number) for number, trajectory in enumerate(trajectories)]
    groups: dict[Any, int] = {}
    rewards: dict[int, list[float]] = {}
    for document, trajectory in zip(documents, trajectories, strict=True):
        label = trajectory.get("group", tuple(trajectory.get("prompt", ())))
        document["group"] = groups.setdefault(label, len(groups))
        rewards.setdefault(document["group"], []).append(document["reward"])
    for number, (document, trajectory) in enumerate(zip(documents, trajectories, strict=True)):
        given, rows = trajectory.get("advantage"), document["weights"].double()
        if given is None:
            own = torch.tensor(rewards[document["group"]], dtype=torch.float64)
            spread = float(own.std()) + 1e-4 if normalise and len(own) > 1 else 1.0
            given = (document["reward"] - float(own.mean())) / spread
        if isinstance(given, (int, float)):
            document["advantage"] = rows * given
            continue
        values, places = torch.tensor(given, dtype=torch.float64), rows.nonzero()[:, 0]
        if len(values) != len(places):
            raise DataError(
                f"trajectory {number} has {len(values)} advantages for the {len(places)} tokens of the policy",
                fix="give one for each token that the policy wrote, or one for the whole trajectory",
            )
        document["advantage"] = rows.index_put((places,), values)
    return documents


def read_rollouts(*sources: str | Path) -> Iterator[dict[str, Any]]:
    """Yield the trajectories of JSONL and Parquet files, folders and URLs, in order.

    Raises ``DataError`` for a record that cannot be read, and ``ConfigError`` where there is no file.
    """
    optional = ("prompt", "turns", "tokens", "logprobs", "group", "advantage")
    kind = RecordKind("rollouts", (("reward",),), optional)
    counts = ReadCounts()
    for unit in plan_units(expand_sources([str(source) for source in sources]), kind):
        for record in iter_records(unit, kind, counts):
            yield dict(record.values)


def tokens_of(trajectory: Mapping[str, Any], number: int) -> list[int]:
    """The tokens of a trajectory, whoever has written them. Raises ``DataError`` if there are fewer than two."""
    turns = trajectory.get("turns") or [trajectory]
    parts = trajectory.get("prompt", ()), *(turn.get("tokens", ()) for turn in turns)
    tokens = [int(token) for part in parts for token in part]
    if len(tokens) < 2:
        raise DataError(f"trajectory {number} has {len(tokens)} tokens", fix="give a prompt and what was written")
    return tokens


def _document(trajectory: Mapping[str, Any], number: int) -> dict[str, Any]:
    reward = trajectory.get("reward")
    if not isinstance(reward, (int, float)) or not math.isfinite(reward):
        raise DataError(
            f"the reward of trajectory {number} is {reward!r}",
            so="no advantage could be computed for any trajectory of its prompt",
            fix="give a finite number, or leave the trajectory out",
        )
    tokens = tokens_of(trajectory, number)
    written, logprobs = ([0.0] * len(trajectory.get("prompt", ())) for _ in range(2))
    for turn in trajectory.get("turns") or [trajectory]:
        own, given = turn.get("tokens", ()), turn.get("logprobs")
        trained = bool(turn.get("trained", True))
        if trained and (given is None or len(given) != len(own) or not all(map(math.isfinite, given))):
            raise DataError(
                f"a turn of trajectory {number} has {len(own)} tokens and the log-probabilities {_short(given)}",
                so="the ratio to the policy that wrote it is not known",
                fix="give one finite log-probability for each token, or trained: false for what it has only read",
            )
        written += [float(trained)] * len(own)
        logprobs += [float(value) for value in given] if trained and given is not None else [0.0] * len(own)
    # Row i predicts token i + 1.
    return {
        "tokens": torch.tensor(tokens),
        "weights": torch.tensor([*written[1:], 0.0]),
        "old_logprobs": torch.tensor([*logprobs[1:], 0.0], dtype=torch.float64),
        "reward": float(reward),
    }


def _short(values: Any) -> str:
    return "None" if values is None else f"{list(values)[:4]}{'...' if len(values) > 4 else ''} ({len(values)})"
