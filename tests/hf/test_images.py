"""Documents with images and videos: equal to plain transformers with the same documents one by one, under any plan."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image, ImageDraw
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForImageTextToText, LlavaProcessor, PreTrainedTokenizerFast
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from bytescale import HDP, score
from bytescale.common.errors import ConfigError, DataError, RankFailure
from bytescale.hf.loop.encoded import EncodedItems, Items, StandingFor
from bytescale.hf.model.encoders import Encoders
from bytescale.parity.compare import WideCasts
from bytescale.plan.last_message import last_backward_is_silent
from tests.helpers.effort import one_of

from .support import on_ranks, small_model

IMAGE, VIDEO, WORDS = 70, 71, 80
TEXT: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": WORDS,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
PATCHES = {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3, "depth": 2}
VISION: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32, **PATCHES}
FIXED: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 4,
}  # fmt: skip


def _rotary(sections: list[int], **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "mrope_section": sections, "rope_theta": 1e4, **more}}


LLAVA: dict[str, Any] = {
    "text_config": TEXT | {"model_type": "llama"},
    "vision_config": FIXED | {"model_type": "siglip_vision_model"},
    "vision_feature_select_strategy": "full",
    "vision_feature_layer": -1,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"text_config": TEXT | _rotary([1, 1, 2]), "vision_config": VISION | {"embed_dim": 32}},
    "qwen2_5_vl": {
        "text_config": TEXT | _rotary([1, 1, 2]),
        "vision_config": VISION | {"window_size": 16, "fullatt_block_indexes": [1]},
    },
    "qwen3_vl": {  # rows for deeper layers, too
        "text_config": TEXT | _rotary([2, 1, 1], mrope_interleaved=True),
        "vision_config": VISION | {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]},
    },
    "llava": LLAVA,
    "internvl": {
        "text_config": TEXT | {"model_type": "qwen2"},
        "vision_config": FIXED | {"image_size": [16, 16], "patch_size": [4, 4]},
        "image_seq_length": 4,
    },
    "mistral3": {
        "text_config": TEXT | {"model_type": "mistral"},
        "vision_config": FIXED | {"model_type": "pixtral", "head_dim": 16},
    },
    "qwen3_vl_moe": {
        "text_config": TEXT
        | _rotary([2, 1, 1], mrope_interleaved=True)
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        "vision_config": VISION | {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]},
    },
    "qwen3_5": {  # recurrent layers
        "text_config": TEXT
        | _rotary([2, 1, 1], mrope_interleaved=True)
        | {
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
        "vision_config": VISION | {"num_position_embeddings": 64},
    },
    "llava_next": {**LLAVA, "image_grid_pinpoints": [[16, 16]]},
    "llava_onevision": {**LLAVA, "image_grid_pinpoints": [[16, 16]], "text_config": TEXT | {"model_type": "qwen2"}},
    "vipllava": {
        "text_config": TEXT | {"model_type": "llama"},
        "vision_config": FIXED | {"model_type": "clip_vision_model"},
        "vision_feature_layers": [-1],
    },
    "idefics3": {"text_config": TEXT | {"model_type": "llama"}, "vision_config": FIXED, "scale_factor": 2},
    "smolvlm": {"text_config": TEXT | {"model_type": "llama"}, "vision_config": FIXED, "scale_factor": 2},
    "aya_vision": {**LLAVA, "text_config": TEXT | {"model_type": "cohere2"}, "downsample_factor": 2},
    "cohere2_vision": {
        "text_config": TEXT | {"model_type": "cohere2"},
        "vision_config": FIXED | {"model_type": "siglip_vision_model"},
        "downsample_factor": 2,
        "alignment_intermediate_size": 64,
    },
    "gemma3": {"text_config": TEXT, "vision_config": FIXED | {"vision_use_head": False}, "mm_tokens_per_image": 4},
}
EQUAL = [name for name in FAMILIES if name != "gemma3"]
WAYS: dict[str, dict[str, Any]] = {
    "kept": {},
    "recomputed": {"checkpointing": "full"},
    "attention kept": {"checkpointing": "attention"},
    "offloaded": {"host_gib": 0.25},
    "sharded": {"shard": "parameters", "domain": 2},
    "left early": {"left_early": True},  # nobody asks whether there is one more micro-batch
}


PIPED: list[tuple[str, int, int, dict[str, Any]]] = [
    (family, num_ranks, tp, way)
    for way in ({}, {"checkpointing": "full"})
    for num_ranks, tp in ((2, 1), (4, 1), (4, 2))
    for family in ("qwen2_5_vl", "qwen3_vl", "llava", "qwen3_5", "internvl")
    if (family, tp) != ("qwen3_vl", 2)
]


def model_of(family: str, num_layers: int = 2) -> Any:
    parts = {**FAMILIES[family], "text_config": {**FAMILIES[family]["text_config"], "num_hidden_layers": num_layers}}
    config = AutoConfig.for_model(
        family, **parts, image_token_id=IMAGE, image_token_index=IMAGE, video_token_id=VIDEO,
        vision_start_token_id=72, vision_end_token_id=73,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float64).double()
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # the grouped one has no fp64
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter) * (parameter.dim() == 1)
    return model


def picture(family: str, seed: int, width: int, height: int) -> dict[str, Tensor]:
    """What a processor makes of one picture."""
    image = Image.new("RGB", (4 * width, 4 * height), (seed * 40 % 256, 90, 160))
    ImageDraw.Draw(image).ellipse((1, 1, 2 * width + seed, 2 * height), fill=(250, seed * 70 % 256, 0))
    if family.startswith("qwen"):
        processor = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, temporal_patch_size=2, min_pixels=64)
        made = processor(images=[image], return_tensors="pt")
        return {"pixel_values": made["pixel_values"].double(), "image_grid_thw": made["image_grid_thw"]}
    pixels = torch.from_numpy(np.array(image.resize((16, 16)), dtype=np.float64) / 255).permute(2, 0, 1)[None]
    if family in ("llava_next", "llava_onevision"):  # the picture, and its only part
        pixels = pixels[:, None].expand(-1, 2, -1, -1, -1)
    elif family in ("idefics3", "smolvlm"):
        pixels = pixels[:, None]
    has_sizes = family in ("mistral3", "llava_next", "llava_onevision")
    return {"pixel_values": pixels} | ({"image_sizes": torch.tensor([[16, 16]])} if has_sizes else {})


def rows_of(family: str, item: dict[str, Tensor]) -> int:
    if family.startswith("qwen"):
        grid = item.get("image_grid_thw", item.get("video_grid_thw"))
        assert grid is not None
        return int(grid.prod()) // 4
    return {"llava": 16, "vipllava": 16, "llava_next": 36, "llava_onevision": 36}.get(family, 4)


Part = int | tuple[str, dict[str, Tensor]]


def document(family: str, *parts: Part) -> dict[str, Any]:
    """Words (how many), and images or videos between them."""
    tokens, items = list[int](), dict[str, list[Any]]()
    for part in parts:
        if isinstance(part, int):
            tokens += [3 + (7 * len(tokens) + place) % 60 for place in range(part)]
        else:
            kind, item = part
            items.setdefault(f"{kind}s", []).append(item)
            tokens += [72, *[IMAGE if kind == "image" else VIDEO] * rows_of(family, item), 73]
    return {"tokens": torch.tensor(tokens), **items}


def batch_of(family: str) -> list[dict[str, Any]]:
    """Several images a document, none, an image without a word that is learned before it, one image twice."""
    made = [("image", picture(family, seed, 4 + 4 * (seed % 2), 4)) for seed in range(5)]
    return [
        document(family, made[0], 10, made[1], 7), document(family, 21), document(family, 3, made[3], made[2]),
        document(family, 2), document(family, made[4], 1), document(family, 5, made[3], 2),
    ]  # fmt: skip


def alone(model: nn.Module, batch: list[dict[str, Any]]) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the documents one by one, as the model takes images."""
    model = copy.deepcopy(model)
    names, total = inspect.signature(model.forward).parameters, sum(len(d["tokens"]) - 1 for d in batch)
    loss = 0.0
    for one in batch:
        given: dict[str, Any] = {}
        for kind in ("images", "videos"):
            for name in one[kind][0] if kind in one else ():
                given[name] = torch.cat([item[name] for item in one[kind]])
        types = (one["tokens"] == IMAGE).int() + 2 * (one["tokens"] == VIDEO).int()
        if given and "mm_token_type_ids" in names:
            given["mm_token_type_ids"] = types[None]
        logits = model(input_ids=one["tokens"][None], **given).logits[0]
        own = nn.functional.cross_entropy(logits[:-1], one["tokens"][1:], reduction="sum") / total
        own.backward()
        loss += float(own.detach())
    return loss, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def planned(
    group: dist.ProcessGroup, model: nn.Module, batch: list[dict[str, Any]], left_early: bool = False, **options: Any
) -> tuple[float, dict[str, Tensor]]:
    hdp = HDP(model, group, capacity_tokens=50 if group.size() > options.get("tp", 1) else 400, **options)
    hdp.adamw(lr=1e-3)
    total, loss = sum(len(d["tokens"]) - 1 for d in batch), 0.0
    with WideCasts():
        planned = hdp.plan(batch)
        micros = iter(planned)
        for _ in range(len(planned) + (not left_early)):
            if (micro := next(micros, None)) is not None:
                own = micro.loss_sum(model) / total
                own.backward()
                loss += float(own.detach())
        return loss, hdp.gradients()


