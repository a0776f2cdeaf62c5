"""Experts that are recorded and played back, equal to plain transformers whose routers are written out by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from bytescale import HDP
from bytescale.common import labels
from bytescale.common.errors import ConfigError, DataError
from bytescale.hf.loop.micro_batch import Micro
from bytescale.parity.compare import WideCasts
from tests.helpers.effort import one_in

from .support import documents, on_ranks, small_model, trained_alone, trained_in_plans

LENGTHS = [37, 5, 1, 22, 14, 3]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "recomputed": {"checkpointing": "full"},
    "attention kept": {"checkpointing": "attention"},
    "offloaded": {"host_gib": 0.25},
    "sharded": {"shard": "parameters", "domain": 2},
    "experts in parallel": {"shard": "parameters", "domain": 2, "experts": "parallel"},
    "tensor parallel": {"tp": 2},
}


def of_softmax(logits: Tensor, chosen: Tensor, config: Any) -> Tensor:
    weights = logits.softmax(-1).gather(-1, chosen)
    return weights / weights.sum(-1, keepdim=True)


def of_deepseek(logits: Tensor, chosen: Tensor, config: Any) -> Tensor:
    weights = logits.sigmoid().gather(-1, chosen)
    return config.routed_scaling_factor * weights / (weights.sum(-1, keepdim=True) + 1e-20)


def of_gpt_oss(logits: Tensor, chosen: Tensor, config: Any) -> Tensor:
    return logits.gather(-1, chosen).softmax(-1)


FAMILIES: dict[str, Callable[[Tensor, Tensor, Any], Tensor]] = {
    "qwen3_moe": of_softmax,
    "mixtral": of_softmax,
    "deepseek_v3": of_deepseek,
    "gpt_oss": of_gpt_oss,
}


def model_of(name: str, **changes: Any) -> Any:
    model = small_model(name, **({"norm_topk_prob": True} if name == "qwen3_moe" else {}), **changes)
    for module in model.modules():
        if hasattr(module, "e_score_correction_bias"):
            module.e_score_correction_bias.copy_(torch.linspace(-0.2, 0.2, len(module.e_score_correction_bias)))
    return model


def routers_of(model: nn.Module) -> list[Any]:
    """By their names in these four families."""
    return [m for name, m in model.named_modules() if type(m).__name__.endswith(("TopKRouter", "TopkRouter"))]


def own_routes(model: nn.Module, document: dict[str, Any]) -> Tensor:
    """``[S, L, K]`` that plain transformers choose for a document alone."""
    seen: list[Tensor] = []
    hooks = [r.register_forward_hook(lambda _, __, out: seen.append(out[-1])) for r in routers_of(model)]
    with torch.no_grad():
        model(input_ids=document["tokens"][None])
    for hook in hooks:
        hook.remove()
    return torch.stack(seen, 1)


def with_routes(model: Any, batch: list[dict[str, Any]], dtype: torch.dtype = torch.int64) -> list[dict[str, Any]]:
    """The documents with random experts; of every fourth token none are known."""
    generator = torch.Generator().manual_seed(3)
    first = routers_of(model)[0]
    shape, experts = (len(routers_of(model)), model.config.num_experts_per_tok), len(first.weight)
    found = []
    for document in batch:
        scores = torch.rand(len(document["tokens"]), shape[0], experts, generator=generator)
        routes = scores.topk(shape[1], -1).indices
        routes[::4] = -1
        found.append({**document, "routed": routes.to(dtype)})
    return found


def alone(name: str, model: Any, batch: list[dict[str, Any]]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Log-probabilities and gradients of the documents one by one, in plain transformers with routers of our own."""
    model, weigh, rows = copy.deepcopy(model), FAMILIES[name], dict[int, Tensor]()

    def forced(place: int, router: Any, plain: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        def forward(hidden: Tensor) -> Any:
            bias = getattr(router, "bias", None)
            logits = F.linear(hidden.reshape(-1, hidden.shape[-1]), router.weight, bias)
            _, weights, chosen = plain(hidden)
            known = rows[place][:, :1] >= 0
            wanted = rows[place].where(known, chosen)
            return logits, weigh(logits, wanted, model.config).where(known, weights), wanted

        return forward

    for place, router in enumerate(routers_of(model)):
        router.forward = forced(place, router, router.forward)
    logprobs = trained_alone(model, batch, lambda document: rows.update(enumerate(document["routed"].unbind(1))))
    return logprobs, {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}


def replayed(
    group: dist.ProcessGroup, model: nn.Module, batch: list[dict[str, Any]], **options: Any
) -> tuple[list[Tensor], dict[str, Tensor]]:
    return trained_in_plans(group, model, batch, lambda micro: micro.replay("routed"), **options)


def check(name: str, num_ranks: int, dtype: torch.dtype = torch.int64, **options: Any) -> None:
    model = model_of(name, **({"num_hidden_layers": 4, "layer_types": None} if "host_gib" in options else {}))
    batch = with_routes(model, documents(LENGTHS), dtype)
    if options.get("share_prefixes"):  # equal tokens, of which some have other routes
        head = {key: batch[0][key][:30] for key in ("tokens", "weights", "routed")}
        other = {**batch[0], "tokens": batch[0]["tokens"].clone(), "routed": batch[0]["routed"].clone()}
        other["routed"][20:] = other["routed"][20:].flip(-1).roll(1, -2)
        batch += [head, other]
    with WideCasts():
        expected, gradients = alone(name, model, batch)

        def work(group: dist.ProcessGroup, own: nn.Module) -> tuple[list[Tensor], dict[str, Tensor]]:
            with WideCasts():
                return replayed(group, own, batch, **options)

        for logprobs, found in on_ranks(num_ranks, model, work):
            for own, wanted in zip(logprobs, expected, strict=True):
                torch.testing.assert_close(own, wanted, rtol=0, atol=1e-10)
            for key, gradient in found.items():
                torch.testing.assert_close(gradient, gradients[key], rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("name", "num_ranks", "option"),
    [("qwen3_moe", 3, "plain"), ("deepseek_v3", 2, "recomputed"), ("gpt_oss", 2, "sharded"),
     ("mixtral", 2, "experts in parallel"), ("qwen3_moe", 4, "tensor parallel")],
)  # fmt: skip
def test_played_back_experts_equal_routers_written_by_hand(name: str, num_ranks: int, option: str) -> None:
    check(name, num_ranks, **OPTIONS[option])


@pytest.mark.exhaustive
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize(
    ("name", "option"),
    [(name, option) for name in FAMILIES for option in OPTIONS if (name, option) != ("gpt_oss", "tensor parallel")],
)
def test_every_family_in_every_way(name: str, num_ranks: int, option: str) -> None:
    check(name, num_ranks, torch.int16, **OPTIONS[option])


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_documents_share_rows_as_far_as_their_routes_are_equal(num_ranks: int) -> None:
    check("qwen3_moe", num_ranks, share_prefixes=True)


@pytest.mark.parametrize("name", one_in(2, list(FAMILIES)))
def test_recorded_routes_are_those_of_each_document_alone(name: str) -> None:
    """And played back they change nothing, to the last bit."""
    model, batch = model_of(name), documents(LENGTHS)
    expected = [own_routes(model, document) for document in batch]

    def work(group: dist.ProcessGroup, own: nn.Module) -> list[list[Tensor]]:
        hdp = HDP(own, group, capacity_tokens=24)
        assert [own.get_submodule(name) for name in hdp.routers] == routers_of(own)
        scores, routes = [], list[Tensor]()
        for field in ("", "routed"):
            given = [{**d, "routed": e} for d, e in zip(batch, routes, strict=True)] if field else batch
            with torch.no_grad():
                for micro in hdp.plan(given):
                    micro.replay(field) if field else micro.record_routes()
                    hdp.collect(micro, micro.logprobs(own))
                scores.append(hdp.collected())
                for micro in hdp.plan(batch):
                    micro.record_routes()
                    micro.logprobs(own)
                    hdp.collect(micro, micro.routes())
            routes = hdp.collected()
        assert all(torch.equal(*pair) for pair in zip(*scores, strict=True))
        return [routes]

    for (routes,) in on_ranks(3, model, work):
        for own, wanted in zip(routes, expected, strict=True):
            assert own.dtype == torch.uint8
            assert torch.equal(own.long(), wanted)


def test_routes_of_all_layers_are_those_of_the_layers_that_have_routers() -> None:
    """As vLLM and SGLang return them; DeepSeek's first layers are dense, and their numbers zeros."""
    model = model_of("deepseek_v3", num_hidden_layers=3)
    batch = with_routes(model, documents(LENGTHS))
    of_layers = [{**d, "routed": F.pad(d["routed"], (0, 0, 1, 0))} for d in batch]
    assert of_layers[0]["routed"].shape[1] == 3
    found = [on_ranks(2, model, lambda group, own, one=one: replayed(group, own, one))[0] for one in (batch, of_layers)]
    assert all(torch.equal(*pair) for pair in zip(*(logprobs for logprobs, _ in found), strict=True))
    assert all(torch.equal(found[0][1][key], found[1][1][key]) for key in found[0][1])


def test_what_stands_at_another_place_gives_other_numbers() -> None:
    """A route shifted by one token, and routes of swapped layers: what the comparison has to notice."""
    model = model_of("qwen3_moe")
    batch = with_routes(model, documents(LENGTHS))
    planted = {
        "shifted": [{**d, "routed": d["routed"].roll(1, 0)} for d in batch],
        "swapped": [{**d, "routed": d["routed"].flip(1)} for d in batch],
    }
    with WideCasts():
        expected, _ = alone("qwen3_moe", model, batch)
        for wrong in planted.values():
            ((found, _),) = on_ranks(1, model, lambda group, own, wrong=wrong: replayed(group, own, wrong))
            assert max(float((own - one).abs().max()) for own, one in zip(found, expected, strict=True)) > 1e-6


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda routes: routes[:, :1], r"has \[1, 2\] torch.int64 a token in place of \[2, 2\] whole numbers"),
        (lambda routes: routes.double(), r"has \[2, 2\] torch.float64 a token in place of \[2, 2\] whole numbers"),
        (lambda routes: routes + 100, "has numbers from .* experts"),
        (lambda routes: torch.zeros_like(routes), "has an expert twice for a token"),
        (None, "'routed' is not there"),
    ],
)
def test_what_cannot_be_played_back(change: Callable[[Tensor], Tensor] | None, said: str) -> None:
    model = model_of("qwen3_moe")
    batch = with_routes(model, documents(LENGTHS))
    given = [{**d, "routed": change(d["routed"])} for d in batch] if change else documents(LENGTHS)

    def work(group: dist.ProcessGroup, own: nn.Module) -> None:
        hdp = HDP(own, group, capacity_tokens=100)
        micro = next(iter(hdp.plan(given)))
        with pytest.raises(DataError, match=said):
            micro.replay("routed")
        with pytest.raises(ConfigError, match=r"micro.routes\(\) was called before"):
            micro.routes()

    on_ranks(1, model, work)


