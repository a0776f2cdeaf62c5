"""What ``bytescale data show`` prints: which tokens of a document are trained on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bytescale.data.loading.corpus import Corpus
from bytescale.data.tokens.fields import WEIGHTS

_SHOWN_CHARACTERS = 240


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRun:
    """Tokens ``start`` to ``stop - 1`` of a document: all have the same weight, and all or none are their own label."""

    document: int
    start: int
    stop: int
    weight: float
    text: str
    """The text of the tokens, or their ids where the corpus has no tokenizer."""
    predicted: str = ""
    """The text of the labels, where they are not the tokens."""


def runs_of_documents(corpus: Corpus, most_documents: int) -> list[TokenRun]:
    """Return the runs of the first documents. The first token of a document, which nothing predicts, has weight 0."""
    shown = corpus.documents(corpus.samples[:most_documents])
    return [run for number, one in enumerate(shown) for run in _runs(corpus, number, one)]


def _runs(corpus: Corpus, number: int, document: Mapping[str, NDArray]) -> Iterator[TokenRun]:
    tokens = document["tokens"]
    weights = np.roll(document[WEIGHTS], 1)  # the last one has no label: 0
    labels = np.roll(document["labels"], 1)
    differs = (labels != tokens) & (weights != 0)
    changes = (np.diff(weights) != 0) | (np.diff(differs.astype(np.int8)) != 0)
    for start, stop in itertools.pairwise([0, *(np.flatnonzero(changes) + 1).tolist(), len(tokens)]):
        yield TokenRun(
            document=number,
            start=start,
            stop=stop,
            weight=float(weights[start]),
            text=_text(corpus, tokens[start:stop]),
            predicted=_text(corpus, labels[start:stop]) if differs[start] else "",
        )


def _text(corpus: Corpus, ids: NDArray) -> str:
    """The text of tokens, the end of a document by its name: whether it is trained on is what people look for."""
    if corpus.tokenizer is None:
        return " ".join(map(str, ids.tolist()))
    parts = np.split(ids, np.flatnonzero(ids == corpus.tokenizer.eos_id))
    texts = [corpus.tokenizer.decode(part) for part in parts]  # each part but the first begins with the end of a text
    return corpus.tokenizer.eos_text.join(texts)


def _shortened(text: str) -> str:
    shown, half = repr(text), _SHOWN_CHARACTERS // 2
    return f"{shown[:half]} ... {shown[-half:]}" if len(shown) > _SHOWN_CHARACTERS else shown


def print_runs(console: Console, runs: Sequence[TokenRun]) -> None:
    """Print a table for each document, and how many of its tokens are trained on."""
    for number, own in itertools.groupby(runs, key=lambda run: run.document):
        held = list(own)
        table = Table(title=f"Document {number}", title_justify="left", box=box.SIMPLE_HEAD)
        for name in ("tokens", "weight"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("text")
        for run in held:
            shown = _shortened(run.text) + (f" -> {_shortened(run.predicted)}" if run.predicted else "")
            style = "bold green" if run.weight else "dim"
            table.add_row(f"{run.start}-{run.stop - 1}", f"{run.weight:g}", Text(shown, style=style))
        console.print(table, soft_wrap=False)
        trained = sum(run.stop - run.start for run in held if run.weight)
        console.print(f"{trained} of {held[-1].stop} tokens are trained on.")
