"""Every type of the installed transformers that takes images, videos or sounds, small, under ``HDP`` and alone.

``python -m tests.hf.image_sweep`` writes the part of docs/model_types.md about them. ``python -m tests.hf.image_sweep
TYPE ...`` prints rows.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from transformers import AutoModelForMultimodalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

from bytescale import HDP
from bytescale.common.errors import BytescaleError
from bytescale.hf.model.head import KINDS
from bytescale.parity.compare import WideCasts

from .support import on_ranks
from .sweep import MLA, MOST_PARAMETERS, TABLE, Result, first_line

TYPES = sorted(MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES)
SECTION = "## Images, videos and sounds"
WORDS = {"image": 70, "video": 71, "audio": 74}
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}
_TEXT: dict[str, Any] = {
    "vocab_size": 80, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24, "attention_dropout": 0.0, "sliding_window": 64, "layer_types": None,
    "mlp_layer_types": None, "hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 80,
}  # fmt: skip
_ENCODER: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_heads": 4,
    "depth": 2, "embed_dim": 32, "out_hidden_size": 32, "image_size": 16, "patch_size": 4, "d_model": 32,
    "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48, "num_key_value_heads": 4, "head_dim": 8,
    "num_mel_bins": 16, "dropout": 0.0, "encoder_layerdrop": 0.0, "output_dim": 32, "vision_use_head": False,
    "num_position_embeddings": 64, "attention_dropout": 0.0, "hidden_dropout": 0.0, "window_size": 16,
    "drop_path_rate": 0.0, "n_window": 50, "n_window_infer": 100,
}  # fmt: skip


def _sections(*sections: int, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "mrope_section": [*sections], "rope_theta": 1e4, **more}}


_LAYERS = ["full_attention", "sliding_attention"]
_LLAVA: dict[str, Any] = {
    "vision_config": {"model_type": "siglip_vision_model", "vision_use_head": False},
    "vision_feature_select_strategy": "full", "vision_feature_layer": -1,
}  # fmt: skip
_TILES = {**_LLAVA, "image_grid_pinpoints": [[16, 16]]}
_DELTA: dict[str, Any] = {"text_config": {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_key_head_dim": 8,
    "linear_num_value_heads": 2, "linear_value_head_dim": 8,
}}  # fmt: skip
_DEEP = {"vision_config": {"deepstack_visual_indexes": [0, 1]}}
_PAIR = {"image_size": [16, 16], "patch_size": [4, 4]}
_QFORMER = {"model_type": "blip_2_qformer", "encoder_hidden_size": 32, "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0}  # fmt: skip
_SPEECH = {"encoder_config": {"input_dim": 16, "hidden_dim": 32, "num_layers": 1, "num_heads": 4, "dim_head": 8,
                              "output_dim": 32, "context_size": 16}, "projector_config": _QFORMER}  # fmt: skip
_MAMBA = {"layers_block_type": ["mamba", "attention"], "n_groups": 1, "ssm_state_size": 4, "mamba_num_heads": 4,
          "mamba_head_dim": 16}  # fmt: skip
CHANGES: dict[str, dict[str, Any]] = {
    "apertus1p5": {
        "image_token_offset": 80, "audio_token_offset": 88, "text_config": {"vocab_size": 96},
        "audio_config": {"codebook_dim": 32, "num_filters": 2, "codebook_size": 8, "decoder_num_layers": 1},
        "vision_config": {"base_channels": 32, "embed_dim": 32, "latent_channels": 32, "codebook_size": 8,
                          "num_res_blocks": 1}},
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "aya_vision": {**_LLAVA, "downsample_factor": 2},
    "cohere2_vision": {"downsample_factor": 2, "alignment_intermediate_size": 64},
    "cohere_compass": {"text_config": {
        "layer_types": _LAYERS, "rope_parameters": dict.fromkeys(_LAYERS, _sections(2, 1, 1)["rope_parameters"])}},
    "cosmos3_omni": _DEEP,
    "dots3_note": {"text_config": MLA},
    "ernie4_5_vl_moe": {"text_config": {
        "moe_intermediate_size": [24, 24], "moe_num_experts": 4, "moe_k": 2, **_sections(1, 1, 2)}},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 8}},
    "fuyu": {"patch_size": 4},
    "gemma3": {"mm_tokens_per_image": 4},
    "gemma4": {
        "text_config": {"layer_types": ["sliding_attention", "full_attention"]},
        "vision_config": {
            "model_type": "gemma4_vision", "num_hidden_layers": 1, "hidden_size": 32, "head_dim": 8,
            "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 48, "patch_size": 4,
            "position_embedding_size": 16, "pooling_kernel_size": 2},
        "audio_config": {
            "model_type": "gemma4_audio", "num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 4,
            "output_proj_dims": 32, "subsampling_conv_channels": [8, 4]},
    },
    "gemma4_unified": {"text_config": {"layer_types": ["sliding_attention", "full_attention"]}},
    "glm4v_moe": {"text_config": _sections(1, 1, 0)},
    "glm5_next": {"text_config": {"num_key_value_heads": 4, "layer_types": ["full_attention"] * 2}},
    "granite_speech": _SPEECH, "granite_speech_plus": _SPEECH,
    "hy_v4_vl": {"text_config": MLA | _sections(1, 1, 0) | {"index_n_heads": 2, "index_head_dim": 8}},
    "idefics3": {"scale_factor": 2},
    "inkling2": {"vision_config": {"text_hidden_size": 32}},
    "inkling2_loop": {"vision_config": {"text_hidden_size": 32},
                      "text_config": {"num_hidden_layers": 3, "n_layers_per_attn_res_block": 1,
                                      "loop_layer_index_start": 1, "loop_layer_index_end": 2}},
    "internvl": {"vision_config": _PAIR, "image_seq_length": 4},
    "kimi_k25": {"text_config": MLA, "projection_hidden_size": 32,
                 "vision_config": {"pos_emb_height": 8, "pos_emb_width": 8}},
    "lfm3_vl": {"text_config": {"layer_types": ["conv", "full_attention"]}},
    "llava": _LLAVA, "llava_next": _TILES, "llava_next_video": _TILES, "llava_onevision": _TILES,
    "minicpm_ocr": _DELTA, "minicpmv4_6": _DELTA, "minicpmv4_7": _DELTA,
    "mistral3": {"vision_config": {"head_dim": 8}},
    "mistral_large4": {"text_config": {"num_key_value_heads": 4}},
    "molmo2": {"vision_config": {"image_size": [16, 16]}, "adapter_config": {"vision_feature_layer": [0, 1]}},
    "nemo_speechlm": {"audio_config": {"hidden_size": ...}, "text_config": _MAMBA},
    "nemotron_h_omni": {"text_config": _MAMBA},
    "omniasr": {"audio_config": {"activation_dropout": 0.0, "layerdrop": 0.0}},
    "ovis2": {"hidden_size": 32, "visual_indicator_token_ids": [76, 77, 78, 79],
              "vision_config": {"num_visual_indicator_tokens": 4, "vocab_size": 64}},
    "paddleocr_vl": {"text_config": _sections(2, 1, 1)},
    "paligemma": {"projection_dim": 32},
    "qianfan_ocr": {"vision_config": _PAIR, "image_seq_length": 4},
    "qwen2_5_vl": {"vision_config": {"fullatt_block_indexes": [1]}},
    "qwen3_5": _DELTA, "qwen3_5_moe": _DELTA,
    "qwen3_omni_moe_thinker": _DEEP, "qwen3_vl": _DEEP, "qwen3_vl_moe": _DEEP,
    "qwen4_exp": {"text_config": _DELTA["text_config"] | {
        "indexer_budget": 8, "indexer_compress_ratio": 2, "indexer_head_dim": 8, "indexer_n_heads": 4,
        "indexer_kv_heads": 1}},
    "shieldgemma2": {"mm_tokens_per_image": 4},
    "smolvlm": {"scale_factor": 2},
    "video_llava": _LLAVA,
    "vipllava": {"vision_feature_layers": [-1]},
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """What became of a type's items of one kind, or of its text."""

    name: str
    kind: str
    result: Result
    why: str = ""


