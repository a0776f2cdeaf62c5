"""One training step two ways: under a plan on several ranks, and by the plain one-process reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bytescale.attention import select_kernel
from bytescale.common.labels import IGNORE_INDEX
from bytescale.plan import MicroBatch, Plan, RankPlan
from bytescale.runtime.executor import Decoder, Executor
from bytescale.runtime.mesh import Mesh, MeshShape
from bytescale.runtime.optimizer.flat import FlatParameters
from tests.helpers.decoder import PlainDecoder, Sizes
from tests.helpers.reference_attention import reference_attention
from tests.helpers.reference_loss import reference_cross_entropy

from .ranks import run_mesh


def make_model(sizes: Sizes, dtype: torch.dtype, seed: int = 0) -> PlainDecoder:
    """With random weights of 0.02, smaller where they write to the residual stream. Norms are ones."""
    generator = torch.Generator().manual_seed(seed)
    model = PlainDecoder(sizes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                parameter.normal_(0.0, 0.02 / (2 * sizes.num_layers if residual else 1) ** 0.5, generator=generator)
    return model.to(dtype)


@dataclass
class Batch:
    """Tokens and labels of every sequence of a global batch, and the weights of the labels; None: all are 1."""

    tokens: list[Tensor]
    labels: list[Tensor]
    weights: list[Tensor] | None = None

    @property
    def lengths(self) -> list[int]:
        return [len(tokens) for tokens in self.tokens]

    @property
    def num_targets(self) -> int:
        return sum(int((labels != IGNORE_INDEX).sum()) for labels in self.labels)


def random_batch(
    lengths: Sequence[int], vocab_size: int, seed: int, masked_share: float = 0.2, *, real_weights: bool = False
) -> Batch:
    """Random tokens; labels are the next tokens, some of them masked out. ``real_weights``: they weigh -1 to 1."""
    generator = torch.Generator().manual_seed(seed)
    tokens, labels = [], []
    for length in lengths:
        sequence = torch.randint(vocab_size, (length,), generator=generator)
        label = torch.cat([sequence[1:], torch.tensor([IGNORE_INDEX])])
        label[torch.rand(length, generator=generator) < masked_share] = IGNORE_INDEX
        tokens.append(sequence)
        labels.append(label)
    draws = [2 * torch.rand(length, generator=generator, dtype=torch.float64) - 1 for length in lengths]
    return Batch(tokens, labels, draws if real_weights else None)


@dataclass
class MicroBatchTokens:
    tokens: Tensor
    labels: Tensor
    position_ids: Tensor
    weights: Tensor | None = None


def slice_batch(batch: Batch, micro_batch: MicroBatch) -> MicroBatchTokens:
    """What a loader does, spelled out: the tokens and labels of a micro-batch's segments."""
    segments = list(
        zip(
            micro_batch.segment_sequences.tolist(),
            micro_batch.segment_starts.tolist(),
            micro_batch.segment_stops.tolist(),
            strict=True,
        )
    )
    empty = [torch.zeros(0, dtype=torch.int64)]
    return MicroBatchTokens(
        tokens=torch.cat([batch.tokens[s][a:b] for s, a, b in segments] or empty),
        labels=torch.cat([batch.labels[s][a:b] for s, a, b in segments] or empty),
        position_ids=torch.as_tensor(micro_batch.position_ids()),
        weights=None if batch.weights is None else torch.cat([batch.weights[s][a:b] for s, a, b in segments] or empty),
    )


@dataclass
class StepOutcome:
    loss: float  # mean over the targets of the global batch
    gradients: dict[str, Tensor]
    bytes_sent: list[int]
    batch_loss: float = 0.0


def reference_step(model: PlainDecoder, batch: Batch) -> StepOutcome:
    """Every document on its own through SDPA, all logits at once: no packing, no ring, no chunks."""
    total = torch.zeros((), dtype=torch.float64)
    model.zero_grad()
    for tokens, labels, weights in zip(
        batch.tokens, batch.labels, batch.weights or [None] * len(batch.tokens), strict=True
    ):
        hidden = model(tokens, torch.arange(len(tokens)), lambda q, k, v: reference_attention(q, k, v, [len(q)]))
        loss = reference_cross_entropy(hidden, model.head_weight, labels, 0.0, weights) / batch.num_targets
        loss.backward()
        total += loss.detach().double()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    return StepOutcome(float(total), gradients, [])


def planned_step(
    make: Callable[[], PlainDecoder], batch: Batch, plan: Plan, kernel: str = "auto", nodes: Sequence[int] | None = None
) -> StepOutcome:
    """The same step under ``plan``, one thread per rank; gradients as the reduce-scatter sums them."""

    def one_rank(mesh: Mesh) -> tuple[float, Tensor, int, list]:
        hdp = mesh.hdp
        model = make()
        flat = FlatParameters(model.named_parameters(), hdp.size)
        rank_plan = RankPlan.of(plan, hdp.rank)
        result = Executor(
            part=Decoder(module=model),
            kernel=select_kernel(kernel, torch.device("cpu"), flat.values.dtype),
            mesh=mesh,
        ).run(
            rank_plan,
            [slice_batch(batch, micro_batch) for micro_batch in rank_plan.micro_batches],
            num_global_targets=batch.num_targets,
        )
        sent = sum(group.exchange.bytes_sent for group in mesh.ring_groups())
        return result.loss_sum, hdp.reduce_scatter(flat.gradients), sent, flat.entries

    outcomes = run_mesh(MeshShape(hdp=plan.num_ranks), one_rank, nodes=nodes)
    flat_gradient = torch.cat([shard for _, shard, _, _ in outcomes])
    gradients = {e.name: flat_gradient[e.start : e.stop].view(e.shape) for e in outcomes[0][3]}
    loss = sum(loss_sum for loss_sum, _, _, _ in outcomes) / batch.num_targets
    return StepOutcome(loss, gradients, [sent for _, _, sent, _ in outcomes])


def worst_relative_error(ours: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    """Largest ``|ours - reference| / |reference|`` (2-norms) over the parameters.

    A gradient that is zero in exact arithmetic (of the query and key weights, when every sequence has one token) is
    rounding noise on some processors and zero on others. A gradient below 1e-4 of all gradients together is therefore
    measured against that.
    """
    assert ours.keys() == reference.keys()
    floor = 1e-4 * float(torch.cat([gradient.flatten().double() for gradient in reference.values()]).norm())
    return max(
        float((ours[name] - reference[name]).norm() / reference[name].norm().clamp_min(floor)) for name in reference
    )
