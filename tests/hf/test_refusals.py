"""Models for which a plan would not give the results of one process are refused, with the part that is in the way."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from transformers import PaliGemmaConfig, PaliGemmaForConditionalGeneration
from transformers.models.qwen3_next import modeling_qwen3_next

import bytescale
from bytescale.attention import AttentionRules
from bytescale.common.errors import ConfigError, DataError
from bytescale.hf.model.probe import LayerAttention, ModelStructure, check_widths
from bytescale.parity import small_model
from bytescale.parity.families import USUAL

from .support import documents

DECODER = {"is_decoder": True, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("recurrent_gemma", {}, r"RecurrentGemmaForCausalLM cannot be attached: .*mixes tokens"),
        ("zaya", {"num_experts_per_tok": 1}, r"ZayaForCausalLM cannot be attached: .*mixes tokens"),
        ("roberta", DECODER, r"layer\.0\.attention\.self cannot be attached: .*are not at positions 0, 1"),
        (
            "data2vec-text",
            DECODER,
            r"layer\.0\.attention\.self cannot be attached: .*are not at positions 0, 1",
        ),
        ("doge", {}, r"layers\.0\.self_attn cannot be attached: .*it computes with its attention mask"),
        ("bloom", {"n_layer": 1, "hidden_size": 32, "n_head": 4}, "AttentionInterface"),
    ],
)
def test_models_that_cannot_be_attached(name: str, changes: dict[str, Any], message: str) -> None:
    model = small_model(name, dtype=torch.float32, **changes)
    with pytest.raises(ConfigError, match=message):
        bytescale.HDP(model, capacity_tokens=100)
    assert not model.config._attn_implementation.startswith("hdp")  # it is as before


def test_a_mixer_whose_state_is_lost_at_a_cut_is_refused() -> None:
    """As a kernel of another version might do, which takes the state before its tokens and does not use it."""
    kernel = modeling_qwen3_next.torch_chunk_gated_delta_rule

    def forgetful(*args: Any, initial_state: Any = None, **options: Any) -> Any:
        return kernel(*args, initial_state=None, **options)

    with patch.object(modeling_qwen3_next, "torch_chunk_gated_delta_rule", forgetful):
        model = small_model("qwen3_next")
        with pytest.raises(ConfigError, match=r"layers\.0\.linear_attn \(Qwen3NextGatedDeltaNet\) cannot .*: cut into"):
            bytescale.HDP(model, capacity_tokens=100)


def test_a_model_that_changes_its_mask_by_itself_is_refused() -> None:
    config = PaliGemmaConfig(
        text_config={**USUAL, "model_type": "gemma"},
        vision_config={"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
                       "image_size": 28, "patch_size": 14, "projection_dim": 32},
        projection_dim=32,
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"language_model cannot be attached: it fails in a pass on our attention"):
        bytescale.HDP(PaliGemmaForConditionalGeneration(config), capacity_tokens=100)


def test_keys_that_stand_for_many_tokens_are_refused_when_they_appear() -> None:
    """Scores would have been wrong without a word: the model was tried with fewer tokens than become one key."""
    rates = dict.fromkeys(("compressed_sparse_attention", "heavily_compressed_attention"), 16)
    model = small_model("deepseek_v4", compress_rates=rates)
    (micro,) = bytescale.HDP(model, capacity_tokens=100).plan(documents([40]))
    with pytest.raises(ConfigError, match="40 queries and 42 keys in a micro-batch of 40 rows"), torch.no_grad():
        micro.logprobs(model)


def test_a_module_that_is_no_model_of_transformers() -> None:
    with pytest.raises(ConfigError, match="no part that is a PreTrainedModel"):
        bytescale.HDP(nn.Linear(2, 2), capacity_tokens=100)


def test_dropout_is_refused_in_training_mode_and_harmless_in_evaluation() -> None:
    model = small_model("llama", attention_dropout=0.1)
    hdp = bytescale.HDP(model, capacity_tokens=100)
    (micro,) = hdp.plan(documents([7]))
    with pytest.raises(ConfigError, match=r"self_attn cannot be attached: it draws random numbers"):
        model(**micro.inputs)
    model.eval()
    assert model(**micro.inputs).logits.shape == (1, 7, 67)


def test_bidirectional_attention_is_refused() -> None:
    model = small_model("llama")
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    with pytest.raises(ConfigError, match=r"layers\.0\.self_attn cannot be attached: it is not causal"):
        bytescale.HDP(model, capacity_tokens=100)


def test_a_loss_for_even_use_of_experts_is_refused() -> None:
    model = small_model("qwen3_moe", output_router_logits=True)
    with pytest.raises(ConfigError, match=r"Qwen3MoeForCausalLM cannot be attached: .*even use of experts"):
        bytescale.HDP(model, capacity_tokens=100)
    model.config.output_router_logits = False
    hdp = bytescale.HDP(model, capacity_tokens=100)
    (micro,) = hdp.plan(documents([7]))
    model.config.output_router_logits = True  # and later
    with pytest.raises(ConfigError, match=r"Qwen3MoeForCausalLM cannot be attached: .*even use of experts"):
        model(**micro.inputs)
    model(**micro.inputs, output_router_logits=False)


def test_a_model_that_changes_after_it_was_attached_is_told() -> None:
    model = small_model("llama")
    hdp = bytescale.HDP(model, capacity_tokens=100)
    (micro,) = hdp.plan(documents([7]))
    model.model.layers = model.model.layers[:1]
    model.config.num_hidden_layers = 1
    with pytest.raises(ConfigError, match="attention and recurrences were called 1 times"):
        model(**micro.inputs)
    with pytest.raises(ConfigError, match=r"its part model\.layers was put in, replaced or taken out"):
        list(hdp.plan(documents([7])))


def test_parameters_that_the_optimizer_does_not_know_are_told() -> None:
    model = small_model("llama")
    hdp = bytescale.HDP(model, capacity_tokens=100)
    hdp.adamw(lr=1e-2)
    for micro in hdp.plan(documents([7])):
        micro.logprobs(model).sum().backward()
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    with pytest.raises(ConfigError, match=r"its parameter model\.embed_tokens\.weight was replaced or resized"):
        list(hdp.plan(documents([7])))
    with pytest.raises(ConfigError, match=r"its parameter model\.embed_tokens\.weight was replaced or resized"):
        hdp.step()


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_rope_that_depends_on_the_pass_is_refused_or_fixed(rope: str) -> None:
    """With the choice made for 100 tokens, short documents are rotated as in a pass of 100."""
    parameters: dict[str, Any] = {"rope_type": rope, "rope_theta": 1e4, "factor": 4.0}
    if rope == "longrope":
        parameters |= {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4, "original_max_position_embeddings": 16}
    model = small_model("llama", rope_parameters=parameters, max_position_embeddings=64 if rope == "longrope" else 16)
    with pytest.raises(
        ConfigError, match=rf"rotary_emb .* its rotary positions \({rope}\).*every document, also a short one, is then"
    ):
        bytescale.HDP(model, capacity_tokens=200)
    tokens = torch.arange(2, 66).repeat(2)[None, :100]
    with torch.no_grad():
        wanted = model(tokens).logits[0, :9]
    hdp = bytescale.HDP(model, capacity_tokens=200, longest_document=100)
    (micro,) = hdp.plan([{"tokens": tokens[0, :9]}, {"tokens": tokens[0, :20]}])
    with torch.no_grad():
        logits = model(**micro.inputs).logits[0]
    first = 0 if micro.segments[0][0] == 0 else 20
    torch.testing.assert_close(logits[first : first + 9], wanted, rtol=0, atol=1e-10)
    with pytest.raises(DataError, match="Document 1 has 101 tokens; the model has positions for 100"):
        hdp.plan(documents([7, 101]))
    bytescale.HDP(model, capacity_tokens=50)
    with pytest.raises(ConfigError, match="has fixed its rotary positions for documents of 100 tokens"):
        bytescale.HDP(model, capacity_tokens=200, longest_document=200)


class QuantisedByTensor(nn.Linear):
    """Rounds its input to 8 bits with one scale for all rows, and lets gradients through as if it did not."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        scale = rows.detach().abs().max() / 127
        return super().forward(rows + ((rows / scale).round() * scale - rows).detach())


