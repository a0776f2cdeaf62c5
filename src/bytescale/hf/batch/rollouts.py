"""Rollouts as data: trajectories with turns, several per prompt, as documents of a loop of one's own.

A trajectory is a mapping, as a line of a JSONL file or a row of a Parquet file has it::

    {"prompt": [5, 17, 9], "turns": [{"tokens": [3, 8], "logprobs": [-0.1, -2.0]},
                                     {"tokens": [40, 41], "trained": false},
                                     {"tokens": [7, 1], "logprobs": [-0.3, -0.2]}], "reward": 1.0, "group": "p17"}

The policy has written the turns; those with ``trained: false``, such as results of tools, it has only read.
``tokens`` may stand in place of ``turns`` for a trajectory of one turn, with ``logprobs`` beside it.

**Branches** name the ``id`` of the trajectory that they go on from: ``parent_id``. A branch without a ``prompt`` has
its own turns alone, and those of its parents stand before them. With one it is whole, and begins with its parent's
tokens. A parent without ``reward`` is no trajectory of its own.

Documents have the numbers of a token at the row that predicts it, as ``labels`` are: ``weights`` are 1 where the policy
wrote the next token, and ``old_logprobs`` are what it gave this token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bytescale.common.errors import DataError
from bytescale.data.sources.files import expand_sources
from bytescale.data.sources.records import ReadCounts, RecordKind, iter_records, plan_units

MOST_TURNS = 2**24
"""Of all branches, with those of their parents."""


def rollout_documents(trajectories: Sequence[Mapping[str, Any]], *, normalise: bool = True) -> list[dict[str, Any]]:
    """Documents for ``hdp.plan``, in the order of ``trajectories``.

    Each has ``tokens``, ``weights``, ``old_logprobs``, ``reward``, ``advantage`` and ``group``, the same number for all
    trajectories of a prompt: labels for ``together``. Parents without a reward are left out.

    Args:
        trajectories: see above. An ``advantage``, a number or one for each token that the policy wrote, is kept. Where
            it is missing it is the reward minus the mean of its group.
        normalise: whether this difference is divided by the group's standard deviation (GRPO), or not (Dr. GRPO).

    Raises ``DataError`` for rewards or log-probabilities that are not finite or missing, and log-probabilities that are
    not as many as the tokens; and as ``whole_trajectories``.
    """
    trajectories = whole_trajectories(trajectories, "trajectory {}".format)
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


def read_rollouts(*sources: str | Path) -> Iterator[Mapping[str, Any]]:
    """Yield the whole trajectories of JSONL and Parquet files, folders and URLs, in order; branches may be in any.

    Raises ``DataError`` for a record that cannot be read, and as ``whole_trajectories``, with its file and line;
    ``ConfigError`` where there is no file.
    """
    optional = ("prompt", "turns", "tokens", "logprobs", "group", "advantage", "reward", "id", "parent_id")
    kind, counts = RecordKind("rollouts", (), optional), ReadCounts()
    units = plan_units(expand_sources([str(source) for source in sources]), kind)
    records = [record for unit in units for record in iter_records(unit, kind, counts)]
    for record in records:
        try:
            _tokens({name: value for name, value in record.values.items() if value is not None})
        except (AttributeError, TypeError, ValueError, OverflowError) as error:
            raise DataError(
                f"{record.place()} has a prompt or tokens that are no list of numbers, or turns that are none",
                so="its tokens are not known",
                fix="write them as `bytescale.hf.batch.rollouts` says",
            ) from error
    yield from whole_trajectories([record.values for record in records], lambda number: records[number].place())


def whole_trajectories(
    trajectories: Sequence[Mapping[str, Any]], place_of: Callable[[int], str]
) -> list[Mapping[str, Any]]:
    """Trajectories from their first token on, without ``parent_id``, in order; see above for branches.

    A branch without a ``group`` has that of its parent.

    Args:
        trajectories: see above. What is None is not there, as a null of a file.
        place_of: from the number of a trajectory to what messages call it.

    Raises ``DataError`` for a parent that does not exist or is two trajectories, trajectories that are their own
    ancestors, a branch with a prompt that does not begin with its parent's tokens, and one without reward and branches.
    """
    trajectories = [{name: value for name, value in one.items() if value is not None} for one in trajectories]
    parents = [one.get("parent_id") for one in trajectories]
    named, numbers, firsts = {*map(str, parents)}, dict[str, int](), list[int]()
    for number, one in enumerate(trajectories):
        own = str(one.get("id"))
        if own in named and "id" in one and (before := numbers.setdefault(own, number)) != number:
            raise DataError(
                f"{place_of(number)} has the id {one['id']!r}, as has {place_of(before)}",
                so="which of them a branch goes on from could not be told",
                fix="give every record an id of its own",
            )
    branches: dict[int, list[int]] = {}
    for number, parent in enumerate(parents):
        if parent is not None and str(parent) not in numbers:
            raise DataError(
                f"{place_of(number)} goes on from {parent!r}, and no record has this id",
                so="the tokens before its own are not known",
                fix="add the record, or mend parent_id",
            )
        (firsts if parent is None else branches.setdefault(numbers[str(parent)], [])).append(number)
    whole = {number: trajectories[number] for number in firsts}
    num_turns = 0
    for number in firsts:  # and, as they are added, of all branches
        for branch in branches.get(number, ()):
            whole[branch] = _branch(trajectories[branch], whole[number], partial(place_of, branch))
            firsts.append(branch)
            if (num_turns := num_turns + len(whole[branch].get("turns", ()))) > MOST_TURNS:
                raise DataError(
                    f"{place_of(branch)} is one of so many branches of branches that they have {num_turns} turns",
                    so="written out, they would take gigabytes of memory",
                    fix="give fewer records at once",
                )
    for number in sorted({*range(len(parents))} - {*whole}):
        raise DataError(
            f"{place_of(number)} goes on from {parents[number]!r}, and its parents go on from each other",
            so="none of them has a first token",
            fix="mend parent_id",
        )
    for number, one in enumerate(trajectories):
        if "reward" not in one and number not in branches:
            raise DataError(
                f"{place_of(number)} has no reward, and no branch goes on from it",
                so="no advantage could be computed for any trajectory of its prompt",
                fix="give a finite number, or leave it out",
            )
    return [whole[number] for number, one in enumerate(trajectories) if "reward" in one]


def _branch(own: Mapping[str, Any], parent: Mapping[str, Any], place: Callable[[], str]) -> Mapping[str, Any]:
    inherited = {"group": parent.get("group", tuple(parent.get("prompt", ()))), **own, "parent_id": None}
    if "prompt" not in own:
        turns = [turn for one in (parent, own) for turn in one.get("turns") or ([one] if one.get("tokens") else [])]
        return {**inherited, "prompt": parent.get("prompt", ()), "turns": turns}
    before, tokens = _tokens(parent), _tokens(own)
    if tokens[: len(before)] != before:
        raise DataError(
            f"{place()} goes on from {own['parent_id']!r}, but does not begin with its {len(before)} tokens",
            so="it would be taken for a branch of another trajectory",
            fix="leave prompt out of a record that has only what comes behind its parent, or mend parent_id",
        )
    return inherited


def tokens_of(trajectory: Mapping[str, Any], number: int) -> list[int]:
    """The tokens of a trajectory, whoever has written them. Raises ``DataError`` if there are fewer than two."""
    tokens = _tokens(trajectory)
    if len(tokens) < 2:
        raise DataError(f"trajectory {number} has {len(tokens)} tokens", fix="give a prompt and what was written")
    return tokens


def _tokens(trajectory: Mapping[str, Any]) -> list[int]:
    turns = trajectory.get("turns") or [trajectory]
    parts = trajectory.get("prompt", ()), *(turn.get("tokens", ()) for turn in turns)
    return [int(token) for part in parts for token in part]


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
                f"a turn of trajectory {number} has {len(own)} tokens and the log-probabilities "
                + ("None" if given is None else f"{list(given)[:4]}{'...' if len(given) > 4 else ''} ({len(given)})"),
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
