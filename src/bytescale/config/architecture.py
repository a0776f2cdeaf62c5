"""Model shapes: the presets, and the concrete architecture that a model section resolves to. Free of torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from bytescale.common.errors import ConfigError, problem
from bytescale.config.schema import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Every number that defines a decoder of the Llama family. Two models of equal architecture share checkpoints.

    With experts it is a Mixtral: every layer has ``num_experts`` feed-forward blocks and each token runs through
    ``experts_per_token`` of them.
    """

    vocab_size: int
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_hidden_size: int
    rope_theta: float = 10_000.0
    rope_scaling: str = "none"
    rope_scaling_factor: float = 1.0
    rope_original_context: int = 8192
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    init_std: float = 0.02
    num_experts: int = 0
    experts_per_token: int = 0
    router_aux_loss_weight: float = 0.0

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


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
    # Narrow layers want larger initial weights: 0.08 is about 1 / sqrt(128) (docs/LOG.md has the losses).
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


def resolve_architecture(config: ModelConfig, *, tokenizer_vocab_size: int | None = None) -> Architecture:
    """The preset with the section's own numbers put in.

    ``vocab_size``, when the section does not set it, is the tokenizer's rounded up to a multiple of 64 if a tokenizer
    is known, else the preset's. Raises ``ConfigError`` for an unknown preset and for shapes that contradict each other.
    """
    if config.preset not in PRESETS:
        raise ConfigError(
            problem(
                f"model.preset is {config.preset!r}, which does not exist",
                fix="use one of " + ", ".join(PRESETS),
            )
        )
    base = PRESETS[config.preset]
    given = {
        spec.name: getattr(config, spec.name) for spec in fields(Architecture) if getattr(config, spec.name) is not None
    }
    if "vocab_size" not in given and tokenizer_vocab_size is not None:
        given["vocab_size"] = -(-tokenizer_vocab_size // 64) * 64
    if "head_dim" not in given and ("hidden_size" in given or "num_heads" in given):
        hidden = given.get("hidden_size", base.hidden_size)
        heads = given.get("num_heads", base.num_heads)
        if heads < 1 or hidden % heads:
            raise ConfigError(
                problem(
                    f"model.hidden_size = {hidden} is not a multiple of model.num_heads = {heads}",
                    fix="change one of them, or set model.head_dim",
                )
            )
        given["head_dim"] = hidden // heads
    architecture = replace(base, **given)
    _check_architecture(architecture)
    return architecture


def _check_architecture(shape: Architecture) -> None:
    for name in (
        "vocab_size",
        "num_layers",
        "hidden_size",
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "ffn_hidden_size",
    ):
        if getattr(shape, name) < 1:
            raise ConfigError(problem(f"model.{name} is {getattr(shape, name)}", fix="use a number of at least 1"))
    if shape.num_heads % shape.num_kv_heads:
        raise ConfigError(
            problem(
                f"model.num_heads = {shape.num_heads} is not a multiple of model.num_kv_heads = {shape.num_kv_heads}",
                so="query heads could not share key and value heads evenly",
                fix="use a divisor of num_heads",
            )
        )
    if shape.head_dim % 2:
        raise ConfigError(
            problem(
                f"model.head_dim is {shape.head_dim}, odd",
                so="rotary embeddings turn pairs",
                fix="make it even",
            )
        )
    if shape.num_experts or shape.experts_per_token:
        _check_experts(shape)


def _check_experts(shape: Architecture) -> None:
    if not 1 <= shape.experts_per_token <= shape.num_experts:
        raise ConfigError(
            problem(
                f"model.experts_per_token is {shape.experts_per_token} and model.num_experts {shape.num_experts}",
                so="a token could not be sent to that many experts",
                fix="use 1 to num_experts, or 0 for both (a dense model)",
            )
        )
    if shape.router_aux_loss_weight < 0:
        raise ConfigError(
            problem(
                f"model.router_aux_loss_weight is {shape.router_aux_loss_weight}",
                so="the router would learn to send all tokens to one expert",
                fix="use 0 (off) or more; 0.02 is Mixtral's",
            )
        )
    for name in ("hidden_size", "ffn_hidden_size"):
        if getattr(shape, name) % 8:
            raise ConfigError(
                problem(
                    f"model.{name} is {getattr(shape, name)}, not a multiple of 8",
                    so="grouped matrix products need rows of whole 16 bytes",
                    fix=f"use {-(-getattr(shape, name) // 8) * 8}",
                )
            )
