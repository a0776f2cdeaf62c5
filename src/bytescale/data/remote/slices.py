"""What planner, servers and clients tell each other about a rank's slices, and how slices become training data.

A *range* is ``count`` tokens from ``place`` on in one part of the corpus. Letters: P segments of all micro-batches of
a rank, in their order.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bytescale.common.labels import IGNORE_INDEX
from bytescale.data.batches import GlobalBatch, SamplerState
from bytescale.data.index import CorpusIndex
from bytescale.data.loader import MicroBatchData
from bytescale.data.remote_tokens import BLOCK_TOKENS
from bytescale.plan import Plan, RankPlan
from bytescale.plan.rank_plan import MicroBatch
from bytescale.plan.summary import PlanSummary

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentTable:
    """Where the tokens of a rank's segments are."""

    pieces: IntArray  # [P] name of the piece of the corpus
    servers: IntArray  # [P] server that reads it
    parts: IntArray  # [P] part of the corpus
    places: IntArray  # [P] first token inside the part
    counts: IntArray  # [P] tokens
    num_labels: IntArray  # [P] tokens with a label: the first ones

    @property
    def ranges(self) -> IntArray:
        """``[P]`` tokens to fetch: the last label of a segment may be the token behind it."""
        return self.counts + ((self.num_labels == self.counts) & (self.counts > 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """A planned global batch and where its tokens are: what every rank's part is cut from.

    Plain arrays, of which every node reads one copy in shared memory. S sequences of the batch.
    """

    step: int
    plan: Plan
    digest: int  # of the plan
    pieces: IntArray  # [S] name of the piece of the corpus
    parts: IntArray  # [S] part of the corpus that holds it
    places: IntArray  # [S] its first token inside the part
    num_targets: IntArray  # [S] its tokens with a label: the first ones
    owners: PartOwners
    summary: PlanSummary
    state_after: SamplerState
    planning_seconds: float

    @staticmethod
    def of(
        batch: GlobalBatch,
        plan: Plan,
        index: CorpusIndex,
        owners: PartOwners,
        state_after: SamplerState,
        planning_seconds: float,
    ) -> PlannedStep:
        """Locate every sequence of the batch."""
        parts, places = index.locate(batch.pieces, np.zeros_like(batch.pieces))
        return PlannedStep(
            step=batch.step,
            plan=plan,
            digest=plan.digest(),
            pieces=batch.pieces,
            parts=parts,
            places=places,
            num_targets=batch.num_targets,
            owners=owners,
            summary=PlanSummary.of(plan),
            state_after=state_after,
            planning_seconds=planning_seconds,
        )

    @property
    def num_bytes(self) -> int:
        """Of all arrays."""
        arrays = [getattr(self.plan, spec.name) for spec in fields(self.plan)]
        arrays += [self.pieces, self.parts, self.places, self.num_targets]
        return sum(array.nbytes for array in arrays if isinstance(array, np.ndarray))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStep:
    """One rank's own part of a planned step, and what every rank has to know of the whole."""

    step: int
    rank_plan: RankPlan
    segments: SegmentTable
    num_targets: int
    """Tokens with a label in the GLOBAL batch."""
    summary: PlanSummary
    plan: Plan | None
    """The whole plan, for the first rank, which writes it down."""
    state_after: SamplerState
    planning_seconds: float
    steps_planned: int = 0
    """Steps beyond this one that were planned already."""
    life: str = ""
    """Of the planner that planned it: another one after a restart."""

    @staticmethod
    def of(planned: PlannedStep, rank: int, reference: StepReference) -> RankStep:
        """Cut the part of ``rank``: 0.1 ms at 16,384 ranks."""
        rank_plan = RankPlan.of(planned.plan, rank, digest=planned.digest)
        return RankStep(
            step=planned.step,
            rank_plan=rank_plan,
            segments=locate_segments(rank_plan, planned),
            num_targets=int(planned.num_targets.sum()),
            summary=planned.summary,
            plan=planned.plan if rank == 0 else None,
            state_after=planned.state_after,
            planning_seconds=planned.planning_seconds,
            steps_planned=reference.steps_planned,
            life=reference.life,
        )

    @property
    def num_bytes(self) -> int:
        """Of the arrays of the part, without the whole plan."""
        found: list[SegmentTable | MicroBatch] = [self.segments, *self.rank_plan.micro_batches]
        arrays = [getattr(table, spec.name) for table in found for spec in fields(table)]
        return sum(array.nbytes for array in arrays if isinstance(array, np.ndarray))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReference:
    """The planner's answer to a node: small, however large the plan and however many ask."""

    planned: Any
    """Ray's reference to a ``PlannedStep``, which lives as long as the planner that made it."""
    state_before: SamplerState
    state_after: SamplerState
    life: str
    """Of that planner: another one after a restart."""
    steps_planned: int = 0
    """Steps beyond this one that were planned already."""


@dataclass(frozen=True, slots=True)
class StillReading:
    """The planner's answer while servers tokenise what the step needs: ask again."""

    num_parts: int  # that it waits for


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSlices:
    """A server's answer: the ranges one after the other, in the narrow integers of the file."""

    tokens: NDArray[np.integer]
    server_life: str  # another one after a restart


def locate_segments(rank_plan: RankPlan, planned: PlannedStep) -> SegmentTable:
    """Every segment of a rank's plan, found in the corpus."""
    none = [np.zeros(0, dtype=np.int64)]
    micro_batches = rank_plan.micro_batches
    sequences = np.concatenate([m.segment_sequences for m in micro_batches] or none)
    starts = np.concatenate([m.segment_starts for m in micro_batches] or none)
    stops = np.concatenate([m.segment_stops for m in micro_batches] or none)
    parts, places = planned.parts[sequences], planned.places[sequences] + starts
    counts = stops - starts
    return SegmentTable(
        pieces=planned.pieces[sequences],
        servers=planned.owners.servers_of(parts, places),
        parts=parts,
        places=places,
        counts=counts,
        num_labels=np.clip(planned.num_targets[sequences] - starts, 0, counts),
    )


@dataclass(frozen=True, slots=True)
class PartOwners:
    """Which server reads what: a part of text belongs to the one that tokenised it, ``.bin`` files to all in turn.

    They are dealt in the blocks in which they are fetched where they lie elsewhere.
    """

    num_servers: int
    is_text: NDArray[np.bool_]  # [number of parts]

    def server_of(self, part: int) -> int:
        """Server that says what is in a part."""
        return part % self.num_servers

    def servers_of(self, parts: IntArray, places: IntArray) -> IntArray:
        """``[P]`` server of each range that starts at ``places`` of ``parts``."""
        turn = np.where(self.is_text[parts], parts, parts + places // BLOCK_TOKENS)
        return turn % self.num_servers


def assemble(
    rank_plan: RankPlan, segments: SegmentTable, answers: dict[int, NDArray[np.integer]]
) -> tuple[MicroBatchData, ...]:
    """Tokens, labels and positions of each micro-batch, equal to what ``loader.read_micro_batch`` reads.

    Args:
        rank_plan: the plan that ``segments`` belongs to.
        segments: where each segment is.
        answers: per server, the tokens of its ranges in the order of ``segments``.
    """
    ends = np.cumsum(segments.counts)
    num_tokens = int(ends[-1]) if len(ends) else 0
    tokens = np.empty(num_tokens, dtype=np.int64)
    labels = np.full(num_tokens, IGNORE_INDEX, dtype=np.int64)
    read = dict.fromkeys(answers, 0)
    columns = (segments.servers, ends - segments.counts, segments.counts, segments.num_labels, segments.ranges)
    for server, at, count, with_label, fetched in zip(*(column.tolist() for column in columns), strict=True):
        if not fetched:
            continue
        first = read[server]
        source = answers[server]
        tokens[at : at + count] = source[first : first + count]
        labels[at : at + with_label] = source[first + 1 : first + 1 + with_label]
        read[server] = first + fetched
    # Views, micro-batch by micro-batch: nothing is copied again.
    data = []
    token = segment = 0
    for micro_batch in rank_plan.micro_batches:
        num_segments = len(micro_batch.segment_sequences)
        stop = token + micro_batch.num_tokens
        data.append(
            MicroBatchData(
                tokens=tokens[token:stop],
                labels=labels[token:stop],
                position_ids=micro_batch.position_ids(),
                segment_pieces=segments.pieces[segment : segment + num_segments],
            )
        )
        token, segment = stop, segment + num_segments
    return tuple(data)
