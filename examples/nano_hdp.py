"""Hybrid data parallelism in one file: ByteScale's idea (SIGCOMM 2025, arXiv 2502.21231) on PyTorch alone.

A batch has documents of very different lengths, and a rank holds at most ``CAPACITY`` tokens at once. A static mesh of
data and context parallelism cuts every document for as many ranks as the longest one needs, so short ones pay for
messages that no computation hides. Hybrid data parallelism gives each document just the ranks that it needs itself:

1. ``plan`` decides from lengths alone which ranks run which documents, and in which order (Algorithm 2 of the paper).
2. ``rows_of`` cuts a document that n ranks share into 2n segments. Rank i takes segments i and 2n - 1 - i. So all ranks
   have equally many tokens and equally much of the causal mask's triangle.
3. ``RingAttention`` passes keys and values around the ranks of a micro-batch, from neighbour to neighbour. A pack of
   whole documents on one rank is a ring of one: it sends nothing.
4. ``hdp_step`` runs a rank's micro-batches. The loss is a SUM over tokens, divided by the number of targets of the
   GLOBAL batch. So the gradients of all ranks just add up, whoever computed a token: one all-reduce ends the step.
5. ``check`` compares the loss and every gradient with those of one process that reads the documents one by one.

Run it on 4 ranks. It prints the plan of a static mesh beside the hybrid one, and checks both:

    torchrun --nproc-per-node 4 examples/nano_hdp.py

It leaves out offloading, sharded optimizer states, pipelines and the loader. Shape letters: R rows (tokens) of a rank's
micro-batch, K those of another member of its ring, H heads, D width of a head.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

CAPACITY = 64  # tokens that a rank holds in one micro-batch
LENGTHS = (180, 100, 61, *range(40, 1, -1))  # of the documents of a batch: most are short
WORDS, WIDTH, HEADS, LAYERS = 97, 32, 4, 2

# For estimates, a token of this toy stands for 1K tokens of a 7B model. Seconds of a whole step on one GPU: for matrix
# products of 1K tokens, for attention of 1K tokens to each other, and to send the keys and values of 1K tokens to a
# neighbour, their gradients included (some 400 MB at 20 GB/s).
PRODUCTS, ATTENTION, MESSAGE = 0.023, 0.001, 0.02


# 1. The plan: from lengths alone, before any token is read.
@dataclass(frozen=True)
class MicroBatch:
    """Documents that run together, each of them cut over all ``ranks``. A pack on one rank is cut nowhere."""

    documents: tuple[int, ...]
    ranks: tuple[int, ...]


def seconds(lengths: list[int], num_ranks: int) -> float:
    """Estimated time of documents that share ``num_ranks`` ranks."""
    # Attention grows with the square of a length, messages with the length: only long documents hide their messages.
    tokens, pairs = sum(lengths) / num_ranks, sum(length**2 for length in lengths) / num_ranks
    return PRODUCTS * tokens + max(ATTENTION * pairs, MESSAGE * tokens * (num_ranks - 1))


def best_fit(documents: list[int], lengths: tuple[int, ...], most_tokens: int) -> list[list[int]]:
    """Packs of at most ``most_tokens``: each document goes to the fullest pack that has room for it."""
    packs: list[list[int]] = []
    for document in documents:
        filled = [sum(lengths[other] for other in pack) for pack in packs]
        with_room = [place for place, tokens in enumerate(filled) if tokens + lengths[document] <= most_tokens]
        if with_room:
            packs[max(with_room, key=filled.__getitem__)].append(document)
        else:
            packs.append([document])
    return packs


def plan(lengths: tuple[int, ...], num_ranks: int, capacity: int, num_buckets: int = 3) -> list[MicroBatch]:
    """The hybrid plan (the paper's Algorithm 2, DP-Balance): equal time for all ranks, not equally many micro-batches.

    All ranks follow this one list from top to bottom and skip the micro-batches that they are not in. So two ranks that
    meet twice meet in the same order, and ranks never wait for each other in a circle.
    """
    # Step 1. Sort documents by length, longest first, and cut them into buckets of about equal work.
    documents = sorted(range(len(lengths)), key=lambda document: -lengths[document])
    work = [seconds([lengths[document]], 1) for document in documents]
    buckets: list[list[int]] = [[] for _ in range(num_buckets)]
    for place, document in enumerate(documents):
        buckets[int(num_buckets * sum(work[:place]) / sum(work))].append(document)

    # Step 2. In each bucket, short documents are packed. A long one shares no pack, so it is a group of its own.
    groups = [best_fit(bucket, lengths, capacity) for bucket in buckets]  # [bucket][group][document]

    # Step 3. Ranks that lag behind the busiest by more than delta are served first. What they get is from the first
    # bucket that is left, so that all ranks run micro-batches of like work at any moment.
    busy, planned, delta = [0.0] * num_ranks, list[MicroBatch](), seconds([capacity], 1)
    while any(groups):
        bucket = next(bucket for bucket in groups if bucket)
        num_lagging = sum(time < max(busy) - delta for time in busy) or num_ranks
        degrees = [math.ceil(sum(lengths[document] for document in group) / capacity) for group in bucket]
        chosen = next((place for place, degree in enumerate(degrees) if degree <= num_lagging), 0)
        degree, group = degrees[chosen], bucket.pop(chosen)  # the fewest ranks that hold it
        ranks = tuple(sorted(sorted(range(num_ranks), key=busy.__getitem__)[:degree]))  # those furthest behind
        if len(ranks) < degree:
            raise ValueError(f"a document needs {degree} ranks of {capacity} tokens, and there are {num_ranks}")
        end = max(busy[rank] for rank in ranks) + seconds([lengths[document] for document in group], degree)
        for rank in ranks:
            busy[rank] = end  # they start together, when the last of them is free, and end together
        planned.append(MicroBatch(tuple(group), ranks))
    return planned


def static_plan(lengths: tuple[int, ...], num_ranks: int, capacity: int) -> list[MicroBatch]:
    """What a static mesh does: rows of as many ranks as the longest document needs, and packs as long as that."""
    degree = next(n for n in range(1, num_ranks + 1) if num_ranks % n == 0 and n * capacity >= max(lengths))
    documents = sorted(range(len(lengths)), key=lambda document: -lengths[document])
    rows = [tuple(range(first, first + degree)) for first in range(0, num_ranks, degree)]
    packs = enumerate(best_fit(documents, lengths, degree * capacity))
    return [MicroBatch(tuple(pack), rows[number % len(rows)]) for number, pack in packs]


def table(title: str, planned: list[MicroBatch], lengths: tuple[int, ...], num_ranks: int) -> str:
    """The plan for people: a line for each micro-batch, a column for each rank: its tokens and estimated seconds."""
    busy, lines = [0.0] * num_ranks, [("lengths of the documents", [f"rank {rank}" for rank in range(num_ranks)])]
    for micro_batch in planned:
        ranks, own = micro_batch.ranks, [lengths[document] for document in micro_batch.documents]
        start, needed, cells = max(busy[rank] for rank in ranks), seconds(own, len(ranks)), ["."] * num_ranks
        for member, rank in enumerate(ranks):
            tokens = sum(len(rows_of(length, member, len(ranks))) for length in own)
            busy[rank], cells[rank] = start + needed, f"{tokens} {needed:6.2f} s"
        lines.append((textwrap.shorten(" ".join(map(str, own)), 40, placeholder=" ..."), cells))
    lines.append(("the rank is ready after", [f"{end:.2f} s" for end in busy]))
    body = [f"{name:<42}" + "".join(f"{cell:>14}" for cell in cells) for name, cells in lines]
    return "\n".join([f"{title}: a step of {max(busy):.2f} s", *body])


# 2. Rows: which tokens of a micro-batch a rank holds.
def rows_of(length: int, member: int, num_members: int) -> Tensor:
    """``[R]`` positions in a document of the tokens that one of its ``num_members`` ranks holds.

    Of 2 ranks, rank 0 has segments 0 and 3, and rank 1 has 1 and 2: cheap beginnings go with expensive ends.
    """
    bounds = [length * cut // (2 * num_members) for cut in range(2 * num_members + 1)]
    return torch.cat([torch.arange(bounds[i], bounds[i + 1]) for i in (member, 2 * num_members - 1 - member)])


@dataclass(frozen=True)
class Rows:
    """What the rows of one member are."""

    tokens: Tensor  # [R]
    labels: Tensor  # [R] the next token of the document, which may be on another rank; -100 behind the last one
    documents: Tensor  # [R]
    positions: Tensor  # [R] in the document, not in the rank's piece of it: RoPE and the causal mask need these

    @staticmethod
    def of(micro_batch: MicroBatch, member: int, texts: list[Tensor]) -> Rows:
        parts = []
        for document in micro_batch.documents:
            tokens = texts[document]
            labels = torch.cat([tokens[1:], torch.tensor([-100])])
            rows = rows_of(len(tokens), member, len(micro_batch.ranks))
            parts.append((tokens[rows], labels[rows], torch.full_like(rows, document), rows))
        return Rows(*(torch.cat(column) for column in zip(*parts, strict=True)))


# 3. Attention around a ring.
@dataclass(frozen=True)
class Ring:
    """The ranks of a micro-batch in order. The plan tells each of them what all others hold, so no shape is sent."""

    ranks: tuple[int, ...]
    member: int  # which of them we are
    rows: list[Rows]  # of every member

    def rows_in(self, step: int) -> Rows:  # whose keys and values are here in a step
        return self.rows[(self.member - step) % len(self.ranks)]

    def start_passing(self, here: Tensor, step: int) -> tuple[Tensor, list[dist.Work]]:
        """Give ``here`` to the next member. Returns what arrives from the one before, and the works to wait for."""
        arriving = here.new_empty(len(here), len(self.rows_in(step + 1).positions), *here.shape[2:])
        after, before = self.ranks[(self.member + 1) % len(self.ranks)], self.ranks[self.member - 1]
        operations = [dist.P2POp(dist.isend, here, after), dist.P2POp(dist.irecv, arriving, before)]
        # One batch: if all members sent first, each might wait for its neighbour, all around the ring.
        return arriving, dist.batch_isend_irecv(operations)


def scores_of(query: Tensor, key: Tensor, ours: Rows, theirs: Rows) -> Tensor:
    """``[H, R, K]``: causal inside each document, -inf (no attention) elsewhere."""
    same_document = ours.documents[:, None] == theirs.documents
    not_later = ours.positions[:, None] >= theirs.positions
    scores = torch.einsum("rhd,khd->hrk", query, key) / math.sqrt(query.shape[-1])
    return scores.masked_fill(~(same_document & not_later), -math.inf)


class RingAttention(torch.autograd.Function):
    """Attention of a micro-batch whose rows lie on the members of a ring: ``[R, H, D]`` of queries, keys and values.

    In step t, a member computes with the keys and values that began t members before it. Of the softmax so far, a row
    keeps its output and the logarithm of its sum (lse), which suffice to merge the next part exactly.
    """

    @staticmethod
    def forward(ctx: Any, ring: Ring, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        n = len(ring.ranks)
        out = torch.zeros_like(query)  # [R, H, D]
        lse = query.new_full((query.shape[1], len(query)), -math.inf)  # [H, R]
        here = torch.stack([key, value])  # [2, K, H, D]
        for step in range(n):
            # Messages travel while we compute. What arrives last is not passed on.
            arriving, works = ring.start_passing(here, step) if step < n - 1 else (here, [])
            scores = scores_of(query, here[0], ring.rows_in(0), ring.rows_in(step))
            merged = torch.logaddexp(lse, torch.logsumexp(scores, -1))
            safe = merged.masked_fill(merged == -math.inf, 0)  # a row that has seen no key yet stays 0, not NaN
            part = torch.einsum("hrk,khd->rhd", torch.exp(scores - safe[..., None]), here[1])
            out, lse = out * torch.exp(lse - safe).T[..., None] + part, merged
            for work in works:
                work.wait()
            here = arriving
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.ring = ring
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        """Once more around: gradients travel with their keys and values. Each member adds its share; step n is home."""
        query, key, value, out, lse = ctx.saved_tensors
        ring, n, scale = ctx.ring, len(ctx.ring.ranks), 1 / math.sqrt(query.shape[-1])
        d_query, correction = torch.zeros_like(query), (d_out * out).sum(-1).T[..., None]  # of the softmax, [H, R, 1]
        here = torch.stack([key, value, torch.zeros_like(key), torch.zeros_like(value)])  # [4, K, H, D]
        for step in range(n):
            weights = torch.exp(scores_of(query, here[0], ring.rows_in(0), ring.rows_in(step)) - lse[..., None])
            d_scores = weights * (torch.einsum("rhd,khd->hrk", d_out, here[1]) - correction) * scale
            d_query += torch.einsum("hrk,khd->rhd", d_scores, here[0])
            here[2] += torch.einsum("hrk,rhd->khd", d_scores, query)
            here[3] += torch.einsum("hrk,rhd->khd", weights, d_out)
            if n > 1:
                arriving, works = ring.start_passing(here, step)
                for work in works:
                    work.wait()
                here = arriving
        return None, d_query, here[2], here[3]


# A decoder that knows nothing of ranks. It is given positions, and a function that computes attention.
def rotate(heads: Tensor, positions: Tensor) -> Tensor:
    """RoPE: ``[R, H, D]`` turned by angles that grow with the position in the document."""
    half = heads.shape[-1] // 2
    angles = (positions[:, None] / 10000 ** (torch.arange(half) / half))[:, None]  # [R, 1, D / 2]
    first, second = heads.split(half, -1)
    return torch.cat([first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos()], -1)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, hidden: Tensor, positions: Tensor, attention: Callable[..., Tensor]) -> Tensor:
        query, key, value = self.qkv(self.norm(hidden)).view(len(hidden), 3, HEADS, -1).unbind(1)
        attended = attention(rotate(query, positions), rotate(key, positions), value)
        hidden = hidden + self.out(attended.flatten(1))
        return hidden + self.mlp(self.mlp_norm(hidden))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, tokens: Tensor, positions: Tensor, attention: Callable[..., Tensor]) -> Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden, positions, attention)
        return self.head(hidden)  # [R, WORDS]


# 4. A step.
def hdp_step(model: Decoder, texts: list[Tensor], planned: list[MicroBatch], rank: int) -> Tensor:
    """Leave the gradients of the mean loss over ALL targets in ``model``, on every rank. Returns that loss."""
    num_targets = sum(len(text) - 1 for text in texts)
    loss = torch.zeros((), dtype=torch.float64)
    for micro_batch in planned:
        if rank not in micro_batch.ranks:
            continue
        member, num_members = micro_batch.ranks.index(rank), len(micro_batch.ranks)
        rows = [Rows.of(micro_batch, other, texts) for other in range(num_members)]
        ring, ours = Ring(micro_batch.ranks, member, rows), rows[member]
        logits = model(ours.tokens, ours.positions, partial(RingAttention.apply, ring))
        share = F.cross_entropy(logits, ours.labels, ignore_index=-100, reduction="sum") / num_targets
        share.backward()
        loss += share.detach()
    return add_up(loss, list(model.parameters()))


def add_up(loss: Tensor, parameters: list[nn.Parameter]) -> Tensor:
    """Sum the loss and all gradients over the ranks, in one message. A rank that had nothing to do gives zeros."""
    gradients = [torch.zeros_like(own) if own.grad is None else own.grad for own in parameters]
    flat = torch.cat([loss.view(1), *(gradient.flatten() for gradient in gradients)])
    dist.all_reduce(flat)
    for own, values in zip(parameters, flat[1:].split([own.numel() for own in parameters]), strict=True):
        own.grad = values.view_as(own).clone()
    return flat[0]


# 5. The check.
def one_process(model: Decoder, texts: list[Tensor]) -> Tensor:
    """The reference, without any line of parts 1 to 4: PyTorch's attention, whole documents, the mean of all losses."""

    def attention(*qkv: Tensor) -> Tensor:
        heads = (value.transpose(0, 1)[None] for value in qkv)
        return F.scaled_dot_product_attention(*heads, is_causal=True)[0].transpose(0, 1)

    logits = [model(text, torch.arange(len(text)), attention)[:-1] for text in texts]
    loss = F.cross_entropy(torch.cat(logits), torch.cat([text[1:] for text in texts]))
    loss.backward()
    return loss.detach()


def check(lengths: tuple[int, ...], planned: list[MicroBatch], rank: int) -> str:
    """Run a step by the plan in fp64. Raises ``AssertionError`` unless loss and gradients are those of one process."""
    torch.manual_seed(0)  # every rank has the same weights and the same documents
    model = Decoder().double()
    texts = [torch.randint(WORDS, (length,)) for length in lengths]
    expected = one_process(model, texts)
    reference = {name: own.grad for name, own in model.named_parameters()}
    model.zero_grad()
    loss = hdp_step(model, texts, planned, rank)
    assert abs(loss - expected) < 1e-10, f"the loss is {loss:.12f}, that of one process {expected:.12f}"
    differences = {name: float((own.grad - reference[name]).abs().max()) for name, own in model.named_parameters()}
    worst = max(differences, key=differences.__getitem__)
    assert differences[worst] < 1e-10, f"gradients of {worst} differ by {differences[worst]:.1e} from one process"
    return f"loss {loss:.12f}, of one process {expected:.12f}; gradients differ by at most {differences[worst]:.0e}"


def main() -> None:
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    static, hybrid = static_plan(LENGTHS, num_ranks, CAPACITY), plan(LENGTHS, num_ranks, CAPACITY)
    for title, planned in (("Static mesh", static), ("Hybrid", hybrid)):
        result = check(LENGTHS, planned, rank)
        if rank == 0:
            print(table(title, planned, LENGTHS, num_ranks), result, sep="\n", end="\n\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
