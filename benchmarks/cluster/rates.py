"""The one rule that gives the links of ``benchmarks/cluster`` their rate: as fast, for their ranks, as published ones.

A small model on a slow core needs a slow link to wait for it as long as a large model on a GPU waits. What has to be
equal is how long a ring's transfer takes beside the attention that hides it::

    transfer of one slice / block of attention of one slice        both of one layer's forward

It is bytes per FLOP of network and device, times FLOPs per byte of a ring with slices of that many tokens. Both are in
it because neither model width nor slice is the same here. With ``b`` bytes of keys and values per token, attention of
``a s^2`` seconds for a causal sequence of s tokens (so ``a n^2`` for a block of n queries and n / 2 visible keys), and
slices of ``n`` tokens, the rule is ``rate = b n / (ratio a n^2)``.
"""

from __future__ import annotations

from dataclasses import dataclass

from bytescale.config.presets import PRESETS
from bytescale.cost.profile import Profile
from bytescale.cost.profile_file import load_profile
from bytescale.train.parts.describe import spec_of_content

KIBI = 1024


@dataclass(frozen=True, kw_only=True)
class Published:
    """A cluster whose figures are published, and the ratio that they give."""

    name: str
    source: str
    transfer_seconds: float
    """Of a slice, in the forward of one layer."""
    block_seconds: float
    """Of attention, for the same slice."""

    @property
    def ratio(self) -> float:
        """Transfer over block."""
        return self.transfer_seconds / self.block_seconds


def case_study() -> Published:
    """The paper's: 7B on 1024 GPUs, slices of 8K tokens, 39 ranks a group; 110 ms of attention and 1.58 ms a step."""
    profile, tokens = load_profile("case-study"), 8 * KIBI
    bytes_sent = tokens * profile.ring_forward_bytes_per_token
    transfer = bytes_sent / profile.links.inter_node_bytes_per_second + profile.links.latency_seconds
    return Published(
        name="case-study",
        source="arXiv 2502.21231 section 8, as in the shipped profile case-study",
        transfer_seconds=transfer,
        block_seconds=profile.attention_forward.quadratic * tokens**2,
    )


def h100() -> Published:
    """H100 with one 400 Gb/s adapter (50 GB/s) each, 7B in bf16, slices of 8K tokens, 60 % of 989 TFLOP/s."""
    spec, tokens = spec_of_content(PRESETS["7b"]), 8 * KIBI
    return Published(
        name="h100",
        source="data sheet: 989 TFLOP/s dense in bf16 (60 % reached), 50 GB/s",
        transfer_seconds=tokens * 2 * spec.mean("key_numbers") / 50e9,
        block_seconds=spec.mean("pair_numbers") * tokens**2 / (0.6 * 989e12),
    )


PUBLISHED = {"case-study": case_study, "h100": h100}


def link_rate(published: Published, profile: Profile, slice_tokens: int) -> float:
    """Bytes per second of a link, for ranks that ``profile`` describes and slices of ``slice_tokens`` tokens."""
    block = profile.attention_forward.quadratic * slice_tokens**2
    return slice_tokens * profile.ring_forward_bytes_per_token / (published.ratio * block)
