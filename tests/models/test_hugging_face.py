"""Weights and shapes against transformers' own models, both ways."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from bytescale.common.errors import CheckpointError, ConfigError
from bytescale.config.architecture import PRESETS, Architecture
from bytescale.config.hugging_face import architecture_from_hf, hf_config_of, read_hf_config
from bytescale.config.resolve import resolve_model
from bytescale.config.schema import ModelConfig
from bytescale.models import Llama, build_model
from bytescale.models.hf_folder import INDEX, FolderWeights, hf_tensors, write_json, write_weights
from tests.helpers.reference_attention import reference_attention
from tests.helpers.steps import make_model, small_shape

LLAMA3 = {"rope_scaling": "llama3", "rope_scaling_factor": 4.0, "rope_original_context": 16, "rope_theta": 500.0}
MIXTURE = {"num_experts": 4, "experts_per_token": 2, "router_aux_loss_weight": 0.02}
SHAPES: dict[str, dict[str, Any]] = {
    "grouped-query attention": {},
    "tied heads": {"tie_embeddings": True},
    "multi-head attention": {"num_kv_heads": 6},
    "wide heads": {"head_dim": 16},
    "linear": {"rope_scaling": "linear", "rope_scaling_factor": 4.0},
    "llama3": LLAMA3,
    "mixture": MIXTURE,
    "tied mixture with llama3": {**MIXTURE, **LLAMA3, "tie_embeddings": True},
}


def write_folder(folder: Path, model: Llama, shard_bytes: int = 20_000) -> Path:
    """``model`` as a Hugging Face folder of several shards."""
    folder.mkdir()
    write_weights(folder, hf_tensors(weights_of(model)), shard_bytes=shard_bytes)
    write_json(folder / "config.json", hf_config_of(model.shape, dtype="float32"))
    return folder


def read_model(folder: Path, shape: Architecture) -> Llama:
    """The model in a folder, by our reader."""
    model = build_model(shape)
    weights = FolderWeights(folder, hf_tensors(weights_of(model)))
    for name, target in hf_tensors(weights_of(model)):
        target.copy_(weights.read(name))
    return model


def weights_of(model: Llama) -> list[tuple[str, Tensor]]:
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


def our_logits(model: Llama, tokens: Tensor) -> Tensor:
    hidden = model(tokens, torch.arange(len(tokens)), lambda q, k, v: reference_attention(q, k, v, [len(q)]))
    return hidden @ model.head_weight.T


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES.keys())
def test_logits_equal_those_of_transformers_both_ways(changes: dict[str, Any], tmp_path: Path) -> None:
    shape = small_shape(**{"init_std": 0.2, **changes})
    ours = make_model(shape, torch.float32)
    folder = write_folder(tmp_path / "ours", ours)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert type(theirs).__name__ == ("MixtralForCausalLM" if shape.num_experts else "LlamaForCausalLM")
    tokens = torch.randint(shape.vocab_size, (40,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(tokens[None]).logits[0]
        torch.testing.assert_close(our_logits(ours, tokens), expected, rtol=1e-5, atol=1e-5)

        # Back: what transformers writes, we read; every weight bit for bit.
        theirs.save_pretrained(tmp_path / "theirs")
        assert architecture_from_hf(read_hf_config(tmp_path / "theirs")) == shape
        again = read_model(tmp_path / "theirs", shape)
        torch.testing.assert_close(our_logits(again, tokens), expected, rtol=1e-5, atol=1e-5)
    for (name, first), (_, second) in zip(ours.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(first, second), name


def test_shards_have_an_index_that_adds_up(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "ours", make_model(small_shape(), torch.float32))
    index = json.loads((folder / INDEX).read_text())
    stored = {name: file.name for file in folder.glob("*.safetensors") for name in load_file(file)}
    assert index["weight_map"] == stored
    assert len(set(stored.values())) > 2
    assert all(file.stat().st_size < 25_000 for file in folder.glob("*.safetensors"))
    assert index["metadata"]["total_size"] == sum(
        tensor.nbytes for file in folder.glob("*.safetensors") for tensor in load_file(file).values()
    )


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_configs_of_presets_survive_the_round_trip(preset: str) -> None:
    content = hf_config_of(PRESETS[preset], dtype="bfloat16")
    assert architecture_from_hf(content) == PRESETS[preset]


def test_missing_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    model = make_model(small_shape(), torch.float32)
    folder = write_folder(tmp_path / "ours", model, shard_bytes=2**30)
    tensors = load_file(folder / "model.safetensors")
    narrow = {**tensors, "model.layers.1.mlp.up_proj.weight": torch.zeros(2, 24)}
    save_file(narrow, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight 2x24 instead of 40x24"):
        read_model(folder, model.shape)
    del narrow["model.norm.weight"], narrow["lm_head.weight"]
    save_file(narrow, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lacks 2 of \d+ tensors: model\.norm\.weight, lm_head\.weight|lacks 2"):
        read_model(folder, model.shape)


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["GPT2LMHeadModel"]},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"sliding_window": 4096},
        {"hidden_act": "gelu"},
        {"architectures": None, "model_type": None},
        {"rope_scaling": {"type": "yarn", "factor": 2.0}},
        {"rope_scaling": {"type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 2.0}},
    ],
    ids=str,
)
def test_what_our_models_cannot_compute_is_left_to_transformers(changes: dict[str, Any]) -> None:
    assert architecture_from_hf(hf_config_of(small_shape(), dtype="float32") | changes) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_dropout": 0.1}, "attention_dropout = 0.1.*set it to 0.0"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"quantised weights \(fp8\)"),
    ],
)
def test_what_nobody_can_compute_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        architecture_from_hf(hf_config_of(small_shape(), dtype="float32") | changes)


def test_folders_without_a_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        read_hf_config(tmp_path)
    with pytest.raises(ConfigError, match="has no weights that can be read"):
        read_model(tmp_path, small_shape())


def test_a_file_without_architectures_is_known_by_its_model_type(tmp_path: Path) -> None:
    content = hf_config_of(small_shape(), dtype="float32")
    del content["architectures"]
    assert architecture_from_hf(content) == small_shape()
    del content["model_type"]
    write_json(tmp_path / "config.json", content)
    with pytest.raises(ConfigError, match="does not say its model_type, and architectures has none of LlamaForCausal"):
        resolve_model(ModelConfig(preset=f"hf:{tmp_path}"))


def test_tensors_without_a_place_are_named(tmp_path: Path) -> None:
    """They used to be ignored: biases, norms of queries, and a head beside tied embeddings."""
    model = make_model(small_shape(tie_embeddings=True), torch.float32)
    folder = write_folder(tmp_path / "ours", model, shard_bytes=2**30)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "model.layers.0.self_attn.q_norm.weight": torch.ones(4)}, file)
    with pytest.raises(CheckpointError, match=r"no place for: model\.layers\.0\.self_attn\.q_norm\.weight"):
        read_model(folder, model.shape)
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, file)
    with pytest.raises(CheckpointError, match="set tie_word_embeddings to false"):
        read_model(folder, model.shape)
    same = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    save_file({**tensors, **same, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}, file)
    assert torch.equal(read_model(folder, model.shape).embed_tokens.weight, model.embed_tokens.weight)


def test_damaged_files_and_pickles_are_told_apart(tmp_path: Path) -> None:
    model = make_model(small_shape(), torch.float32)
    folder = write_folder(tmp_path / "ours", model, shard_bytes=2**30)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="cut short or damaged"):
        read_model(folder, model.shape)
    file.rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin only"):
        read_model(folder, model.shape)