class QuantisedByToken(nn.Linear):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        scale = rows.detach().abs().amax(dim=-1, keepdim=True) / 127
        return super().forward(rows + ((rows / scale).round() * scale - rows).detach())


class LessTheMean(nn.Linear):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return super().forward(rows - rows.detach().mean(dim=1, keepdim=True))


class InTraining(nn.Linear):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return super().forward(rows / rows.detach().square().mean().sqrt() if self.training else rows)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("place", ["lm_head", "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"])
def test_what_mixes_rows_anywhere_is_found(place: str, dtype: torch.dtype) -> None:
    """No gradient says so. What takes its scale from a token alone is attached."""
    for family in ("llama", "qwen3_moe") if place == "lm_head" else ("llama",):
        for cls in (QuantisedByTensor, LessTheMean, InTraining, QuantisedByToken):
            model = small_model(family, dtype=dtype)
            parent, _, name = place.rpartition(".")
            old = model.get_submodule(place)
            new = cls(old.in_features, old.out_features, bias=False, dtype=dtype)
            new.weight = old.weight
            setattr(model.get_submodule(parent), name, new)
            if cls is QuantisedByToken:
                bytescale.HDP(model, capacity_tokens=100)
                continue
            with pytest.raises(ConfigError, match="a part other than attention mixes tokens"):
                bytescale.HDP(model, capacity_tokens=100)


def test_a_refused_model_keeps_its_rotary_positions() -> None:
    model = small_model("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0})
    with pytest.raises(ConfigError, match="fastest"):
        bytescale.HDP(model, capacity_tokens=200, longest_document=100, planner="fastest")  # type: ignore[arg-type]
    assert model.model.rotary_emb.rope_type == "dynamic"
    with pytest.raises(ConfigError, match="depend on the longest one of a pass"):
        bytescale.HDP(model, capacity_tokens=200)


def test_heads_that_flash_attention_does_not_have() -> None:
    """Wider than 256 on a GPU; a soft cap has a kernel that takes any width."""
    wide = LayerAttention(
        name="model.layers.3.self_attn", num_heads=2, num_kv_heads=1, head_dim=512, value_dim=512,
        rules=AttentionRules(),
    )  # fmt: skip
    structure = ModelStructure(layers=(wide,), random_parts=())
    with pytest.raises(ConfigError, match=r"model\.layers\.3\.self_attn cannot be attached: its heads are 512 wide"):
        check_widths(structure, cuda_flash=True)
    check_widths(structure, cuda_flash=False)
    capped = dataclasses.replace(wide, rules=AttentionRules(soft_cap=30.0))
    check_widths(ModelStructure(layers=(capped,), random_parts=()), cuda_flash=True)
