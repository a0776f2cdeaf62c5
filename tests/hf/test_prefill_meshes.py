"""Prefill on tensor-parallel ranks and on stages: logits, and whole caches, are those of plain transformers."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from bytescale import HDP
from bytescale.common.errors import ConfigError, PlanError
from bytescale.hf.loop import prefill
from bytescale.hf.loop.prefill import Prefill
from bytescale.hf.model.head import cache_name
from bytescale.hf.model.selectors import LowestFirst
from bytescale.parity import small_model
from bytescale.parity.compare import WideCasts
from bytescale.plan import Plan
from bytescale.plan.plan import GroupSpec
from tests.helpers.effort import one_of
from tests.hf.support import on_ranks
from tests.hf.test_prefill import LENGTHS, NEW_TOKENS, plain, prompts

MESHES = [(2, 2, 1), (2, 1, 2), (4, 2, 2), (4, 2, 1), (4, 1, 2), (4, 4, 1)]
"""Ranks, tensor-parallel ranks and stages among them. Of the last one, pairs of ranks have the same key/value head."""
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "mixtral": {},
    "phi3": {},  # its keys are gathered inside of attention
    "gemma2": {"sliding_window": 16},
    "gemma3_text": {"sliding_window": 16, "num_hidden_layers": 7},
    "deepseek_v2": {},  # latents, beside heads that are cut
    "deepseek_v3": {},  # latents of an attention that runs whole
    "deepseek_v32": {"index_topk": 12},
    "minimax_m3_vl_text": {},
    "qwen3_next": {},
    "kimi_linear": {},
    "jamba": {},
    "minimax": {},
}


def tensors_of(cache: Any) -> Iterator[tuple[str, Tensor]]:
    """All that is in a cache, without the first column of convolutions, which no model reads."""
    for number, layer in enumerate(cache.layers):
        for name, held in vars(layer).items():
            for key, value in held.items() if isinstance(held, dict) else [(0, held)]:
                if isinstance(value, Tensor):
                    yield f"{number}.{name}.{key}", value[..., 1:] if name == "conv_states" else value
    for number, value in enumerate(getattr(cache, "linear_cache", ())):
        if isinstance(value, Tensor):
            yield f"{number}.linear", value


def numbers_in(filled: Prefill) -> int:
    """Of caches that this rank holds."""
    return sum(part.numel() for parts in filled.parts.values() for part in parts.values())


@pytest.mark.parametrize(
    ("name", "mesh"),
    one_of([(name, mesh) for name in MODELS for mesh in MESHES], ("qwen3_next", (4, 2, 2))),
)
def test_caches_are_whole(name: str, mesh: tuple[int, int, int]) -> None:
    """A model that is loaded elsewhere goes on from them. Short prompts lie on one rank, the long one on all."""
    num_ranks, tp, pp = mesh
    with WideCasts(), LowestFirst(), torch.no_grad():
        model = small_model(name, **{"max_position_embeddings": 256, **MODELS[name]}).eval().requires_grad_(False)
        model.generation_config.eos_token_id = None
        wanted = [model(input_ids=prompt[None], use_cache=True) for prompt in prompts()]
        texts = [plain(model, prompt).tolist() for prompt in prompts()]
    logits = torch.stack([own.logits[0, -1] for own in wanted])

    def work(group: dist.ProcessGroup, own: nn.Module) -> int:
        with WideCasts(), LowestFirst():  # of this thread
            whole, first = copy.deepcopy(own), dict[int, Tensor]()
            hdp = HDP(own, group, capacity_tokens=40 * (1 + num_ranks // (tp * pp) % 2), tp=tp, pp=pp)
            filled = hdp.prefill(prompts(), ready=lambda number, values: first.update({number: values}))
            assert hdp.group.sum_of([float(len(first))]) == [len(LENGTHS)]
            assert filled.next_tokens.tolist() == logits.argmax(dim=1).tolist()
            torch.testing.assert_close(filled.next_logits(), logits, rtol=1e-10, atol=1e-10)
            for number in range(len(LENGTHS)):
                rank = number % num_ranks
                cache, given = filled.cache(number, rank), filled.inputs(number, rank)
                assert (cache is None) == (given is None) == (rank != group.rank())
                if cache is None or given is None:
                    continue
                found, theirs = dict(tensors_of(cache)), dict(tensors_of(wanted[number][cache_name(model)]))
                assert found.keys() == theirs.keys()
                for key, value in theirs.items():
                    torch.testing.assert_close(found[key], value, rtol=1e-10, atol=1e-10)
                text = whole.generate(**given, max_new_tokens=NEW_TOKENS - 1, do_sample=False)
                assert text[0, given["input_ids"].shape[1] - 1 :].tolist() == texts[number]
            return numbers_in(filled)

    with WideCasts(), LowestFirst():
        alone = HDP(copy.deepcopy(model), capacity_tokens=200, forward_only=True).prefill(prompts())
    assert sum(on_ranks(num_ranks, model, work)) == numbers_in(alone)  # what ranks have alike, one of them keeps


def test_caches_of_other_heads_than_those_of_attention_are_refused_by_name() -> None:
    """Such as keys that are repeated between the cache and attention."""

    def work(group: dist.ProcessGroup, own: nn.Module) -> None:
        hdp = HDP(own.eval(), group, capacity_tokens=80, forward_only=True, tp=2)
        attentions = hdp.engine.decoder.attentions
        attentions |= {module: replace(layer, num_kv_heads=2) for module, layer in attentions.items()}
        told = r"Layer 0 gives its cache 1 heads that are not those of its attention.*prefill with an HDP without tp"
        with pytest.raises(ConfigError, match=told):
            hdp.prefill(prompts())

    on_ranks(2, small_model("llama"), work)


def test_prompts_in_an_order_that_would_hang_are_refused_before_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank has two short prompts between two long ones that it shares with the other."""
    generator = torch.Generator().manual_seed(0)
    given = [torch.randint(2, 67, (length,), generator=generator) for length in (30, 30, 3, 3)]
    shared = [GroupSpec(sequences=[number], ranks=[0, 1]) for number in (0, 1)]
    alone = [GroupSpec(sequences=[number], ranks=[1]) for number in (2, 3)]
    plan = Plan.build(
        lengths=np.array([30, 30, 3, 3]),
        capacity_tokens=[40] * 2,
        groups=[shared[0], *alone, shared[1]],
        schedule=[[[0], [3]], [[0], [1], [2], [3]]],
    )
    monkeypatch.setattr(prefill, "short_first", lambda *_: plan)

    def work(group: dist.ProcessGroup, own: nn.Module) -> None:
        hdp = HDP(own.eval(), group, capacity_tokens=40, forward_only=True, pp=2)
        with pytest.raises(PlanError, match="wait"):
            hdp.prefill(given)

    on_ranks(4, small_model("llama"), work)
