"""Hybrid data parallelism in one file: ByteScale's idea (SIGCOMM 2025, arXiv 2502.21231), and nothing else of ours.

A batch has documents of very different lengths, and a rank holds at most ``CAPACITY`` tokens at once. A static mesh
would cut every document for the longest one. Here a document takes as many ranks as it needs, for one micro-batch:

1. ``plan`` decides from lengths alone which ranks run which documents, and in which order (after Algorithm 2).
2. ``rows_of`` cuts a document that n ranks share into 2n segments. Rank i takes segments i and 2n - 1 - i, so that all
   have equally much of the triangle below the diagonal.
3. ``RingAttention`` passes keys and values around the ranks that share a document, by messages from neighbour to
   neighbour, and merges softmaxes of parts. A pack of short documents is a ring of one rank: it sends nothing.
4. The loss is a SUM over tokens, divided by the number of targets of the whole batch. So gradients of ranks just add
   up, whichever rank has computed a token: one all-reduce at the end of the step, and no barrier before it.

Run it on 4 ranks. It compares loss and gradients with those of one process that reads the documents one by one:

    torchrun --nproc-per-node 4 examples/nano_hdp.py

Shape letters: R rows of a rank's micro-batch, K keys of a member, H heads, D width of a head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

CAPACITY = 64  # tokens that a rank holds in one micro-batch
LENGTHS = (220, 100, 61, 40, 33, 30, 22, 20, 17, 13, 12, 9, 7, 5, 3, 2)  # of the documents of a batch
WORDS, WIDTH, HEADS, LAYERS = 97, 32, 4, 2


# 1. The plan.


@dataclass(frozen=True)
class MicroBatch:
    """Documents that run together: one that several ranks share, or a pack of whole ones on one rank."""

    documents: tuple[int, ...]
    ranks: tuple[int, ...]


def seconds(length: int) -> float:
    """What a document costs: products that grow with its tokens, and attention that grows with their square."""
    return length + length**2 / 64


def plan(lengths: tuple[int, ...], num_ranks: int, capacity: int) -> list[MicroBatch]:
    """Micro-batches in the order in which every rank runs those that it is in.

    After the paper's Algorithm 2: a document takes ceil(s / C) ranks. Longest first, each goes to the ranks that have
    least to do so far. A short one fills the pack that its rank has begun, or begins a new one. So ranks get equal
    times, not equal numbers of documents.

    The order is one for all ranks: two ranks that share two documents meet at both in the same order, and never wait
    for each other in a circle.
    """
    busy = [0.0] * num_ranks
    planned: list[MicroBatch] = []
    open_pack: dict[int, int] = {}  # by rank, the place in ``planned`` of the pack that it has begun
    for document in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        length = lengths[document]
        degree = math.ceil(length / capacity)
        if degree > num_ranks:
            raise ValueError(f"{length} tokens need {degree} ranks of {capacity} tokens, and there are {num_ranks}")
        ranks = tuple(sorted(sorted(range(num_ranks), key=busy.__getitem__)[:degree]))
        for rank in ranks:
            busy[rank] += seconds(length) / degree
        pack = planned[open_pack[ranks[0]]] if degree == 1 and ranks[0] in open_pack else None
        if pack is not None and sum(lengths[number] for number in pack.documents) + length <= capacity:
            planned[open_pack[ranks[0]]] = MicroBatch((*pack.documents, document), ranks)
            continue
        if degree == 1:
            open_pack[ranks[0]] = len(planned)
        planned.append(MicroBatch((document,), ranks))
    return planned


# 2. Which rows a rank has.


def rows_of(length: int, member: int, num_members: int) -> Tensor:
    """``[R]`` positions of the tokens that a member holds: segments i and 2n - 1 - i of 2n nearly equal ones."""
    bounds = [length * cut // (2 * num_members) for cut in range(2 * num_members + 1)]
    first, second = member, 2 * num_members - 1 - member
    return torch.cat([torch.arange(bounds[part], bounds[part + 1]) for part in (first, second)])


@dataclass(frozen=True)
class Rows:
    """What a rank reads of a micro-batch: its tokens, where they stand, and in which document."""

    tokens: Tensor  # [R]
    labels: Tensor  # [R] the next token; -100 behind a document's last one
    positions: Tensor  # [R] in the document
    documents: Tensor  # [R]


def read(micro_batch: MicroBatch, member: int, num_members: int, texts: list[Tensor]) -> Rows:
    parts = []
    for number in micro_batch.documents:
        text = texts[number]
        positions = rows_of(len(text), member, num_members)
        labels = torch.cat([text[1:], torch.tensor([-100])])
        parts.append((text[positions], labels[positions], positions, torch.full_like(positions, number)))
    return Rows(*(torch.cat(column) for column in zip(*parts, strict=True)))


# 3. Attention around a ring.


def pass_on(values: list[Tensor], ranks: tuple[int, ...], member: int) -> list[Tensor]:
    """Give ``values`` to the next member, and take those of the one before. Their number of rows travels first."""
    after, before = ranks[(member + 1) % len(ranks)], ranks[member - 1]

    def swap(sent: list[Tensor], received: list[Tensor]) -> list[Tensor]:
        sends = [dist.P2POp(dist.isend, value.contiguous(), after) for value in sent]
        takes = [dist.P2POp(dist.irecv, value, before) for value in received]
        for work in dist.batch_isend_irecv(sends + takes):
            work.wait()
        return received

    (rows,) = swap([torch.tensor([len(values[0])])], [torch.zeros(1, dtype=torch.long)])
    return swap(values, [value.new_empty(int(rows), *value.shape[1:]) for value in values])


def scores_of(query: Tensor, key: Tensor, own: Rows, where: Tensor) -> Tensor:
    """``[H, R, K]`` scores; -inf where a key is of another document or comes later. ``where [K, 2]``: of keys."""
    sees = (own.documents[:, None] == where[:, 1]) & (own.positions[:, None] >= where[:, 0])
    scores = torch.einsum("rhd,khd->hrk", query, key) / math.sqrt(query.shape[-1])
    return scores.masked_fill(~sees, -math.inf)


class RingAttention(torch.autograd.Function):
    """Causal attention of a micro-batch whose rows lie on the members of a ring.

    Forward: n times, compute with the keys and values at hand, and pass them on. Of the softmax so far, a row keeps its
    output and the logarithm of its sum (lse), with which parts are merged. Backward goes around once more: keys and
    values travel together with their gradients, to which every member adds its share, and come home at the end.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, own: Rows, ranks: tuple[int, ...], member: int
    ) -> Tensor:
        where = torch.stack([own.positions, own.documents], 1)
        out = torch.zeros_like(query)  # [R, H, D]
        lse = query.new_full((query.shape[1], len(query)), -math.inf)  # [H, R]
        travelling = [key, value, where]
        for step in range(len(ranks)):
            keys, values, places = travelling
            scores = scores_of(query, keys, own, places)
            part_lse = torch.logsumexp(scores, -1)
            weights = torch.exp(scores - part_lse.masked_fill(part_lse == -math.inf, 0)[..., None])
            part = torch.einsum("hrk,khd->rhd", weights, values)
            total = torch.logaddexp(lse, part_lse)
            safe = total.masked_fill(total == -math.inf, 0)
            out = out * torch.exp(lse - safe).T[..., None] + part * torch.exp(part_lse - safe).T[..., None]
            lse = total
            if step < len(ranks) - 1:
                travelling = pass_on(travelling, ranks, member)
        ctx.save_for_backward(query, key, value, where, out, lse)
        ctx.rest = own, ranks, member
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, where, out, lse = ctx.saved_tensors
        own, ranks, member = ctx.rest
        scale = 1 / math.sqrt(query.shape[-1])
        correction = (d_out * out).sum(-1).T[..., None]  # [H, R, 1] what the softmax's own derivative takes away
        d_query = torch.zeros_like(query)
        travelling = [key, value, where, torch.zeros_like(key), torch.zeros_like(value)]
        for _ in range(len(ranks)):
            keys, values, places, d_keys, d_values = travelling
            weights = torch.exp(scores_of(query, keys, own, places) - lse[..., None])
            d_values = d_values + torch.einsum("hrk,rhd->khd", weights, d_out)
            d_scores = weights * (torch.einsum("rhd,khd->hrk", d_out, values) - correction) * scale
            d_query += torch.einsum("hrk,khd->rhd", d_scores, keys)
            d_keys = d_keys + torch.einsum("hrk,rhd->khd", d_scores, query)
            travelling = [keys, values, places, d_keys, d_values]
            if len(ranks) > 1:
                travelling = pass_on(travelling, ranks, member)
        return d_query, travelling[3], travelling[4], None, None, None