def piped(
    group: dist.ProcessGroup, model: nn.Module, batch: list[dict[str, Any]], **options: Any
) -> tuple[float, dict[str, Tensor]]:
    """The same on stages of a pipeline; only the last one has losses."""
    hdp = HDP(model, group, capacity_tokens=50 if group.size() > 2 * options.get("tp", 1) else 400, pp=2, **options)
    hdp.adamw(lr=1e-3)
    total = sum(len(d["tokens"]) - 1 for d in batch)
    with WideCasts():
        loss = hdp.plan(batch).forward_backward(lambda micro: micro.loss_sum(model) / total)
        return loss, hdp.gradients()


def difference(model: nn.Module, batch: list[dict[str, Any]], num_ranks: int, **options: Any) -> float:
    with WideCasts():
        wanted, gradients = alone(model, batch)
    results = on_ranks(num_ranks, model, lambda group, own: planned(group, own, batch, **options))
    apart = [abs(sum(loss for loss, _ in results) - wanted)]
    return max([*apart, *(float((results[0][1][name] - g).abs().max()) for name, g in gradients.items())])


@pytest.mark.parametrize("way", one_of(list(WAYS), "recomputed"))
@pytest.mark.parametrize("num_ranks", one_of([1, 2, 3, 4], 3))
@pytest.mark.parametrize("family", one_of(["qwen2_5_vl", "qwen3_vl", "llava"], "qwen3_vl"))
def test_documents_with_images_are_those_of_one_process(family: str, num_ranks: int, way: str) -> None:
    """Loss, and gradients of text, encoder and projector; images are cut across ranks."""
    model = model_of(family, 4 if way == "offloaded" else 2)
    num_ranks += num_ranks % 2 if way == "sharded" else 0
    assert difference(model, batch_of(family), num_ranks, **WAYS[way]) < 1e-10