def _has(config: PreTrainedConfig, name: str) -> bool:
    try:
        return hasattr(config, name)
    except Exception:
        return True  # layers may have numbers of their own


def model_of(name: str, dtype: torch.dtype) -> nn.Module:
    """A small one with random weights."""
    usual, changes, parts = CONFIG_MAPPING[name](), CHANGES.get(name, {}), dict[str, Any]()
    for part, own in vars(usual).items():
        if isinstance(own, PreTrainedConfig):
            small = {key: value for key, value in (_TEXT if "text" in part else _ENCODER).items() if _has(own, key)}
            ignored = getattr(own, "ignore_keys_at_rope_validation", None) or ()
            if "mrope_section" in {*ignored, *(getattr(own, "rope_parameters", None) or ())}:
                small |= _sections(1, 1, 2) if "qwen2" in name else _sections(2, 1, 1, mrope_interleaved=True)
            given = {"model_type": own.model_type, **small, **changes.get(part, {})}
            parts[part] = {key: value for key, value in given.items() if value is not ...}
    words = {f"{kind}_token_{end}": word for kind, word in WORDS.items() for end in ("id", "index")}
    words = {key: word for key, word in words.items() if hasattr(usual, key)}
    begins = {"vision_start_token_id": 72, "vision_end_token_id": 73, "audio_start_token_id": 75}
    config = CONFIG_MAPPING[name](**{**words, **begins, **changes, **parts})
    torch.manual_seed(0)
    with torch.device("meta"):
        number = sum(p.numel() for p in AutoModelForMultimodalLM.from_config(config).parameters())
    if number > MOST_PARAMETERS:
        raise ValueError(f"its smallest configuration here has {number} parameters")
    model: nn.Module = AutoModelForMultimodalLM.from_config(config, dtype=dtype).to(dtype)
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and part._can_set_experts_implementation():
            part.set_experts_implementation("eager")  # the grouped one has no fp64
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter) * (parameter.dim() == 1)
    return model


