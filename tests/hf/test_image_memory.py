"""What pictures take of a rank's memory: estimates are what is really allocated, and plans leave room for them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from bytescale import HDP
from bytescale.common.errors import ConfigError
from bytescale.cost.memory.measured import MeasuredRows
from bytescale.hf.loop.batch_plan import BatchToPlan
from bytescale.hf.loop.encoded import Items
from bytescale.hf.model.counting import LiveBytes
from bytescale.hf.model.encoders import Encoders, even_frame, work_of
from bytescale.hf.model.measure import measure_encoder
from bytescale.plan.limits import MemoryLimits, Phase
from tests.helpers.effort import one_of

from .support import on_ranks
from .test_images import FAMILIES, document, model_of, picture

GIB = 0.03


def pictures_of(family: str, number: int = 4, side: int = 20) -> list[dict[str, Any]]:
    """Documents with a picture each, in fp32."""
    made = [picture(family, seed, side + 4 * seed, 16) for seed in range(number)]
    items = [{name: own.float() if own.is_floating_point() else own for name, own in item.items()} for item in made]
    return [document(family, 40, ("image", item), 30) for item in items]


WAYS = [(family, way) for family in ("qwen2_5_vl", "qwen3_vl") for way in ("none", "full", "frozen")]


@pytest.mark.parametrize(("family", "way"), one_of(WAYS, ("qwen3_vl", "none")))
def test_the_estimate_is_what_training_allocates(family: str, way: str) -> None:
    """Beside a micro-batch, and while encoders run; parameters, gradients and states are counted with the text's."""
    model = model_of(family).float()
    model.model.visual.requires_grad_(way != "frozen")
    hdp = HDP(model, capacity_tokens="auto", device_gib=GIB, checkpointing="full" if way == "full" else "none")
    memory, batch, decoder = hdp.room.memory, pictures_of(family), hdp.engine.decoder
    assert memory is not None
    assert hdp.planner.limits is not None
    parameters = list(model.parameters())
    numbers = {own: sum(p.numel() for p in parameters if p.requires_grad == own) for own in (True, False)}
    assert (memory.states.num_parameters, memory.states.num_frozen) == (numbers[True], numbers[False])
    hdp.adamw(lr=1e-3)
    given = BatchToPlan.of(hdp, batch, shift_labels=False, per_document=None)
    assert given.items is not None
    rows = [[len(decoder.encoders.encode(*item)[0])] for item in given.items.items]
    keeps, tokens = hdp.engine.activations.keeps_graphs, sum(len(own["tokens"]) for own in batch)
    waiting, alone = given.items.memory(rows, 1, tokens, memory.rows, keeps_graphs=keeps)
    with LiveBytes() as live:
        for micro in hdp.plan(batch):
            encoding, live.peak = live.peak, live.now
            micro.loss_sum(model).backward()
            text, live.peak = live.peak, live.now
    beside = float(hdp.planner.limits.device_peak(tokens, 0, 0)) - hdp.planner.limits.states_bytes
    assert text == pytest.approx(beside + waiting, rel=0.1)
    if way == "frozen":  # the highest point of all
        assert max(encoding, live.peak) < alone < text
    else:
        assert max(encoding, live.peak) == pytest.approx(alone, rel=0.1)


def test_plans_leave_room_for_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """A micro-batch gets smaller where pictures wait beside it, the same on all ranks; what does not fit is refused."""
    model, batch = model_of("qwen2_5_vl").float(), pictures_of("qwen2_5_vl", 8)

    def largest(group: dist.ProcessGroup, own: nn.Module, capacity: Any = "auto", gib: float = GIB / 2) -> Any:
        hdp = HDP(own, group, capacity_tokens=capacity, device_gib=gib)
        try:
            whole = hdp.plan([{"tokens": one["tokens"] * 0 + 5} for one in batch])
            planned = hdp.plan(batch)
        except ConfigError as error:
            return str(error)
        assert hdp.planner.limits is not None
        limits = replace(hdp.planner.limits, states_bytes=0)
        return [
            max([0.0, *(float(limits.device_peak(micro.num_tokens, 0, 0)) for micro in one.micro_batches)])
            for one in (whole, planned)
        ]

    room = 2**30 * GIB / 2
    assert all(alone <= room for alone, _ in on_ranks(2, model, largest))
    (text, beside), _ = on_ranks(2, model, largest)
    assert beside < text
    said = on_ranks(2, model, lambda group, own: largest(group, own, 300, GIB / 6))
    assert all("he pictures of a batch need" in own and "a rank may use" in own for own in said)
    monkeypatch.setattr(Items, "memory", lambda *args, **options: (0.0, 0.0))  # a planted fault
    (text, beside), _ = on_ranks(2, model, largest)
    assert beside >= text


