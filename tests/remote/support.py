"""Corpora whose tokens say where they come from, and ranks that write down what they were given."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bytescale.config.schema import DataConfig, PlannerConfig
from bytescale.cost.cluster import Cluster
from bytescale.cost.profile import Profile
from bytescale.data.loading.loader import Loader, Reader, StepData
from bytescale.data.open import opened_loader
from bytescale.data.order.batches import SamplerState
from bytescale.data.tokens.pairs import IndexedWriter, MetadataGatherer
from bytescale.planner.verified import VerifiedPlanner
from tests.helpers.llama import spec_of_llama

CONTEXT = 96
CAPACITY = 96
BATCH_TOKENS = 400


def write_numbered_corpus(prefix: Path, num_documents: int = 120, seed: int = 0, first_token: int = 0) -> int:
    """A ``.bin`` whose token ids are 0, 1, 2, ...: it says where a token comes from. Returns how many."""
    lengths = np.minimum(np.random.default_rng(seed).lognormal(2.5, 1.4, num_documents).astype(np.int64) + 1, 300)
    tokens = np.arange(first_token, first_token + lengths.sum(), dtype="<i4")
    gatherer = MetadataGatherer(tokens.dtype)
    gatherer.add(tokens)
    with IndexedWriter(prefix.with_suffix(".bin"), tokens.dtype) as writer:
        writer.add_documents(tokens, lengths)
        writer.commit(gatherer.finish(lengths).to_json())
    return len(tokens)


def numbered_config(folder: Path, **settings: Any) -> DataConfig:
    values: dict[str, Any] = {
        "sources": (str(folder / "numbers.bin"),),
        "context_length": CONTEXT,
        "batch_tokens": BATCH_TOKENS,
        "cache_dir": str(folder / "cache"),
        **settings,
    }
    return DataConfig(**values)


def planner_for(num_ranks: int) -> VerifiedPlanner:
    cost = Profile.from_flops(spec_of_llama("tiny"), flops_per_second=1e12, bytes_per_element=4).cost_model()
    return VerifiedPlanner(PlannerConfig(), Cluster.uniform(num_ranks, CAPACITY), cost)


@contextmanager
def feeds(config: DataConfig, kind: str, num_ranks: int) -> Iterator[list[Loader]]:
    """All ranks' feeds in this process, which has joined Ray if the kind is ``ray``."""
    told: list[list[Any]] = []
    with ExitStack() as stack:
        readers = [reader_of(rank, num_ranks, told) for rank in range(num_ranks)]
        yield [stack.enter_context(opened_loader(replace(config, loader=kind), reader)) for reader in readers]


def reader_of(rank: int, num_ranks: int, told: list[list[Any]]) -> Reader:
    """A rank that opens its loader after rank 0 has; ``told``: what that one tells the others."""
    heard = iter(told)

    def tell(items: list[Any]) -> None:
        if rank == 0:
            told.append(list(items))
        else:
            items[:] = next(heard)

    return Reader(hdp_rank=rank, num_processes=num_ranks, is_first=rank == 0, broadcast=tell)


def servers(loader: Loader) -> list[Any]:
    """Handles of all servers that a loader reads from."""
    return loader.corpus.parts.servers


def take_steps(
    opened: Sequence[Loader],
    num_steps: int,
    *,
    state: SamplerState | None = None,
    before_step: Callable[[int], None] = lambda step: None,
) -> tuple[list[list[StepData]], SamplerState]:
    """``num_steps`` steps of every rank, in lockstep as training takes them: ``[step][rank]``, and the state after.

    ``before_step`` hears of each. The loaders read ahead beyond the end; that must not count.
    """
    if state is not None:
        for loader in opened:
            loader.load_state_dict(state)
    planner = planner_for(len(opened))
    taken = []
    with ExitStack() as stack:
        loaders = [stack.enter_context(loader.open(planner, stop_step=None)) for loader in opened]
        for step in range(num_steps):
            before_step(step)
            taken.append([next(loader) for loader in loaders])
    return taken, taken[-1][0].sampler_state_after


def count_tokens(steps: Sequence[Sequence[StepData]]) -> Counter[int]:
    """How often each token of a numbered corpus was given to some rank."""
    counts: Counter[int] = Counter()
    for ranks in steps:
        for data in ranks:
            for micro_batch in data.micro_batches:
                counts.update(micro_batch.tokens.tolist())
    return counts


def assert_same_data(ours: StepData, theirs: StepData) -> None:
    """Equal to the last bit: plan, tokens, labels, positions, and where the next step starts."""
    assert ours.step == theirs.step
    assert ours.rank_plan.digest == theirs.rank_plan.digest
    assert ours.num_targets == theirs.num_targets
    assert np.array_equal(ours.plan.lengths, theirs.plan.lengths)
    assert ours.sampler_state_after == theirs.sampler_state_after
    for mine, other in zip(ours.micro_batches, theirs.micro_batches, strict=True):
        for name in ("tokens", "labels", "position_ids", "segment_samples"):
            left, right = getattr(mine, name), getattr(other, name)
            assert left.dtype == right.dtype
            assert np.array_equal(left, right), name
        ones = np.ones(len(mine.tokens))
        assert np.array_equal(*(ones if data.weights is None else data.weights for data in (mine, other)))
        assert mine.fields.keys() == other.fields.keys()
        for name, values in mine.fields.items():
            assert values.dtype == np.float32
            assert np.array_equal(values, other.fields[name]), name
    assert ours.loss_divisor == theirs.loss_divisor


def pid_of(actor: Any) -> Any:
    """Ray's reference to the id of the process of an actor."""
    return actor.__ray_call__.remote(lambda _: os.getpid())


def kill_minus_9(actor: Any) -> None:
    """The process of an actor, gone without a word."""
    import ray

    os.kill(ray.get(pid_of(actor), timeout=600), 9)
