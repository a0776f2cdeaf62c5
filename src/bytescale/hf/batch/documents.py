"""A global batch as the caller has it: a list of documents, each a mapping from names to fields.

A *field* is a tensor, an array or a list with one entry per token of its document, ``[S]`` or ``[S, ...]``. A number
that holds for the whole document (an advantage, a reward) is repeated for every token. All fields are cut alike: a
rank gets the rows of its slices of all of them.

No fields are ``images``, ``videos`` and ``audios``: lists of what the model's processor returns for one of them, which
encoders turn into rows for the tokens that stand for them (``loop.encoded``). Not every document needs them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from bytescale.attention.copies import to_device
from bytescale.common.errors import DataError
from bytescale.common.labels import IGNORE_INDEX, MICRO_BATCH_NAMES
from bytescale.plan import MicroBatch, Plan, RankPlan
from bytescale.plan.trees import Forest

Batch = Sequence[Mapping[str, Any]]

TOKEN_NAMES = ("tokens", "input_ids")
ITEM_NAMES = ("images", "videos", "audios")
"""No fields: what a model's encoders turn into rows (``loop.encoded``)."""
PLACEHOLDERS, POSITIONS = ITEM_FIELDS = ("placeholders", "rotary_positions")
"""Fields that documents with such items get."""


@dataclass(frozen=True, kw_only=True)
class Documents:
    """A checked global batch, or some documents of it. S: documents of the batch.

    Attributes:
        fields: by name and number of a document, a tensor ``[length of the document, ...]``, in CPU memory or where it
            was. Those that are neither numbers nor arrays (texts, names) are left out.
        lengths: ``[S]`` tokens of each document, also of those that are not here.
        labels_were_given: and not shifted, so that they might be the tokens themselves.
    """

    fields: dict[str, dict[int, Tensor]]
    lengths: Sequence[int]
    labels_were_given: bool = False

    @staticmethod
    def of(
        batch: Batch,
        *,
        shift_labels: bool = False,
        numbers: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
    ) -> Documents:
        """Check a batch and complete it.

        ``labels[i]`` is what the model has to predict at token ``i``. Where a batch has no labels, they are the next
        tokens, and ``IGNORE_INDEX`` (-100) at a document's end. Where it has no weights, every token with a label
        weighs 1 and every other 0.

        Args:
            batch: documents, all with the same fields. ``tokens`` (or ``input_ids``) is required.
            shift_labels: whether ``labels`` are Hugging Face's, in which ``labels[i]`` belongs to token ``i`` itself.
                They are moved by one token, and so are ``weights``.
            numbers: of the documents that are wanted; None: all. Of the others only the lengths are looked at, and what
                is wrong with the batch as a whole shows in ``totals`` alone.
            lengths: what ``lengths_of`` has found, if it has been asked before.

        Raises ``DataError`` for documents without tokens, fields of other lengths, fields that only some documents
        have, labels that are the tokens themselves, or weights that sum to zero or are not numbers.
        """
        lengths = lengths_of(batch) if lengths is None else lengths
        wanted = range(len(batch)) if numbers is None else sorted({0, *numbers})  # the first one has what all have
        renamed = [_with_tokens(batch[number], number) for number in wanted]
        _require_same_fields(renamed, wanted)
        fields: dict[str, list[Tensor]] = {}
        for name in renamed[0]:
            if name in MICRO_BATCH_NAMES:
                raise DataError(
                    f"a field is called {name!r}, which a micro-batch has itself",
                    fix="leave it out (position_ids are counted from 0 in every document), or give it another name",
                )
            values = [_tensor(document[name]) for document in renamed]
            held = [value for value in values if value is not None]
            if len(held) == len(values):
                fields[name] = _token_aligned(name, held, fields, wanted)
        given = "labels" in fields and not shift_labels
        _complete(fields, shift_labels)
        by_number = {name: dict(zip(wanted, values, strict=True)) for name, values in fields.items()}
        found = Documents(fields=by_number, lengths=lengths, labels_were_given=given)
        if numbers is None:
            require_trainable(found.totals(wanted))
        return found

    def rows(self, micro_batch: MicroBatch) -> dict[str, Tensor]:
        """The rows ``[T, ...]`` of one micro-batch, of every field, in the order of its segments."""
        return {
            name: torch.cat([values[s][a:b] for s, a, b in micro_batch.runs] or [values[0][:0]])
            for name, values in self.fields.items()
        }

    def digest(self, numbers: Sequence[int]) -> int:
        """A 63-bit fingerprint of all fields of some documents, in this order."""
        content = xxhash.xxh3_64()
        for name, values in sorted(self.fields.items()):
            own = [values[number] for number in numbers]
            content.update(f"{name} {[self.lengths[number] for number in numbers]}".encode())
            if own:
                add_numbers(content, torch.cat(own))
        return content.intdigest() >> 1

    def totals(self, numbers: Sequence[int]) -> list[float]:
        """Of some documents, what is to be added over ranks for ``require_trainable``.

        The weights, the tokens with a label, and how many labels are neither ignored nor the token itself, nor the
        next one.
        """
        weights, labels, tokens = (self._joined(name, numbers) for name in ("weights", "labels", "tokens"))
        total = weights.double().sum()
        if not self.labels_were_given or not len(labels):
            return [float(total), 0.0, 0.0, 0.0]
        ends = torch.as_tensor(np.cumsum([self.lengths[number] for number in numbers]) - 1)
        following = torch.cat([tokens[1:], tokens[:1]]).index_fill(0, ends.to(tokens.device), IGNORE_INDEX)
        has_label = labels != IGNORE_INDEX
        counts = [has_label, has_label & (labels != tokens), has_label & (labels != following)]
        return torch.stack([total.cpu(), *(count.sum().double().cpu() for count in counts)]).tolist()

    def _joined(self, name: str, numbers: Sequence[int]) -> Tensor:
        values = self.fields[name]
        return torch.cat([values[number] for number in numbers] or [values[0][:0]])


