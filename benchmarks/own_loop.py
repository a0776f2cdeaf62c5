"""Measures loops of one's own under bytescale.HDP: against the trainer, and against padded batches without it.

    torchrun --nproc-per-node 2 benchmarks/own_loop.py trainer [--steps 12]
    torchrun --nproc-per-node 2 benchmarks/own_loop.py padded [--batches 3]
    torchrun --nproc-per-node 2 benchmarks/own_loop.py window [--tokens 8192 16384]
    torchrun --nproc-per-node 1 benchmarks/own_loop.py invariant [--steps 12] [--batch-tokens 8192]
    torchrun --nproc-per-node 1 benchmarks/own_loop.py host [--steps 12] [--tokens 64 256]

    trainer   The same Llama of transformers and the same documents: the runtime under our trainer, and HDP's loop, with
              the loss by `micro.loss_sum`, by `micro.logprobs` and by all logits at once. The four take turns, step by
              step.
    padded    Documents of mixed lengths: HDP with packing against plain transformers, in which every rank pads batches
              of its documents to their longest one. Documents are sorted by length first, or come as they are.
    window    One document shared by all ranks: a layer of attention with a window against one without, forward and
              backward: time, and bytes that a rank sends.
    invariant Log-probabilities, and a training step, with HDP(..., invariant=True) and without it, in turns.
    host      What HDP's loop costs the host beside plain transformers with PyTorch's attention: a Llama of 16 layers so
              narrow that its products cost little, 40 documents of so many tokens, each a micro-batch. In turns.

Times are medians over steps of the slowest rank. With a single rank they are the process's CPU time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

import bytescale
from bytescale.attention import AttentionRules, PackedAttention, RingBuffers, select_kernel
from bytescale.config.schema import OptimizerConfig
from bytescale.hf.model.decoder import HFDecoder
from bytescale.plan import Plan, RankPlan
from bytescale.plan.plan import GroupSpec
from bytescale.runtime.executor import Decoder, Executor
from bytescale.runtime.group import RankGroup
from bytescale.runtime.mesh import Mesh
from bytescale.runtime.optimizer.flat import FlatParameters
from bytescale.runtime.optimizer.sharded_optimizer import ShardedOptimizer
from bytescale.runtime.saved.activations import Activations

VOCABULARY, HIDDEN, LAYERS, HEADS, KEY_HEADS, INNER = 4096, 256, 4, 8, 4, 768
CPU = torch.device("cpu")


def llama(**other: int) -> nn.Module:
    """transformers' Llama, the same on every rank."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "num_key_value_heads": KEY_HEADS, "max_position_embeddings": 65536,
    }  # fmt: skip
    return AutoModelForCausalLM.from_config(LlamaConfig(**(sizes | other))).train()


def documents(num_tokens: int, longest: int, seed: int) -> list[dict[str, Any]]:
    """Documents of lognormal lengths (median 200, sigma 1.3), ``num_tokens`` in all."""
    random = np.random.default_rng(seed)
    lengths: list[int] = []
    while sum(lengths) < num_tokens:
        length = int(np.clip(random.lognormal(np.log(200), 1.3), 2, longest))
        lengths.append(min(length, num_tokens - sum(lengths)))
    return [{"tokens": torch.as_tensor(random.integers(2, VOCABULARY, length))} for length in lengths if length > 1]


class Tokens:
    """A micro-batch's tokens as the executor takes them."""

    def __init__(self, micro: bytescale.Micro) -> None:
        self.tokens, self.labels = micro.tokens, micro.labels
        self.position_ids, self.weights = micro.position_ids, None


def runtime_step(group: RankGroup) -> Callable[[RankPlan, list[Tokens], float], None]:
    """A step of the trainer's runtime."""
    mesh = Mesh.of_hdp(group)
    model = HFDecoder(llama(), longest_document=65536)
    flat = FlatParameters(model.model.named_parameters(), group.size, bucket_bytes=2**20, late=model.late_parameters())
    optimizer = ShardedOptimizer.of_config(flat, OptimizerConfig(), mesh)
    optimizer.zeros[0].overlap_with((model, model.layers))
    executor = Executor(
        part=Decoder(module=model, activations=Activations([])),
        kernel=select_kernel("auto", CPU, torch.float32),
        mesh=mesh,
    )

    def step(rank_plan: RankPlan, tokens: list[Tokens], total: float) -> None:
        optimizer.begin_step(rank_plan)
        executor.run(rank_plan, tokens, num_global_targets=total, after_last_message=optimizer.after_last_message)
        norm = group.sum_of([optimizer.reduce_gradients()])[0] ** 0.5
        optimizer.update(norm, 1.0, 1e-5)
        optimizer.wait_for_parameters()

    return step


