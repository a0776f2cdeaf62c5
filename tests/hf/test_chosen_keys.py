"""Keys that are recorded and played back, equal to plain transformers whose indexers are written out by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from bytescale import HDP
from bytescale.common.errors import ConfigError, DataError
from bytescale.hf.loop.micro_batch import Micro
from bytescale.hf.model.selectors import LowestFirst
from bytescale.parity import small_model
from bytescale.parity.compare import WideCasts
from tests.helpers.effort import one_of

from .support import documents, on_ranks, trained_alone, trained_in_plans
from .test_selected import DEEPER

LENGTHS = [37, 5, 1, 22, 14, 3]
NUM_KEYS = 4
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "recomputed": {"checkpointing": "full"},
    "attention kept": {"checkpointing": "attention"},
    "offloaded": {"host_gib": 0.25},
    "sharded": {"shard": "parameters", "domain": 2},
    "tensor parallel": {"tp": 2},
    "shared prefixes": {"share_prefixes": True},
}


def layers_of(model: Any) -> list[Any]:
    """Whose indexers choose."""
    return [layer.self_attn for layer in model.model.layers if getattr(layer.self_attn, "indexer", None) is not None]


def with_choices(model: nn.Module, batch: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The documents with random keys; of every fourth token none are known."""
    generator, found = torch.Generator().manual_seed(3), []
    for document in batch:
        length = len(document["tokens"])
        scores = torch.rand(length, len(layers_of(model)), length, generator=generator)
        seen = torch.arange(length)[:, None, None] >= torch.arange(length)
        best = scores.masked_fill(~seen, -1).topk(min(NUM_KEYS, length), -1)
        chosen = best.indices.masked_fill(best.values < 0, -1)
        chosen[::4] = -1
        found.append({**document, "chosen": torch.nn.functional.pad(
            chosen, (0, NUM_KEYS - chosen.shape[-1]), value=-1)[:, :, None]})  # fmt: skip
    return found


