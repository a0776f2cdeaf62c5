"""Every causal model type of the installed transformers, small, under ``HDP`` and in one process.

``python -m tests.hf.sweep`` writes docs/model_types.md. ``python -m tests.hf.sweep TYPE ...`` prints rows.
"""

from __future__ import annotations

import contextlib
import copy
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from bytescale.common.errors import BytescaleError
from bytescale.hf.model.decoder import HFDecoder
from bytescale.hf.model.stages import cut_to_stage
from bytescale.hf.model.tensor_parallel import planned_cuts
from bytescale.parity import FAMILIES, Setup, compare, small_model
from bytescale.parity.compare import plain_step, random_documents
from bytescale.parity.families import USUAL
from bytescale.runtime.mesh import MeshShape

from .mesh_steps import compare_on_mesh

TABLE = Path(__file__).parents[2] / "docs" / "model_types.md"
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
MOST_PARAMETERS = 4e7
SETUPS = (Setup(num_ranks=3), Setup(num_ranks=2, seed=1))

_VERSION = f"transformers {transformers.__version__}."

Result = Literal["equal", "differs", "refused", "not tried", "failed"]

_SMALL: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 67}
_EVERY: dict[str, Any] = {
    "is_decoder": True, "sliding_window": 5, "index_topk": 4, "index_n_heads": 2, "index_head_dim": 8,
    "attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0, "attn_pdrop": 0.0, "router_jitter_noise": 0.0,
    "input_jitter_noise": 0.0, "layerdrop": 0.0, "decoder_layerdrop": 0.0, "decoder_layers": 2, "encoder_layers": 2,
    "decoder_attention_heads": 4, "encoder_attention_heads": 4, "decoder_ffn_dim": 48, "encoder_ffn_dim": 48,
    "d_model": 32, "ffn_dim": 48, "output_router_logits": False, "mamba_expand": 2, "mamba_n_heads": 4,
    "mamba_d_head": 16, "mamba_head_dim": 16, "mamba_num_heads": 4, "mamba_d_state": 4,
}  # fmt: skip
"""For all types. A type takes the numbers that it has, and keeps the others without a use for them."""
MLA: dict[str, Any] = FAMILIES["deepseek_v3"]
_VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "num_heads": 4,
    "depth": 1, "embed_dim": 32, "out_hidden_size": 32, "image_size": 28, "patch_size": 14, "num_channels": 3,
}  # fmt: skip
_TEXT: dict[str, Any] = {
    **_SMALL, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48, "sliding_window": 5,
    "max_position_embeddings": 128, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 1, "hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 67, "intermediate_size_mlp": 48,
}  # fmt: skip
COMPOSITE: dict[str, Any] = {"text_config": _TEXT, "vision_config": _VISION}
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_LAYERS = ["full_attention", "sliding_attention"]
_QUERIES_CHOOSE: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"], "indexer_budget": 8, "indexer_compress_ratio": 2,
    "indexer_head_dim": 8, "indexer_n_heads": 4, "indexer_kv_heads": 1,
}  # fmt: skip
_CHANGES: dict[str, dict[str, Any]] = {
    "axk1": MLA,
    "axk2": MLA | {"index_head_dim": 8},
    "blt": {"encoder_hash_byte_group_vocab": 11, "encoder_hash_byte_group_size": [3], "vocab_size": 260,
            **dict.fromkeys(("patcher_config", "encoder_config", "decoder_config", "global_config"), _TEXT)},
    "codegen": {"rotary_dim": 4},
    "cohere_compass_text": {"layer_types": _LAYERS, "rope_parameters": dict.fromkeys(_LAYERS, _ROPE)},
    "deepseek_v4": {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4}, "n_heads": 4, "n_layers": 2,
             "max_seq_len": 128, "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2}},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    "dots3_note": {"text_config": _TEXT | MLA | {"index_n_heads": 2, "index_head_dim": 8}, "vision_config": _VISION},
    "dots3_note_text": MLA,
    "emu3": {"text_config": _TEXT | {"attention_dropout": 0.0},
             "vq_config": {"embed_dim": 8, "latent_channels": 4, "codebook_size": 8, "base_channels": 32,
                           "hidden_size": 32, "channel_multiplier": [1, 1], "num_res_blocks": 1, "z_channels": 8}},
    "falcon": {"head_dim": ..., "num_kv_heads": 2, "new_decoder_architecture": True},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3": COMPOSITE,
    "gemma3n_text": _TEXT | {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": _LAYERS * 2,
                             "laurel_rank": 4, "activation_sparsity_pattern": [0.0] * 4},
    "gemma4": {"text_config": _TEXT, "vision_config": _VISION | {"head_dim": 8}, "audio_config": None},
    "gemma4_assistant": {
        "text_config": _TEXT | {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 2,
                                "vocab_size_per_layer_input": 0}, "backbone_hidden_size": 32
    },
    "gemma4_text": _TEXT | {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": _LAYERS * 2},
    "gemma4_unified": COMPOSITE,
    "gemma4_unified_assistant": {
        "text_config": _TEXT | {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 2,
                                "vocab_size_per_layer_input": 0}, "backbone_hidden_size": 32
    },
    "git": {"vision_config": _VISION},
    "glm4_moe_lite": MLA,
    "got_ocr2": COMPOSITE,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "window_size": 5},
    "gptj": {"rotary_dim": 4},
    "hy_v4": MLA,
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"head_dim": 16, "num_heads": 4, "state_size": 4, "n_groups": 1},
    "llama4": COMPOSITE,
    "longcat_flash": MLA | {"num_layers": 2},
    "minicpm3": MLA,
    "mllama": {"text_config": _TEXT | {"cross_attention_layers": [1]}, "vision_config": _VISION},
    "moshi": {"audio_vocab_size": 16, "num_codebooks": 2},
    "moss_transcribe_diarize": {"text_config": _TEXT, "audio_config": {"d_model": 32, "encoder_layers": 1,
                                "encoder_attention_heads": 4, "encoder_ffn_dim": 48}},
    "nemotron_h": {"layers_block_type": ["mamba", "attention"], "n_groups": 1, "ssm_state_size": 4},
    "qwen3_5": COMPOSITE,
    "qwen3_5_moe": COMPOSITE,
    "qwen4_exp": {"text_config": _TEXT | _QUERIES_CHOOSE, "vision_config": _VISION},
    "qwen4_exp_text": _QUERIES_CHOOSE,
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local"]},
    "sarvam_mla": MLA,
    "xmod": {"default_language": "en_XX", "languages": ["en_XX"]},
    "xlnet": {"max_position_embeddings": ..., "n_layer": 2, "n_head": 4, "d_inner": 48},
    "prophetnet": {"num_hidden_layers": ..., "num_encoder_layers": 1, "num_decoder_layers": 2,
                   "num_decoder_attention_heads": 4, "num_encoder_attention_heads": 4},
    "phi4_multimodal": {"vision_config": _VISION, "audio_config": {"hidden_size": 32, "num_blocks": 1,
                        "num_attention_heads": 4, "intermediate_size": 48, "nemo_conv_channels": 8}},
    "youtu": MLA,
    "zamba": {"num_hidden_layers": 3, "layer_types": ["mamba", "hybrid", "hybrid"],
              "mamba_dt_rank": 4, "n_mamba_heads": 2, "attention_head_dim": 8},
    "zamba2": {"num_hidden_layers": 3, "layer_types": ["mamba", "hybrid", "hybrid"],
               "mamba_headdim": 16, "mamba_ngroups": 1, "n_mamba_heads": 4},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """What became of a type."""

    name: str
    result: Result
    why: str = ""