def casts(model: nn.Module) -> AbstractContextManager[object]:
    """In fp64, numbers that a model casts to fp32 stay as they are."""
    return WideCasts() if next(model.parameters()).dtype == torch.float64 else nullcontext()


def owner_of(model: nn.Module, kind: str) -> Any:
    """The innermost module that encodes such items, whose method tells its arguments; None: there is none."""
    own = [module for module in model.modules() if hasattr(type(module), f"get_{kind}_features")]
    return own[-1] if own else None


def forms_of(takes: Sequence[str], kind: str, frames: int, numbers: torch.Generator) -> Iterator[dict[str, Tensor]]:
    """Forms that an item of so many ``frames`` may have, for an encoder that ``takes`` such arguments."""

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=numbers, dtype=torch.float64)

    def named(*ends: str) -> str:
        return next((name for name in takes if name.endswith(ends)), "")

    pixels = next((name for name in takes if name.startswith("pixel_values")), "")
    if grid := named("grid_thw"):
        beside = {merge: torch.tensor([2])} if (merge := named("merge_sizes")) else {}
        for patch, channels, time in (
            (4, 3, 2),
            (4, 3, 1),
            (14, 3, 2),
            (14, 3, 1),
            (16, 3, 2),
            (16, 3, 1),
            (16, 12, 1),
        ):
            for size in ((channels * time * patch * patch,), (channels, patch, patch)):
                yield {pixels: random(32 * frames, *size), grid: torch.tensor([[frames, 4, 8]]), **beside}
    elif "high_res_pixel_values" in takes:
        yield {pixels: random(1, 3, 16, 16), "high_res_pixel_values": random(1, 3, 16, 16)}
    elif sizes := next((name for name in takes if name.startswith("target_sizes")), ""):
        yield {pixels: random(1, 3, 4, 128), sizes: torch.tensor([[4, 8]])}
    elif "spatial_shapes" in takes:
        mask = torch.ones(1, 32, dtype=torch.int64)
        yield {pixels: random(1, 32, 48), "spatial_shapes": torch.tensor([[4, 8]]), "pixel_attention_mask": mask}
    elif "image_position_ids" in takes:
        places = torch.stack([torch.arange(16) % 4, torch.arange(16) // 4], dim=-1)
        yield {pixels: random(1, 16, 48), "image_position_ids": places[None]}
    elif "input_values" in takes:
        yield {"input_values": random(1, 1, 4000)}
    elif kind == "audio":
        mask_name = named("features_mask", "attention_mask")
        for shape in ((1, 16, 8), (1, 16, 100), (1, 16, 3000), (1, 32, 16), (1, 32, 128)):
            for length in {shape[1], shape[2]} if mask_name else {0}:
                mask = {mask_name: torch.ones(1, length, dtype=torch.int64)} if mask_name else {}
                yield {next(iter(takes)): random(*shape), **mask}
                yield {next(iter(takes)): random(*shape), **{name: one.bool() for name, one in mask.items()}}
    elif pixels:
        yield {pixels: random(1, 8, 48)}
        for side in (16, 28, 32, 56, 64):
            for shape in ((1, 3, side, side), (1, 1, 3, side, side), (1, 2, 3, side, side)):
                yield {pixels: random(*shape)}
                if "image_sizes" in takes:
                    yield {pixels: random(*shape), "image_sizes": torch.tensor([[side, side]])}


def item_of(model: Any, kind: str, frames: int, seed: int) -> tuple[dict[str, Tensor], int]:
    """The first form of an item that the encoder takes, and how many rows it makes of it."""
    function, numbers = getattr(owner_of(model, kind), f"get_{kind}_features"), torch.Generator().manual_seed(seed)
    takes, dtype, reasons = list(inspect.signature(function).parameters), next(model.parameters()).dtype, list[str]()
    for form in forms_of(takes, kind, frames, numbers):
        item = {name: value.to(dtype) if value.is_floating_point() else value for name, value in form.items()}
        try:
            with torch.no_grad(), casts(model):
                output = function(**item, return_dict=True)
            rows = output.last_hidden_state if output.pooler_output is None else output.pooler_output
            if (mask := getattr(output, "attention_mask", None)) is not None:
                rows = rows[mask]
            rows = torch.cat([*rows]) if isinstance(rows, list | tuple) else rows
        except Exception as error:
            reasons.append(f"{type(error).__name__}: {first_line(error)}")
            continue
        if kind == "video" and "video_second_per_grid" in inspect.signature(model.forward).parameters:
            item["video_second_per_grid"] = torch.tensor([0.5])
        return item, rows.flatten(0, -2).shape[0]
    raise ValueError(f"its encoder takes none of {len(reasons)} forms ({min(reasons, default='none has its names')})")


def batch_of(model: Any, kind: str, word: int, frames: int) -> list[dict[str, Any]]:
    """Documents with items, for which a ``word`` stands, at their begin, inside and at their end, several, and none."""
    if kind == "text":
        return [{"tokens": torch.arange(3, 24)}, {"tokens": torch.arange(5, 12)}]
    made = [item_of(model, kind, frames, seed) for seed in range(3)]

    def document(*parts: int | tuple[dict[str, Tensor], int]) -> dict[str, Any]:
        tokens, items = list[int](), []
        for part in parts:
            if isinstance(part, int):
                tokens += [3 + (7 * len(tokens) + place) % 60 for place in range(part)]
            else:
                tokens += [75 if kind == "audio" else 72, *[word] * part[1], 73]
                items.append(part[0])
        return {"tokens": torch.tensor(tokens)} | ({f"{kind}s": items} if items else {})

    return [document(made[0], 9, made[1], 6), document(21), document(3, made[2], 1), document(2)]


def alone(model: nn.Module, batch: list[dict[str, Any]], kind: str) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the documents one by one, as the model takes items."""
    model = copy.deepcopy(model)
    names, total = inspect.signature(model.forward).parameters, sum(len(d["tokens"]) - 1 for d in batch)
    loss = 0.0
    for one in batch:
        items, given = one.get(f"{kind}s", ()), dict[str, Any]()
        for name in items[0] if items else ():
            given[name] = torch.cat([item[name] for item in items])
        stands = (one["tokens"] == WORDS["image"]) | (one["tokens"] == WORDS.get(kind, -1))
        types = (1 + KINDS.index(kind) if items else 0) * stands[None].int()
        usual = {"mm_token_type_ids": types, "token_type_ids": types} if items else {}
        usual["attention_mask"] = torch.ones_like(types)
        given |= {name: value for name, value in usual.items() if name in names}
        logits = model(input_ids=one["tokens"][None], **given).logits[0]
        part = nn.functional.cross_entropy(logits[:-1], one["tokens"][1:], reduction="sum") / total
        part.backward()
        loss += float(part.detach())
    return loss, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def planned(group: dist.ProcessGroup, model: nn.Module, batch: list[dict[str, Any]]) -> tuple[float, dict[str, Tensor]]:
    """The same under a plan whose documents ranks share."""
    hdp = HDP(model, group, capacity_tokens=max(30, max(len(d["tokens"]) for d in batch) // 2))
    hdp.adamw(lr=1e-3)
    total, loss = sum(len(d["tokens"]) - 1 for d in batch), 0.0
    with casts(model):
        for micro in hdp.plan(batch):
            own = micro.loss_sum(model) / total
            own.backward()
            loss += float(own.detach())
        return loss, hdp.gradients()


def tried(name: str) -> Iterator[Row]:
    """A row for its text and, where that is equal, one for each kind of items that it has an encoder for."""
    try:
        model: Any = model_of(name, torch.float32)
    except Exception as error:
        yield Row(name, "text", "not tried", f"no small model ({type(error).__name__}: {first_line(error)})")
        return
    yield (text := tried_kind(name, "text"))
    for kind in KINDS if text.result == "equal" else ():
        if owner_of(model, kind) is not None:
            yield tried_kind(name, kind)


def tried_kind(name: str, kind: str) -> Row:
    """The row of one kind of items, or of text."""
    wanted: Any = None
    is_video, reasons = kind == "video", list[str]()
    words, frames = [WORDS.get(kind, 0)] + [WORDS["image"]] * is_video, (2, 1) if is_video else (1,)
    for dtype, word, number in itertools.product(TOLERANCES, words, frames):  # the widest in which it runs alone
        try:
            model = model_of(name, dtype)
            batch = batch_of(model, kind, word, number)
            with casts(model):
                wanted = alone(model, batch, kind)
            break
        except Exception as error:
            reasons.append(f"{type(error).__name__}: {first_line(error)}")
    if wanted is None:
        return Row(name, kind, "not tried", reasons[0])
    try:
        results = on_ranks(3, model, lambda group, own: planned(group, own, batch))
    except Exception as error:
        cause = error.__cause__ or error
        is_ours = isinstance(cause, BytescaleError)
        text = first_line(cause).removeprefix("rank 0 found: ")
        return Row(name, kind, "refused" if is_ours else "failed", text)
    apart = [abs(sum(loss for loss, _ in results) - wanted[0])]
    apart += [float((results[0][1][name] - g).abs().max()) for name, g in wanted[1].items()]
    return (
        Row(name, kind, "equal") if max(apart) < TOLERANCES[dtype] else Row(name, kind, "differs", f"{max(apart):.1e}")
    )


def line_of(row: Row) -> str:
    """A row of the page's tables."""
    return f"| `{row.name}` | {row.kind} | {row.why.replace('|', ' ')} |"


def list_of(title: str, names: Sequence[str]) -> list[str]:
    """A paragraph of the page."""
    listed = ", ".join(f"`{name}`" for name in names)
    return ["", f"### {title}: {len(names)}", "", textwrap.fill(listed, 118, break_on_hyphens=False)]


def section(rows: Sequence[Row]) -> str:
    """Of docs/model_types.md."""
    assert not (wrong := [row for row in rows if row.result in ("differs", "failed")]), wrong
    lines = [
        SECTION,
        "",
        f"All {len({own.name for own in rows})} types that `AutoModelForMultimodalLM` loads, each as a small model",
        "with random weights. Three ranks train on documents with several items, one and none, which they share,",
        "and plain transformers on one after the other: loss and every gradient, the encoder's included, are",
        "compared, in fp64, or in fp32 where the model does not run in fp64. `python -m tests.hf.image_sweep`",
        "writes this part.",
    ]
    titles = {"image": "Images equal", "video": "Videos equal", "audio": "Sounds equal"}
    for kind, title in titles.items():
        lines += list_of(title, [row.name for row in rows if row.kind == kind and row.result == "equal"])
    seen = {row.name for row in rows if row.result == "equal" and row.kind != "text"}
    text = [row.name for row in rows if row.kind == "text" and row.result == "equal"]
    lines += list_of("Text alone equal", [name for name in text if name not in seen])
    for result, title in (("refused", "Refused by name"), ("not tried", "Not tried")):
        own = [row for row in rows if row.result == result]
        lines += ["", f"### {title}: {len(own)}", "", "| type | what | why |", "|---|---|---|", *map(line_of, own)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    rows = []
    for row in (row for name in sys.argv[1:] or TYPES for row in tried(name)):
        rows.append(row)
        print(f"{row.name:24} {row.kind:6} {row.result:10} {row.why[:260]}", flush=True)
    if not sys.argv[1:]:
        page = TABLE.read_text(encoding="utf-8").partition(SECTION)[0].rstrip()
        TABLE.write_text(f"{page}\n\n{section(rows)}", encoding="utf-8")
