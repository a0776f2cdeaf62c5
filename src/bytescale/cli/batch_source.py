"""What ``plan`` and ``simulate`` work on: a batch, and the costs of running it.

The batch comes from a file of lengths, a length distribution of the paper, or the corpus of a config.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from bytescale.common.arrays import IntArray
from bytescale.common.errors import ConfigError, DataError
from bytescale.common.limits import limits
from bytescale.common.parsing import parse_json
from bytescale.common.units import MOST_COUNT
from bytescale.config import Config, ModelConfig, RingGradients, resolve_architecture
from bytescale.cost import Links, Profile, load_profile
from bytescale.cost.profile_file import require_model, warn_of_bad_fits

KIBI = 1024


@dataclass(slots=True, kw_only=True)
class BatchConfig:
    """The sequences: from `lengths` if set, else from the corpus of the config if any, else from `distribution`."""

    lengths: Path | None = None
    """A file of sequence lengths: .npy, .json (a list), or text with numbers."""
    distribution: Literal["github", "byted"] = "github"
    """A length distribution of the paper."""
    tokens: int = 32 * KIBI * KIBI
    """Tokens of a batch that is drawn from a distribution. For the corpus of a config, data.batch_tokens counts."""
    context: int = 2 * KIBI * KIBI
    """Longer documents of a distribution are split. For the corpus of a config, data.context_length counts."""
    seed: int = field(default=0, metadata=limits(least=0))
    """Random seed for a distribution. For the corpus of a config, the number of the step."""


@dataclass(slots=True, kw_only=True)
class RatesConfig:
    """Rates of one device, used if no profile is given. The defaults are for an H100 or H200."""

    flops: float = field(default=400e12, metadata=limits(above=0))
    """Operations per second in matrix products."""
    attention_flops: float = field(default=300e12, metadata=limits(above=0))
    """Operations per second in attention."""
    intra_node: float = field(default=300e9, metadata=limits(above=0))
    """Bytes per second to a neighbour in the same node."""
    inter_node: float = field(default=40e9, metadata=limits(above=0))
    """Bytes per second to a neighbour in another node."""
    latency: float = field(default=10e-6, metadata=limits(least=0, most=60))
    """Seconds until the first byte of a transfer arrives."""
    launch: float = field(default=50e-6, metadata=limits(least=0, most=60))
    """Fixed seconds that attention takes in each layer, and that the rest of the layer takes too."""
    host: float = field(default=25e9, metadata=limits(above=0))
    """Bytes per second to and from host memory."""

    def links(self) -> Links:
        """Return the links of one device."""
        return Links(
            intra_node_bytes_per_second=self.intra_node,
            inter_node_bytes_per_second=self.inter_node,
            latency_seconds=self.latency,
            device_to_host_bytes_per_second=self.host,
            host_to_device_bytes_per_second=self.host,
        )


@dataclass(slots=True, kw_only=True)
class CostSource:
    """Where the times of a step come from."""

    profile: str | None = None
    """A file from `bytescale profile`, or a shipped profile (case-study, figure-6). Unset: operations are counted."""
    rates: RatesConfig = field(default_factory=RatesConfig)
    """Rates for counted operations."""


class SourceBatch(NamedTuple):
    """A batch of sequences, and where it comes from."""

    lengths: IntArray  # [S]
    origin: str
    vocab_size: int | None = None  # of the tokenizer of the corpus; None without a corpus


def read_batch(source: BatchConfig, config: Config | None) -> SourceBatch:
    """Read or draw the batch. Raises ``DataError`` for a file that does not hold lengths."""
    if source.lengths is not None:
        return SourceBatch(read_lengths(source.lengths), str(source.lengths))
    if config is not None:
        from bytescale.data.loading.corpus import prepare_corpus
        from bytescale.data.order.batches import make_sampler

        corpus = prepare_corpus(config.data, text_later=True)
        sampler = make_sampler(corpus.index, config.data)
        for _ in range(source.seed):
            sampler.next_batch()
        origin = f"step {source.seed} of {', '.join(config.data.sources)}"
        return SourceBatch(sampler.next_batch().lengths, origin, corpus.metadata.vocab_size)
    from bytescale.data.length_distributions import sample_lengths

    lengths = sample_lengths(source.distribution, source.tokens, source.seed, source.context)
    if not len(lengths):
        raise ConfigError(
            f"a batch of batch.tokens = {source.tokens} has no document of {source.distribution}",
            so="there is nothing to plan",
            fix="raise batch.tokens; the distributions begin at 512 tokens a document",
        )
    return SourceBatch(lengths, f"{source.distribution}, seed {source.seed}")


def read_lengths(path: Path) -> IntArray:
    """Read ``[S]`` whole numbers of at least 1 from a .npy, .json or text file."""
    try:
        if path.suffix == ".npy":
            values = np.load(path, allow_pickle=False)
        elif path.suffix == ".json":
            values = np.array(parse_json(path.read_text(encoding="utf-8")))
        else:
            values = np.array([float(word) for word in path.read_text(encoding="utf-8").replace(",", " ").split()])
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path} cannot be read as lengths ({error})",
            fix="give a .npy file, a .json list, or a text file of numbers",
        ) from error
    if values.ndim != 1 or not np.issubdtype(values.dtype, np.number) or not len(values):
        raise DataError(f"{path} does not hold a list of numbers", fix="give one number of tokens per sequence")
    wrong = np.flatnonzero((values < 1) | (values > MOST_COUNT) | (values != np.floor(values)))
    if len(wrong):
        raise DataError(
            f"{path}: entry {wrong[0]} is {values[wrong[0]]}",
            so="no sequence has that many tokens",
            fix=f"use whole numbers from 1 to {MOST_COUNT}",
        )
    return values.astype(np.int64)


DEFAULT_MODEL = ModelConfig(preset="7b")
"""The model if neither a config, nor a profile, nor an option names one."""


def read_profile(
    source: CostSource,
    model: ModelConfig,
    *,
    tensor_parallel: int,
    model_is_given: bool,
    vocab_size: int | None = None,
    ring_gradients: RingGradients = "wide",
) -> Profile:
    """Return the named profile for ``tensor_parallel``, or one made from the counted operations of the model.

    A profile has a model of its own. If a model is given as well, its layers must have the same shape. ``vocab_size``:
    the vocabulary size of the tokenizer, if it is known.
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
    return Profile.from_flops(
        resolve_architecture(model, tokenizer_vocab_size=vocab_size),
        flops_per_second=rates.flops,
        attention_flops_per_second=rates.attention_flops,
        launch_seconds=rates.launch,
        tensor_parallel=tensor_parallel,
        links=rates.links(),
    ).with_ring_gradients(ring_gradients)