def alone(model: Any, batch: list[dict[str, Any]]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Log-probabilities and gradients of the documents one by one, in plain transformers."""
    model, rows = copy.deepcopy(model), dict[int, Tensor]()

    def forced(place: int, plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def forward(*args: Any, **kwargs: Any) -> Tensor:
            own, wanted = plain(*args, **kwargs), rows[place].to(torch.int32)
            invisible = torch.arange(len(wanted))[:, None] + torch.arange(1, NUM_KEYS + 1)  # they are masked
            missing = wanted < 0
            filled = torch.where(missing, invisible.gather(1, (missing.cumsum(1) - 1).clamp(min=0)), wanted)
            known = (wanted >= 0).any(1, keepdim=True)
            return torch.where(known, filled[:, : own.shape[-1]].to(own.dtype), own)

        return forward

    for place, layer in enumerate(layers_of(model)):
        layer.indexer.forward = forced(place, layer.indexer.forward)
    logprobs = trained_alone(
        model, batch, lambda document: rows.update(enumerate(document["chosen"][:, :, 0].unbind(1)))
    )
    return logprobs, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def played(
    group: dist.ProcessGroup, model: nn.Module, batch: list[dict[str, Any]], **options: Any
) -> tuple[list[Tensor], dict[str, Tensor]]:
    return trained_in_plans(group, model, batch, lambda micro: micro.replay_chosen_keys("chosen"), **options)


def choosing(family: str) -> nn.Module:
    return small_model(family, **{**DEEPER[family], "index_topk": NUM_KEYS})


@pytest.mark.parametrize("way", one_of(list(WAYS), "tensor parallel"))
@pytest.mark.parametrize("family", one_of(["deepseek_v32", "glm_moe_dsa"], "glm_moe_dsa"))
def test_played_back_keys_equal_indexers_written_by_hand(family: str, way: str) -> None:
    model = choosing(family)
    batch = with_choices(model, documents(LENGTHS))
    if way == "shared prefixes":  # equal tokens, of which some have other keys
        head = {key: value[:30] for key, value in batch[0].items()}
        other = {**batch[0], "chosen": batch[0]["chosen"].clone()}
        other["chosen"][20:] = torch.where(other["chosen"][20:] >= 0, torch.arange(NUM_KEYS), -1)
        batch += [head, other]
    with WideCasts(), LowestFirst():
        expected, gradients = alone(model, batch)

    def work(group: dist.ProcessGroup, own: nn.Module) -> tuple[list[Tensor], dict[str, Tensor]]:
        with WideCasts():
            return played(group, own, batch, **WAYS[way])

    for logprobs, found in on_ranks(2, model, work):
        for own, wanted in zip(logprobs, expected, strict=True):
            torch.testing.assert_close(own, wanted, rtol=0, atol=1e-10)
        for key, gradient in gradients.items():
            torch.testing.assert_close(found[key], gradient, rtol=0, atol=1e-10)


@pytest.mark.parametrize("family", one_of(list(DEEPER), "minimax_m3_vl_text"))
def test_recorded_keys_are_the_same_under_another_plan_and_change_nothing_when_played(family: str) -> None:
    model, batch = choosing(family), documents(LENGTHS)

    def work(group: dist.ProcessGroup, own: nn.Module) -> list[Tensor]:
        hdp = HDP(own, group, capacity_tokens=24 if group.size() > 1 else 90)
        assert hdp.indexers == tuple(name for name, module in own.named_modules() if module in layers_of(own))

        def collected(given: list[dict[str, Any]], result: Callable[[Micro, Tensor], Tensor]) -> list[Tensor]:
            with torch.no_grad():
                for micro in hdp.plan(given):
                    micro.replay_chosen_keys("chosen") if "chosen" in given[0] else micro.record_chosen_keys()
                    hdp.collect(micro, result(micro, micro.logprobs(own)))
            return hdp.collected()

        keys = collected(batch, lambda micro, logprobs: micro.chosen_keys())
        given = [{**d, "chosen": one} for d, one in zip(batch, keys, strict=True)]
        scores = [collected(documents, lambda micro, logprobs: logprobs) for documents in (batch, given)]
        assert all(torch.equal(*pair) for pair in zip(*scores, strict=True))
        return keys

    (one,) = on_ranks(1, model, work)
    for keys in on_ranks(3, model, work):
        for own, wanted in zip(keys, one, strict=True):
            assert own.dtype == torch.int32
            assert torch.equal(own.sort(-1).values, wanted.sort(-1).values)


def test_keys_at_another_place_give_other_numbers() -> None:
    """Choices shifted by one token, and of swapped layers: what the comparison has to notice."""
    model = choosing("deepseek_v32")
    batch = with_choices(model, documents([37]))
    shifted = [{**d, "chosen": d["chosen"].roll(-1, 0).minimum(torch.arange(37)[:, None, None, None])} for d in batch]
    swapped = [{**d, "chosen": d["chosen"].flip(1)} for d in batch]
    with WideCasts(), LowestFirst():
        expected, _ = alone(model, batch)
        for wrong in (swapped, shifted):
            for d in wrong:
                d["chosen"] = d["chosen"].masked_fill(twice(d["chosen"]), -1)
            ((found, _),) = on_ranks(1, model, lambda group, own, wrong=wrong: played(group, own, wrong))
            assert float((found[0] - expected[0]).abs().max()) > 1e-6


def twice(chosen: Tensor) -> Tensor:
    """Which keys stand before in the same choice."""
    equal = (chosen[..., :, None] == chosen[..., None, :]).tril(-1)
    return equal.any(-1)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda keys: keys[:, :1], r"has \[1, 1, 4\] torch.int64 a token in place of 4 x selections x keys"),
        (lambda keys: keys.double(), "torch.float64"),
        (lambda keys: keys.repeat(1, 1, 1, 2), "has 8 keys a token, and the model chooses at most 4"),
        (lambda keys: keys + 100, "or behind the token itself"),
        (lambda keys: keys - 1, "has positions below 0"),
        (torch.zeros_like, "has a key twice for a token"),
        (None, "'chosen' is not there"),
    ],
)
def test_what_cannot_be_played_back(change: Callable[[Tensor], Tensor] | None, said: str) -> None:
    model = choosing("deepseek_v32")
    batch = with_choices(model, documents([9]))
    given = [{**d, "chosen": change(d["chosen"])} for d in batch] if change else documents([9])
    hdp = HDP(model, capacity_tokens=100)
    micro = next(iter(hdp.plan(given)))
    with pytest.raises(DataError, match=said):
        micro.replay_chosen_keys("chosen")


def test_a_model_without_indexers_has_nothing_to_record() -> None:
    hdp = HDP(small_model("llama"), capacity_tokens=100)
    with pytest.raises(ConfigError, match="no layers that choose keys"):
        next(iter(hdp.plan(documents([9])))).record_chosen_keys()


def test_keys_that_were_not_recorded_are_not_there() -> None:
    hdp = HDP(choosing("deepseek_v32"), capacity_tokens=100)
    with pytest.raises(ConfigError, match="before a forward"):
        next(iter(hdp.plan(documents([9])))).chosen_keys()
