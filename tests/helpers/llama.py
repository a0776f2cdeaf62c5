"""Counts of a Llama or a Mixtral worked out by hand, from its config.json: what ``hf.model.costs`` has to find."""

from __future__ import annotations

from typing import Any

from bytescale.config.presets import PRESETS
from bytescale.cost.spec import LayerSpec, ModelSpec


def spec_of_llama(preset: str, **changes: Any) -> ModelSpec:
    """The counts of a preset with other fields of config.json. Weights are all trained."""
    content = PRESETS[preset] | changes
    hidden, block = content["hidden_size"], 3 * content["hidden_size"] * content["intermediate_size"]
    query, key = (content[f"num_{heads}_heads"] * content["head_dim"] for heads in ("attention", "key_value"))
    projections = hidden * (2 * query + 2 * key)
    num_experts, chosen = content.get("num_local_experts", 0), content.get("num_experts_per_tok", 0)
    router = num_experts * hidden
    active = float(projections + router + (chosen * block if num_experts else block))
    parameters = projections + router + max(1, num_experts) * block + 2 * hidden  # and two norms
    words, is_tied = content["vocab_size"] * hidden, content["tie_word_embeddings"]
    total = content["num_hidden_layers"] * parameters + (1 if is_tied else 2) * words + hidden
    layer = LayerSpec(
        count=content["num_hidden_layers"],
        parameters=parameters,
        active_weights=active,
        trained_weights=active,
        expert_weights=num_experts * block,
        expert_rows=float(chosen),
        pair_numbers=2.0 * query,
        num_heads=content["num_attention_heads"],
        key_numbers=2.0 * key,
    )
    return ModelSpec(
        layers=(layer,),
        kind=content["model_type"],
        vocab_size=content["vocab_size"],
        hidden_size=hidden,
        outside=words + hidden,
        head=words,
        head_trained=words,
        is_tied=is_tied,
        total=total,
        total_trained=total,
    )