def sweep(names: Sequence[str] = ()) -> Iterator[Row]:
    """Try the types, in alphabetical order; all if none are named."""
    for name in names or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        yield tried(name)


def tried(name: str) -> Row:
    """Build a small model of the type, and compare it with itself."""
    try:
        dtype = _dtype(name)
    except Exception as error:  # a model that does not even run alone has nothing to be equal to
        return Row(name, "not tried", f"no small model runs alone ({type(error).__name__}: {first_line(error)})")
    try:
        worst = max(compare(_small(name, dtype), setup).worst for setup in SETUPS)
    except BytescaleError as error:
        return Row(name, "refused", first_line(error))
    except Exception as error:
        return Row(name, "failed", f"{type(error).__name__}: {first_line(error)}")
    return Row(name, "equal") if worst <= TOLERANCES[dtype] else Row(name, "differs", f"{worst:.1e}")


@dataclass(frozen=True)
class Meshed:
    """What becomes of an equal type on a mesh; ``tp``, ``pp``: why it is refused there, empty: it is not."""

    name: str
    tp: str
    pp: str
    result: Result
    why: str = ""


def meshed(name: str) -> Meshed:
    """The small model on 2 HDP ranks x 2 tensor-parallel ones x 2 stages, where it may be so, against one process."""
    dtype = _dtype(name)
    model, refused = _small(name, dtype), dict[str, str]()
    for key, attempt in (
        ("tp", lambda: planned_cuts(HFDecoder(copy.deepcopy(model)), 2)),
        ("pp", lambda: [cut_to_stage(HFDecoder(copy.deepcopy(model)), stage, 2) for stage in range(2)]),
    ):
        try:
            attempt()
            refused[key] = ""
        except BytescaleError as error:
            what = first_line(error)
            refused[key] = (what.partition(": ")[2] or what).removesuffix(" (base_model_tp_plan)")
    shape = MeshShape(hdp=2, tp=1 if refused["tp"] else 2, pp=1 if refused["pp"] else 2)
    documents = random_documents(model, Setup(lengths=(17, 1, 8, 3)))
    try:
        worst = compare_on_mesh(model, documents, shape).worst
    except AssertionError as error:
        return Meshed(name, **refused, result="failed", why=first_line(error.__cause__ or error))
    is_equal = worst <= TOLERANCES[dtype]
    return Meshed(name, **refused, result="equal" if is_equal else "differs", why=f"{worst:.1e}")


