"""Prefill and greedy generation give transformers' own text, whatever rank computed which part of a prompt."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from bytescale import HDP
from bytescale.common.errors import ConfigError, DataError
from bytescale.hf.loop.batch_plan import BatchToPlan
from bytescale.hf.model.head import cache_name
from bytescale.hf.model.selectors import LowestFirst
from bytescale.parity import Setup, compare, small_model
from bytescale.parity.compare import WideCasts
from bytescale.plan import Plan
from bytescale.plan.plan import GroupSpec
from tests.helpers.effort import REST, one_of
from tests.hf.support import on_ranks

LENGTHS = (70, 3, 1, 20, 9, 33)
NEW_TOKENS = 32 if REST else 16
"""With them, the prompts of 1 and 3 tokens fill a window, and that of 9 leaves it."""

# A window that ends inside of prompts, grouped key/value heads, other layers than the last with full attention.
MODELS: dict[str, dict[str, Any]] = {
    "falcon_mamba": {},  # no attention, and no count of tokens
    "qwen3": {},
    "mistral": {"sliding_window": 16},
    "gemma3_text": {"sliding_window": 16, "num_hidden_layers": 7},
    "gpt2": {},
    "falcon_h1": {},
    "mixtral": {},
    "qwen3_next": {},
    "jamba": {},
    "lfm2": {},
    "deepseek_v3": {},  # compressed keys and values
    "kimi_linear": {},
    "nemotron_h": {},
    "bamba": {},
    "granitemoehybrid": {},
    "minimax": {},  # a class of caches of its own
    "olmo_hybrid": {},
    "zamba2": {},  # an attention that is several layers'
    "mamba2": {},
    "zamba": {"num_hidden_layers": 3, "layer_types": ["mamba", "hybrid", "hybrid"], "mamba_expand": 2,
              "mamba_dt_rank": 4, "n_mamba_heads": 2, "attention_head_dim": 8},  # its heads are calls of their own
    "deepseek_v32": {"index_topk": 12},  # keys that are chosen, whose indexer has a cache, too
    "minimax_m3_vl_text": {},
}  # fmt: skip


def prompts(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, 67, (length,), generator=generator) for length in LENGTHS]


def plain(model: nn.Module, prompt: torch.Tensor) -> torch.Tensor:
    """``[NEW_TOKENS]`` greedy tokens of transformers on one process."""
    mask = torch.ones_like(prompt)[None]
    found = model.generate(prompt[None], attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False)
    return found[0, len(prompt) :]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in ("jamba", "olmo_hybrid") else pytest.mark.exhaustive) for name in MODELS],
)
@pytest.mark.parametrize("num_ranks", one_of([1, 2, 3], 2))
def test_greedy_text_is_that_of_transformers(name: str, num_ranks: int) -> None:
    with WideCasts(), LowestFirst():  # recurrences cast to fp32
        compare_text(name, num_ranks)


def compare_text(name: str, num_ranks: int) -> None:
    changes = {} if name == "gpt2" else {"max_position_embeddings": 256, **MODELS[name]}
    model = small_model(name, **changes).eval()
    model.generation_config.eos_token_id = None  # the text goes on whatever it says
    expected = [plain(model, prompt) for prompt in prompts()]
    with torch.no_grad():
        logits = [model(input_ids=prompt[None]).logits[0, -1] for prompt in prompts()]

    def work(group: dist.ProcessGroup, own: nn.Module) -> list[torch.Tensor]:
        hdp = HDP(own.eval(), group, capacity_tokens=40 if num_ranks > 1 else 80, forward_only=True)
        first = {}
        filled = hdp.prefill(prompts(), ready=lambda number, own_logits: first.update({number: own_logits.argmax()}))
        assert {number: int(token) for number, token in first.items()} == {n: filled.next_tokens[n] for n in first}
        assert hdp.group.sum_of([float(len(first))]) == [len(LENGTHS)]
        torch.testing.assert_close(filled.next_logits(), torch.stack(logits), rtol=1e-10, atol=1e-10)
        texts = []
        for number in range(len(LENGTHS)):
            rank = number % group.size()
            given = filled.inputs(number, rank)
            assert (given is None) == (group.rank() != rank)
            if given is not None:
                found = own.generate(**given, max_new_tokens=NEW_TOKENS - 1, do_sample=False)
                texts.append((number, found[0, given["input_ids"].shape[1] - 1 :]))
        return texts

    def widened(group: dist.ProcessGroup, own: nn.Module) -> list[torch.Tensor]:
        with WideCasts(), LowestFirst():  # of this thread
            return work(group, own)

    found = dict(pair for texts in on_ranks(num_ranks, model, widened) for pair in texts)
    assert [found[number].tolist() for number in range(len(LENGTHS))] == [text.tolist() for text in expected]


def test_short_prompts_come_before_the_long_one() -> None:
    """A rank that has a part of the long prompt runs its short ones first."""

    def work(group: dist.ProcessGroup, own: nn.Module) -> list[int]:
        order: list[int] = []
        hdp = HDP(own.eval(), group, capacity_tokens=40, forward_only=True)
        hdp.prefill(prompts(), ready=lambda number, logits: order.append(number))
        return order

    orders = on_ranks(2, small_model("llama").eval(), work)
    assert sorted(orders[0] + orders[1]) == list(range(len(LENGTHS)))
    assert all(0 not in order[:-1] for order in orders)


@pytest.mark.parametrize(
    ("name", "num_ranks", "tp", "pp"),
    one_of(
        [
            *itertools.product(["qwen3", "gemma3_text", "gpt2", "deepseek_v3"], [1, 2, 3, 4], [1], [1]),
            *itertools.product(["qwen3", "gemma3_text"], [4], [2], [1, 2]),
        ],
        ("qwen3", 2, 1, 1),
    ),
)
def test_questions_about_one_document_compute_it_once(name: str, num_ranks: int, tp: int, pp: int) -> None:
    """Caches and logits are transformers', also of equal prompts, of the document alone, and of other prompts."""
    changes = {} if name == "gpt2" else {"max_position_embeddings": 256, **MODELS.get(name, {})}
    model, generator = small_model(name, **changes).eval(), torch.Generator().manual_seed(1)
    document, *ends = (torch.randint(2, 67, (n,), generator=generator) for n in (80, 9, 1, 25, 14, 6, 30))
    questions = [torch.cat([document, end]) for end in ends] + [document, torch.cat([document, ends[0]]), *prompts()]

    def work(group: dist.ProcessGroup, own: nn.Module) -> tuple[int, list[Any]]:
        capacity = -(-400 * tp * pp // num_ranks)
        hdp, rows = HDP(own.eval(), group, capacity_tokens=capacity, forward_only=True, tp=tp, pp=pp), [0]
        own.get_input_embeddings().register_forward_hook(lambda _, inputs, __: rows.append(inputs[0].numel()))
        filled, caches = hdp.prefill(questions), []
        for number in range(len(questions) if name != "deepseek_v3" else 0):  # its cache holds something else
            cache = filled.cache(number, number % num_ranks)
            if cache is not None:
                filled.free(number)
                caches.append((number, [part for layer in cache.layers for part in (layer.keys, layer.values)]))
        return sum(rows), [filled.next_logits(), filled.next_tokens, caches]

    def widened(group: dist.ProcessGroup, own: nn.Module) -> tuple[int, list[Any]]:
        with WideCasts():
            return work(group, own)

    with WideCasts(), torch.no_grad():
        wanted = [model(input_ids=question[None], use_cache=True) for question in questions]
    found = on_ranks(num_ranks, model, widened)
    assert sum(rows for rows, _ in found) < 0.6 * sum(map(len, questions)) * pp
    logits = torch.stack([own.logits[0, -1] for own in wanted])
    for _, (ours, tokens, _) in found:
        torch.testing.assert_close(ours, logits, rtol=1e-10, atol=1e-10)
        assert tokens.tolist() == logits.argmax(dim=1).tolist()
    caches = dict(pair for _, (_, _, own) in found for pair in own)
    assert len(caches) == (0 if name == "deepseek_v3" else len(questions))
    for number, parts in caches.items():
        theirs = [part for layer in wanted[number][cache_name(model)].layers for part in (layer.keys, layer.values)]
        for part, own in zip(parts, theirs, strict=True):
            torch.testing.assert_close(part, own, rtol=1e-10, atol=1e-10)


def test_more_ranks_share_a_prompt_than_it_has_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four members' eight runs five are empty, four of them at the prompt's end; one rank has its last token."""
    model, prompt = small_model("llama").eval(), torch.tensor([5, 9, 2])
    shared = Plan.build(
        lengths=np.array([3]),
        capacity_tokens=[8] * 4,
        groups=[GroupSpec(sequences=[0], ranks=[0, 1, 2, 3])],
        schedule=[[[0]]] * 4,
    )

    monkeypatch.setattr(BatchToPlan, "plan", lambda self: (shared, None))

    def work(group: dist.ProcessGroup, own: nn.Module) -> torch.Tensor:
        return HDP(own.eval(), group, capacity_tokens=8, forward_only=True).prefill([prompt]).next_tokens

    with torch.no_grad():
        expected = model(input_ids=prompt[None]).logits[0, -1].argmax()
    assert [int(found) for found in on_ranks(4, model, work)] == [int(expected)] * 4


def test_a_cache_stays_where_it_was_computed() -> None:
    """The members of the long prompt hold their own parts; a prompt of one token lies on one rank."""

    def work(group: dist.ProcessGroup, own: nn.Module) -> list[list[tuple[int, int]]]:
        filled = HDP(own.eval(), group, capacity_tokens=40, forward_only=True).prefill(prompts())
        held = [
            [
                (start, start + len(part))
                for (layer, kind, start, _), part in filled.parts.get(number, {}).items()
                if (layer, kind) == (0, "keys")
            ]
            for number in (0, 2)
        ]
        filled.free(0)
        with pytest.raises(DataError, match=r"No rank has the keys and values of prompt 0 any more \(model\.layers\.0"):
            filled.cache(0)
        with pytest.raises(ConfigError, match=r"model\.layers\.0.*prefill\.inputs\(prompt, rank\) on every rank"):
            own.generate(prompts()[2][None], max_new_tokens=1, **{cache_name(own): filled})
        return held

    ranks = on_ranks(3, small_model("llama").eval(), work)
    long = sorted(run for held in ranks for run in held[0])
    assert long[0][0] == 0
    assert long[-1][1] == LENGTHS[0]
    assert all(before[1] == after[0] for before, after in itertools.pairwise(long))
    assert sum(bool(held[0]) for held in ranks) > 1
    assert sorted(held[1] for held in ranks) == [[], [], [(0, 1)]]


def test_what_cannot_be_prefilled() -> None:
    hdp = HDP(small_model("llama").eval(), capacity_tokens=40)
    with pytest.raises(DataError, match=r"The tokens of document 1 have shape \[0\]"):
        hdp.prefill([[1, 2], []])
    hdp.model.can_generate = lambda: False
    with pytest.raises(ConfigError, match=r"it cannot generate \(can_generate\(\) is not true\)"):
        hdp.prefill([[1, 2]])


NAMES = ("cache", "past_key_values", "cache_params")
"""Of the argument, in one version of transformers or another, or in code beside it."""


def rename_cache(module: nn.Module, name: str) -> None:
    """Let the module's forward take its cache by this name."""
    stock, own = type(module).forward, cache_name(module)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if name in kwargs:
            kwargs[own] = kwargs.pop(name)
        return stock(self, *args, **kwargs)

    signature = inspect.signature(stock)
    parameters = [part.replace(name=name) if part.name == own else part for part in signature.parameters.values()]
    forward.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    module.__class__ = type(type(module).__name__, (type(module),), {"forward": forward})


@pytest.mark.parametrize("name", NAMES)
def test_a_model_is_given_its_cache_by_the_name_that_its_forward_has(name: str) -> None:
    model = small_model("qwen3").eval()
    text = plain(model, prompts()[0])
    rename_cache(model, name)
    hdp = HDP(model, capacity_tokens=200, forward_only=True)
    given = hdp.prefill(prompts()).inputs(0)
    assert given is not None
    assert set(given) == {"input_ids", "attention_mask", name}
    assert given["input_ids"][0, -1] == text[0]
    assert given[name].get_seq_length() == LENGTHS[0]


@pytest.mark.parametrize("name", NAMES)
def test_layers_that_choose_keys_are_given_theirs_in_the_same_way(name: str) -> None:
    model = small_model("deepseek_v32", index_topk=4)
    for layer in [part for part in model.modules() if hasattr(part, "indexer")]:
        rename_cache(layer, name)
    assert compare(model, Setup(num_ranks=2)).worst <= 1e-9


def test_a_forward_whose_cache_has_another_name_is_refused() -> None:
    """What it was given would be lost among its keywords."""
    model = small_model("qwen3").eval()
    rename_cache(model, "memory")
    with pytest.raises(ConfigError, match=r"Qwen3ForCausalLM.*its forward takes no cache by a name that is known here"):
        HDP(model, capacity_tokens=200, forward_only=True).prefill(prompts())
