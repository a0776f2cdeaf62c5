"""A model that is not what it was when it was attached is told, with what has changed, in the next batch."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import bytescale
from bytescale.common.errors import ConfigError, RankFailure
from bytescale.hf.loop import session
from bytescale.hf.model.changes import Snapshot

from .support import documents, on_ranks, small_model

Hdp = bytescale.HDP


def attention_dropout(model: Any) -> None:
    model.model.layers[1].self_attn.attention_dropout = 0.1


def scaling(model: Any) -> None:
    model.model.layers[0].self_attn.scaling = 1.0


def a_dropout_put_in(model: Any) -> None:
    model.model.layers[0].mlp = nn.Sequential(model.model.layers[0].mlp, nn.Dropout(0.1))


def a_dropout_appended(model: Any) -> None:
    model.model.layers[1].mlp.add_module("chance", nn.Dropout(0.1))


def resized(model: Any) -> None:
    model.resize_token_embeddings(80, mean_resizing=False)


def replaced(model: Any) -> None:
    model.model.norm.weight = nn.Parameter(torch.ones(32, dtype=torch.float64))


def unfrozen(model: Any) -> None:
    model.model.layers[0].requires_grad_(True)


def frozen(model: Any) -> None:
    model.model.layers[1].mlp.requires_grad_(False)


def converted(model: Any) -> None:
    model.float()


def another_window(model: Any) -> None:
    model.config.sliding_window = 3


CHANGES = [
    (converted, r"its parameter model\.embed_tokens\.weight was replaced or resized, or has another dtype"),
    (another_window, r"config\.sliding_window, which was 5, is 3"),
    (attention_dropout, r"model\.layers\.1\.self_attn\.attention_dropout, which was 0\.0, is 0\.1"),
    (scaling, r"model\.layers\.0\.self_attn\.scaling, which was 0\.35.*, is 1\.0"),
    (a_dropout_put_in, r"its part model\.layers\.0\.mlp was put in, replaced or taken out"),
    (a_dropout_appended, r"its part model\.layers\.1\.mlp\.chance was put in, replaced or taken out"),
    (resized, r"its part lm_head was put in, replaced or taken out"),
    (replaced, r"its parameter model\.norm\.weight was replaced or resized"),
    (unfrozen, r"its parameter model\.layers\.0\.self_attn\.q_proj\.weight was unfrozen"),
    (frozen, r"its parameter model\.layers\.1\.mlp\.gate_proj\.weight was frozen"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_changes_after_the_optimizer_was_made(change: Callable[[Any], None], message: str) -> None:
    family = "mistral" if change is another_window else "qwen3"
    model: Any = small_model(family, tie_word_embeddings=False)
    model.model.layers[0].requires_grad_(False)
    hdp = Hdp(model, capacity_tokens=30)
    hdp.adamw(lr=1e-2)
    change(model)
    with pytest.raises(ConfigError, match=f"has changed since HDP.*{message}"):
        list(hdp.plan(documents([20])))
    with pytest.raises(ConfigError, match="has changed since HDP"):
        hdp.backward(documents([20]), lambda own, values: values[0].sum())


def test_a_higher_probability_is_told() -> None:
    model = small_model("gpt2")
    hdp = Hdp(model, capacity_tokens=30)
    model.transformer.drop.p = 0.1
    with pytest.raises(ConfigError, match=r"transformer\.drop\.p, which was 0\.0, is 0\.1"):
        list(hdp.plan(documents([20])))


def test_sharded_parameters_that_are_unfrozen() -> None:
    def work(group: Any, model: Any) -> None:
        model.model.layers[0].requires_grad_(False)
        hdp = Hdp(model, group, capacity_tokens=30, shard="parameters", domain=2)
        hdp.adamw(lr=1e-2)
        for _ in range(2):  # what we do to parameters ourselves is no change
            for micro in hdp.plan(documents([20, 9])):
                micro.loss_sum(model).backward()
            hdp.step()
        unfrozen(model)
        with pytest.raises(ConfigError, match=r"q_proj\.weight was unfrozen"):
            list(hdp.plan(documents([20])))

    on_ranks(2, small_model("qwen3"), work)


def test_what_is_trained_may_change_before_the_optimizer_is_made() -> None:
    """Parts may not: adapters come before HDP(...), which looks at them."""
    model: Any = small_model("qwen3")
    hdp = Hdp(model, capacity_tokens=30)
    unfrozen(model)
    frozen(model)
    assert len(list(hdp.plan(documents([20])))) == 1
    get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.1))
    with pytest.raises(
        ConfigError, match=r"its part model\.layers\.0\.self_attn\.q_proj was put in, replaced or taken out"
    ):
        hdp.adamw(lr=1e-2)


def test_what_attention_is_called_with_is_looked_at_in_every_layer() -> None:
    model: Any = small_model("qwen3")
    hdp = Hdp(model, capacity_tokens=30)
    own = model.model.layers[1].self_attn
    for name, value in (("scaling", 0.5), ("attention_dropout", 0.2)):
        (micro,) = hdp.plan(documents([20]))
        with patch.object(own, name, value), pytest.raises(ConfigError, match=r"layers\.1\.self_attn .* attends with"):
            model(**micro.inputs)


def three_batches(hdp: Hdp, model: nn.Module) -> None:
    with torch.no_grad():
        for _ in range(3):
            for micro in hdp.plan(documents([20, 9])):
                micro.logprobs(model)


@pytest.mark.parametrize("batches", [0, 2])
def test_weights_of_one_rank_alone_are_named(batches: int) -> None:
    """In the first batch, and every so many batches."""

    def work(group: Any, model: Any) -> None:
        hdp = Hdp(model, group, capacity_tokens=30)
        hdp.adamw(lr=1e-2)
        for _ in range(batches):
            for micro in hdp.plan(documents([20, 9])):
                micro.loss_sum(model).backward()
            hdp.step()
        if hdp.group.rank == 1:
            model.model.norm.load_state_dict({"weight": torch.ones(32)})
        with pytest.raises(RankFailure, match=r"Rank 1 of 3 has other weights than the others; model\.norm\.weight"):
            three_batches(hdp, model)

    with patch.object(session, "WEIGHTS_EVERY", 3):
        on_ranks(3, small_model("qwen3"), work)


def test_a_look_takes_a_fraction_of_a_millisecond() -> None:
    """0.2 ms for 32 layers on a core that is ours alone."""
    model = small_model("qwen3", num_hidden_layers=32)
    snapshot = Snapshot(model, [layer.self_attn for layer in model.model.layers])
    seconds = []
    for _ in range(20):
        start = time.perf_counter()
        assert snapshot.change(with_training=True) is None
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 2e-3