def test_a_model_without_routers_has_no_routes() -> None:
    def work(group: dist.ProcessGroup, own: nn.Module) -> None:
        hdp = HDP(own, group, capacity_tokens=100)
        micro = next(iter(hdp.plan(documents(LENGTHS))))
        for call in (micro.record_routes, lambda: micro.replay("weights"), lambda: hdp.routers):
            with pytest.raises(ConfigError, match="it has no routers that choose a token's experts"):
                call()

    on_ranks(1, small_model("llama"), work)


def test_routers_are_left_alone_after_detach() -> None:
    def work(group: dist.ProcessGroup, own: nn.Module) -> None:
        hdp = HDP(own, group, capacity_tokens=100)
        next(iter(hdp.plan(documents(LENGTHS)))).record_routes()
        assert any(router._forward_pre_hooks for router in routers_of(own))
        hdp.detach()
        assert not any(router._forward_pre_hooks for router in routers_of(own))

    on_ranks(1, model_of("mixtral"), work)


def test_no_field_takes_the_name_of_what_a_micro_batch_has() -> None:
    """A field of such a name could not be read: the attribute would be found first."""

    def work(group: dist.ProcessGroup, own: nn.Module) -> None:
        micro = next(iter(HDP(own, group, capacity_tokens=100).plan(documents(LENGTHS))))
        public = {name for name in [*vars(micro), *vars(Micro)] if not name.startswith("_")}
        assert public <= set(labels.MICRO_BATCH_NAMES)

    on_ranks(1, small_model("llama"), work)
