"""Images, videos and sounds of a batch: encoded on all ranks, and handed to the rows that stand for them.

Which rank encodes an item has nothing to do with where its text is. A loop over a batch has three parts::

    encode       every rank encodes its share of the items; shares are of equal work
    text         micro-batches as planned, each with the rows of its placeholders
    backward     gradients of these rows go home and are added up, encoders run backward

Ranks wait for each other between the parts, so that a step takes the sum of the parts' longest times, and each part is
balanced for itself. Ranks without items take part in all exchanges. An item that several documents have is encoded
once. A video is shared out by frames, where its encoder sees each by itself. With checkpointing, an encoder runs again
in its backward, one piece at a time; without it, its graphs are kept.

Shape letters: n rows of an item, N rows that a rank asks for, W numbers of a row (``model.encoders``).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor

from bytescale.attention.copies import to_device
from bytescale.common.arrays import FloatArray
from bytescale.common.errors import ConfigError, DataError, RankFailure
from bytescale.hf.batch.documents import ITEM_NAMES, PLACEHOLDERS, POSITIONS, Batch, Documents, add_numbers
from bytescale.hf.model.encoders import Encoders, Form, Item, some_frames
from bytescale.hf.model.head import KINDS
from bytescale.runtime.group import RankGroup
from bytescale.runtime.plain_data import all_gather_json

if TYPE_CHECKING:
    from bytescale.cost.memory.measured import MeasuredRows
    from bytescale.hf.model.decoder import HFDecoder


class StandingFor(NamedTuple):
    """What stands for items of one kind in a micro-batch: of each placeholder the piece and its row."""

    kind: str
    pairs: list[tuple[int, int]]


class ItemPart(NamedTuple):
    """What one rank encodes at a time: an item, or some of its frames."""

    item: int
    first: int
    end: int


@dataclass(frozen=True)
class Items:
    """The items of a global batch.

    Attributes:
        items: each once, with its kind.
        lists: what single documents have, each once: by kind, places in ``items``. Text alone is the first one.
        of_documents: the place in ``lists`` of each document with items.
        work: of each item's frames, in any unit (``encoders.work_of``).
        contents: of each item a text that changes with it, where ranks do not have all of them; None: they do.
    """

    items: Sequence[tuple[str, Item]]
    lists: Sequence[Mapping[str, Sequence[int]]]
    of_documents: Mapping[int, int]
    work: Sequence[Sequence[float]]
    contents: Sequence[str] | None = None

    @staticmethod
    def of(batch: Batch, work: Callable[[str, Any], Sequence[float]]) -> Items | None:
        """None: the documents are text alone."""
        items, places = list[tuple[str, Item]](), dict[tuple[str, int], int]()
        lists, known, of_documents = [dict[str, list[int]]()], {"": 0}, dict[int, int]()
        for number, document in enumerate(batch):
            own: dict[str, list[int]] = {}
            for kind, name in zip(KINDS, ITEM_NAMES, strict=True):
                for item in document.get(name) or ():
                    place = places.setdefault((kind, id(item)), len(items))
                    if place == len(items):
                        items.append((kind, item))
                    own.setdefault(kind, []).append(place)
            if own:
                of_documents[number] = place = known.setdefault(str(own), len(lists))
                lists += [own] if place == len(lists) else []
        if not items:
            return None
        return Items(items, lists, of_documents, [work(*item) for item in items])

    def content_of(self, places: Sequence[int]) -> int:
        """A 64-bit fingerprint of some items' numbers."""
        content = xxhash.xxh3_64()
        for place in places:
            if self.contents is not None:
                content.update(self.contents[place].encode())
                continue
            for name, value in sorted(self.items[place][1].items()):
                numbers = torch.as_tensor(value).detach()
                content.update(f"{name} {list(numbers.shape)}".encode())
                add_numbers(content, numbers)
        return content.intdigest()

    def __repr__(self) -> str:
        """All but contents, the same on all ranks (``alike.digest_of``)."""
        return f"{[kind for kind, _ in self.items]} {self.work} {self.lists} {self.of_documents}"

    def with_fields(self, documents: Documents, encoders: Encoders) -> Documents:
        """``documents`` with ``PLACEHOLDERS [S, 2]`` and, for some models, rotary ``POSITIONS [S, 3]``.

        Of a placeholder: the place of its document's items in ``lists``, and its number among those of its kind; -1 of
        a word. So rows with equal fields are of equal items, and documents may share them.
        """
        own, positions = dict[int, Tensor](), dict[int, Tensor]()
        for number, tokens in documents.fields["tokens"].items():
            kinds, found = encoders.kinds_of(tokens), tokens.new_full((len(tokens), 2), -1)
            found[kinds > 0, 0] = self.of_documents.get(number, 0)
            for place in range(1, 1 + len(KINDS)):
                found[kinds == place, 1] = torch.arange(int((kinds == place).sum()), device=tokens.device)
            own[number] = found
            held = self.lists[self.of_documents.get(number, 0)]
            given = {kind: [self.items[one][1] for one in places] for kind, places in held.items()}
            if (places_of_tokens := encoders.positions(number, tokens.cpu(), given)) is not None:
                positions[number] = places_of_tokens
        fields = {**documents.fields, PLACEHOLDERS: own} | ({POSITIONS: positions} if positions else {})
        return replace(documents, fields=fields)

    def pieces(self, size: int, by_frames: Mapping[str, bool] | None = None) -> list[ItemPart]:
        """In the order of items; those of kinds that go ``by_frames`` in runs of at most an eighth of a rank's work."""
        most, found = sum(map(sum, self.work)) / size / 8, list[ItemPart]()
        for place, (frames, (kind, _)) in enumerate(zip(self.work, self.items, strict=True)):
            first, sum_of = 0, 0.0
            for number, own in enumerate(frames):
                if number > first and sum_of + own > most and (by_frames or {}).get(kind):
                    found.append(ItemPart(place, first, number))
                    first, sum_of = number, 0.0
                sum_of += own
            found.append(ItemPart(place, first, len(frames)))
        return found

    def ranks(self, size: int, pieces: Sequence[ItemPart] | None = None) -> list[int]:
        """Which rank encodes each piece: those with most work first, each on the rank with least."""
        pieces = self.pieces(size) if pieces is None else pieces
        work = [sum(self.work[place][first:end]) for place, first, end in pieces]
        loads, found = [(0.0, rank) for rank in range(size)], [0] * len(pieces)
        for number in sorted(range(len(pieces)), key=lambda number: -work[number]):
            load, rank = heapq.heappop(loads)
            found[number] = rank
            heapq.heappush(loads, (load + work[number], rank))
        return found

    def loads(self, size: int) -> FloatArray:
        """``[size]`` work of each rank, where no item is shared out."""
        return np.bincount(self.ranks(size), list(map(sum, self.work)), size).astype(np.float64)

    def memory(
        self, sizes: Sequence[Sequence[float]], size: int, num_tokens: int, rows: MeasuredRows, *,
        keeps_graphs: bool, by_frames: Mapping[str, bool] | None = None,
    ) -> tuple[float, float]:  # fmt: skip
        """Bytes of a rank of ``size``: what waits while micro-batches run, and the most that encoders need beside none.

        ``sizes``: the rows that are made of each item's frames. ``num_tokens``: of the batch, of which ranks are taken
        to have equally many. ``rows``, ``keeps_graphs``, ``by_frames``: of the model.
        """
        pieces, loads, largest = self.pieces(size, by_frames), [0.0] * size, 0.0
        for (place, first, end), rank in zip(pieces, self.ranks(size, pieces), strict=True):
            own = sum(sizes[place][first:end])
            loads[rank], largest = loads[rank] + own, max(largest, own)
        held = (places for number in self.of_documents.values() for places in self.lists[number].values())
        stand_for = sum(sum(sizes[place]) for places in held for place in places)
        kept, leaves = rows.encoder_row, rows.encoder_row * min(stand_for, num_tokens / size)
        if rows.encoder_saved > rows.encoder_row:  # it is trained, and rows that were sent have gradients
            kept, leaves = rows.encoder_saved if keeps_graphs else kept, 2 * leaves
        waiting = leaves + kept * max(loads)
        again = rows.encoder_peak - (rows.encoder_saved if keeps_graphs else 0.0)
        moved = leaves + rows.encoder_row * max(loads)  # messages
        return waiting, waiting + moved + rows.encoder_fixed + again * largest

    def require_total(self, number: int, of_kinds: Mapping[str, int], counts: Sequence[int]) -> None:
        """Raise ``DataError`` if a document has another number of placeholders than its items have rows."""
        for kind, total in of_kinds.items():
            there = sum(counts[place] for place in self.lists[self.of_documents.get(number, 0)].get(kind, ()))
            if there != total:
                raise DataError(
                    f"document {number} has {total} tokens that stand for {kind} items, which have {there} rows",
                    so="rows would stand at wrong places",
                    fix="give the tokens and the items that the model's own processor makes of one text, each item by "
                    "itself",
                )


