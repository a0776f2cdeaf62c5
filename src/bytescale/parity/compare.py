"""One training step twice: by plain transformers, document by document, and by ``HDP`` on several ranks."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Variable
from torch.overrides import TorchFunctionMode

from bytescale.common.errors import ConfigError
from bytescale.common.labels import IGNORE_INDEX
from bytescale.config.schema import Experts
from bytescale.cost.cluster import Cluster
from bytescale.cost.model import CostModel
from bytescale.hf.loop.hdp import HDP
from bytescale.hf.loop.micro_batch import Micro
from bytescale.hf.model.blind import INDEXED
from bytescale.hf.model.interface import names_in
from bytescale.hf.model.selectors import LowestFirst
from bytescale.parity.thread_ranks import run_ranks
from bytescale.plan import Plan
from bytescale.plan.plan import GroupSpec
from bytescale.planner.adaptive.aligned import align

Document = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One comparison. ``seed`` decides documents and plan."""

    num_ranks: int = 3
    tp: int = 1
    pp: int = 1
    lengths: tuple[int, ...] = (37, 1, 8, 3, 24)
    seed: int = 0
    planner: str = "random"
    """``random``: any groups of any ranks; otherwise one of ``HDP``'s planners, with room for a third of the tokens."""
    equal_counts: bool = False
    domain: int = 1
    """Consecutive ranks that share the layers' parameters."""
    experts: Experts = "gathered"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Largest differences, relative to the reference.

    Gradients are compared parameter by parameter, relative to the parameter's largest gradient, or to a thousandth of
    the model's largest where that is more (some gradients are zero but for rounding, such as those of key biases).
    """

    loss: float
    logprobs: float
    gradients: dict[str, float]

    @property
    def worst(self) -> float:
        return max(self.loss, self.logprobs, *self.gradients.values())


@dataclass(frozen=True, kw_only=True)
class StepNumbers:
    """What one step gives: the loss, per document the log-probabilities of its labels, and all gradients."""

    loss: float
    logprobs: list[Tensor]
    gradients: dict[str, Tensor]


def compare(model: nn.Module, setup: Setup) -> Comparison:
    """Compare ``model``, which stays as it is, with itself under ``HDP``. Raises ``ConfigError`` if it is refused."""
    HDP(copy.deepcopy(model), capacity_tokens=1).detach()  # a refusal says more than an error of the model's own
    documents = random_documents(model, setup)
    reference = plain_step(copy.deepcopy(model), documents)
    return difference(reference, planned_step(model, documents, setup))


def random_documents(model: nn.Module, setup: Setup) -> list[Document]:
    """Documents with random tokens, labels of which a fifth is masked, and real-valued weights."""
    generator = torch.Generator().manual_seed(setup.seed)
    ends: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]  # type: ignore[operator]
    words = min(len(end.weight) for end in ends if hasattr(end, "weight"))
    documents = []
    for length in setup.lengths:
        tokens = torch.randint(2, words, (length,), generator=generator)
        labels = torch.cat([tokens[1:], torch.tensor([IGNORE_INDEX])])
        labels[torch.rand(length, generator=generator) < 0.2] = IGNORE_INDEX
        weights = torch.rand(length, generator=generator, dtype=torch.float64) + 0.1
        documents.append({"tokens": tokens, "labels": labels, "weights": weights})
    return documents


def plain_step(model: nn.Module, documents: list[Document]) -> StepNumbers:
    """The reference: every document alone, by the model as it is."""
    total = float(sum(document["weights"].sum() for document in documents))
    loss_sum, logprobs = 0.0, []
    chooses = any(names_in(module) & INDEXED for module in model.modules())
    for document in documents:
        with WideCasts(), LowestFirst() if chooses else nullcontext():
            logits = model(input_ids=document["tokens"][None], use_cache=False).logits[0]
            losses = F.cross_entropy(logits, document["labels"], reduction="none", ignore_index=IGNORE_INDEX)
            loss = (document["weights"].to(losses.dtype) * losses).sum() / total
            loss.backward()
        loss_sum += float(loss.detach())
        logprobs.append(-losses.detach())
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return StepNumbers(loss=loss_sum, logprobs=logprobs, gradients=gradients)


def planned_step(model: nn.Module, documents: list[Document], setup: Setup) -> StepNumbers:
    """The same step by ``HDP``, on ranks that are threads of this process."""
    lengths = [len(document["tokens"]) for document in documents]
    total = float(sum(document["weights"].sum() for document in documents))
    plan, num_hdp = None, setup.num_ranks // (setup.tp * setup.pp)
    if setup.planner == "random":
        alike = {"domain": setup.domain, "num_stages": setup.pp}
        plan = random_plan(lengths, num_hdp, setup.seed, weighted=max(alike.values()) == 1, **alike)
    capacity = max(-(-sum(lengths) // 3), -(-max(lengths) // num_hdp) + 1)

    def one_rank(group: dist.ProcessGroup) -> StepNumbers:
        own = copy.deepcopy(model)  # here, because what is older than the ranks outlives them, with its groups' threads
        hdp = HDP(
            own,
            group,
            capacity_tokens=capacity,
            tp=setup.tp,
            pp=setup.pp,
            planner="adaptive" if setup.planner == "random" else setup.planner,  # type: ignore[arg-type]
            equal_counts=setup.equal_counts,
            shard="parameters" if setup.domain > 1 else "optimizer",
            domain=setup.domain,
            experts=setup.experts,
        )
        hdp.optimizer(torch.optim.SGD, lr=0.0)

        def loss_of(micro: Micro) -> Tensor:
            logits = own(**micro.inputs).logits[0, : micro.num_rows]
            losses = F.cross_entropy(logits, micro.labels, reduction="none", ignore_index=IGNORE_INDEX)
            return (micro.weights.to(losses.dtype) * losses).sum() / total

        with WideCasts():
            loss = hdp.plan(documents, plan=plan).forward_backward(loss_of)
        gradients = hdp.gradients()
        hdp.zero_grad()
        with WideCasts(), torch.no_grad():
            planned = hdp.plan(documents, plan=plan)
            planned.forward_backward(lambda micro: hdp.collect(micro, micro.logprobs(own, rows_at_a_time=7)))
        return StepNumbers(loss=loss, logprobs=hdp.collected(), gradients=gradients)

    try:
        results = run_ranks(setup.num_ranks, one_rank)
    except AssertionError as error:
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from None
        raise
    return results[-1]


def difference(reference: StepNumbers, ours: StepNumbers) -> Comparison:
    largest = max(float(gradient.abs().max()) for gradient in reference.gradients.values())
    missing = {name for name, gradient in ours.gradients.items() if name not in reference.gradients and gradient.any()}
    assert not missing, f"gradients that the reference does not have: {sorted(missing)}"
    return Comparison(
        loss=abs(ours.loss - reference.loss) / abs(reference.loss),
        logprobs=max(
            float((a - b).abs().max()) / max(1.0, float(b.abs().max()))
            for a, b in zip(ours.logprobs, reference.logprobs, strict=True)
        ),
        gradients={
            name: float((ours.gradients[name] - gradient).abs().max())
            / max(float(gradient.abs().max()), 1e-3 * largest)
            for name, gradient in reference.gradients.items()
        },
    )


def random_plan(
    lengths: Sequence[int], num_ranks: int, seed: int, *, weighted: bool = False, domain: int = 1, num_stages: int = 1
) -> Plan:
    """A plan that respects every rule except that capacity is whatever it takes.

    Sequences are thrown together into groups of random ranks in random member order, with a random shape. Local groups
    join the micro-batches of shared ones or get their own, wherever they fall. For lockstep domains and for pipelines,
    which equal shares are needed for, the plan is aligned.
    """
    random = np.random.default_rng(seed)
    sequences = random.permutation(len(lengths))
    cuts = np.sort(random.integers(0, len(lengths) + 1, size=random.integers(0, len(lengths) + 1)))
    groups: list[GroupSpec] = []
    for members in np.split(sequences, cuts):
        if not len(members):
            continue
        size = int(random.integers(1, num_ranks + 1))
        ranks = random.permutation(num_ranks)[:size].tolist()
        weights = random.integers(1, 5, size).tolist() if weighted else ()
        columns = int(random.choice([columns for columns in range(1, size + 1) if size % columns == 0]))
        groups.append(GroupSpec(sequences=members.tolist(), ranks=ranks, weights=weights, columns=columns))
    schedule: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    for number, group in enumerate(groups):
        for rank in group.ranks:
            micro_batches = schedule[rank]
            local = len(group.ranks) == 1
            if local and micro_batches and random.random() < 0.5:
                micro_batches[int(random.integers(len(micro_batches)))].append(number)
            else:
                micro_batches.append([number])
    # A local group may be what a later shared group joins: the shared one goes first in the micro-batch.
    for rank, micro_batches in enumerate(schedule):
        merged: list[list[int]] = []
        for micro_batch in micro_batches:
            previous_is_local = bool(merged) and all(len(groups[group].ranks) == 1 for group in merged[-1])
            if previous_is_local and random.random() < 0.5:
                merged[-1] = micro_batch + merged[-1]
            else:
                merged.append(micro_batch)
        schedule[rank] = merged
    capacity = int(np.sum(lengths))
    plan = Plan.build(
        lengths=lengths, capacity_tokens=[capacity] * num_ranks, groups=groups, schedule=schedule, planner="random"
    )
    if domain > 1 or num_stages > 1:
        plan = align(plan, cluster=Cluster.uniform(num_ranks, capacity), cost=CostModel.from_work())
    return replace(plan, domain=domain)


class WideCasts(TorchFunctionMode):
    """Within it, a conversion of fp64 numbers to fp32 leaves them in fp64.

    Many norms, routers and recurrences compute in fp32. Sums in another order then differ by 1e-6, and a mistake of
    that size would not show. A mode holds for one thread, hence for one rank of ``thread_ranks``.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call ``func`` with fp64 for fp32, if a number that it is given is fp64."""
        kwargs = kwargs or {}
        if func is Tensor.backward:
            # Layers may be computed again, for which the mode has to hold. Functions that it is asked about run
            # without it, hence the engine's own, which it is not asked about.
            gradient = kwargs.get("gradient")
            gradient = torch.ones_like(args[0]) if gradient is None else gradient
            with self:
                return Variable._execution_engine.run_backward(
                    (args[0],), (gradient,), False, False, (), True, accumulate_grad=True
                )
        if any(isinstance(given, Tensor) and given.dtype == torch.float64 for given in (*args, *kwargs.values())):
            if func is Tensor.float:
                return args[0]
            args = [torch.float64 if given is torch.float32 else given for given in args]
            kwargs = {name: torch.float64 if given is torch.float32 else given for name, given in kwargs.items()}
        return func(*args, **kwargs)
