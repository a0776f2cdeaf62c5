"""A global batch as the caller has it: a list of documents, each a mapping from names to fields.

A *field* is a tensor, an array or a list with one entry per token of its document, ``[S]`` or ``[S, ...]``. A number
that holds for the whole document (an advantage, a reward) is repeated for every token. All fields are cut alike: a
rank gets the rows of its slices of all of them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bytescale.common.errors import DataError
from bytescale.common.labels import IGNORE_INDEX, MICRO_BATCH_NAMES
from bytescale.plan import MicroBatch, Plan, RankPlan
from bytescale.plan.trees import Forest

Batch = Sequence[Mapping[str, Any]]

TOKEN_NAMES = ("tokens", "input_ids")


@dataclass(frozen=True, kw_only=True)
class Documents:
    """A checked global batch. S: documents.

    Attributes:
        fields: by name, one tensor ``[length of the document, ...]`` per document, in CPU memory or where it was.
            Those that are neither numbers nor arrays (texts, names) are left out.
    """

    fields: dict[str, list[Tensor]]

    @property
    def lengths(self) -> list[int]:
        """``[S]`` tokens of each document."""
        return [len(tokens) for tokens in self.fields["tokens"]]

    @staticmethod
    def of(batch: Batch, *, shift_labels: bool = False) -> Documents:
        """Check a batch and complete it.

        ``labels[i]`` is what the model has to predict at token ``i``. Where a batch has no labels, they are the next
        tokens, and ``IGNORE_INDEX`` (-100) at a document's end. Where it has no weights, every token with a label
        weighs 1 and every other 0.

        Args:
            batch: documents, all with the same fields. ``tokens`` (or ``input_ids``) is required.
            shift_labels: whether ``labels`` are Hugging Face's, in which ``labels[i]`` belongs to token ``i`` itself.
                They are moved by one token, and so are ``weights``.

        Raises ``DataError`` for documents without tokens, fields of other lengths, fields that only some documents
        have, labels that are the tokens themselves, or weights that sum to zero or are not numbers.
        """
        if not isinstance(batch, Sequence) or not all(isinstance(document, Mapping) for document in batch):
            raise DataError(
                f"a batch is a list of documents, each a mapping of fields; this is a {type(batch).__name__}",
                fix='give [{"tokens": [...], "labels": [...]}, ...]; split padded batches into documents',
            )
        if not batch:
            raise DataError("the batch has no documents", so="there is nothing to plan", fix="leave it out")
        renamed = [_with_tokens(document, number) for number, document in enumerate(batch)]
        _require_same_fields(renamed)
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
                fields[name] = _token_aligned(name, held, fields)
        _complete(fields, shift_labels)
        return Documents(fields=fields)

    def rows(self, micro_batch: MicroBatch) -> dict[str, Tensor]:
        """The rows ``[T, ...]`` of one micro-batch, of every field, in the order of its segments."""
        return {
            name: torch.cat([values[s][a:b] for s, a, b in micro_batch.runs] or [values[0][:0]])
            for name, values in self.fields.items()
        }

    def digest(self) -> int:
        """A 63-bit fingerprint of all fields, which ranks compare before they start."""
        content = hashlib.blake2b(digest_size=8)
        for name, values in sorted(self.fields.items()):
            content.update(f"{name} {values[0].dtype}".encode())
            for value in values:
                content.update(np.int64(len(value)).tobytes())
                packed = value.cpu().clone(memory_format=torch.contiguous_format)
                content.update(packed.flatten().view(torch.uint8).numpy().tobytes())
        return int.from_bytes(content.digest(), "little") >> 1


def _with_tokens(document: Mapping[str, Any], number: int) -> dict[str, Any]:
    names = [name for name in TOKEN_NAMES if name in document]
    if len(names) != 1:
        raise DataError(
            f"document {number} has the fields {', '.join(map(repr, document)) or 'none'}",
            so="which of them holds its tokens cannot be told",
            fix=f"give every document exactly one of {' and '.join(map(repr, TOKEN_NAMES))}",
        )
    rest = {name: value for name, value in document.items() if name != names[0]}
    # Hugging Face's tokenizers give a mask of ones for a document that is not padded. A mask with zeros is refused.
    mask = rest.pop("attention_mask", None)
    if mask is not None and not bool(torch.as_tensor(mask).all()):
        raise DataError(
            f"the attention_mask of document {number} has zeros",
            so="padding would be trained on as if it were text",
            fix="give every document without its padding",
        )
    return {"tokens": document[names[0]], **rest}


def _require_same_fields(documents: list[dict[str, Any]]) -> None:
    first = set(documents[0])
    for number, document in enumerate(documents):
        if set(document) != first:
            different = sorted(first ^ set(document))
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


def _token_aligned(name: str, values: list[Tensor], fields: dict[str, list[Tensor]]) -> list[Tensor]:
    if name == "tokens":
        for number, tokens in enumerate(values):
            if tokens.dim() != 1 or not len(tokens) or tokens.dtype.is_floating_point:
                raise DataError(
                    f"the tokens of document {number} have shape {list(tokens.shape)} and dtype {tokens.dtype}",
                    fix="give every document at least one token, as a flat list of whole numbers",
                )
        return [tokens.to(torch.int64) for tokens in values]
    aligned = []
    for number, (value, tokens) in enumerate(zip(values, fields["tokens"], strict=True)):
        rows = value.expand(len(tokens)) if value.dim() == 0 else value
        if len(rows) != len(tokens) or rows.shape[1:] != values[0].shape[1:] or rows.dtype != values[0].dtype:
            raise DataError(
                f"field {name!r} of document {number} has shape {list(value.shape)} and dtype {value.dtype}; the "
                f"document has {len(tokens)} tokens, and document 0 has dtype {values[0].dtype}",
                so="its rows could not be cut with the tokens",
                fix="give one entry per token, or one number per document, of the same dtype everywhere",
            )
        # Log-probabilities of single tokens may be infinite. Weights are looked at together (``_complete``).
        wrong = ~value.isfinite() if value.dim() == 0 else value.isnan()
        if name != "weights" and bool(wrong.any()):
            raise DataError(
                f"field {name!r} of document {number} {'is' if value.dim() == 0 else 'has'} {float(value[wrong][0])}",
                so="the loss and every gradient would not be numbers either",
                fix="give numbers, or leave the document out",
            )
        aligned.append(rows)
    return aligned


def _complete(fields: dict[str, list[Tensor]], shift_labels: bool) -> None:
    tokens = fields["tokens"]
    end = torch.tensor([IGNORE_INDEX])
    next_tokens = [torch.cat([document[1:], end.to(document.device)]) for document in tokens]
    if "labels" not in fields:
        fields["labels"] = next_tokens
    elif shift_labels:
        fields["labels"] = [torch.cat([labels[1:], end.to(labels)]) for labels in fields["labels"]]
        if "weights" in fields:
            fields["weights"] = [torch.cat([w[1:], torch.zeros_like(w[:1])]) for w in fields["weights"]]
    else:
        _refuse_unshifted(fields["labels"], tokens, next_tokens)
    if "weights" not in fields:
        fields["weights"] = [(labels != IGNORE_INDEX).to(torch.float32) for labels in fields["labels"]]
        return
    total = float(sum(weights.double().sum() for weights in fields["weights"]))
    if not math.isfinite(total):
        raise DataError(
            f"the weights of the batch sum to {total}",
            so="the loss and every gradient would not be numbers either",
            fix="give finite weights; 0 leaves a token out",
        )
    if total == 0.0:
        raise DataError(
            "the weights of the batch sum to zero",
            so="a loss divided by their sum would be 0 / 0, and every parameter NaN",
            fix="leave this batch out, or give numbers that may sum to zero another name than 'weights'",
        )


def _refuse_unshifted(labels: list[Tensor], tokens: list[Tensor], next_tokens: list[Tensor]) -> None:
    """Labels of Hugging Face's kind would train the model to repeat its input."""

    def fits(wanted: list[Tensor]) -> bool:
        return all(
            bool(((have == want) | (have == IGNORE_INDEX)).all()) for have, want in zip(labels, wanted, strict=True)
        )

    any_label = any(bool((have != IGNORE_INDEX).any()) for have in labels)
    if any_label and fits(tokens) and not fits(next_tokens):
        raise DataError(
            "the labels of the batch are its tokens: labels[i] is token i",
            so="the model would learn to repeat its input",
            fix="call plan(batch, shift_labels=True), which moves Hugging Face's labels by one token",
        )


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
            lengths=documents.lengths,
        )


def cut(plan: Plan, rank: int, batch: Batch, *, shift_labels: bool = False) -> RankBatch:
    """Rank ``rank``'s part of ``batch`` under ``plan``, for a driver that plans and sends each worker its rows."""
    return RankBatch.of(RankPlan.of(plan, rank), Documents.of(batch, shift_labels=shift_labels))
