"""The presets: each is the content of a config.json of transformers."""

from __future__ import annotations

from typing import Any

SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Written as unknown: left out, transformers would take 1 and 2, whatever the tokenizer."""


def _llama(layers: int, heads: int, kv_heads: int, hidden: int, ffn: int, **fields: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "rope_theta": 500_000.0,
        "intermediate_size": ffn,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        "hidden_act": "silu",
        "max_position_embeddings": 8192,  # nothing is computed from it
        "rope_scaling": None,
        **dict.fromkeys(SPECIAL_TOKENS),
        **fields,
    }


# A Llama whose hidden size need not be a multiple of its heads.
_MISTRAL: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None,
}  # fmt: skip
_MIXTRAL: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2,
    "sliding_window": None, "router_aux_loss_coef": 0.02,
}  # fmt: skip
# Narrow layers want larger initial weights: 0.08 is about 1 / sqrt(128) (docs/decisions/tensor_parallelism.md).
_TINY: dict[str, Any] = {"vocab_size": 4096, "rope_theta": 10_000.0, "initializer_range": 0.08}

# 7b to 70b: layers, heads, KV groups and hidden size are the paper's (section 8, table 1). It does not print the
# feed-forward widths; these are Llama 2's and, for 7b, Llama 3 8B's / Mistral 7B's 3.5x.
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": _llama(4, 4, 2, 128, 384, **_TINY),
    "160m": _llama(12, 12, 4, 768, 2048, vocab_size=32000, tie_word_embeddings=True),
    "1b": _llama(16, 32, 8, 2048, 8192, tie_word_embeddings=True),
    "7b": _llama(32, 32, 8, 4096, 14336),
    "13b": _llama(40, 40, 8, 5120, 13824),
    "30b": _llama(60, 56, 8, 6656, 17920, **_MISTRAL),
    "70b": _llama(80, 64, 8, 8192, 28672),
    # The paper's mixtures: top-2 of 8 experts; feed-forward widths and vocabularies are Mixtral's.
    "tiny-moe": _llama(4, 4, 2, 128, 192, **_MIXTRAL, **_TINY),
    "mixtral-8x7b": _llama(32, 32, 8, 4096, 14336, **_MIXTRAL, vocab_size=32000, rope_theta=1e6),
    "mixtral-8x22b": _llama(56, 48, 8, 6144, 16384, **_MIXTRAL, vocab_size=32768, rope_theta=1e6),
}
