"""Pictures as planned work: encoders beside text, in plans and on ranks behind slow links.

    python -m benchmarks.pictures planned [--ranks 64 1024] [--shares 0 0.2 0.6 0.95] [--seeds 3]
    python -m benchmarks.pictures measured [--ranks 4] [--mbit 1000] [--rounds 5]            (Linux, root)

``planned``: batches of 32K tokens a rank, of which a share stands for pictures of 64 to 16K patches (log-uniform; four
patches a token). Pictures are spread over documents of github's lengths, at most 128K tokens. Text is a 7B, the encoder
a vision transformer of 32 layers of width 1280 that sees all of a picture, both at the operations a second of assumed
H100s. A step takes the time of the rank with most encoder work, and then that of the plan. The bound is all work spread
evenly, or the largest picture where that takes longer. Columns, all over the bound of what they name:

    text       adaptive text alone: what messages and whole documents leave
    encoders   ours alone
    ours       any rank encodes any picture, shares are equal by work
    patches    the same with shares that are equal by patches
    home       adaptive text; a picture is encoded by one of the ranks that have its document, the one with least work
    static     the same on a static mesh for 128K tokens

``measured``: training steps of a small Qwen2.5-VL on ranks that are nodes of their own (``benchmarks/cluster``), each
with its part of ``--cpus`` cores by a quota. One long document, and many short ones, of which few have many pictures.
``static`` encodes as "home" does, in a static mesh. Sides take turns on the same batches, and losses are compared.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from benchmarks.grpo import measure
from benchmarks.recurrent_cluster import report_steps, steps_in_turns
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText

import bytescale
from bytescale.common.arrays import IntArray
from bytescale.config.presets import PRESETS
from bytescale.cost.assumed import MeshCosts, Rates
from bytescale.cost.cluster import Cluster
from bytescale.data.length_distributions import sample_lengths
from bytescale.hf.loop.encoded import Items
from bytescale.hf.model.encoders import even_frame, work_of
from bytescale.plan import Plan
from bytescale.planner.adaptive.planner import adaptive_plan
from bytescale.planner.baselines import static_plan
from bytescale.planner.evaluate import evaluate
from bytescale.train.parts.describe import spec_of_content

CAPACITY, CONTEXT, TOKENS_OF_RANK = 8192, 2**17, 2**15
WIDTH, LAYERS = 1280, 32
EVEN = 6.0 * WIDTH  # of a plain transformer, whose inner width is 4 times its own
IMAGE, VOCABULARY, LONGEST, SHORT_CAPACITY = 511, 512, 2048, 512
FLOPS_PER_CORE = 1.5e10
VISION = {
    "hidden_size": 128, "out_hidden_size": 128, "intermediate_size": 256, "num_heads": 4, "depth": 4, "patch_size": 4,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3, "window_size": 32,
    "fullatt_block_indexes": [0, 1, 2, 3],
}  # fmt: skip
TEXT = {
    "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": LONGEST,
    "rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 1e4},
}  # fmt: skip


def drawn(ranks: int, share: float, seed: int) -> tuple[IntArray, list[int], list[int]]:
    """Lengths of documents, patches of pictures, and the document of each picture."""
    random, total = np.random.default_rng(seed), ranks * TOKENS_OF_RANK
    lengths = sample_lengths("github", int(total * (1 - share)), seed, CONTEXT // 2).tolist()
    patches, documents, left = list[int](), list[int](), share * total
    while left > 0:
        own = int(np.exp(random.uniform(np.log(64), np.log(2**14)))) // 4 * 4
        place = int(random.integers(len(lengths)))
        if lengths[place] + own // 4 > CONTEXT:
            place = len(lengths)
            lengths.append(32)
        lengths[place] += own // 4
        patches.append(own)
        documents.append(place)
        left -= own / 4
    return np.array(lengths), patches, documents


def at_home(plan: Plan, documents: list[int], work: list[float]) -> list[int]:
    """The rank of each picture: of those that have its document the one with least work, large pictures first."""
    group_of = np.empty(plan.num_sequences, dtype=np.int64)
    for group in range(plan.num_groups):
        group_of[plan.sequences_of(group)] = group
    loads, ranks = np.zeros(plan.num_ranks), [0] * len(work)
    for place in sorted(range(len(work)), key=lambda place: -work[place]):
        own = plan.ranks_of(int(group_of[documents[place]]))
        ranks[place] = int(own[np.argmin(loads[own])])
        loads[ranks[place]] += work[place]
    return ranks


def report_planned(all_ranks: list[int], shares: list[float], seeds: int) -> None:
    spec = spec_of_content(PRESETS["7b"])
    cost = MeshCosts(kind="cuda", bytes_per_element=2).assumed(spec)
    of_patch = cost.token_seconds * 12 * LAYERS * WIDTH**2 / (spec.total - spec.vocab_size * spec.hidden_size)
    names = ("text", "encoders", "ours", "patches", "home", "static")
    print(f"{'ranks':>6}{'share':>7}{'pictures':>10}{'of work':>9}" + "".join(f"{name:>10}" for name in names))
    for ranks in all_ranks:
        cluster = Cluster.uniform(ranks, CAPACITY)
        for share in shares:
            rows = []
            for seed in range(seeds):
                lengths, patches, documents = drawn(ranks, share, seed)
                work = [work_of([own], EVEN) * of_patch for own in patches]
                adaptive = adaptive_plan(lengths, cluster=cluster, cost=cost)
                static = static_plan(lengths, cluster=cluster, cp=CONTEXT // CAPACITY)
                texts = [evaluate(plan, cluster=cluster, cost=cost).end_seconds for plan in (adaptive, static)]
                items = Items([("image", {})] * len(work), [{}], {}, [[own] for own in work])
                by_patches = Items([("image", {})] * len(work), [{}], {}, [[own] for own in patches])
                owners = [
                    (items.ranks(ranks), texts[0]), (by_patches.ranks(ranks), texts[0]),
                    (at_home(adaptive, documents, work), texts[0]), (at_home(static, documents, work), texts[1]),
                ]  # fmt: skip
                spent = [float(np.bincount(own, work, ranks).max()) if work else 0.0 for own, _ in owners]
                even, of_text = sum(work) / ranks, float(cost.work_seconds(lengths).sum()) / ranks
                least = max([even, *work])
                alone = [texts[0] / of_text, spent[0] / least if work else 1.0]
                ends = [(own + text) / (least + of_text) for own, (_, text) in zip(spent, owners, strict=True)]
                rows.append([len(work), even / (even + of_text), *alone, *ends])
            count, part, *ratios = np.median(rows, axis=0)
            ratios_of = "".join(f"{ratio:10.3f}" for ratio in ratios)
            print(f"{ranks:6}{share:7.0%}{count:10.0f}{part:9.0%}{ratios_of}", flush=True)


def picture(seed: int, side: int) -> dict[str, Tensor]:
    pixels = torch.randn(side * side, 3 * 2 * 16, generator=torch.Generator().manual_seed(seed))
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, side, side]])}


def mixture(num_tokens: int, seed: int) -> list[dict[str, Any]]:
    """One long document, and short ones; three quarters of all pictures are in every eighth document."""
    random, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    documents = [{"tokens": torch.randint(2, 500, (LONGEST,), generator=generator)}]
    while sum(len(own["tokens"]) for own in documents) < num_tokens:
        words = int(np.clip(random.lognormal(np.log(64), 1.0), 16, SHORT_CAPACITY // 4))
        parts, images = [torch.randint(2, 500, (words,), generator=generator)], list[dict[str, Tensor]]()
        for _ in range(6 if len(documents) % 8 == 1 else int(random.integers(0, 2))):
            side = 2 * int(random.choice([4, 6, 8, 10]))
            if sum(map(len, parts)) + side * side // 4 + 2 <= SHORT_CAPACITY:
                images.append(picture(len(documents), side))
                parts += [torch.tensor([509]), torch.full((side * side // 4,), IMAGE), torch.tensor([508])]
        documents.append({"tokens": torch.cat(parts)} | ({"images": images} if images else {}))
    return documents


class Side:
    """Steps of one way."""

    def __init__(self, planner: Any, arguments: argparse.Namespace) -> None:
        config = AutoConfig.for_model(
            "qwen2_5_vl", text_config=TEXT, vision_config=VISION, image_token_id=IMAGE, video_token_id=510,
            vision_start_token_id=509, vision_end_token_id=508,
        )  # fmt: skip
        torch.manual_seed(0)
        self.model: Any = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        flops, rate = FLOPS_PER_CORE * arguments.cpus / arguments.ranks, arguments.mbit * 1e6 / 8
        rates = Rates(
            flops_per_second=flops, attention_flops_per_second=flops, inter_node_bytes_per_second=rate,
            intra_node_bytes_per_second=2e8, latency_seconds=2e-3, launch_seconds=0.0,
        )  # fmt: skip
        looked_at = bytescale.HDP(self.model, capacity_tokens=SHORT_CAPACITY)
        cost = rates.profile(looked_at.engine.decoder.spec, bytes_per_element=4).cost_model(ranks_per_node=1)
        looked_at.detach()
        self.is_static, self.even = planner == "static", even_frame(config, "image")
        self.hdp = bytescale.HDP(self.model, capacity_tokens=SHORT_CAPACITY, planner=planner, cost=cost)
        self.hdp.adamw(1e-3)

    def step(self, batch: list[dict[str, Any]]) -> float:
        """This rank's part of the mean loss."""
        total, seen, ranks = sum(len(own["tokens"]) - 1 for own in batch), 0.0, Items.ranks
        if self.is_static:
            plan = self.hdp.planner(np.array([len(own["tokens"]) for own in batch]))
            owned = [(number, one) for number, own in enumerate(batch) for one in own.get("images", ())]
            work = [work_of([len(one["pixel_values"])], self.even) for _, one in owned]
            owners = at_home(plan, [number for number, _ in owned], work)
            Items.ranks = lambda self, size, pieces=None: owners  # type: ignore[method-assign]
        for micro in self.hdp.plan(batch):
            loss = micro.loss_sum(self.model) / total
            loss.backward()
            seen += float(loss.detach())
        Items.ranks = ranks  # type: ignore[method-assign]
        self.hdp.step()
        return seen


