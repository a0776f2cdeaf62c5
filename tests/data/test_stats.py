from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytescale.common.errors import ConfigError, DataError
from bytescale.data.length_distributions import bucket_edges, distribution_names, sample_lengths, token_shares
from bytescale.data.stats import BUCKET_EDGES, length_stats

MEBI = 2**20


@given(lengths=st.lists(st.one_of(st.integers(0, 4096), st.sampled_from([2**21, 2**21 + 1, 5 * MEBI])), min_size=1))
def test_stats_against_a_loop(lengths: list[int]) -> None:
    held = sorted(length for length in lengths if length)
    if not held:
        return
    stats = length_stats(np.array(lengths))
    low = 0
    for i, high in enumerate([*BUCKET_EDGES.tolist(), 10**12]):
        inside = [length for length in held if low < length <= high]
        assert stats.num_documents[i] == len(inside)
        assert stats.num_tokens[i] == sum(inside)
        low = high
    assert stats.longest_tokens == held[-1]
    assert sum(length <= stats.median_tokens for length in held) * 2 >= len(held)
    assert sum(length for length in held if length <= stats.median_token_tokens) * 2 >= sum(held)
    assert sum(length for length in held if length < stats.median_token_tokens) * 2 < sum(held)
    assert stats.token_share.sum() == pytest.approx(1)


def test_bucket_labels() -> None:
    labels = length_stats(np.array([1])).labels
    assert len(labels) == 14
    assert (labels[0], labels[1], labels[-2], labels[-1]) == ("to 512", "to 1K", "to 2M", "above 2M")


def test_no_document() -> None:
    with pytest.raises(DataError, match="no document with a token"):
        length_stats(np.array([0, 0]))


def test_the_shares_are_what_the_paper_says() -> None:
    """Section 3.1: github 16.2 % above 128K and 9.8 % above 256K; byted 44.3 %, 37 %, and 12.1 % at 2M."""
    assert distribution_names() == ("byted", "github")
    above_128k = bucket_edges()[1:] > 128 * 1024
    above_256k = bucket_edges()[1:] > 256 * 1024
    github, byted = token_shares("github"), token_shares("byted")
    assert github[above_128k].sum() == pytest.approx(0.162)
    assert github[above_256k].sum() == pytest.approx(0.098)
    assert byted[above_128k].sum() == pytest.approx(0.443)
    assert byted[above_256k].sum() == pytest.approx(0.370)
    assert byted[-1] == pytest.approx(0.121)


@pytest.mark.parametrize("name", ["github", "byted"])
def test_samples_follow_the_shares(name: str) -> None:
    num_tokens = 4096 * MEBI  # enough that a single document of 2M is nothing
    lengths = sample_lengths(name, num_tokens, seed=0)
    assert lengths.sum() == pytest.approx(num_tokens, rel=0.01)
    assert lengths.min() > 512
    bucket = np.searchsorted(bucket_edges()[1:], lengths)
    found = np.bincount(bucket, weights=lengths, minlength=11) / lengths.sum()
    # 0.5 % of all tokens: three standard deviations of the sparsest bucket, [1M, 2M], with some hundred documents.
    assert np.abs(found - token_shares(name)).max() < 0.005
    assert (lengths[bucket == 10] == 2 * MEBI).all()


def test_samples_are_log_uniform_inside_a_bucket() -> None:
    lengths = sample_lengths("github", 1024 * MEBI, seed=1)
    inside = lengths[(lengths > 2048) & (lengths <= 4096)]
    assert np.mean(inside <= 2048 * 2**0.5) == pytest.approx(0.5, abs=0.01)


def test_samples_are_a_function_of_the_seed() -> None:
    assert np.array_equal(sample_lengths("byted", MEBI, 3), sample_lengths("byted", MEBI, 3))
    assert not np.array_equal(sample_lengths("byted", MEBI, 3), sample_lengths("byted", MEBI, 4))


@given(max_length=st.integers(1, 300_000), seed=st.integers(0, 10))
def test_a_shorter_context_splits_and_keeps_all_tokens(max_length: int, seed: int) -> None:
    whole = sample_lengths("byted", 2 * MEBI, seed)
    split = sample_lengths("byted", 2 * MEBI, seed, max_length)
    assert split.sum() == whole.sum()
    assert split.min() >= 1
    assert split.max() <= max_length


def test_a_lower_edge_gives_the_same_tokens_in_more_documents() -> None:
    usual, short = sample_lengths("github", 32 * MEBI, 0), sample_lengths("github", 32 * MEBI, 0, lowest_edge=9)
    assert usual.min() > 512
    assert 9 < short.min() < 20
    assert len(short) == pytest.approx(22_600, abs=200)
    assert short.sum() == pytest.approx(usual.sum(), rel=0.02)


def test_bad_arguments() -> None:
    with pytest.raises(ConfigError, match=r"no length distribution 'gitlab'.*byted, github"):
        sample_lengths("gitlab", MEBI, 0)
    with pytest.raises(ConfigError, match=r"num_tokens = 0"):
        sample_lengths("github", 0, 0)
    with pytest.raises(ConfigError, match=r"max_length = 0"):
        sample_lengths("github", 1, 0, 0)
    with pytest.raises(ConfigError, match=r"lowest_edge = 2048.*use 1 to 2047 tokens"):
        sample_lengths("github", 1, 0, lowest_edge=2048)