CUT = ["qwen2_5_vl", "qwen2_vl", "llava", "internvl", "mistral3", "qwen3_5", "llava_next", "llava_onevision"]
TP: list[tuple[str, int, int, dict[str, Any]]] = [
    (family, num_ranks, tp, way)
    for way in ({}, {"checkpointing": "full"}, {"shard": "parameters", "domain": 2})
    for num_ranks, tp in ((2, 2), (4, 2), (4, 4))
    for family in CUT
    if num_ranks > tp or "shard" not in way
]


@pytest.mark.parametrize(("family", "num_ranks", "tp", "way"), one_of(TP, ("qwen2_5_vl", 4, 2, {})))
def test_tensor_parallelism(family: str, num_ranks: int, tp: int, way: dict[str, Any]) -> None:
    """Encoders are whole on every rank, and each picture is encoded by one of all ranks."""
    assert difference(model_of(family), batch_of(family), num_ranks, tp=tp, **way) < 1e-10


@pytest.mark.parametrize(("family", "num_ranks", "tp", "way"), one_of(PIPED, ("qwen2_5_vl", 4, 1, {})))
def test_pipelines(family: str, num_ranks: int, tp: int, way: dict[str, Any]) -> None:
    """The first stage's ranks encode, and rows that go to deeper layers stay on it."""
    model, batch = model_of(family, 2 if family == "qwen3_5" else 4), batch_of(family)
    with WideCasts():
        wanted, gradients = alone(model, batch)
    results = on_ranks(num_ranks, model, lambda group, own: piped(group, own, batch, tp=tp, **way))
    assert [loss for loss, _ in results] == pytest.approx([wanted] * num_ranks, rel=1e-10)
    found = dict[str, Tensor]()
    for _, own in results:
        found |= own
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-10)


def test_rows_for_layers_of_later_stages_are_refused() -> None:
    model, batch = model_of("qwen3_vl", 2), batch_of("qwen3_vl")  # a layer for each stage, and rows for both

    def work(group: dist.ProcessGroup, own: nn.Module) -> str:
        with pytest.raises(DataError) as error:
            piped(group, own, batch)
        return str(error.value)

    assert all("first stage, does not put all rows of image items" in said for said in on_ranks(2, model, work))


