"""AReaL's own actor and its supervised fine-tuning on an engine over ``HDP``: ``areal.py RANKS``.

``Planned`` has the methods of AReaL's ``TrainEngine`` that these call: a batch of padded rollouts goes through
``WholeBatch``, AReaL's losses are called on whole rollouts of each micro-batch, and weighted as ``FSDPEngine`` does.
``Plain`` has the same methods over transformers' model, one rollout at a time, for all ranks' rollouts in one process.
Both models are in fp64. AReaL's statistics take numbers in fp32 alone, so its losses are given those.
"""

from __future__ import annotations

import copy
import itertools
import logging
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from areal.api.cli_args import PPOActorConfig
from areal.trainer.ppo.actor import PPOActor
from areal.trainer.sft.lm_engine import LMEngine
from tests.helpers.forks import run_forked
from tests.rl.beside_plain import CAPACITY, padded, rollouts, small_model
from torch import Tensor, nn

import bytescale
from bytescale.common.labels import IGNORE_INDEX
from bytescale.integrations.whole_batch import ENTROPY, LOG_PROBS, WholeBatch, word_columns

LR, UPDATES = 3e-3, 3
ACTORS = {
    "ppo": {},
    "decoupled": {"use_decoupled_loss": True},
    "sequence": {"importance_sampling_level": "sequence"},
    "sapo": {"use_sapo_loss": True, "use_decoupled_loss": False},
    "m2po": {"m2_threshold": 0.04, "use_decoupled_loss": True},
}
COMMON: dict[str, Any] = {"use_decoupled_loss": False, "recompute_logprob": False, "ppo_n_minibatches": 1}
SUPERVISED = ("input_ids", "attention_mask", "loss_mask")
Batch = dict[str, Tensor]


class Engine:
    """What AReaL's algorithms call, but for ``forward`` and ``train_batch``."""

    model: nn.Module

    def train(self, mode: bool = True) -> None:
        self.model.train(mode)

    def eval(self) -> None:
        self.train(False)

    def get_version(self) -> int:
        return 0


