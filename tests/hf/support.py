"""Small models and documents for the tests of ``bytescale.HDP``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from bytescale import HDP
from bytescale.hf.loop.micro_batch import Micro
from bytescale.parity import small_model
from bytescale.parity.thread_ranks import run_ranks

Result = TypeVar("Result")


def documents(lengths: Sequence[int], seed: int = 0, **more: Any) -> list[dict[str, Any]]:
    """Documents with random tokens and real-valued weights."""
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            "tokens": torch.randint(2, 67, (length,), generator=generator),
            "weights": torch.rand(length, generator=generator, dtype=torch.float64) + 0.1,
            **more,
        }
        for length in lengths
    ]


def on_ranks(num_ranks: int, model: nn.Module, work: Callable[[dist.ProcessGroup, nn.Module], Result]) -> list[Result]:
    """Run ``work`` on every rank with a model of its own, a copy of ``model``.

    The rank makes the copy, so that it is gone with the rank. A copy with hooks keeps its group, and that its threads.
    """
    return run_ranks(num_ranks, lambda group: work(group, copy.deepcopy(model)), timeout_seconds=120)


def trained_alone(
    model: nn.Module, batch: list[dict[str, Any]], begin: Callable[[dict[str, Any]], object]
) -> list[Tensor]:
    """Log-probabilities of the documents one by one, in plain transformers, and gradients of their weighted mean.

    ``begin`` is called with each document before the model runs on it.
    """
    logprobs, total = [], sum(float(d["weights"].sum()) for d in batch)
    for document in batch:
        begin(document)
        logits = model(input_ids=document["tokens"][None]).logits[0]
        own = logits.log_softmax(-1)[:-1].gather(-1, document["tokens"][1:, None])[:, 0]
        own = torch.cat([own, own.new_zeros(1)])
        (-(document["weights"] * own).sum() / total).backward()
        logprobs.append(own.detach())
    return logprobs


def trained_in_plans(
    group: dist.ProcessGroup, model: nn.Module, batch: list[dict[str, Any]], begin: Callable[[Micro], object],
    **options: Any,
) -> tuple[list[Tensor], dict[str, Tensor]]:  # fmt: skip
    """The same under ``HDP``, with its gradients. ``begin`` is called with each micro-batch before it runs."""
    plan = {"share_prefixes": options.pop("share_prefixes", False)}
    hdp = HDP(model, group, capacity_tokens=24 if group.size() > options.get("tp", 1) else 80, **options)
    hdp.adamw(lr=1e-3)
    total = sum(float(d["weights"].sum()) for d in batch)
    for micro in hdp.plan(batch, **plan):
        begin(micro)
        logprobs = micro.logprobs(model)
        (-(micro.weights * logprobs).sum() / total).backward()
        hdp.collect(micro, logprobs)
    return hdp.collected(), hdp.gradients()


def printed_loop(hdp: HDP, model: nn.Module, batch: list[dict[str, Any]], **options: Any) -> float:
    """The loop of the documentation, without the step. Returns this rank's share of the loss."""
    total = sum(float(d["weights"].sum()) for d in batch)
    loss_sum = 0.0

    def loss_of(micro: Micro) -> Tensor:
        logits = model(**micro.inputs).logits[0, : micro.num_rows]
        losses = F.cross_entropy(logits, micro.labels, reduction="none", ignore_index=-100)
        return (micro.weights * losses).sum() / total

    if hdp.mesh.shape.pp > 1:
        return hdp.plan(batch, **options).forward_backward(loss_of) / hdp.group.size
    for micro in hdp.plan(batch, **options):
        loss = loss_of(micro)
        loss.backward()
        loss_sum += float(loss.detach())
    return loss_sum


def plain_update(model: nn.Module, batch: list[dict[str, Any]], optimizer: torch.optim.Optimizer, clip: float) -> float:
    """One step of plain transformers and PyTorch in one process. Returns the loss."""
    total = sum(float(d["weights"].sum()) for d in batch)
    loss_sum = 0.0
    optimizer.zero_grad()
    for document in batch:
        logits = model(input_ids=document["tokens"][None]).logits[0]
        labels = torch.cat([document["tokens"][1:], torch.tensor([-100])])
        losses = F.cross_entropy(logits, labels, reduction="none", ignore_index=-100)
        loss = (document["weights"] * losses).sum() / total
        loss.backward()
        loss_sum += float(loss.detach())
    nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], clip)
    optimizer.step()
    return loss_sum


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


__all__ = ["documents", "on_ranks", "parameters_of", "plain_update", "printed_loop", "small_model"]