def add_numbers(content: xxhash.xxh3_64, values: Tensor) -> None:
    """Add the dtype and all numbers of ``values`` to a fingerprint."""
    packed = values.cpu().contiguous().flatten()
    content.update(str(packed.dtype).encode())
    content.update(packed.view(torch.uint8).numpy().data)


def lengths_of(batch: Batch) -> list[int]:
    """``[S]`` tokens of each document. Raises ``DataError`` for what is no list of documents with tokens."""
    if not isinstance(batch, Sequence) or not all(isinstance(own, Mapping) for own in batch if type(own) is not dict):
        raise DataError(
            f"a batch is a list of documents, each a mapping of fields; this is a {type(batch).__name__}",
            fix='give [{"tokens": [...], "labels": [...]}, ...]; split padded batches into documents',
        )
    if not batch:
        raise DataError("the batch has no documents", so="there is nothing to plan", fix="leave it out")
    name = TOKEN_NAMES[TOKEN_NAMES[0] not in batch[0]]
    try:
        own = [document[name] for document in batch]
    except KeyError:
        own = [_with_tokens(document, number)["tokens"] for number, document in enumerate(batch)]
    try:  # a tensor's own length takes six times as long as its shape
        lengths = [value.shape[0] if isinstance(value, Tensor) else len(value) for value in own]
    except (TypeError, IndexError):  # a number
        lengths = [int(np.ndim(value) > 0) for value in own]
    if not min(lengths):
        number = lengths.index(0)
        raise _no_tokens(number, torch.as_tensor(own[number]))
    return lengths


def require_trainable(totals: Sequence[float]) -> None:
    """Raise ``DataError`` for a batch whose ``Documents.totals`` say that nothing good can come of it.

    Labels of Hugging Face's kind would train the model to repeat its input.
    """
    weights, num_labels, unlike_tokens, unlike_next = totals
    if num_labels and not unlike_tokens and unlike_next:
        raise DataError(
            "the labels of the batch are its tokens: labels[i] is token i",
            so="the model would learn to repeat its input",
            fix="call plan(batch, shift_labels=True), which moves Hugging Face's labels by one token",
        )
    if not math.isfinite(weights):
        raise DataError(
            f"the weights of the batch sum to {weights}",
            so="the loss and every gradient would not be numbers either",
            fix="give finite weights; 0 leaves a token out",
        )
    if weights == 0.0:
        raise DataError(
            "the weights of the batch sum to zero",
            so="a loss divided by their sum would be 0 / 0, and every parameter NaN",
            fix="leave this batch out, or give numbers that may sum to zero another name than 'weights'",
        )


def _with_tokens(document: Mapping[str, Any], number: int) -> dict[str, Any]:
    names = [name for name in TOKEN_NAMES if name in document]
    if len(names) != 1:
        raise DataError(
            f"document {number} has the fields {', '.join(map(repr, document)) or 'none'}",
            so="which of them holds its tokens cannot be told",
            fix=f"give every document exactly one of {' and '.join(map(repr, TOKEN_NAMES))}",
        )
    rest = {name: value for name, value in document.items() if name not in (names[0], *ITEM_NAMES)}
    # Hugging Face's tokenizers give a mask of ones for a document that is not padded. A mask with zeros is refused.
    mask = rest.pop("attention_mask", None)
    if mask is not None and not bool(torch.as_tensor(mask).all()):
        raise DataError(
            f"the attention_mask of document {number} has zeros",
            so="padding would be trained on as if it were text",
            fix="give every document without its padding",
        )
    return {"tokens": document[names[0]], **rest}


def _require_same_fields(documents: list[dict[str, Any]], numbers: Sequence[int]) -> None:
    first = documents[0].keys()
    for number, document in zip(numbers, documents, strict=True):
        if document.keys() != first:
            different = sorted(first ^ document.keys())
            raise DataError(
                f"document {number} and document 0 differ in the fields {', '.join(map(repr, different))}",
                so="a micro-batch has rows of several documents, and would lack them for some",
                fix="give all documents of a batch the same fields",
            )