class Planned(Engine):
    """Over ``HDP``: each rank is given its own part of a batch."""

    def __init__(self, model: nn.Module, ranks: int) -> None:
        self.model, self.ranks = model, ranks
        self.hdp = bytescale.HDP(model, capacity_tokens=CAPACITY // ranks)
        self.hdp.optimizer(torch.optim.SGD, lr=LR)  # AdamW would make much of what is rounded
        self.norms: list[float] = []

    @torch.no_grad()
    def forward(self, input_: Batch, **_: Any) -> Tensor:
        """``[B, L]`` log-probabilities of next tokens."""
        fields = fields_of(input_)
        values, _rest = WholeBatch(self.hdp, word_columns(self.model, count=2), num_trained=2).run(fields)
        return padded(values[:, LOG_PROBS].float().split([len(own) for own in fields["tokens"]]))

    def train_batch(self, input_: Batch, loss_fn: Any, loss_weight_fn: Any) -> dict[str, float]:
        """One update. A part of a batch weighs as much as its tokens among those of all ranks."""
        fields = fields_of(input_)
        lengths = [len(own) for own in fields["tokens"]]
        whole = [{name: rows[place] for name, rows in fields.items()} for place in range(len(lengths))]
        total = self.hdp.group.sum_of([float(loss_weight_fn(packed(whole)))])[0]

        def loss(documents: list[Batch], values: list[Tensor]) -> Tensor:
            part, rows = packed(documents), torch.cat(values).float()
            return loss_fn(rows[:, LOG_PROBS], rows[:, ENTROPY], part) * loss_weight_fn(part) / total

        batch = WholeBatch(self.hdp, word_columns(self.model, count=2), num_trained=2)
        values, _ = batch.run(fields, loss=loss)
        loss(whole, list(values.split(lengths))).backward()
        self.passes = 2 if batch.finish() else 1
        self.norms.append(self.hdp.step(max_grad_norm=0.0).grad_norm)
        return {"grad_norm": self.norms[-1]}


class Plain(Engine):
    """One process, which has the rollouts of ``ranks`` ranks, as many of each."""

    def __init__(self, model: nn.Module, ranks: int) -> None:
        self.model, self.ranks, self.norms = model, ranks, []
        self.optimizer = torch.optim.SGD(model.parameters(), lr=LR)

    def scores(self, tokens: Tensor) -> Tensor:
        """``[S, 2]``: log-probabilities of next tokens and entropies; zeros for the last one."""
        rows = self.model(input_ids=tokens[None]).logits[0, :-1].log_softmax(-1)
        both = torch.stack([rows.gather(1, tokens[1:, None])[:, 0], -(rows.exp() * rows).sum(1)], dim=1)
        return torch.cat([both, both.new_zeros(1, 2)])

    @torch.no_grad()
    def forward(self, input_: Batch, **_: Any) -> Tensor:
        return padded([self.scores(own)[:, 0].float() for own in fields_of(input_)["tokens"]])

    def train_batch(self, input_: Batch, loss_fn: Any, loss_weight_fn: Any) -> dict[str, float]:
        self.optimizer.zero_grad()
        fields = fields_of(input_)
        whole = [{name: rows[place] for name, rows in fields.items()} for place in range(len(fields["tokens"]))]
        total, size = loss_weight_fn(packed(whole)), len(whole) // self.ranks
        for part in (whole[place : place + size] for place in range(0, len(whole), size)):
            rows = torch.cat([self.scores(own["tokens"]) for own in part]).float()
            given = packed(part)
            (loss_fn(rows[:, 0], rows[:, 1], given) * loss_weight_fn(given) / total).backward()
        self.norms.append(float(nn.utils.get_total_norm([own.grad for own in self.model.parameters()])))
        self.optimizer.step()
        return {"grad_norm": self.norms[-1]}


def fields_of(batch: Batch) -> dict[str, list[Tensor]]:
    """Of each rollout what it has of a padded batch, by the names of ``WholeBatch`` and by AReaL's."""
    lengths = batch["attention_mask"].sum(-1).tolist()
    tokens = [own[:size].long() for own, size in zip(batch["input_ids"], lengths, strict=True)]
    labels = [torch.cat([own[1:], own.new_full((1,), IGNORE_INDEX)]) for own in tokens]
    rest = {name: own for name, own in batch.items() if name not in ("input_ids", "attention_mask") and own.dim() == 2}
    cut = {name: [row[:size] for row, size in zip(own, lengths, strict=True)] for name, own in rest.items()}
    return {"tokens": tokens, "labels": labels, **cut}


def packed(documents: Sequence[Batch]) -> Batch:
    """One behind the other, as AReaL's losses take them."""
    edges = torch.tensor([0, *itertools.accumulate(len(own["tokens"]) for own in documents)], dtype=torch.int32)
    part = {name: torch.cat([own[name] for own in documents]) for name in documents[0]}
    return part | {"input_ids": part["tokens"], "cu_seqlens": edges}


def trajectories() -> list[Batch]:
    """Rollouts as AReaL's workflows return them, ``[1, S]`` each; ``logprobs`` are those of the tokens themselves."""
    made = []
    for number, own in enumerate(rollouts()):
        size, prompt = len(own["tokens"]), int(own["prompt"])
        mask = (torch.arange(size) >= prompt).long()
        made.append({
            "input_ids": own["tokens"][None],
            "attention_mask": torch.ones(1, size, dtype=torch.long),
            "loss_mask": mask[None],
            "logprobs": torch.cat([torch.zeros(prompt), own["old"].float()])[None],
            "versions": torch.where(mask > 0, 0, -1)[None],
            "rewards": torch.tensor([(-1.0) ** number * (0.5 + number)]),
        })  # fmt: skip
    return made


def trained(kind: str, engine: Any, own: slice) -> None:
    """Some updates by AReaL's code, on the rollouts of a rank."""
    for _ in range(UPDATES):
        data = [copy.deepcopy(row) for row in trajectories()[own]]
        if kind == "sft":
            LMEngine(engine).train_lm([{key: row[key] for key in SUPERVISED} for row in data])
            continue
        actor = PPOActor(PPOActorConfig(**COMMON | ACTORS[kind]), engine)
        for row, scores in zip(data, actor.compute_logp(data), strict=True):
            row["prox_logp"] = scores
        actor.ppo_update(actor.compute_advantages(data))


def main(ranks: int) -> int:
    logging.disable(logging.WARNING)  # AReaL tells its settings
    start, failed, size = small_model(), 0, len(rollouts()) // ranks

    def over_hdp(rank: int) -> Any:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        found = {}
        for kind in ("sft", *ACTORS):
            engine = Planned(copy.deepcopy(start), ranks)
            trained(kind, engine, slice(rank * size, (rank + 1) * size))
            weights = {name: own.detach().numpy() for name, own in engine.model.named_parameters()}
            found[kind] = engine.norms, engine.passes, weights
        return found

    for kind, (norms, passes, weights) in run_forked(ranks, over_hdp)[0].items():
        plain = Plain(copy.deepcopy(start), ranks)
        trained(kind, plain, slice(None))
        far = max(float((torch.from_numpy(weights[n]) - own).abs().max()) for n, own in plain.model.named_parameters())
        off = max(abs(a - b) / b for a, b in zip(norms, plain.norms, strict=True))
        good = far < 1e-8 and off < 1e-6  # of fp32; the mean of SFT adds 1e-5 to each count of tokens
        failed += not good
        print(
            f"{ranks} rank(s): {kind}: {len(norms)} updates in {passes} pass(es); "
            f"norms {norms[0]:.4f} to {norms[-1]:.4f}, {off:.0e} off; weights {far:.0e} off{'' if good else ' FAILED'}",
            flush=True,
        )
    return failed


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
