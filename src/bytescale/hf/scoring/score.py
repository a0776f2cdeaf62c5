"""Log-probabilities of documents of mixed lengths: forward only, a global batch at a time, in the caller's order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bytescale.hf.batch.documents import TOKEN_NAMES
from bytescale.hf.loop.hdp import HDP

_NEEDED = (*TOKEN_NAMES, "labels")


def score(hdp: HDP, documents: Iterable[Mapping[str, Any]], *, batch_tokens: int = 2**18) -> Iterator[Tensor]:
    """Yield ``[length]`` log-probabilities of every document's labels, on every rank, in the order of ``documents``.

    At most ``batch_tokens`` tokens (or one longer document) are read ahead and planned together. The logits of a few
    rows exist at a time, whatever the vocabulary. A label of -100 (a document's last token has one) gives 0. Fields
    besides tokens and labels are not read.

    Args:
        hdp: attached to the model, which is in evaluation mode, best with ``forward_only=True``.
        documents: mappings as ``HDP.plan`` takes them, with ``tokens`` and perhaps ``labels``; the same on every rank.
        batch_tokens: tokens that are planned together.

    Raises:
        DataError, PlanError: as ``HDP.plan``; a document may be longer than all ranks hold.
    """
    held: list[Mapping[str, Any]] = []
    num_tokens = 0
    for document in documents:
        length = len(document.get("tokens", document.get("input_ids", ())))
        if held and num_tokens + length > batch_tokens:
            yield from score_batch(hdp, held)
            held, num_tokens = [], 0
        held.append(document)
        num_tokens += length
    if held:
        yield from score_batch(hdp, held)


@torch.no_grad()
def score_batch(hdp: HDP, documents: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    """The log-probabilities of one global batch; see ``score``."""
    # Other fields are not read: weights, for example, may sum to zero, which a loss could not be divided by.
    needed = [{name: document[name] for name in _NEEDED if name in document} for document in documents]
    for micro in hdp.plan(needed):
        hdp.collect(micro, micro.logprobs(hdp.model))
    return hdp.collected()