def ring_attention(own: Rows, ranks: tuple[int, ...], member: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """``[R, H, D]``: the output for this member's rows."""
    return RingAttention.apply(query, key, value, own, ranks, member)


# A model that knows nothing of ranks: it is given rows and a function for attention.


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor, attention: Any) -> Tensor:
        query, key, value = self.qkv(F.layer_norm(hidden, [WIDTH])).view(len(hidden), 3, HEADS, -1).unbind(1)
        hidden = hidden + self.out(attention(query, key, value).flatten(1))
        return hidden + self.down(F.gelu(self.up(F.layer_norm(hidden, [WIDTH]))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def loss_sum(self, rows: Rows, attention: Any) -> Tensor:
        """The sum of the cross-entropies of all rows that have a label."""
        turns = rows.positions[:, None] / 100.0 ** (torch.arange(WIDTH // 2) / WIDTH)
        hidden = self.embedding(rows.tokens) + torch.cat([turns.sin(), turns.cos()], 1)
        for layer in self.layers:
            hidden = layer(hidden, attention)
        return F.cross_entropy(self.head(hidden), rows.labels, ignore_index=-100, reduction="sum")


# 4. A step: every rank runs its micro-batches, and gradients are added up once.


def hdp_step(model: Model, texts: list[Tensor], planned: list[MicroBatch], rank: int) -> Tensor:
    """Leave the gradients of the mean loss over ALL targets in ``model``, on every rank. Returns that loss."""
    num_targets = sum(len(text) - 1 for text in texts)
    loss = torch.zeros(())
    for micro_batch in planned:
        if rank not in micro_batch.ranks:
            continue
        ranks, member = micro_batch.ranks, micro_batch.ranks.index(rank)
        rows = read(micro_batch, member, len(ranks), texts)
        share = model.loss_sum(rows, partial(ring_attention, rows, ranks, member)) / num_targets
        share.backward()
        loss += share.detach()
    gradients = [torch.zeros_like(own) if own.grad is None else own.grad for own in model.parameters()]
    flat = torch.cat([loss.view(1), *(gradient.flatten() for gradient in gradients)])
    dist.all_reduce(flat)  # the sum
    for own, values in zip(
        model.parameters(), flat[1:].split([own.numel() for own in model.parameters()]), strict=True
    ):
        own.grad = values.view_as(own).clone()
    return flat[0]


def one_process(model: Model, texts: list[Tensor]) -> Tensor:
    """The same by PyTorch's own attention, document by document: the reference."""

    def attention(*qkv: Tensor) -> Tensor:
        heads = (value.transpose(0, 1)[None] for value in qkv)
        return F.scaled_dot_product_attention(*heads, is_causal=True)[0].transpose(0, 1)

    num_targets = sum(len(text) - 1 for text in texts)
    loss = torch.zeros(())
    for number in range(len(texts)):
        share = model.loss_sum(read(MicroBatch((number,), (0,)), 0, 1, texts), attention) / num_targets
        share.backward()
        loss += share.detach()
    return loss


def main() -> None:
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)  # every rank has the same weights and the same documents
    model = Model()
    texts = [torch.randint(WORDS, (length,)) for length in LENGTHS]
    planned = plan(LENGTHS, num_ranks, CAPACITY)
    if rank == 0:
        for own in planned:
            print(f"{[LENGTHS[number] for number in own.documents]} on ranks {list(own.ranks)}")
    expected = one_process(model, texts)
    reference = [own.grad.clone() for own in model.parameters() if own.grad is not None]
    model.zero_grad()
    loss = hdp_step(model, texts, planned, rank)
    worst = max(float((own.grad - one).abs().max()) for own, one in zip(model.parameters(), reference, strict=True))
    if rank == 0:
        print(f"loss {loss:.12f}, of one process {expected:.12f}; gradients differ by at most {worst:.1e}")
    assert abs(float(loss - expected)) < 1e-10, "the loss is not that of one process"
    assert worst < 1e-10, "the gradients are not those of one process"
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