def test_what_pictures_leave_too_little_for_is_named() -> None:
    """A document that would fit without them, and the frames of a video that ranks share out."""
    limits = MemoryLimits(
        states_bytes=100, saved_bytes_per_token=1, movable_bytes_per_token=0, phases=(Phase(name="layer"),),
        device_bytes=200,
    )  # fmt: skip
    planner = replace(HDP(model_of("llava"), capacity_tokens=100).planner, limits=limits)
    assert planner.beside(40, 50, 60).cluster.capacity_tokens.tolist() == [60]
    with pytest.raises(
        ConfigError, match=r"need 50 B a rank .* and 40 B meanwhile, .* a micro-batch of 61 tokens or more"
    ):
        planner.beside(40, 50, 61)
    with pytest.raises(ConfigError, match="need 101 B a rank while they are encoded"):
        planner.beside(0, 101, 1)
    items = Items([("video", {})], [{}, {"video": [0]}], {0: 1}, [[1.0] * 8])
    rows = MeasuredRows(saved_per_token=0, peak_per_token=0, fixed=0, encoder_saved=8, encoder_peak=9, encoder_row=1)
    whole, shared = (
        items.memory([[1.0] * 8], 4, 8, rows, keeps_graphs=True, by_frames=by) for by in (None, {"video": True})
    )
    assert (whole[0], shared[0]) == (2 * 2 + 8 * 8, 2 * 2 + 8 * 2)


@pytest.mark.parametrize("family", one_of([name for name in FAMILIES if name != "gemma3"], "idefics3"))
def test_encoders_of_all_families_are_measured(family: str) -> None:
    measured = measure_encoder(HDP(model_of(family), capacity_tokens=64).engine.decoder)
    assert measured["encoder_peak"] >= measured["encoder_saved"] > measured["encoder_row"] > 0


def test_an_encoder_that_cannot_be_measured_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Encoders, "sample", lambda *args: None)
    with pytest.warns(UserWarning, match="encoders of LlavaForConditionalGeneration need could not be measured"):
        HDP(model_of("llava"), capacity_tokens="auto", device_gib=GIB)


@pytest.mark.parametrize("way", one_of(["none", "full"], "full"))
def test_a_first_stage_leaves_room_for_pictures(way: str) -> None:
    """Its ranks' highest point is the estimate, which all stages have; what does not fit is an error on all of them."""
    model, batch = model_of("qwen2_5_vl").float(), pictures_of("qwen2_5_vl", side=60)

    def measured(group: dist.ProcessGroup, own: nn.Module) -> Any:
        hdp = HDP(own, group, capacity_tokens="auto", device_gib=GIB, pp=2, checkpointing=way)
        memory = hdp.room.memory
        assert memory is not None
        hdp.adamw(lr=1e-3)
        sizes = [[len(one["tokens"]) - 72] for one in batch]
        items = Items.of(batch, lambda kind, item: [1.0])
        assert items is not None
        keeps, tokens = hdp.engine.activations.keeps_graphs, sum(len(own["tokens"]) for own in batch)
        needed = items.memory(sizes, 1, tokens, memory.rows, keeps_graphs=keeps)
        planned, one = hdp.plan(batch), replace(memory.first_stage or memory, num_in_flight=1)
        largest, *rest = sorted((micro.num_tokens for micro in planned.micro_batches), reverse=True)
        assert len(rest) <= 1  # a stage before the last one keeps two at a time
        text = float(one.limits().device_peak(largest, 0, 0)) + sum(rest) * one.saved_bytes_per_token
        text += needed[0] - one.limits().states_bytes
        with LiveBytes() as live:
            planned.forward_backward(lambda micro: micro.loss_sum(own))
        return (*needed, max(needed[1], text)), live.peak

    def said(group: dist.ProcessGroup, own: nn.Module) -> str:
        try:
            HDP(own, group, capacity_tokens=300, device_gib=GIB / 6, pp=2, checkpointing=way).plan(batch)
        except ConfigError as error:
            return str(error)
        return ""

    (first, peak), (last, _) = on_ranks(2, model, measured)
    assert first == last
    assert peak == pytest.approx(first[2], rel=0.1)
    assert all("he pictures of a batch need" in one for one in on_ranks(2, model, said))


@pytest.mark.parametrize("family", one_of(["qwen2_5_vl", "qwen3_vl", "llava", "internvl"], "qwen2_5_vl"))
def test_operations_of_an_encoder_are_those_that_it_runs(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a larger picture than it was measured on, with attention; backward has twice as many, and what runs again."""
    deep = {**FAMILIES[family]["vision_config"]}
    deep |= {"depth": 8} if "depth" in deep or family.startswith("qwen") else {"num_hidden_layers": 8}
    deep |= {"fullatt_block_indexes": [3, 7]} if family == "qwen2_5_vl" else {}
    monkeypatch.setitem(FAMILIES, family, {**FAMILIES[family], "vision_config": deep})
    decoder = HDP(model_of(family), capacity_tokens=64).engine.decoder
    kept, again = (measure_encoder(decoder, keeps) for keeps in (True, False))
    slow = model_of(family)
    slow.set_attn_implementation("eager")  # whose attention is counted
    encoders, item = HDP(slow, capacity_tokens=64).engine.decoder.encoders, picture(family, 0, 24, 16)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        rows = len(encoders.encode("image", item)[0])
    even = even_frame(slow.config, "image") / 4 if family.startswith("qwen") else math.inf
    assert counter.get_total_flops() == pytest.approx(work_of([rows], even) * kept["encoder_forward_flops"], rel=0.2)
    assert kept["encoder_backward_flops"] == pytest.approx(2 * kept["encoder_forward_flops"], rel=0.2)
    added = again["encoder_backward_flops"] - kept["encoder_backward_flops"]
    assert added == pytest.approx(kept["encoder_forward_flops"])
    decoder.model.requires_grad_(False)
    assert measure_encoder(decoder)["encoder_backward_flops"] == 0