def hdp_step(
    loss_by: Literal["loss_sum", "logprobs", "logits"], capacity: int
) -> tuple[bytescale.HDP, Callable[[list[dict[str, Any]]], None]]:
    """HDP and a step of the printed loop."""
    model = llama()
    hdp = bytescale.HDP(model, capacity_tokens=capacity)
    hdp.adamw(1e-5)

    def step(batch: list[dict[str, Any]]) -> None:
        total = sum(len(d["tokens"]) - 1 for d in batch)
        for micro in hdp.plan(batch):
            if loss_by == "logits":
                logits = model(**micro.inputs).logits[0, : micro.num_rows]
                loss = F.cross_entropy(logits, micro.labels, reduction="sum", ignore_index=-100)
            elif loss_by == "logprobs":
                loss = -micro.logprobs(model).sum()
            else:
                loss = micro.loss_sum(model)
            (loss / total).backward()
        hdp.step()

    return hdp, step


def seconds_of(work: Callable[[], None], group: RankGroup) -> float:
    """Of the slowest rank; of one rank alone, the time that its process computes, whatever else the machine does."""
    clock = time.process_time if group.size == 1 else time.perf_counter
    group.max_of([0.0])
    start = clock()
    work()
    return group.max_of([clock() - start])[0]


def against_trainer(group: RankGroup, steps: int, batch_tokens: int) -> None:
    """Five kinds of steps over the same documents."""
    capacity = 4096
    batch = documents(batch_tokens, capacity * group.size, seed=0)
    hdp, by_loss_sum = hdp_step("loss_sum", capacity)
    _, by_logprobs = hdp_step("logprobs", capacity)
    _, by_logits = hdp_step("logits", capacity)
    planned = hdp.plan(batch)
    tokens = [Tokens(micro) for micro in planned]
    total = float(sum(len(d["tokens"]) - 1 for d in batch))
    runtime = runtime_step(group)
    kinds: dict[str, Callable[[], None]] = {
        "trainer's runtime": lambda: runtime(planned.rank_plan, tokens, total),
        "own loop, micro.loss_sum": lambda: by_loss_sum(batch),
        "own loop, micro.logprobs": lambda: by_logprobs(batch),
        "own loop, all logits": lambda: by_logits(batch),
    }
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for number in range(steps + 1):
        for name, work in kinds.items():
            seconds = seconds_of(work, group)
            if number:
                times[name].append(seconds)
    base = statistics.median(times["trainer's runtime"])
    for name, taken in times.items():
        middle = statistics.median(taken)
        _say(f"{name:42} {middle:7.3f} s  {total / middle:8.0f} tokens/s  {middle / base - 1:+6.1%}")


def against_padding(group: RankGroup, number: int, batch_tokens: int) -> None:
    """Tokens a second, of documents and not of padding."""
    capacity = 4096
    batches = [documents(batch_tokens, 4096, seed) for seed in range(number)]
    steps = {
        "HDP, packed": hdp_step("loss_sum", capacity)[1],
        "padded, sorted by length": _padded_step(group, True, capacity),
        "padded, as they come": _padded_step(group, False, capacity),
    }
    rates: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():  # once without a clock
        step(batches[0])
    for batch in batches:
        for name, step in steps.items():
            seconds = seconds_of(lambda step=step, batch=batch: step(batch), group)  # type: ignore[misc]
            rates[name].append(sum(len(d["tokens"]) for d in batch) / seconds)
    ours = statistics.median(rates["HDP, packed"])
    for name, held in rates.items():
        middle = statistics.median(held)
        shares = [_padding_share(batch, "sorted" in name, capacity) for batch in batches] if "padded" in name else [0.0]
        _say(
            f"{name:26} {middle:8.0f} tokens/s ({min(held):.0f} to {max(held):.0f}), "
            f"{statistics.mean(shares):.0%} padding; HDP {ours / middle:.2f}x"
        )


