"""The batch that ``plan`` and ``simulate`` look at: a file of lengths, a named distribution, or a config's corpus; and
the costs that they believe in."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from bytescale.common.arrays import IntArray
from bytescale.common.errors import ConfigError, DataError, problem
from bytescale.config import Config, ModelConfig, RingGradients, resolve_architecture
from bytescale.cost import Links, Profile, load_profile
from bytescale.cost.profile_file import require_model, warn_of_bad_fits

KIBI = 1024


@dataclass(slots=True, kw_only=True)
class BatchConfig:
    """Which sequences: of `lengths`, else of the config's corpus if a config is given, else of `distribution`."""

    lengths: Path | None = None
    """A file of sequence lengths: .npy, .json (a list), or text with a number per word."""
    distribution: Literal["github", "byted"] = "github"
    """The paper's length distributions."""
    tokens: int = 32 * KIBI * KIBI
    """Size of a batch drawn from a distribution; a config's corpus has data.batch_tokens."""
    context: int = 2 * KIBI * KIBI
    """Longer documents of a distribution are split; a config's corpus has data.context_length."""
    seed: int = 0
    """Seed of the drawing; for a corpus, the number of the step."""


@dataclass(slots=True, kw_only=True)
class RatesConfig:
    """What the model's operations cost when no profile is given: rates of one device, an H100 or H200 by default."""

    flops: float = 400e12
    """Operations a second in matrix products."""
    attention_flops: float = 300e12
    """Operations a second in attention."""
    intra_node: float = 300e9
    """Bytes a second to a neighbour in the node."""
    inter_node: float = 40e9
    """Bytes a second to a neighbour in another node."""
    latency: float = 10e-6
    """Seconds until a transfer's first byte arrives."""
    launch: float = 50e-6
    """Fixed seconds of a layer's attention, and again of the rest of it."""
    host: float = 25e9
    """Bytes a second to and from host memory."""


@dataclass(slots=True, kw_only=True)
class CostSource:
    """What plans and times rest on."""

    profile: str | None = None
    """A profile of `bytescale profile`, or a shipped one (case-study, figure-6); unset: operations are counted."""
    rates: RatesConfig = field(default_factory=RatesConfig)
    """Rates for counted operations."""


class SourceBatch(NamedTuple):
    """A batch and its origin."""

    lengths: IntArray  # [S]
    origin: str
    vocab_size: int | None = None  # of the corpus' tokenizer; None: there is none


def read_batch(source: BatchConfig, config: Config | None) -> SourceBatch:
    """Raises ``DataError`` for a file that holds no lengths."""
    if source.lengths is not None:
        return SourceBatch(read_lengths(source.lengths), str(source.lengths))
    if config is not None:
        from bytescale.data import prepare_corpus
        from bytescale.data.order.mixture import make_sampler

        corpus = prepare_corpus(config.data, text_later=True)
        sampler = make_sampler(corpus.index, config.data)
        for _ in range(source.seed):
            sampler.next_batch()
        origin = f"step {source.seed} of {', '.join(config.data.sources)}"
        return SourceBatch(sampler.next_batch().lengths, origin, corpus.facts.vocab_size)
    from bytescale.data.length_distributions import sample_lengths

    lengths = sample_lengths(source.distribution, source.tokens, source.seed, source.context)
    return SourceBatch(lengths, f"{source.distribution}, seed {source.seed}")


def read_lengths(path: Path) -> IntArray:
    """``[S]`` whole numbers of at least 1 from a .npy, .json or text file."""
    try:
        if path.suffix == ".npy":
            values = np.load(path, allow_pickle=False)
        elif path.suffix == ".json":
            values = np.array(json.loads(path.read_text(encoding="utf-8")))
        else:
            values = np.array([float(word) for word in path.read_text(encoding="utf-8").replace(",", " ").split()])
    except (OSError, ValueError, UnicodeDecodeError) as error:
        raise DataError(
            problem(f"{path} cannot be read as lengths ({error})", fix="give .npy, a .json list, or numbers in a text")
        ) from error
    if values.ndim != 1 or not np.issubdtype(values.dtype, np.number) or not len(values):
        raise DataError(problem(f"{path} holds no list of numbers", fix="give one number of tokens per sequence"))
    wrong = np.flatnonzero((values < 1) | (values != np.floor(values)))
    if len(wrong):
        raise DataError(
            problem(
                f"{path}: entry {wrong[0]} is {values[wrong[0]]}",
                so="no sequence has that many tokens",
                fix="use whole numbers of at least 1",
            )
        )
    return values.astype(np.int64)


DEFAULT_MODEL = ModelConfig(preset="7b")
"""Without a config, a profile or a word about it."""


def read_profile(
    source: CostSource,
    model: ModelConfig,
    *,
    tensor_parallel: int,
    model_is_given: bool,
    vocab_size: int | None = None,
    ring_gradients: RingGradients = "wide",
) -> Profile:
    """The profile named, at ``tensor_parallel``, or one counted from the model's operations.

    A profile speaks for its own model; one given as well has to have layers of the same shape. ``vocab_size``: of the
    tokenizer, if one is known.
    """
    if source.profile is not None:
        profile = load_profile(source.profile)
        warn_of_bad_fits(profile)
        if model_is_given:
            architecture = resolve_architecture(model, tokenizer_vocab_size=vocab_size)
            require_model(profile, architecture)
            profile = profile.of_model(architecture)
        if tensor_parallel != profile.tensor_parallel:
            profile = profile.scaled_to(profile.architecture, tensor_parallel=tensor_parallel)
        return profile.with_ring_gradients(ring_gradients)
    rates = source.rates
    if min(rates.host, rates.intra_node, rates.inter_node) <= 0:
        raise ConfigError(problem("a bandwidth in rates is not above 0", fix="use bytes a second"))
    return Profile.from_flops(
        resolve_architecture(model, tokenizer_vocab_size=vocab_size),
        flops_per_second=rates.flops,
        attention_flops_per_second=rates.attention_flops,
        launch_seconds=rates.launch,
        tensor_parallel=tensor_parallel,
        links=Links(
            intra_node_bytes_per_second=rates.intra_node,
            inter_node_bytes_per_second=rates.inter_node,
            latency_seconds=rates.latency,
            device_to_host_bytes_per_second=rates.host,
            host_to_device_bytes_per_second=rates.host,
        ),
    ).with_ring_gradients(ring_gradients)
