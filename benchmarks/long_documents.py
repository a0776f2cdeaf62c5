"""Fine-tuning, scoring and prefill of documents of mixed lengths, beside what is usual: padded batches, static groups.

    python benchmarks/long_documents.py scoring [--rounds 5]    tokens/s against transformers with padded batches
    python benchmarks/long_documents.py sft [--rounds 5]        forward and backward: packed against padded
    torchrun --nproc-per-node 4 benchmarks/long_documents.py prefill [--rounds 5]
    python benchmarks/long_documents.py simulate                a prompt of a million tokens among short ones

The first three run small models of transformers on this machine. Both sides take turns, and medians over the rounds are
printed. ``simulate`` needs neither a GPU nor torch: 7B on H100, forward only, from counted operations, event by event.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from bytescale.common.arrays import FloatArray, IntArray
from bytescale.config.presets import PRESETS
from bytescale.cost.cluster import Cluster
from bytescale.cost.links import Links
from bytescale.cost.model import CostModel
from bytescale.cost.profile import Profile
from bytescale.plan import Plan
from bytescale.planner.adaptive.planner import adaptive_plan
from bytescale.planner.baselines import static_plan
from bytescale.planner.evaluate import evaluate
from bytescale.planner.short_first import short_first
from bytescale.train.parts.describe import spec_of_content

VOCABULARY = 8192
PADDED_DOCUMENTS = 8
"""Documents of a padded batch."""
MILLION = 2**20
CAPACITY = 32768


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["scoring", "sft", "prefill", "simulate"])
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    {
        "scoring": lambda: against_padding(arguments.rounds, backward=False),
        "sft": lambda: against_padding(arguments.rounds, backward=True),
        "prefill": lambda: measured_prefill(arguments.rounds),
        "simulate": simulated_prefill,
    }[arguments.what]()


def mixed_lengths(count: int, seed: int, longest: int, middle: int = 128) -> IntArray:
    """Log-normal lengths with a long tail, as conversations have them."""
    random = np.random.default_rng(seed)
    return np.clip(random.lognormal(np.log(middle), 1.2, count), 8, longest).astype(np.int64)


def make_model() -> Any:
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=16384,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


# Scoring and fine-tuning on one process.


def against_padding(rounds: int, *, backward: bool) -> None:
    import torch

    from bytescale import HDP

    torch.set_num_threads(1)
    model = make_model()
    lengths = mixed_lengths(96, 1, 2048)
    generator = torch.Generator().manual_seed(0)
    documents = [torch.randint(VOCABULARY, (length,), generator=generator) for length in lengths.tolist()]
    hdp = HDP(model, capacity_tokens=2048, forward_only=not backward)
    if backward:
        hdp.adamw(lr=0.0)  # gradients in flat memory, for both sides
    order = np.argsort(lengths, kind="stable")
    sides = {
        "packed": lambda: packed(hdp, documents, backward),
        "padded": lambda: padded(model, documents, backward),
        "padded, sorted by length": lambda: padded(model, [documents[i] for i in order], backward),
    }
    results = {name: side() for name, side in sides.items()}  # warms up
    for name, value in results.items():
        assert abs(value - results["packed"]) < 1e-4 * abs(value), f"{name}: {value}, packed: {results['packed']}"
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            times[name].append(seconds_of(side))
    share = lengths.sum() / sum(PADDED_DOCUMENTS * part.max() for part in np.split(lengths, range(8, 96, 8)))
    print(f"{lengths.sum()} tokens of {len(lengths)} documents of {lengths.min()} to {lengths.max()}; ", end="")
    print(f"{share:.0%} of the tokens in unsorted padded batches are real")
    for name, own in times.items():
        rates = sorted(lengths.sum() / seconds for seconds in own)
        ratio = statistics.median(a / b for a, b in zip(times["padded"], own, strict=True))
        print(f"{name:26} {statistics.median(rates):8.0f} tokens/s ({rates[0]:.0f} to {rates[-1]:.0f}), {ratio:.2f}")


def packed(hdp: Any, documents: list[Any], backward: bool) -> float:
    """The sum of log-probabilities of all targets, with our packs."""
    import torch

    total = 0.0
    with torch.set_grad_enabled(backward):
        for micro in hdp.plan([{"tokens": tokens} for tokens in documents]):
            value = micro.logprobs(hdp.model).sum()
            if backward:
                value.backward()
            total += float(value.detach())
    if backward:
        hdp.zero_grad()
    return total


def padded(model: Any, documents: list[Any], backward: bool) -> float:
    """The same in padded batches: transformers' own attention, and all logits of a batch."""
    import torch
    import torch.nn.functional as F

    total = 0.0
    with torch.set_grad_enabled(backward):
        for first in range(0, len(documents), PADDED_DOCUMENTS):
            own = documents[first : first + PADDED_DOCUMENTS]
            tokens = torch.nn.utils.rnn.pad_sequence(own, batch_first=True)
            mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in own], batch_first=True)
            labels = tokens.masked_fill(mask == 0, -100)[:, 1:]
            logits = model(input_ids=tokens, attention_mask=mask, use_cache=False).logits[:, :-1]
            value = -F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100)
            if backward:
                value.backward()
            total += float(value.detach())
    if backward:
        model.zero_grad()
    return total