def _micro_batches(batch: list[dict[str, Any]], sort: bool, capacity: int) -> list[list[torch.Tensor]]:
    """Documents in groups whose padded size is at most the capacity."""
    groups: list[list[torch.Tensor]] = []
    for tokens in sorted((d["tokens"] for d in batch), key=len) if sort else (d["tokens"] for d in batch):
        longest = max([len(tokens), *(len(other) for other in groups[-1])]) if groups else 0
        if groups and longest * (len(groups[-1]) + 1) <= capacity:
            groups[-1].append(tokens)
        else:
            groups.append([tokens])
    return groups


def _padding_share(batch: list[dict[str, Any]], sort: bool, capacity: int) -> float:
    groups = _micro_batches(batch, sort, capacity)
    padded = sum(max(map(len, group)) * len(group) for group in groups)
    return 1 - sum(len(d["tokens"]) for d in batch) / padded


def _padded_step(group: RankGroup, sort: bool, capacity: int) -> Callable[[list[dict[str, Any]]], None]:
    """Plain transformers with sdpa; micro-batches dealt to ranks in turn, gradients summed at the end of the step."""
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step(batch: list[dict[str, Any]]) -> None:
        total = sum(len(d["tokens"]) - 1 for d in batch)
        optimizer.zero_grad(set_to_none=False)
        for tokens in _micro_batches(batch, sort, capacity)[group.rank :: group.size]:
            inputs = nn.utils.rnn.pad_sequence(tokens, batch_first=True)
            mask = nn.utils.rnn.pad_sequence([torch.ones_like(t) for t in tokens], batch_first=True)
            labels = torch.where(mask.bool(), inputs, -100)
            logits = model(input_ids=inputs, attention_mask=mask, use_cache=False).logits
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
            (loss / total).backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                group.all_reduce(parameter.grad)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def window_against_full(group: RankGroup, lengths: list[int], windows: list[int], repeats: int = 5) -> None:
    """One layer's attention over one shared document."""
    kernel = select_kernel("auto", CPU, torch.float32)
    for length in lengths:
        shared = GroupSpec(sequences=[0], ranks=list(range(group.size)))
        plan = Plan.build(
            lengths=[length], capacity_tokens=[length] * group.size, groups=[shared],
            schedule=[[[0]] for _ in range(group.size)], planner="one group",
        )  # fmt: skip
        micro_batch = RankPlan.of(plan, group.rank).micro_batches[0]
        rows = micro_batch.num_tokens
        for window in (None, *windows):
            rules, times, buffers = AttentionRules(window=window), [], RingBuffers()
            sent = 0
            for _ in range(repeats + 1):
                attention = PackedAttention(micro_batch, kernel, group.exchange, None, buffers)
                q, k, v = (torch.randn(rows, heads, 32, requires_grad=True) for heads in (HEADS, KEY_HEADS, KEY_HEADS))
                before = group.exchange.bytes_sent
                times.append(seconds_of(lambda: attention(q, k, v, rules).sum().backward(), group))  # noqa: B023
                sent = group.exchange.bytes_sent - before
                buffers.release()
            _say(
                f"{length:6} tokens, {'no window' if window is None else f'window {window}':12} "
                f"{statistics.median(times[1:]) * 1e3:8.1f} ms "
                f"({min(times[1:]) * 1e3:.1f} to {max(times[1:]) * 1e3:.1f})  "
                f"{sent / 2**20:8.3f} MiB sent a rank"
            )