def _tensor(value: Any) -> Tensor | None:
    """A field of one document as a tensor, or None where it holds no numbers."""
    if isinstance(value, Tensor):
        return value.detach()
    array = np.array(value)
    if array.dtype.kind not in "biuf":
        return None
    return torch.as_tensor(value) if array.dtype.kind == "f" else torch.from_numpy(array)


def _token_aligned(
    name: str, values: list[Tensor], fields: Mapping[str, list[Tensor]], numbers: Sequence[int]
) -> list[Tensor]:
    if name == "tokens":
        for number, tokens in zip(numbers, values, strict=True):
            if tokens.dim() != 1 or not len(tokens) or tokens.dtype.is_floating_point:
                raise _no_tokens(number, tokens)
        return [tokens.to(torch.int64) for tokens in values]
    like, aligned = values[0], []
    for number, value, tokens in zip(numbers, values, fields["tokens"], strict=True):
        rows = value.expand(tokens.shape[0]) if value.dim() == 0 else value
        if rows.shape[0] != tokens.shape[0] or rows.shape[1:] != like.shape[1:] or rows.dtype != like.dtype:
            raise DataError(
                f"field {name!r} of document {number} has shape {list(value.shape)} and dtype {value.dtype}; the "
                f"document has {len(tokens)} tokens, and document 0 has dtype {like.dtype}",
                so="its rows could not be cut with the tokens",
                fix="give one entry per token, or one number per document, of the same dtype everywhere",
            )
        aligned.append(rows)
    # Log-probabilities of single tokens may be infinite. Weights are looked at together (``require_trainable``).
    of_tokens, of_documents = [own for own in values if own.dim()], [own for own in values if not own.dim()]
    has_nan = bool(of_tokens) and bool(torch.cat(of_tokens).isnan().any())
    is_infinite = bool(of_documents) and not bool(torch.stack(of_documents).isfinite().all())
    if name != "weights" and (has_nan or is_infinite):
        for number, value in zip(numbers, values, strict=True):
            bad = ~value.isfinite() if value.dim() == 0 else value.isnan()
            if bool(bad.any()):
                raise DataError(
                    f"field {name!r} of document {number} {'is' if value.dim() == 0 else 'has'} {float(value[bad][0])}",
                    so="the loss and every gradient would not be numbers either",
                    fix="give numbers, or leave the document out",
                )
    return aligned


def _no_tokens(number: int, tokens: Tensor) -> DataError:
    return DataError(
        f"the tokens of document {number} have shape {list(tokens.shape)} and dtype {tokens.dtype}",
        fix="give every document at least one token, as a flat list of whole numbers",
    )


def _complete(fields: dict[str, list[Tensor]], shift_labels: bool) -> None:
    tokens = fields["tokens"]
    if "labels" not in fields:
        end = tokens[0].new_full((1,), IGNORE_INDEX)
        fields["labels"] = [torch.cat([document[1:], end.to(document.device)]) for document in tokens]
    elif shift_labels:
        end = torch.tensor([IGNORE_INDEX])
        fields["labels"] = [torch.cat([labels[1:], end.to(labels)]) for labels in fields["labels"]]
        if "weights" in fields:
            fields["weights"] = [torch.cat([w[1:], torch.zeros_like(w[:1])]) for w in fields["weights"]]
    if "weights" not in fields:
        fields["weights"] = [(labels != IGNORE_INDEX).to(torch.float32) for labels in fields["labels"]]


@dataclass(frozen=True, kw_only=True)
class RankBatch:
    """One rank's part of a planned batch: its plan and its rows. It can be pickled and sent."""

    rank_plan: RankPlan
    rows: list[dict[str, Tensor]]  # for each micro-batch its rows of every field
    no_rows: dict[str, Tensor]  # of every field, as a micro-batch without tokens has it
    lengths: list[int]  # tokens of all documents of the global batch
    forest: Forest | None = None  # where prefixes are shared: what is called a document here is one of its sequences

    @staticmethod
    def of(rank_plan: RankPlan, documents: Documents) -> RankBatch:
        """The rows of ``documents`` that belong to a rank."""
        return RankBatch(
            rank_plan=rank_plan,
            rows=[documents.rows(micro_batch) for micro_batch in rank_plan.micro_batches],
            no_rows={name: values[0][:0] for name, values in documents.fields.items()},
            lengths=list(documents.lengths),
        )


def of_documents(forest: Forest, values: Sequence[Tensor]) -> list[Tensor]:
    """``[D]`` tensors ``[length, ...]`` in the order of ``forest.documents``, from ``[U, ...]`` of each sequence."""
    places = zip(forest.sequence_of.tolist(), forest.paths, strict=True)
    return [values[sequence][to_device(torch.as_tensor(path), values[sequence].device)] for sequence, path in places]


def cut(plan: Plan, rank: int, batch: Batch, *, shift_labels: bool = False) -> RankBatch:
    """Rank ``rank``'s part of ``batch`` under ``plan``, for a driver that plans and sends each worker its rows."""
    return RankBatch.of(RankPlan.of(plan, rank), Documents.of(batch, shift_labels=shift_labels))