def equal_types(page: str) -> list[str]:
    """Those that the page says are equal."""
    return re.findall("`(.+?)`", page.partition("## Equal")[2].partition("## ")[0])


def _dtype(name: str) -> torch.dtype:
    """The widest in which the model runs alone, forward and backward."""
    for dtype in (torch.float64, torch.float32):
        try:
            model = _small(name, dtype)
            plain_step(model, random_documents(model, SETUPS[0]))
            return dtype
        except Exception as error:
            reason = error
    raise reason


def _small(name: str, dtype: torch.dtype) -> nn.Module:
    if name in FAMILIES:
        return small_model(name, dtype=dtype)
    changes = _EVERY | _CHANGES.get(name, {})
    given = {key: value for key, value in (USUAL | changes).items() if value is not ...}
    config = AutoConfig.for_model(name, **given)
    with torch.device("meta"), contextlib.suppress(NotImplementedError):
        number = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
        if number > MOST_PARAMETERS:
            raise ValueError(f"its smallest configuration here has {number} parameters")
    return small_model(name, dtype=dtype, **changes)


def first_line(error: Exception) -> str:
    """The cause alone, in one line: not what would follow from it, nor what to do."""
    text = " ".join(str(error).split())
    return text.partition(". ")[0].removesuffix(".")


def page(rows: list[Row], of_meshes: list[Meshed]) -> str:
    """docs/model_types.md. ``of_meshes``: of the equal types, what becomes of them on a mesh."""
    found = {result: [row for row in rows if row.result == result] for result in ("equal", "refused", "not tried")}
    assert sum(map(len, found.values())) == len(rows), [r for r in rows if r.result in ("differs", "failed")]
    lines = [
        "# Model types",
        "",
        f"{_VERSION} All {len(rows)} types that its `AutoModelForCausalLM` loads, each as a",
        "small model with random weights: one training step under `HDP` with documents that ranks share, against plain",
        "transformers in one process. Loss, log-probabilities and every gradient are compared. A type stands for its",
        "usual configuration; another one may differ, and is tried when it is attached.",
        "`python -m tests.hf.sweep` writes this page, and a test compares every line of it with the code.",
        "",
        f"## Equal: {len(found['equal'])}",
        "",
        textwrap.fill(", ".join(f"`{row.name}`" for row in found["equal"]), 118, break_on_hyphens=False),
    ]
    for result, title in (("refused", "Refused by name"), ("not tried", "Not tried")):
        lines += ["", f"## {title}: {len(found[result])}", "", "| type | why |", "|---|---|"]
        lines += [line_of(row) for row in found[result]]
    assert all(row.result == "equal" for row in of_meshes), [row for row in of_meshes if row.result != "equal"]
    lines += [
        "",
        "## On meshes",
        "",
        "Each equal type on 2 tensor-parallel ranks x 2 pipeline stages x 2 HDP ranks, where it may be so: one step of",
        "a plan whose documents ranks share, against plain transformers in one process, as above.",
    ]
    for key, title in (("tp", "Tensor parallelism"), ("pp", "Pipelines")):
        whys: dict[str, list[str]] = {}
        for row in of_meshes:
            if why := getattr(row, key):
                whys.setdefault(why, []).append(f"`{row.name}`")
        number = len(of_meshes) - sum(map(len, whys.values()))
        lines += ["", f"### {title}: {number} of {len(of_meshes)}", "", "| refused by name | why |", "|---|---|"]
        lines += [f"| {', '.join(names)} | {why.replace('|', ' ')} |" for why, names in sorted(whys.items())]
    return "\n".join(lines) + "\n"


def is_of_this_version() -> bool:
    """Whether the page was made with the installed transformers."""
    return _VERSION in TABLE.read_text(encoding="utf-8")


def line_of(row: Row) -> str:
    """A row of the page's tables."""
    return f"| `{row.name}` | {row.why.replace('|', ' ')} |"


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    if not sys.argv[1:]:
        rows = list(sweep())
        of_meshes = [meshed(row.name) for row in rows if row.result == "equal"]
        images = TABLE.read_text(encoding="utf-8").partition("## Images")  # ``image_sweep`` writes that part
        TABLE.write_text("\n".join([page(rows, of_meshes), "".join(images[1:])]), encoding="utf-8")
    for row in sweep(sys.argv[1:]) if sys.argv[1:] else ():
        print(f"{row.name:24} {row.result:10} {row.why[:260]}", flush=True)
