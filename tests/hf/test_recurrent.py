"""Recurrent layers under ``HDP``: packs, shared documents, recomputation, offloading; and what a leak looks like."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration
from transformers.models.qwen3_next import modeling_qwen3_next

import bytescale
from bytescale.attention import PackedAttention
from bytescale.common.errors import ConfigError, DataError
from bytescale.common.units import format_bytes
from bytescale.hf.model.head import require_words, words_of
from bytescale.parity import Setup, compare, small_model
from bytescale.parity.compare import StepNumbers, WideCasts, difference, plain_step, random_documents
from bytescale.recurrence.cuts import GroupCuts
from tests.helpers.effort import examples, one_of
from tests.hf.sweep import COMPOSITE
from tests.recurrence import packages

from .support import on_ranks, printed_loop

LENGTHS = (37, 1, 8, 3, 24)


def gradients(model: nn.Module, num_ranks: int, **options: Any) -> list[tuple[float, dict[str, Tensor], int]]:
    """By rank: its share of the loss, all gradients, and bytes that it sent."""
    batch = random_documents(model, Setup(lengths=LENGTHS))

    def one_rank(group: dist.ProcessGroup, own: nn.Module) -> tuple[float, dict[str, Tensor], int]:
        hdp = bytescale.HDP(own, group, capacity_tokens=-(-sum(LENGTHS) // num_ranks), **options)
        hdp.optimizer(torch.optim.SGD, lr=0.0)
        before = hdp.group.exchange.bytes_sent
        with WideCasts():
            loss = printed_loop(hdp, own, batch)
        return loss, hdp.gradients(), hdp.group.exchange.bytes_sent - before

    return on_ranks(num_ranks, model, one_rank)


MODELS = ["qwen3_next", "jamba", "falcon_h1", "lfm2"]
"""A delta rule; a mixer that is handed no keywords; a recurrence beside attention; a convolution alone."""


@pytest.mark.parametrize(
    ("name", "checkpointing"),
    [
        ("jamba", "full"),
        *one_of([(n, m) for n in MODELS for m in ("full", "attention")][:-1], ("falcon_h1", "attention")),
    ],
)
def test_recomputed_layers(name: str, checkpointing: str) -> None:
    """Checkpointing of attention keeps states and halos, so that nothing is sent a second time."""
    model = small_model(name)
    with WideCasts():
        reference = plain_step(copy.deepcopy(model), random_documents(model, Setup(lengths=LENGTHS)))
    plain, ours = (gradients(model, 3, checkpointing=mode) for mode in ("none", checkpointing))
    found = StepNumbers(loss=sum(loss for loss, _, _ in ours), logprobs=reference.logprobs, gradients=ours[0][1])
    assert difference(reference, found).worst <= 1e-10
    sent, as_before = (sum(sent for _, _, sent in results) for results in (ours, plain))
    assert sent == as_before if checkpointing == "attention" else sent > as_before


@pytest.mark.exhaustive
def test_a_host_has_activations_of_recurrent_layers() -> None:
    model = small_model("qwen3_next", num_hidden_layers=6, layer_types=["linear_attention", "full_attention"] * 3)
    with WideCasts():
        reference = plain_step(copy.deepcopy(model), random_documents(model, Setup(lengths=LENGTHS)))
    batch = random_documents(model, Setup(lengths=LENGTHS))
    hdp = bytescale.HDP(model, capacity_tokens=40, host_gib=0.25)
    hdp.optimizer(torch.optim.SGD, lr=0.0)
    plan = hdp.planner(np.array(LENGTHS))
    with WideCasts():
        loss = printed_loop(hdp, model, batch, plan=replace(plan, group_offload_ratio=np.ones(plan.num_groups)))
    offload = hdp.engine.activations.offload
    assert offload is not None
    assert offload.bytes_moved > 0
    found = StepNumbers(loss=loss, logprobs=reference.logprobs, gradients=hdp.gradients())
    assert difference(reference, found).worst <= 1e-10


@pytest.mark.parametrize("name", one_of(MODELS, "qwen3_next"))
@examples(1, 6)
@given(
    num_ranks=st.integers(2, 4),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=7),
    planner=st.sampled_from(["random", "adaptive", "static"]),
    seed=st.integers(0, 10**6),
)
def test_random_plans_and_cuts(name: str, num_ranks: int, lengths: list[int], planner: str, seed: int) -> None:
    setup = Setup(num_ranks=num_ranks, lengths=(9, *lengths), planner=planner, seed=seed)
    assert compare(small_model(name), setup).worst <= 1e-10


@pytest.mark.parametrize("name", one_of(MODELS, "lfm2"))
def test_a_state_that_leaks_between_documents_would_show(name: str) -> None:
    """A pack of one rank whose documents are taken for one. The comparison of this house has to see it."""
    make = GroupCuts.__init__

    def leaking(self: GroupCuts, attention: PackedAttention) -> None:
        make(self, attention)
        if self.documents:
            self.documents = [slice(self.documents[0].start, self.documents[-1].stop)]

    model = small_model(name)
    setup = Setup(num_ranks=1)
    assert compare(model, setup).worst <= 1e-10
    with patch.object(GroupCuts, "__init__", leaking):
        assert compare(model, setup).worst > 1e-4


@pytest.mark.parametrize("name", one_of(MODELS, "jamba"))
def test_a_state_that_is_lost_between_ranks_would_show(name: str) -> None:
    def forgetful(self: GroupCuts, out: Tensor, decay: Tensor, state: Tensor) -> Any:
        return out, torch.zeros_like(state)

    def without_halo(self: GroupCuts, rows: Tensor, width: int) -> Any:
        return rows, rows[:0], [[-1] * width for _ in (*self.fragments, *self.documents)]

    lost = patch.object(GroupCuts, "entry", forgetful)
    if name == "lfm2":
        lost = patch.object(GroupCuts, "halo", without_halo)
    with lost:
        assert compare(small_model(name), Setup(num_ranks=2, lengths=(40,), planner="static")).worst > 1e-4


def test_hugging_faces_checkpointing() -> None:
    """It hands a layer's keywords on. A mixer that gets none cannot know its micro-batch, and says so."""
    model = small_model("qwen3_next")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert compare(model, Setup(num_ranks=2)).worst <= 1e-10
    model = small_model("jamba")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with pytest.raises(ConfigError, match="JambaMambaMixer cannot be attached: it is computed again in backward"):
        compare(model, Setup(num_ranks=1))


