"""Log-probabilities of ``HDP(..., invariant=True)`` have the same bits under any plan and any number of ranks."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import bytescale
from bytescale.common.errors import ConfigError
from bytescale.config.schema import Config, EvalConfig, ParallelConfig, TrainerConfig
from bytescale.config.validate import check_sharing
from bytescale.hf.model.invariant import FixedProducts
from bytescale.parity.compare import random_plan
from tests.data.support import write_jsonl
from tests.train.runs import run, small_run, write_corpus
from tests.train.test_evaluation import evaluations

from .support import documents, on_ranks, small_model

FAMILIES = ("llama", "qwen3", "mistral", "gpt_oss", "qwen3_moe")
"""Plain, with norms of heads, with windows, with windows and sinks in a mixture, and a mixture."""
DTYPES = (torch.float32, torch.bfloat16)
LENGTHS = (1, 2, 5, 20, 63, 64, 65, 130, 255, 300, 520)


def bits_that_differ(first: list[Tensor], second: list[Tensor]) -> int:
    return sum(int((a != b).sum()) for a, b in zip(first, second, strict=True))


def scored(
    model: nn.Module, batch: list[dict[str, Any]], num_ranks: int, seed: int, planner: str = "random", **options: Any
) -> list[Tensor]:
    """Log-probabilities under a plan that ``seed`` decides, or that a planner makes of small capacities."""
    lengths = [len(document["tokens"]) for document in batch]
    capacity = max(-(-sum(lengths) // (2 * num_ranks)), -(-max(lengths) // num_ranks) + 1)

    def work(group: dist.ProcessGroup, own: nn.Module) -> list[Tensor]:
        own.eval()
        name: Any = "adaptive" if planner == "random" else planner
        hdp = bytescale.HDP(own, group, capacity_tokens=capacity, planner=name, **options)
        plan = random_plan(lengths, num_ranks, seed, weighted=True) if planner == "random" else None
        with torch.no_grad():
            for micro in hdp.plan(batch, plan=plan):
                hdp.collect(micro, micro.logprobs(own))
        return hdp.collected()

    return on_ranks(num_ranks, model, work)[0]


def pair_of_plans(model: nn.Module, seed: int, **options: Any) -> int:
    """Bits that differ between two random plans, one of which a planner may have made."""
    draw = random.Random(seed)
    batch = documents([draw.choice(LENGTHS) for _ in range(draw.randint(2, 6))], seed)
    planner = draw.choice(["random", "random", "adaptive", "naive", "static"])
    first = scored(model, batch, draw.randint(1, 4), seed, **options)
    second = scored(model, batch, draw.randint(1, 4), seed + 1000, planner, **options)
    return bits_that_differ(first, second)


@pytest.mark.parametrize(
    ("name", "dtype", "seeds"),
    [
        ("llama", torch.bfloat16, range(2)),
        ("gpt_oss", torch.float32, range(20, 21)),
        *(
            pytest.param(name, dtype, range(first, first + 20), marks=pytest.mark.exhaustive)
            for first, (name, dtype) in enumerate((name, dtype) for name in FAMILIES for dtype in DTYPES)
        ),
    ],
)
def test_no_bit_depends_on_the_plan(name: str, dtype: torch.dtype, seeds: range) -> None:
    """200 pairs of plans in the rest. A width of 45 leaves numbers over that fill no register."""
    model = small_model(name, dtype=dtype, intermediate_size=45)
    assert [pair_of_plans(model, seed, invariant=True) for seed in seeds] == [0] * len(seeds)


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_it_bits_depend_on_the_plan(dtype: torch.dtype) -> None:
    """So the comparison would see it."""
    model = small_model("llama", dtype=dtype)
    assert any(pair_of_plans(model, seed) for seed in range(3))


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_the_ratio_before_an_update_is_one(checkpointing: Any) -> None:
    """Old log-probabilities of one plan, without gradients, and new ones of another, with the optimizer's memory.

    The new ones share a prefix, and a layer that is computed again gives the gradients of forward to the last bit.
    """
    model = small_model("qwen3_moe", dtype=torch.float32)
    batch = documents([170, 180, 140, 65], 3)
    for document in batch[:3]:
        document["tokens"][:130] = batch[0]["tokens"][:130]
    old = scored(model, batch, 3, 5, invariant=True)

    def work(group: dist.ProcessGroup, own: nn.Module, kind: Any) -> tuple[list[Tensor], dict[str, Tensor]]:
        hdp = bytescale.HDP(own, group, capacity_tokens=200, invariant=True, checkpointing=kind)
        hdp.adamw(lr=1e-2)
        given = [{**document, "old": logprobs} for document, logprobs in zip(batch, old, strict=True)]
        has_trees = False
        for micro in hdp.plan(given, share_prefixes=True):
            has_trees |= micro.plan.trees is not None
            ratio = (micro.logprobs(own) - micro.old).exp()
            hdp.collect(micro, ratio.detach())
            (micro.multiplicity * ratio).sum().backward()
        assert bool(hdp.group.max_of([float(has_trees)])[0])
        return hdp.collected(), hdp.gradients()

    ratios, gradients = on_ranks(2, model, lambda group, own: work(group, own, checkpointing))[0]
    assert all(torch.equal(ratio, torch.ones_like(ratio)) for ratio in ratios)
    if checkpointing != "none":
        _, kept = on_ranks(2, model, lambda group, own: work(group, own, "none"))[0]
        assert all(torch.equal(gradients[name], kept[name]) for name in kept)


def test_a_second_model_and_a_pass_for_inference() -> None:
    """Of a reference that is attached, and under ``inference_mode``, where operators arrive undivided."""
    model, other = small_model("llama", dtype=torch.float32), small_model("gpt2", dtype=torch.float32)
    batch = documents([30, 90, 3], 1)

    def work(group: dist.ProcessGroup, own: nn.Module) -> list[Tensor]:
        hdp = bytescale.HDP(own, group, capacity_tokens=60, invariant=True)
        hdp.attach(reference := copy.deepcopy(other))
        with torch.inference_mode():
            for micro in hdp.plan(batch):
                hdp.collect(micro, torch.stack([micro.logprobs(own), micro.logprobs(reference)], dim=1))
        return [values.clone() for values in hdp.collected()]

    found = on_ranks(3, model, work)[0]
    for place, alone in enumerate((model, other)):
        assert bits_that_differ([own[:, place] for own in found], scored(alone, batch, 1, 0, invariant=True)) == 0


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": nn.functional.silu,
    "tanh gelu": partial(nn.functional.gelu, approximate="tanh"),
    "sigmoid": torch.sigmoid,
    "softplus": nn.functional.softplus,
    "power": lambda rows: rows.abs().pow(-0.5),
    "reciprocal root": lambda rows: rows.abs().rsqrt(),
    "of two": lambda rows: torch.logaddexp(rows, 0.3 * rows),
}


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_number_has_no_neighbours(dtype: torch.dtype) -> None:
    """At any place among any others, with several threads; and a row in a product."""
    generator, threads = torch.Generator().manual_seed(0), torch.get_num_threads()
    numbers = (3 * torch.randn(80_000, generator=generator)).to(dtype)
    rows, weight = numbers[:60_000].view(-1, 40), numbers[60_000:61_200].view(40, 30)
    torch.set_num_threads(3)
    try:
        with FixedProducts():
            for name, function in FUNCTIONS.items():
                whole = function(numbers)
                for start, count in ((0, 1), (7, 63), (100, 64), (5, 65), (3, 131), (11, 40_001), (1, 70_003)):
                    some = function(numbers[start : start + count].clone())
                    assert torch.equal(some, whole[start : start + count]), (name, start, count)
            torch.set_num_threads(2)  # with 3, oneDNN's bf16 products on AVX-512 alone depend on the place
            whole = rows @ weight
            for start, count in ((0, 1), (9, 2), (65, 63), (3, 64), (1, 200), (17, 1001)):
                assert torch.equal(rows[start : start + count] @ weight, whole[start : start + count])
    finally:
        torch.set_num_threads(threads)


def test_what_cannot_be_invariant_is_refused() -> None:
    def refused(model: nn.Module, message: str, **options: Any) -> None:
        with pytest.raises(ConfigError, match=message):
            bytescale.HDP(model, capacity_tokens=60, invariant=True, **options)
        bytescale.HDP(model, capacity_tokens=60)  # it was left as it had been

    refused(small_model("qwen3_next", dtype=torch.float32), "it has recurrent layers")
    refused(small_model("deepseek_v32", dtype=torch.float32), "its queries choose their keys")
    model = small_model("llama", dtype=torch.float32)
    part: Any = model.model.layers[0].mlp  # type: ignore[union-attr]
    part.act_fn.forward = lambda rows: rows * (1 + 1e-5 * rows.shape[1])
    refused(model, "a document of 37 tokens has other bits beside other documents")
    part.act_fn.forward = lambda rows: torch.bmm(rows, torch.eye(rows.shape[2])[None])
    with pytest.raises(ConfigError, match=r"aten.bmm.*Which of the rows are tokens is not known"):
        bytescale.HDP(model, capacity_tokens=60, invariant=True)
    trained = Config(trainer=TrainerConfig(invariant=True), parallel=ParallelConfig(ranks=2, tp=2))
    with pytest.raises(ConfigError, match="Invariant = true with tp = 2"):
        check_sharing(trained, 2)
    for options in ({"tp": 2}, {"experts": "parallel", "shard": "parameters"}):
        own = small_model("qwen3_moe", dtype=torch.float32)
        with pytest.raises(AssertionError, match=r"Invariant = true with (tp = 2|experts)"):
            on_ranks(2, own, lambda g, m: bytescale.HDP(m, g, capacity_tokens=60, invariant=True, **options))  # noqa: B023


def test_evaluation_of_a_run_is_the_same_on_any_ranks(tmp_path: Path) -> None:
    """``trainer.invariant``. The sums of a few fp32 losses in fp64 are exact, whatever their order."""
    corpus = write_corpus(tmp_path / "corpus")
    texts = write_jsonl(tmp_path / "eval.jsonl", [{"text": "the ring waits for none " * n} for n in (1, 2, 9, 3)])
    found = []
    for ranks, stages in ((1, 1), (3, 1), (2, 2)):
        folder = tmp_path / f"{ranks}"
        config = small_run(corpus, folder, steps=1, dtype="fp32", invariant=True)
        config = replace(
            config,
            parallel=ParallelConfig(ranks=ranks, pp=stages, capacity_tokens=256, timeout_seconds=100.0),
            optimizer=replace(config.optimizer, lr=1e-30),
            eval=EvalConfig(sources=(str(texts),)),
        )
        run(config)
        found.append(evaluations(folder)[0]["loss"])
    assert found == [found[0]] * 3