class EncodedItems:
    """This rank's part of the items of a batch, for one loop over its micro-batches."""

    def __init__(
        self, decoder: HFDecoder, group: RankGroup, items: Items, rows: Sequence[Mapping[str, Tensor]],
        totals: Mapping[int, Mapping[str, int]], *, keeps_graphs: bool, error: str = "",
    ) -> None:  # fmt: skip
        """Encode, and ask for what the micro-batches need. All ranks of the ``group`` call it.

        ``rows``: fields of the micro-batches. ``totals``: of the documents that this rank looks at, their placeholders.
        ``keeps_graphs``: whether backward does not encode again. ``error``: what is wrong with this rank's items.
        Raises ``DataError`` on every rank where one has an item that its encoder does not take, or another number of
        placeholders than rows.
        """
        self._items, self._group, self._rows = items, group, rows
        self._encoders: Encoders = decoder.encoders
        self._token_rows = decoder.token_rows
        self._attachment, self._keeps_graphs = decoder.attachment, keeps_graphs
        size = group.size // (1 if decoder.stage is None else decoder.stage.count)  # encoders are on the first stage
        for (kind, item), frames in zip(items.items, items.work, strict=True):  # all ranks see the same items
            if kind == "video" and len(frames) > 1 and decoder.stage is None:
                self._encoders.takes_frames(kind, item)
        self._pieces = items.pieces(size, self._encoders.by_frames)
        ranks = items.ranks(size, self._pieces)
        shares: list[list[int]] = [[] for _ in range(group.size)]
        for number, rank in enumerate(ranks):
            shares[rank].append(number)
        self._own = shares[self._group.rank]
        self._encoded, forms = list[Tensor](), dict[str, Form]()
        try:
            for number in () if error else self._own:
                encoded, forms[items.items[self._pieces[number].item][0]] = self._encode(number)
                encoded = encoded if self._keeps_graphs else encoded.detach()  # the graph ends before the next one's
                self._encoded.append(encoded)
        except DataError as found:
            error = str(found)
        looked_at = self._own, shares[self._group.rank + 1 - len(shares)]
        contents = [items.content_of(sorted({self._pieces[number].item for number in own})) for own in looked_at]
        told = self._told([error, forms, [len(encoded) for encoded in self._encoded], contents])
        self._require_same([one[3] for one in told])
        self._forms = {kind: Form(*form) for _, known, *_ in told for kind, form in known.items()}
        self._trains = any(form.has_gradient for form in self._forms.values())
        of_pieces, counts = [0] * len(ranks), [0] * len(items.items)
        for numbers, (_, _, lengths, _) in zip(shares, told, strict=True):
            for number, length in zip(numbers, lengths, strict=True):
                of_pieces[number] = length
                counts[self._pieces[number].item] += length
        self._rows_of: list[list[tuple[int, int]]] = [[] for _ in counts]  # of items: pieces, and rows of these
        for number, piece in enumerate(self._pieces):
            self._rows_of[piece.item] += [(number, row) for row in range(of_pieces[number])]
        self._wanted, is_first = list[list[StandingFor]](), group.rank < size
        error = self._encoders.problem(decoder.model, self._forms, self._of_rank) if is_first else ""
        try:
            for number, of_kinds in totals.items():
                items.require_total(number, of_kinds, counts)
            self._wanted = [self._of_micro_batch(own) if is_first else [] for own in rows]
        except DataError as found:
            error = error or str(found)
        self._told([error])
        self._encoders.tried |= self._forms.keys()
        self._exchange(ranks)

    def _told(self, own: list[Any]) -> list[Any]:
        """What all ranks have to say. Raises ``DataError`` if one of them has an error, which comes first."""
        told: list[Any] = all_gather_json(own, self._group.group, self._group.device)
        if failed := [(rank, one[0]) for rank, one in enumerate(told) if one[0]]:
            raise DataError(f"rank {failed[0][0]} found: {failed[0][1]}")
        return told

    def _require_same(self, contents: Sequence[Sequence[int]]) -> None:
        """Raise ``RankFailure`` if ranks have other numbers for an item, which its rank and the one before it see."""
        for rank, (_, copied) in enumerate(contents):
            following = (rank + 1) % len(contents)
            if copied != contents[following][0]:
                raise RankFailure(
                    f"ranks {rank} and {following} have different numbers for the images that rank {following} encodes",
                    so="they would train on different data",
                    fix="give every rank the same pictures; seed what changes them at random alike",
                )

    def _encode(self, number: int) -> tuple[Tensor, Form]:
        place, first, end = self._pieces[number]
        kind, item = self._items.items[place]
        is_whole = end - first == len(self._items.work[place])
        return self._encoders.encode(kind, item if is_whole else some_frames(item, first, end))

    def _of_micro_batch(self, fields: Mapping[str, Tensor]) -> list[StandingFor]:
        """By kind, in the order of rows."""
        own_rows, found = self._of_rank(torch.arange(len(fields["tokens"]))), []
        kinds, stands = self._encoders.kinds_of(fields["tokens"][own_rows]), fields[PLACEHOLDERS][own_rows]
        for kind in self._encoders.kinds:
            placeholders = stands[kinds == 1 + KINDS.index(kind)].tolist()
            tables = {
                own: [pair for place in self._items.lists[own].get(kind, ()) for pair in self._rows_of[place]]
                for own in {own for own, _ in placeholders}
            }
            if placeholders:
                found.append(StandingFor(kind, [tables[own][row] for own, row in placeholders]))
        return found

    def _of_rank(self, tokens: Tensor) -> Tensor:
        """Of a micro-batch's ``tokens [T]``, or their numbers, those that this rank's model is given."""
        return tokens if self._token_rows is None or not len(tokens) else self._token_rows.tokens(tokens)

    def _exchange(self, ranks: Sequence[int]) -> None:
        """Ask each rank for rows of the items that it has encoded, and get them."""
        group, device = self._group, self._group.device
        wanted = [pair for of_micro in self._wanted for own in of_micro for pair in own.pairs]
        owners = torch.tensor([ranks[number] for number, _ in wanted], dtype=torch.int64)
        order = owners.argsort(stable=True)
        asked = torch.tensor(wanted, dtype=torch.int64).view(-1, 2)[order].to(device)
        self._asked = torch.bincount(owners, minlength=group.size).tolist()
        self._answered = [int(row[group.rank]) for row in group.share([float(count) for count in self._asked])]
        requests = group.all_to_all(asked, self._asked, self._answered)
        starts, at = torch.zeros(len(ranks), dtype=torch.int64), 0
        for number, rows in zip(self._own, self._encoded, strict=True):
            starts[number], at = at, at + len(rows)
        self._places, self._order = starts.to(device)[requests[:, 0]] + requests[:, 1], order.to(device)
        self._width, dtype = max((form.width, form.dtype) for form in self._forms.values())
        self._nothing = torch.empty(0, self._width, dtype=getattr(torch, dtype), device=device)
        encoded = torch.cat([self._nothing, *(self._wide(rows.detach()) for rows in self._encoded)])
        arrived = group.all_to_all(encoded[self._places], self._answered, self._asked)
        here = torch.empty_like(arrived)
        here[self._order] = arrived
        asked_for = [own for of_micro in self._wanted for own in of_micro]
        parts = zip(asked_for, here.split([len(own.pairs) for own in asked_for]), strict=True)
        self._leaves = [
            part[:, : self._forms[own.kind].width].clone().requires_grad_(self._trains) for own, part in parts
        ]

    def _wide(self, rows: Tensor) -> Tensor:
        """``rows [n, W]`` with zeros behind them where other kinds have wider ones."""
        return torch.nn.functional.pad(rows, (0, self._width - rows.shape[1]))

    def beside(self, index: int) -> dict[str, Any]:
        """What the model takes beside a micro-batch's tokens: positions of whole documents, rows of placeholders."""
        given: dict[str, Any] = {}
        fields = self._rows[index] if index < len(self._rows) else {}
        if POSITIONS in fields and len(fields["tokens"]):
            given["position_ids"] = to_device(fields[POSITIONS], self._group.device).T[:, None]
        if own := self._wanted[index] if fields else []:
            first = sum(len(before) for before in self._wanted[:index])
            rows = {one.kind: self._leaves[first + place] for place, one in enumerate(own)}
            tokens = to_device(self._of_rank(fields["tokens"]), self._group.device)
            given |= self._encoders.inputs(tokens, rows, self._forms)
        return given

    @torch.enable_grad()
    def backward(self) -> None:
        """Send the gradients of all rows home, and run the encoders backward. All ranks call it."""
        if not self._trains:
            return
        group, attachment = self._group, self._attachment
        parts = [self._wide(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad) for leaf in self._leaves]
        gradients = torch.cat([self._nothing, *parts])[self._order]
        arrived = group.all_to_all(gradients, self._asked, self._answered)
        ran_plain, at = attachment.ran_plain_backward, 0
        for number, kept in zip(self._own, self._encoded, strict=True):
            rows = kept if self._keeps_graphs else self._encode(number)[0]
            mine = (self._places >= at) & (self._places < at + len(rows))
            total = rows.new_zeros(len(rows), self._width, dtype=torch.promote_types(rows.dtype, torch.float32))
            total.index_add_(0, self._places[mine] - at, arrived[mine].to(total.dtype))
            if rows.requires_grad:
                rows.backward(total[:, : rows.shape[1]].to(rows.dtype))
            at += len(rows)
        attachment.ran_plain_backward = ran_plain
        self._leaves, self._encoded = [], []


def require_use(items: Items, decoder: HFDecoder, others: Sequence[HFDecoder] = ()) -> None:
    """Raise ``ConfigError`` where such items cannot be used. ``others``: further models."""
    if missing := {kind for kind, _ in items.items} - decoder.encoders.kinds.keys():
        raise ConfigError(
            f"documents have {', '.join(sorted(missing))} items, and {type(decoder.encoders.root).__name__} takes none "
            "that were encoded before (mm_encoder_outputs)",
            so="the model would not see them",
            fix="load the model by AutoModelForImageTextToText, or train on documents of text alone",
        )
    if others:
        raise ConfigError(
            "documents have images, videos or audios, and a second model is attached",
            so="the second model has encoders of its own, which no plan runs",
            fix="score with the second model in an HDP of its own",
        )
