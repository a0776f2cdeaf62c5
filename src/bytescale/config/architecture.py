"""Model shapes: what defines a decoder, and the presets. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from bytescale.common.limits import limits


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Every number that defines a decoder of the Llama family. Two models of equal architecture share checkpoints.

    With experts it is a Mixtral: every layer has ``num_experts`` feed-forward blocks and each token runs through
    ``experts_per_token`` of them.
    """

    vocab_size: int = field(metadata=limits(least=1, most=2**30))
    num_layers: int = field(metadata=limits(least=1, most=4096))
    hidden_size: int = field(metadata=limits(least=1, most=2**22))
    num_heads: int = field(metadata=limits(least=1, most=2**17))
    num_kv_heads: int = field(metadata=limits(least=1, most=2**17))
    head_dim: int = field(metadata=limits(least=1, most=2**17))
    ffn_hidden_size: int = field(metadata=limits(least=1, most=2**22))
    rope_theta: float = field(default=10_000.0, metadata=limits(above=0))
    norm_eps: float = field(default=1e-5, metadata=limits(least=0))
    tie_embeddings: bool = False
    init_std: float = field(default=0.02, metadata=limits(least=0))
    num_experts: int = field(default=0, metadata=limits(least=0, most=2**16))
    experts_per_token: int = 0
    router_aux_loss_weight: float = field(default=0.0, metadata=limits(least=0))


def _llama(layers: int, heads: int, kv_heads: int, hidden: int, ffn: int, *, vocab: int = 128256) -> Architecture:
    return Architecture(
        vocab_size=vocab,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=hidden // heads,
        ffn_hidden_size=ffn,
        rope_theta=500_000.0,
    )


_TOP_2_OF_8: dict[str, Any] = {"num_experts": 8, "experts_per_token": 2, "router_aux_loss_weight": 0.02}

# 7b to 70b: layers, heads, KV groups and hidden size are the paper's (section 8, table 1). It does not print the
# feed-forward widths; these are Llama 2's and, for 7b, Llama 3 8B's / Mistral 7B's 3.5x.
PRESETS: dict[str, Architecture] = {
    # Narrow layers want larger initial weights: 0.08 is about 1 / sqrt(128) (docs/decisions/tensor_parallelism.md).
    "tiny": replace(_llama(4, 4, 2, 128, 384, vocab=4096), rope_theta=10_000.0, init_std=0.08),
    "160m": replace(_llama(12, 12, 4, 768, 2048, vocab=32000), tie_embeddings=True),
    "1b": replace(_llama(16, 32, 8, 2048, 8192), tie_embeddings=True),
    "7b": _llama(32, 32, 8, 4096, 14336),
    "13b": _llama(40, 40, 8, 5120, 13824),
    "30b": _llama(60, 56, 8, 6656, 17920),
    "70b": _llama(80, 64, 8, 8192, 28672),
    # The paper's mixtures: top-2 of 8 experts; feed-forward widths and vocabularies are Mixtral's.
    "tiny-moe": replace(_llama(4, 4, 2, 128, 192, vocab=4096), rope_theta=10_000.0, init_std=0.08, **_TOP_2_OF_8),
    "mixtral-8x7b": replace(_llama(32, 32, 8, 4096, 14336, vocab=32000), rope_theta=1e6, **_TOP_2_OF_8),
    "mixtral-8x22b": replace(_llama(56, 48, 8, 6144, 16384, vocab=32768), rope_theta=1e6, **_TOP_2_OF_8),
}
