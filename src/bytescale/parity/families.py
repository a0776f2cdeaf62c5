"""Small models of many families, with random weights, made from their configurations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from bytescale.common.errors import ConfigError

_SMALL: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "attention_dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}
_GPT2: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"), ...),
    "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "attn_pdrop": 0.0,
}  # fmt: skip
_MLA: dict[str, Any] = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
    "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "n_shared_experts": 1, "num_nextn_predict_layers": 0, "head_dim": 4,
}  # fmt: skip
_INDEXER: dict[str, Any] = {
    "index_topk": 4, "index_n_heads": 2, "index_head_dim": 8, "index_block_size": 4, "index_topk_blocks": 2,
}  # fmt: skip
_LINEAR = ["linear_attention", "full_attention"]
_DELTA: dict[str, Any] = {
    "layer_types": _LINEAR, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 6, "linear_conv_kernel_dim": 3,
}  # fmt: skip
_CONVOLUTION: dict[str, Any] = {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1}
_MAMBA: dict[str, Any] = {
    "mamba_expand": 2, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_head_dim": 16, "mamba_num_heads": 4,
    "mamba_d_state": 4, "mamba_chunk_size": 8, "chunk_size": 8,
}  # fmt: skip
_NO_DROPOUT: dict[str, Any] = {"dropout": 0.0, "hidden_dropout": 0.0, "activation_dropout": 0.0, "resid_pdrop": 0.0,
                               "embd_pdrop": 0.0, "classifier_dropout": 0.0}  # fmt: skip

USUAL = _SMALL | _EXPERTS | _NO_DROPOUT
"""What the small configuration of any type has. A type takes the numbers that it knows."""

_PLAIN = (
    "llama qwen2 qwen3_moe qwen2_moe mixtral olmo olmo2 olmoe gemma phi phi3 gpt_neox glm glm4 smollm3 ernie4_5 helium "
    "hunyuan_v1_dense arcee minimax_m2"
)
FAMILIES: dict[str, dict[str, Any]] = {
    **{name: {} for name in _PLAIN.split()},
    "qwen3": {"tie_word_embeddings": True},
    "granite": {
        "logits_scaling": 2.0,
        "attention_multiplier": 0.3,
        "residual_multiplier": 0.5,
        "embedding_multiplier": 2.0,
    },
    "starcoder2": {"residual_dropout": 0.0, "embedding_dropout": 0.0},
    "gpt2": _GPT2,
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "seed_oss": {"residual_dropout": 0.0},
    "cohere": {"logit_scale": 0.25},
    # Windows, soft caps, sinks, values of another width
    "mistral": {"sliding_window": 5},
    "gemma2": {"sliding_window": 5, "query_pre_attn_scalar": 11, "attn_logit_softcapping": 2.0},
    "gemma3_text": {"sliding_window": 5, "num_hidden_layers": 3, "sliding_window_pattern": 2},
    "olmo3": {"sliding_window": 5, "num_hidden_layers": 4},
    "exaone4": {"sliding_window": 5, "num_hidden_layers": 4, "sliding_window_pattern": 2},
    "cohere2": {"sliding_window": 5, "num_hidden_layers": 4, "logit_scale": 0.25},
    "gpt_oss": {"sliding_window": 5},
    "deepseek_v2": _MLA | {"topk_method": "greedy"},
    "deepseek_v3": _MLA,
    # Keys that are chosen for each query: by tokens, also for a later layer, and by blocks of tokens
    "deepseek_v32": _MLA | _INDEXER,
    "glm_moe_dsa": _MLA | _INDEXER | {"indexer_types": ["full", "shared"]},
    "minimax_m3_vl_text": _INDEXER
    | {
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "shared_intermediate_size": 48,
        "dense_intermediate_size": 48,
    },
    # Recurrences and convolutions
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _DELTA),
    "olmo_hybrid": _DELTA | {"linear_num_value_heads": 2},
    "kimi_linear": _MLA | {"linear_num_heads": 4, "linear_head_dim": 8, "layer_types": _LINEAR},
    **dict.fromkeys(("lfm2", "lfm2_moe"), _CONVOLUTION),
    "nemotron_h": _MAMBA | {"layers_block_type": ["mamba", "attention"], "n_groups": 1, "ssm_state_size": 4},
    "granitemoehybrid": _MAMBA | {"layer_types": ["mamba", "attention"]},
    "falcon_h1": _MAMBA | {"mamba_d_ssm": 64},
    "bamba": _MAMBA | {"attn_layer_indices": [1]},
    "zamba2": _MAMBA
    | {
        "num_hidden_layers": 3,
        "layers_block_type": ["mamba", "hybrid", "hybrid"],
        "mamba_headdim": 16,
        "mamba_ngroups": 1,
        "n_mamba_heads": 4,
    },
    "mamba2": {"head_dim": 16, "num_heads": 4, "state_size": 4, "n_groups": 1},
    "jamba": _MAMBA | {"attn_layer_period": 2, "attn_layer_offset": 1},
    "falcon_mamba": {"state_size": 4, "num_attention_heads": ..., "num_key_value_heads": ...},
    "minimax": {"layer_types": _LINEAR, "block_size": 8},
}
"""The families of the tests, and what their small configurations have besides the usual numbers."""


def small_model(name: str, *, dtype: torch.dtype = torch.float64, seed: int = 0, **changes: Any) -> nn.Module:
    """A small causal model with random weights.

    Args:
        name: a model type of transformers; or a folder or a name on the hub, of which only the configuration is read.
        dtype: of parameters.
        seed: of the weights.
        changes: of the configuration; ``...`` leaves a number of ``USUAL`` to transformers.

    Raises ``ConfigError`` if there is no such configuration, or no causal model of it.
    """
    try:
        if name not in CONFIG_MAPPING and (Path(name).exists() or "/" in name):
            config = _fewer_layers(AutoConfig.from_pretrained(name, trust_remote_code=False))
        else:
            given = USUAL | FAMILIES.get(name, {}) | changes
            config = AutoConfig.for_model(name, **{key: value for key, value in given.items() if value is not ...})
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
        model.to(dtype)  # some make a parameter in fp32 whatever the dtype
        if model._can_set_experts_implementation():
            model.set_experts_implementation("eager")  # the grouped one has no fp64
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"no small model can be made of {name!r}: {str(error).splitlines()[0]}",
            fix="give a folder with a config.json or a model type of transformers, or build the model yourself and "
            "call bytescale.parity.compare(model, Setup())",
        ) from error
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms, biases and sinks differ from zero and one
                parameter.add_(0.1 * torch.randn(parameter.shape).to(parameter))
    return model.train()


def _fewer_layers(config: Any) -> Any:
    """The configuration with a few of its layers, of every kind that they have."""
    kinds = getattr(config, "layer_types", None)
    if kinds:
        number = max(kinds.index(kind) for kind in set(kinds)) + 1
        config.layer_types = kinds[:number]
    else:
        number = min(2, config.num_hidden_layers)
    config.num_hidden_layers = number
    return config