def test_text_and_images_with_shared_parameters() -> None:
    """The head of a wrapped model is what lies behind its whole base; else its embedding would run once more."""
    batch = [document("llava", 21), document("llava", 9), document("llava", 2, ("image", picture("llava", 1, 4, 4)))]
    for some in (batch[:2], batch):
        assert difference(model_of("llava"), some, 2, shard="parameters") < 1e-10


def test_reductions_begin_behind_the_encoders(monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``last=True``: a rank whose last documents are its own would reduce before encoders have run backward."""
    monkeypatch.setattr("bytescale.runtime.optimizer.take_over.BUCKET_BYTES", 1)
    model, batch = model_of("llava"), batch_of("llava")
    with WideCasts():
        _, gradients = alone(model, batch)
    total = sum(len(d["tokens"]) - 1 for d in batch)

    def work(group: dist.ProcessGroup, own: nn.Module) -> tuple[bool, dict[str, Tensor]]:
        hdp = HDP(own, group, capacity_tokens=30)
        hdp.optimizer(torch.optim.SGD, lr=1.0)
        with WideCasts():
            planned = hdp.plan(batch, last=True)
            for micro in planned:
                (micro.loss_sum(own) / total).backward()
            hdp.step(max_grad_norm=0.0)
        return last_backward_is_silent(planned.rank_plan), {name: p.detach() for name, p in own.named_parameters()}

    results = on_ranks(3, model, work)
    assert {is_silent for is_silent, _ in results} == {True, False}
    for _, weights in results:
        for name, before in model.named_parameters():
            after = before - gradients[name] if name in gradients else before
            assert float((weights[name] - after).abs().max()) < 1e-10, name


@pytest.mark.parametrize("family", one_of(EQUAL, "qwen3_5"))
def test_families(family: str) -> None:
    assert difference(model_of(family, 2), batch_of(family), 3) < 1e-10


@pytest.mark.parametrize("family", one_of(["qwen2_5_vl", "qwen3_vl"], "qwen2_5_vl"))
def test_videos_beside_images(family: str) -> None:
    pixels = torch.randn(2 * 4 * 4, 3 * 2 * 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    video = ("video", {"pixel_values_videos": pixels, "video_grid_thw": torch.tensor([[2, 4, 4]])})
    still = ("image", picture(family, 1, 4, 4))
    if family == "qwen3_vl":  # every frame is a stretch of its own there
        frames = torch.tensor([[1, 4, 4]])
        video = ("video", {"pixel_values_videos": pixels[:16], "video_grid_thw": frames})
    batch = [document(family, 3, video, 4, still, 9), document(family, 30), document(family, video)]
    assert difference(model_of(family), batch, 3) < 1e-10


def video_of(frames: int) -> dict[str, Tensor]:
    pixels = torch.randn(frames * 4 * 4, 3 * 2 * 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return {"pixel_values_videos": pixels, "video_grid_thw": torch.tensor([[frames, 4, 4]])}


@pytest.mark.parametrize("way", one_of(["kept", "recomputed"], "recomputed"))
def test_a_video_is_shared_out_by_frames(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank encodes some of its frames. Positions are those of the whole video."""
    model, encode, seen = model_of("qwen2_5_vl"), Encoders.encode, set[int]()
    batch = [document("qwen2_5_vl", 3, ("video", video_of(7)), 9), document("qwen2_5_vl", 30)]

    def noted(self: Encoders, kind: str, item: Any) -> Any:
        seen.add(int(item["video_grid_thw"][0, 0]))
        return encode(self, kind, item)

    monkeypatch.setattr(Encoders, "encode", noted)
    assert difference(model, batch, 3, **WAYS[way]) < 1e-10
    assert max(seen) == 2  # of two, it was tried whether frames see each other


@pytest.mark.parametrize("mixed", [None, "frames", "positions"])
def test_frames_that_see_each_other_stay_together(mixed: str | None) -> None:
    model = model_of("qwen2_5_vl")
    with WideCasts():
        encoders = HDP(model, capacity_tokens=200).engine.decoder.encoders

        def mix(_: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> Tensor:
            if mixed == "frames":
                return output + 1e-3 * output.mean(0)
            return output + torch.arange(len(output), dtype=output.dtype)[:, None]

        if mixed:
            model.model.visual.patch_embed.register_forward_hook(mix)
        assert encoders.takes_frames("video", video_of(3)) is (mixed is None)


def test_large_pictures_weigh_more_than_their_patches() -> None:
    """Attention inside of a frame: of one with 16 patches here as much as all else at 224."""
    encoders = HDP(model_of("qwen2_5_vl"), capacity_tokens=200).engine.decoder.encoders
    even = (2 * 32 + 48) * 2  # half of the layers see all of a frame
    assert encoders.work("video", video_of(2)) == [16 * (1 + 16 / even)] * 2
    assert encoders.work("image", {"pixel_values": torch.zeros(3, 2, 3, 14, 28)}) == [2 * (1 + 2 / even)] * 6


def test_frozen_encoders_run_once_and_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch, encoded_items = model_of("qwen2_5_vl"), batch_of("qwen2_5_vl"), list[Any]()
    model.model.visual.requires_grad_(False)
    with WideCasts():
        _, gradients = alone(model, batch)
    encode = Encoders.encode

    def counted(self: Encoders, kind: str, item: Any) -> Any:
        encoded_items.append(id(item))
        return encode(self, kind, item)

    monkeypatch.setattr(Encoders, "encode", counted)

    def work(group: dist.ProcessGroup, own: nn.Module) -> dict[str, Tensor]:
        hdp = HDP(own, group, capacity_tokens=30)
        hdp.adamw(lr=1e-2, weight_decay=0.0)
        for micro in hdp.plan(batch):
            (micro.loss_sum(own) / 90).backward()
        hdp.step()
        return {name: parameter.detach() for name, parameter in own.named_parameters()}

    weights, _ = on_ranks(2, model, work)
    assert len(encoded_items) == len(set(encoded_items)) == 5
    for name, before in model.named_parameters():
        assert torch.equal(weights[name], before) == (name not in gradients)


def test_batches_that_are_planned_ahead() -> None:
    """A thread plans the next batch while the loop encodes and runs this one."""
    model, batch = model_of("qwen2_5_vl"), batch_of("qwen2_5_vl")
    with WideCasts():
        _, gradients = alone(model, batch)
    total = sum(len(d["tokens"]) - 1 for d in batch)

    def work(group: dist.ProcessGroup, own: nn.Module) -> dict[str, Tensor]:
        hdp = HDP(own, group, capacity_tokens=50)
        hdp.adamw(lr=1e-3)
        with WideCasts():
            for planned in hdp.planned([batch, batch[:2], batch]):
                for micro in planned if len(planned.batch) == len(batch) else ():
                    (micro.loss_sum(own) / total).backward()
            return hdp.gradients()

    for found in on_ranks(2, model, work):
        for name, gradient in gradients.items():
            torch.testing.assert_close(found[name], 2 * gradient, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("num_ranks", "tp"), one_of([(1, 1), (2, 1), (3, 1), (2, 2), (4, 2)], (2, 1)))
def test_rollouts_of_one_prompt_with_an_image_share_its_rows(num_ranks: int, tp: int) -> None:
    """Equal tokens with other images share no row behind the first of these."""
    family = "qwen3_vl" if tp == 1 else "qwen2_5_vl"
    first, other = (("image", picture(family, seed, 8, 4)) for seed in range(2))
    prompt = document(family, 6, first, 5)
    words = [torch.arange(3 + 9 * number, 9 + 12 * number) % 60 + 3 for number in range(3)]
    batch = [prompt | {"tokens": torch.cat([prompt["tokens"], own])} for own in words]
    batch += [batch[0] | {"images": [other[1]]}, document(family, 17)]
    model = model_of(family).eval()
    with WideCasts():
        wanted, gradients = alone(model, batch)
    total = sum(len(d["tokens"]) - 1 for d in batch)

    def work(group: dist.ProcessGroup, own: nn.Module) -> tuple[float, int, dict[str, Tensor], list[Tensor]]:
        hdp = HDP(own, group, capacity_tokens=40 if group.size() > tp else 400, tp=tp)
        hdp.adamw(lr=1e-3)
        loss, rows = 0.0, 0
        with WideCasts():
            for micro in hdp.plan(batch, share_prefixes=True):
                part = micro.loss_sum(own) / total
                part.backward()
                loss, rows = loss + float(part.detach()), rows + micro.num_rows
            return loss, rows, hdp.gradients(), list(score(hdp, batch))

    results = on_ranks(num_ranks, model, work)
    assert sum(loss for loss, *_ in results) == pytest.approx(wanted, rel=1e-10)
    assert sum(rows for _, rows, *_ in results) < sum(len(d["tokens"]) for d in batch)
    for name, gradient in gradients.items():
        torch.testing.assert_close(results[0][2][name], gradient, rtol=0, atol=1e-10)
    assert -sum(float(logprobs.sum()) for logprobs in results[0][3]) / total == pytest.approx(wanted, rel=1e-10)


def continued(model: Any, given: dict[str, Any], number: int) -> Tensor:
    """Logits ``[number, V]`` of greedy text."""
    text = model.generate(
        **given, max_new_tokens=number, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    return torch.cat(text.logits)


@pytest.mark.parametrize(
    ("family", "num_ranks", "tp", "pp"),
    one_of(
        [
            (family, *mesh)
            for family in ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "llava", "internvl", "qwen2_vl")
            for mesh in ((1, 1, 1), (2, 1, 1), (3, 1, 1), (2, 2, 1), (2, 1, 2), (4, 2, 2))
            if family != "qwen3_vl" or mesh[1:] == (1, 1)  # refused: no plan, and rows for deeper layers
        ],
        ("qwen2_5_vl", 2, 1, 1),
    ),
)
def test_generation_goes_on_from_prompts_with_images(family: str, num_ranks: int, tp: int, pp: int) -> None:
    model, batch = model_of(family).eval(), batch_of(family)
    model.generation_config.eos_token_id = None
    names, wanted = inspect.signature(model.forward).parameters, []
    with WideCasts():
        for one in batch:
            given = {name: torch.cat([own[name] for own in one["images"]]) for name in one.get("images", [{}])[0]}
            if "mm_token_type_ids" in names:
                given["mm_token_type_ids"] = (one["tokens"] == IMAGE).int()[None]
            tokens = one["tokens"][None]
            given |= {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
            wanted.append(continued(model, given, 8)[1:])

    def work(group: dist.ProcessGroup, own: nn.Module) -> dict[int, Tensor]:
        whole, found = copy.deepcopy(own.eval()), {}
        room = {"capacity_tokens": 50 if tp * pp < num_ranks else 400}
        with WideCasts():
            filled = HDP(own, group, **room, tp=tp, pp=pp, forward_only=True).prefill(batch)
            inputs = {number: filled.inputs(number, number % group.size()) for number in range(len(batch))}
            for number, given in inputs.items():
                if given is not None:
                    found[number] = continued(whole, given, 7)
        return found

    found = dict(pair for texts in on_ranks(num_ranks, model, work) for pair in texts.items())
    for number, logits in enumerate(wanted):
        torch.testing.assert_close(found[number], logits, rtol=0, atol=1e-10)


def test_log_probabilities_of_more_documents_than_every_rank_looks_at() -> None:
    """One picture in many documents is encoded once."""
    model, item = model_of("qwen2_5_vl").eval(), ("image", picture("qwen2_5_vl", 1, 4, 4))
    batch = [document("qwen2_5_vl", 1 + number % 3, item, 2) for number in range(260)]
    with torch.no_grad(), WideCasts():
        wanted = []
        for one in batch[:3]:
            types = {"mm_token_type_ids": (one["tokens"] == IMAGE).int()[None]}
            logits = model(input_ids=one["tokens"][None], **item[1], **types).logits[0].log_softmax(-1)
            wanted.append(logits[:-1].gather(1, one["tokens"][1:, None])[:, 0])

    def work(group: dist.ProcessGroup, own: nn.Module) -> list[Tensor]:
        hdp = HDP(own, group, capacity_tokens=600)
        with torch.no_grad(), WideCasts():
            for micro in hdp.plan(batch):
                hdp.collect(micro, micro.logprobs(own))
        return hdp.collected()

    for result in on_ranks(2, model, work):
        for number, found in enumerate(result):
            torch.testing.assert_close(found[:-1], wanted[number % 3], rtol=0, atol=1e-10)


def test_what_a_models_own_processor_makes() -> None:
    """The function of docs/own_loop.md, and the processor's own output given to plain transformers."""
    page = (Path(__file__).parents[2] / "docs" / "own_loop.md").read_text(encoding="utf-8")
    code = page.split("## Images and videos")[1].split("```python\n")[1].split("\nmodel = ")[0]
    words = {word: number for number, word in enumerate(("<unk>", "what", "is", "this", "a", "red", "blue"))}
    tokenizer = Tokenizer(WordLevel({**words, "<image>": IMAGE}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_special_tokens(["<image>"])
    processor: Any = LlavaProcessor(
        image_processor=SiglipImageProcessorPil(size={"height": 16, "width": 16}),
        tokenizer=PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, unk_token="<unk>", extra_special_tokens={"image_token": "<image>"}
        ),
        patch_size=4,
        vision_feature_select_strategy="full",
    )
    red, blue = (Image.new("RGB", (30, 20), color) for color in ("red", "blue"))
    records = [("what is <image> this a red", [red]), ("<image> a blue <image> a red", [blue, red]), ("a blue", [])]
    made: dict[str, Any] = {"processor": processor}
    exec(code, made)
    batch = [made["document"](*record) for record in records]
    model, total, loss = model_of("llava"), sum(len(d["tokens"]) - 1 for d in batch), 0.0
    with WideCasts(), torch.no_grad():
        for text, pictures in records:
            given = processor(text=text, images=pictures or None, return_tensors="pt")
            logits = model(**given).logits[0]
            loss += float(nn.functional.cross_entropy(logits[:-1], given["input_ids"][0, 1:], reduction="sum")) / total
    results = on_ranks(2, model, lambda group, own: planned(group, own, batch))
    assert sum(own for own, _ in results) == pytest.approx(loss, rel=1e-10)


@pytest.fixture(params=["row", "gradient", "positions"])
def fault(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a comparison has to notice."""
    if request.param == "row":
        plain = EncodedItems._of_micro_batch

        def reversed_rows(self: EncodedItems, *args: Any) -> list[StandingFor]:
            return [one._replace(pairs=one.pairs[::-1]) for one in plain(self, *args)]

        monkeypatch.setattr(EncodedItems, "_of_micro_batch", reversed_rows)
    elif request.param == "gradient":
        monkeypatch.setattr(EncodedItems, "backward", lambda self: None)
    else:
        monkeypatch.setattr(Encoders, "positions", lambda self, number, tokens, items: None)


@pytest.mark.usefixtures("fault")
@pytest.mark.parametrize("tp", [1, 2])
def test_planted_faults_are_noticed(tp: int) -> None:
    model, batch = model_of("qwen2_5_vl"), batch_of("qwen2_5_vl")
    assert difference(model, batch, 2, tp=tp) > 1e-6


def test_each_rank_encodes_its_share() -> None:
    patches = [16, 900, 3, 40, 41, 300, 305, 310, 2, 2]
    items = Items([("image", {})] * len(patches), [{}], {}, [[size] for size in patches])
    ranks = items.ranks(3)
    loads = [sum(size for size, rank in zip(patches, ranks, strict=True) if rank == own) for own in range(3)]
    assert max(loads) == 900
    assert sorted(loads)[1] - sorted(loads)[0] <= 305


def said_of(model: nn.Module, batch: list[dict[str, Any]], num_ranks: int = 1, **options: Any) -> str:
    def work(group: dist.ProcessGroup, own: nn.Module) -> str:
        try:
            hdp = HDP(own, group, capacity_tokens=200, **options)
            list(hdp.plan(batch))
        except (ConfigError, DataError) as error:
            return str(error)
        return ""

    return min(on_ranks(num_ranks, model, work))


def _without_first_image(given: dict[str, Any]) -> dict[str, Any]:
    return given | {"images": given["images"][:1]}


def _fewer_channels(given: dict[str, Any]) -> dict[str, Any]:
    return given | {"images": [{**one, "pixel_values": one["pixel_values"][:, 1:]} for one in given["images"]]}


@pytest.mark.parametrize(
    ("family", "change", "said"),
    [
        ("internvl", _without_first_image, "ocument 1 has 8 tokens that stand for image items, which have 4 rows"),
        (
            "internvl",
            lambda d: d | {"tokens": d["tokens"][3:]},
            "has 6 tokens that stand for image items, which have 8",
        ),
        ("internvl", lambda d: {"tokens": d["tokens"]}, "ocument 1 has 8 tokens that stand for image items, which"),
        ("internvl", _fewer_channels, "he encoder of image items does not take one of {'pixel_values': [1, 2, 16"),
        ("qwen2_5_vl", _without_first_image, "ocument 1: Qwen2_5_VLModel finds no positions for its tokens"),
    ],
)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_items_that_do_not_belong_to_their_tokens(
    family: str, change: Callable[..., Any], said: str, num_ranks: int
) -> None:
    """All ranks say so."""
    items = [("image", picture(family, seed, 4 + 4 * seed, 4)) for seed in range(3)]
    wrong, right = change(document(family, items[0], 10, items[1], 7)), document(family, 2, items[2], 3)
    assert said in said_of(model_of(family), [right, wrong, document(family, 3)], num_ranks)


def test_pictures_that_differ_between_ranks_are_noticed() -> None:
    """By one number of one picture, whichever rank encodes it."""
    batch = batch_of("internvl")

    def work(group: dist.ProcessGroup, own: nn.Module) -> str:
        mine = [{**one, "images": [dict(item) for item in one.get("images", [])]} for one in batch]
        if group.rank() == 1:
            mine[0]["images"][1]["pixel_values"] = mine[0]["images"][1]["pixel_values"] + 1e-6
        try:
            list(HDP(own, group, capacity_tokens=30).plan(mine))
        except RankFailure as error:
            return str(error)
        return ""

    assert all(
        "have different numbers for the images that rank" in said for said in on_ranks(3, model_of("internvl"), work)
    )


def test_a_token_of_an_image_without_images_in_the_batch() -> None:
    given = document("internvl", ("image", picture("internvl", 1, 4, 4)))
    assert "has a token of an image" in said_of(model_of("internvl"), [{"tokens": given["tokens"]}])


def test_what_cannot_have_images_is_refused() -> None:
    batch = batch_of("qwen2_5_vl")
    assert "encoded before" in said_of(small_model("llama"), batch)
    assert "see each other in both directions" in said_of(model_of("gemma3"), batch_of("gemma3"))
    model = model_of("llava").train()
    model.model.vision_tower.embeddings.register_forward_hook(lambda _, __, rows: nn.functional.dropout(rows, 0.1))
    assert all("draws random numbers" in said_of(model, batch_of("llava"), ranks) for ranks in (1, 3))


def test_rows_that_a_model_ignores_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As sounds by the keyword for images would be, which no model reads."""
    plain = Encoders.inputs

    def misnamed(self: Encoders, *args: Any) -> dict[str, Any]:
        given = plain(self, *args)
        given["mm_encoder_outputs"]["sound"] = given["mm_encoder_outputs"].pop("image")
        return given

    monkeypatch.setattr(Encoders, "inputs", misnamed)
    for ranks in (1, 2):
        said = said_of(model_of("internvl"), batch_of("internvl"), ranks)
        assert "does not put all rows of image items where their tokens are" in said


def test_images_of_a_batch_are_shared_out_to_their_documents() -> None:
    """What a processor makes of several documents at once, as trainers of other people give it."""
    encoders = HDP(model_of("qwen2_5_vl"), capacity_tokens=200).engine.decoder.encoders
    batch = batch_of("qwen2_5_vl")
    items = [item for own in batch for item in own.get("images", ())]
    together = {name: torch.cat([item[name] for item in items]) for name in items[0]}
    tokens = [own["tokens"] for own in batch]
    for own, found in zip(batch, encoders.shared_out(tokens, together), strict=True):
        assert len(found) == len(own.get("images", ()))
        for item, given in zip(found, own.get("images", ()), strict=True):
            assert all(torch.equal(item[name], given[name]) for name in given)
    with pytest.raises(DataError, match="4 runs of tokens stand for images, and pixel_values is"):
        encoders.shared_out(tokens[1:], together)


@pytest.mark.parametrize("family", one_of(["qwen2_5_vl", "qwen3_vl", "llava"], "qwen2_5_vl"))
def test_nothing_of_attaching_is_left(family: str) -> None:
    """Of attributes and hooks of all modules, behind training on images. Another HDP's methods stay."""
    model = model_of(family)

    def seen() -> dict[tuple[str, str], str]:
        found = {}
        for name, module in model.named_modules():
            for key, value in vars(module).items():
                names = sorted(value) if key in ("_parameters", "_buffers", "_modules") else repr(value)
                found[name, key] = str(names)
        return found

    model.get_image_features(**picture(family, 0, 4, 4))  # transformers leaves hooks of its own
    before = seen()
    hdp = HDP(model, capacity_tokens=400)
    hdp.adamw(lr=0.0)
    for micro in hdp.plan(batch_of(family)):
        micro.loss_sum(model).backward()
    hdp.step()
    assert seen() != before
    hdp.detach()
    assert seen() == before
    first, second = (HDP(model, capacity_tokens=400) for _ in range(2))
    for own in (first, second):
        assert own.engine.decoder.encoders.kinds
    first.detach()
    own = vars(model.model)["get_image_features"]
    second.detach()
    assert "get_image_features" not in vars(model.model)
    assert own.args[0].__func__ is type(model.model).get_image_features