def worker(arguments: argparse.Namespace) -> None:
    """One rank. The first one writes seconds, losses and bytes of each side to a file."""
    dist.init_process_group("gloo")
    sides = {planner: Side(planner, arguments) for planner in ("adaptive", "static")}
    steps_in_turns(sides, mixture, arguments)


def report_measured(arguments: argparse.Namespace) -> None:
    names = ("ranks", "mbit", "rounds", "tokens", "cpus", "ranks_per_node")
    given = argparse.Namespace(**{name: getattr(arguments, name) for name in names})
    report_steps(measure(given, "benchmarks.pictures"), arguments, "in rings")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["planned", "measured"], help="left out: this is a rank")
    parser.add_argument("--ranks", type=int, nargs="+")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.0, 0.2, 0.6, 0.95])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--mbit", type=float, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=6144)
    parser.add_argument("--cpus", type=float, default=1.6)
    parser.add_argument("--ranks-per-node", type=int, default=1)
    parser.add_argument("--out")
    arguments = parser.parse_args()
    if arguments.what == "planned":
        report_planned(arguments.ranks or [64, 1024], arguments.shares, arguments.seeds)
        return
    (arguments.ranks,) = arguments.ranks or [4]
    if arguments.what is None:
        worker(arguments)
    else:
        report_measured(arguments)


if __name__ == "__main__":
    main()