def seconds_of(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


# Prefill of one long prompt among short ones.


def measured_prefill(rounds: int) -> None:
    import torch
    import torch.distributed as dist

    from bytescale import HDP

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = make_model()
    lengths = [8192, *mixed_lengths(160, 2, 512, middle=64).tolist()]
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(VOCABULARY, (length,), generator=generator) for length in lengths]
    makers = {
        name: HDP(model, capacity_tokens=2304, planner=name, forward_only=True)  # type: ignore[arg-type]
        for name in ("adaptive", "static")
    }
    found = {name: hdp.prefill(prompts).next_tokens for name, hdp in makers.items()}
    assert torch.equal(found["adaptive"], found["static"]), "both plans give the same next tokens"
    times: dict[str, list[float]] = {name: [] for name in makers}
    first: dict[str, list[FloatArray]] = {name: [] for name in makers}  # of every prompt, a row a round
    for _ in range(rounds):
        for name, hdp in makers.items():
            dist.barrier()
            at = torch.zeros(len(prompts), dtype=torch.float64)
            started = time.perf_counter()

            def note(number: int, _: Any, at: Any = at, started: float = started) -> None:
                at[number] = time.perf_counter() - started

            hdp.prefill(prompts, ready=note)
            own = torch.tensor(time.perf_counter() - started)
            dist.all_reduce(own, op=dist.ReduceOp.MAX)
            dist.all_reduce(at)  # every prompt's first token comes from one rank
            times[name].append(float(own))
            first[name].append(at.numpy())
    if dist.get_rank() == 0:
        print(
            f"{len(prompts)} prompts, {sum(lengths)} tokens, the longest {max(lengths)}, {dist.get_world_size()} ranks"
        )
        for name, held in times.items():
            short = np.median(first[name], axis=0)[1:]
            print(
                f"{name:9} {statistics.median(held):.2f} s ({min(held):.2f} to {max(held):.2f}); first tokens of short "
                f"prompts: half after {np.median(short):.2f} s, 90 % after {np.quantile(short, 0.9):.2f} s"
            )
        ratios = [a / b for a, b in zip(times["static"], times["adaptive"], strict=True)]
        print(f"static over adaptive: {statistics.median(ratios):.2f}")
    dist.destroy_process_group()


def simulated_prefill() -> None:
    lengths = np.concatenate([[MILLION], mixed_lengths(4096, 3, 8192, middle=512)])
    profile = assumed_profile()
    cost = profile.cost_model(ranks_per_node=8).forward_only(bytes_per_element=2)
    print(f"{len(lengths) - 1} prompts of {lengths[1:].min()} to {lengths[1:].max()} tokens and one of {MILLION}")
    print("seconds until all are done; in brackets: until half, and 90 %, of the short prompts have their first token")
    print(f"{'ranks':>5} {'ideal':>7}  {'ours':24} {'long ones first':24} {'static, fewest ranks':30} best static")
    for num_ranks in (64, 256, 1024, 4096):
        cluster = Cluster.uniform(num_ranks, CAPACITY)
        least = MILLION // CAPACITY
        degrees = [least * 2**power for power in range(8) if least * 2**power <= num_ranks]
        static = {
            cp: ends_of(short_first(static_plan(lengths, cluster=cluster, cp=cp), cost), cluster, cost)
            for cp in degrees
        }
        best = min(static, key=lambda cp: float(static[cp].max()))
        plan = adaptive_plan(lengths, cluster=cluster, cost=cost)
        ours, unturned = (ends_of(each, cluster, cost) for each in (short_first(plan, cost), plan))
        ideal = float(cost.work_seconds(lengths).sum()) / num_ranks
        print(
            f"{num_ranks:5} {ideal:6.2f}s  {shown(ours):24} {shown(unturned):24} "
            f"{f'cp {least}: {shown(static[least])}':30} cp {best}: {shown(static[best])}"
        )


def ends_of(plan: Plan, cluster: Cluster, cost: CostModel) -> FloatArray:
    """Return the seconds ``[S]`` after which each sequence has ended on all ranks that hold a part of it."""
    ended = evaluate(plan, cluster=cluster, cost=cost).micro_batch_end_seconds
    ends, of_sequences = np.zeros(plan.num_groups), np.empty(plan.num_sequences)
    np.maximum.at(ends, plan.micro_batch_groups, np.repeat(ended, np.diff(plan.micro_batch_group_offsets)))
    of_sequences[plan.group_sequences] = np.repeat(ends, np.diff(plan.group_sequence_offsets))
    return of_sequences


def shown(ends: FloatArray) -> str:
    """When all prompts are done, half of the short ones, and 90 % of them."""
    return f"{ends.max():5.2f} ({np.median(ends[1:]):5.2f}, {np.quantile(ends[1:], 0.9):5.2f})"


def assumed_profile() -> Profile:
    """7B in bf16 on H100: 400 TFLOP/s in matrix products, 300 in attention, 300 GB/s in a node, 40 between nodes."""
    return Profile.from_flops(
        spec_of_content(PRESETS["7b"]),
        flops_per_second=400e12,
        attention_flops_per_second=300e12,
        launch_seconds=50e-6,
        links=Links(
            intra_node_bytes_per_second=300e9,
            inter_node_bytes_per_second=40e9,
            latency_seconds=10e-6,
            device_to_host_bytes_per_second=25e9,
            host_to_device_bytes_per_second=25e9,
        ),
    )


if __name__ == "__main__":
    main()