def with_and_without_invariance(group: RankGroup, rounds: int, num_tokens: int) -> None:
    """Scores, and scores with their gradients, of documents of three kinds, in fp32 and bf16."""
    batches = {
        "mixed": documents(num_tokens, num_tokens // 4, seed=0),
        "of 16 tokens": [{"tokens": torch.arange(16) + first} for first in range(0, num_tokens, 16)],
        "one long one": [{"tokens": torch.arange(num_tokens) % VOCABULARY}],
    }
    for dtype in (torch.float32, torch.bfloat16):
        models = {invariant: llama().to(dtype) for invariant in (False, True)}
        hdps = {
            invariant: bytescale.HDP(model, capacity_tokens=num_tokens, invariant=invariant)
            for invariant, model in models.items()
        }

        def score(batch: list[dict[str, Any]], invariant: bool, train: bool, hdps: Any = hdps) -> None:
            with torch.set_grad_enabled(train):
                for micro in hdps[invariant].plan(batch):
                    logprobs = micro.logprobs(hdps[invariant].model)
                    if train:
                        logprobs.sum().backward()

        for name, batch in batches.items():
            for train in (False, True):
                times: dict[bool, list[float]] = {False: [], True: []}
                for number in range(rounds + 1):
                    for invariant, held in times.items():
                        seconds = seconds_of(lambda: score(batch, invariant, train), group)  # noqa: B023
                        if number:
                            held.append(seconds)
                plain, ours = (statistics.median(held) for held in times.values())
                ratios = sorted(ours / plain for plain, ours in zip(*times.values(), strict=True))
                _say(
                    f"{str(dtype)[6:]:9} {name:13} {'with backward' if train else 'forward':13} {plain:7.3f} s, ours "
                    f"{ours:7.3f} s, {statistics.median(ratios):.2f}x ({ratios[0]:.2f} to {ratios[-1]:.2f})"
                )


def host_time(group: RankGroup, rounds: int, lengths: list[int]) -> None:
    """Forward and backward of every document."""
    narrow = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    for length in lengths:
        plain: Any = llama(**narrow, **heads)
        ours = llama(**narrow, **heads)
        batch = [{"tokens": torch.randint(0, 256, (length,))} for _ in range(40)]
        hdp = bytescale.HDP(ours, capacity_tokens=length)

        def hdp_loop(hdp: Any = hdp, ours: nn.Module = ours, batch: list[dict[str, Any]] = batch) -> None:
            for micro in hdp.plan(batch):
                micro.loss_sum(ours).backward()

        def plain_loop(plain: Any = plain, batch: list[dict[str, Any]] = batch) -> None:
            for document in batch:
                tokens = document["tokens"][None]
                hidden = plain.model(input_ids=tokens, use_cache=False).last_hidden_state
                F.cross_entropy(plain.lm_head(hidden[0, :-1]), tokens[0, 1:], reduction="sum").backward()

        times = [(seconds_of(plain_loop, group), seconds_of(hdp_loop, group)) for _ in range(rounds + 1)][1:]
        ratios = sorted(held / alone for alone, held in times)
        alone, held = (statistics.median(column) / len(batch) * 1e3 for column in zip(*times, strict=True))
        least, least_held = (min(column) / len(batch) * 1e3 for column in zip(*times, strict=True))
        _say(
            f"{length:6} tokens a document: plain {alone:.2f} ms, HDP {held:.2f} ms, {statistics.median(ratios):.3f}x "
            f"({ratios[0]:.3f} to {ratios[-1]:.3f}); least {least:.2f} and {least_held:.2f}, {least_held / least:.3f}x"
        )


def _say(line: str) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["trainer", "padded", "window", "invariant", "host"])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch-tokens", type=int, default=16384)
    parser.add_argument("--batches", type=int, default=3)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 16384])
    parser.add_argument("--windows", type=int, nargs="+", default=[512, 2048])
    given = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo")
    group = RankGroup(dist.group.WORLD if dist.get_world_size() > 1 else None, device=CPU)
    if given.what == "trainer":
        against_trainer(group, given.steps, given.batch_tokens)
    elif given.what == "padded":
        against_padding(group, given.batches, given.batch_tokens)
    elif given.what == "invariant":
        with_and_without_invariance(group, given.steps, given.batch_tokens)
    elif given.what == "host":
        host_time(group, given.steps, given.tokens)
    else:
        window_against_full(group, given.tokens, given.windows)
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # 4 of 21 runs were aborted where the interpreter ended (docs/decisions/tests.md)


if __name__ == "__main__":
    main()