@pytest.mark.exhaustive
def test_a_multimodal_wrapper_trains_on_text() -> None:
    """Its vision tower is there, and takes no part."""
    layers = {"layer_types": ["linear_attention", "full_attention"]}
    config = Qwen3_5Config(text_config=COMPOSITE["text_config"] | layers, vision_config=COMPOSITE["vision_config"])
    model = Qwen3_5ForConditionalGeneration(config).to(torch.float64).train()
    assert any("visual" in name for name, _ in model.named_parameters())
    assert compare(model, Setup(num_ranks=2, seed=1)).worst <= 1e-10


def test_detaching_gives_mixers_their_forward_back() -> None:
    model = small_model("qwen3_next", dtype=torch.float32)
    tokens = torch.arange(9)[None]
    before = model(input_ids=tokens).logits
    hdp = bytescale.HDP(model, capacity_tokens=40)
    mixer = model.model.layers[0].linear_attn
    assert "forward" in vars(mixer)
    assert torch.equal(model(input_ids=tokens).logits, before), "outside of plans it is what it was"
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.layers[0].linear_attn.out_proj.weight.mul_(2)
    assert not torch.equal(other(input_ids=tokens).logits, before), "a copy computes with its own weights"
    hdp.detach()
    assert "forward" not in vars(mixer)
    assert torch.equal(model(input_ids=tokens).logits, before)


def test_packs_of_a_kernel_package() -> None:
    """One call for all documents of a micro-batch and one for its fragments; the reference computes without package."""
    model, function = small_model("qwen3_next"), "torch_chunk_gated_delta_rule"
    batch = random_documents(model, Setup(lengths=LENGTHS))
    with WideCasts():
        reference = plain_step(copy.deepcopy(model), batch)
    with packages.installed_in(modeling_qwen3_next, function, packages.chunk_gated_delta_rule) as calls:
        ours = gradients(model, 3)
    found = StepNumbers(loss=sum(loss for loss, _, _ in ours), logprobs=reference.logprobs, gradients=ours[0][1])
    assert difference(reference, found).worst <= 1e-10
    assert max(count for _, count in calls) > 1


def test_a_kernel_package_of_another_version_is_told() -> None:
    def chunk_gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, offsets: Any = None) -> None:
        """As in the first versions of fla."""

    function = "torch_chunk_gated_delta_rule"
    old = packages.as_installed(chunk_gated_delta_rule, getattr(modeling_qwen3_next, function), version="0.1")
    with patch.object(modeling_qwen3_next, function, old):
        model = small_model("qwen3_next")
        with pytest.raises(
            ConfigError, match=r"layers\.0\.linear_attn \(Qwen3NextGatedDeltaNet\) .*takes no init.*0\.6"
        ):
            bytescale.HDP(model, capacity_tokens=100)
        assert "forward" not in vars(model.model.layers[0].linear_attn), "the model is as it was"
        assert model.config._attn_implementation == "sdpa"


def test_memory_that_ends_in_a_recurrent_layer_is_told_with_its_states() -> None:
    def full(*args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    def one_rank(group: dist.ProcessGroup, own: nn.Module) -> str:
        hdp = bytescale.HDP(own, group, capacity_tokens=20)
        with pytest.raises(ConfigError) as told:
            printed_loop(hdp, own, [{"tokens": torch.arange(2, 32), "weights": torch.ones(30)}])
        return str(told.value)

    with patch.object(GroupCuts, "entry", full):
        told = on_ranks(2, small_model("qwen3_next"), one_rank)
    # 2 segments, each with states [4, 8, 6] before and after and a decay [4, 8, 8]
    assert all(text.startswith("model.layers.0.linear_attn ran out of memory, where the 2 segments") for text in told)
    assert all(f"need {format_bytes(4 * 2 * 4 * (2 * 8 * 6 + 8 * 8))} for the states" in text for text in told)


def test_an_image_in_a_run_on_text_is_refused() -> None:
    """The part for text alone has no tower, and so no such token."""
    text = COMPOSITE["text_config"] | {"layer_types": ["linear_attention", "full_attention"]}
    config = Qwen3_5Config(text_config=text, vision_config=COMPOSITE["vision_config"], image_token_id=7)
    with torch.device("meta"):
        model = Qwen3_5ForConditionalGeneration(config)
    short, long = torch.arange(2, 6), torch.arange(2, 9)
    require_words({"tokens": {0: short}, "labels": {0: long}}, model, words_of(model))
    require_words(
        {"tokens": {0: long}, "labels": {0: long}}, (text_model := model.model.language_model), words_of(text_model)
    )
    with pytest.raises(
        DataError, match=r"Document 1 has a token of an image \(7\), and there is no image in the batch"
    ):
        require_words({"tokens": {0: short, 1: long}, "labels": {}}, model, words_of(model))
