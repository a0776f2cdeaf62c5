"""What keeps a text, or a stranger's tokenizer, from filling the memory before anything of it is encoded.

The tokenizers library needs 100 to 400 bytes for a token of a text, and for a character that a normalizer makes. A long
text is not encoded in pieces, because cutting it could change its tokens.
"""

from __future__ import annotations

import base64
import json
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager, suppress
from typing import Any

import tokenizers

from bytescale.common.errors import DataError, is_panic

MOST_TOKENS = 2**22
"""Tokens of the longest text that is encoded: twice those of a context of 2M."""
MOST_GROWTH = 16.0
"""Characters that a tokenizer may make of one before it cuts text. Those of well-known models make up to 4."""
MOST_WORD, MOST_STEPS = 1024, 100
_PROBE = "A text, 1 of 2: naïve 文本 😀\n\n"
"""What is encoded before a tokenizer is used: over this, damaged ones stumble."""
_MOST_CHARACTERS = 2**25  # that it makes of a text
_SURE_CHARACTERS, _SAMPLES = 2**20, 16  # of a text that may be encoded unseen; of a longer one


def growth_of(tokenizer: Any) -> float:
    """How many characters a tokenizer of the library makes of one before it cuts text."""
    parts = [part for part in (tokenizer.normalizer, tokenizer.pre_tokenizer) if part is not None]
    return _growth([json.loads(part.__getstate__()) for part in parts])


def check_tokenizer(tokenizer: Any, name: str) -> None:
    """Raise ``DataError`` for a tokenizer that could fill the memory, or work for hours, and as the library."""
    what, growth, model = "", growth_of(tokenizer), tokenizer.model
    if growth > MOST_GROWTH:
        what = f"makes up to {growth:.3g} characters of one before it cuts text"
    if (num_steps := str(tokenizer.normalizer).count("(") + str(tokenizer.pre_tokenizer).count("(")) > MOST_STEPS:
        what = f"changes text in {num_steps} steps"
    longest = getattr(model, "max_input_chars_per_word", 0)
    if isinstance(model, tokenizers.models.Unigram):
        longest = max(map(len, tokenizer.get_vocab()), default=0)
    if longest > MOST_WORD:
        what = f"tries words of up to {longest} characters at every character"
    if what:
        raise DataError(
            f"tokenizer {name} {what}",
            so="a short text could fill the memory, or take hours",
            fix="take that out of its tokenizer.json, or use another tokenizer",
        )
    with suppress(Exception):  # it may have no token for something of it; a panic is no Exception
        tokenizer.encode_batch_fast([_PROBE])


def check_room(text: str, growth: float, encode: Callable[[Sequence[str]], Sequence[Sized]]) -> None:
    """Raise ``DataError`` for a text that has too many tokens, judged by samples of it.

    ``growth``: as ``growth_of``. ``encode``: from texts to their tokens.
    """
    if len(text) * growth <= _SURE_CHARACTERS:
        return
    size = _SURE_CHARACTERS // int(growth + 1) // _SAMPLES // 4
    starts = range(0, len(text) - size, -(-len(text) // _SAMPLES))
    tokens = sum(map(len, encode([text[start : start + size] for start in starts])))
    expected = tokens * len(text) // (size * len(starts))
    if expected > MOST_TOKENS or len(text) * growth > _MOST_CHARACTERS:
        raise DataError(
            f"a text of {len(text)} characters has about {expected} tokens",
            so=f"its encoding would take gigabytes of memory; at most {MOST_TOKENS} tokens are encoded at once",
            fix="cut it into several documents, or let it be left out (data.max_corrupt_records)",
        )


def _growth(step: Any) -> float:
    """How many characters a normalizer or a pre_tokenizer makes of one at most, forms of Unicode aside."""
    if isinstance(step, list):
        return math.prod(map(_growth, step))
    if not isinstance(step, dict):
        return 1.0
    inner = _growth(step.get("normalizers")) * _growth(step.get("pretokenizers"))
    match step.get("type"):
        case "Replace":
            replaced, content = step["pattern"], len(step["content"])
            return max(1.0, content / max(1, len(replaced["String"])) if "String" in replaced else content + 1.0)
        case "Prepend":
            return 1.0 + len(step["prepend"])
        case "ByteLevel":
            return 2.0
        case "Precompiled":  # pieces of text, each with a NUL behind it, that stand in the place of others
            return max(1.0, max(map(len, base64.b64decode(step["precompiled_charsmap"]).split(b"\0"))) / 64)
    return inner


@contextmanager
def no_traces() -> Iterator[None]:
    """Keep the stack trace of a panic off the terminal, which Rust prints by itself. Other output comes afterwards."""
    if not _redirecting.acquire(blocking=False):  # another thread keeps it off
        yield
        return
    shown, held = os.dup(2), os.memfd_create("stderr")
    os.dup2(held, 2)
    try:
        yield
    except BaseException as error:
        if is_panic(error):
            os.ftruncate(held, 0)
        raise
    finally:
        os.dup2(shown, 2)
        with open(held, "rb") as content:
            content.seek(0)
            os.write(2, content.read())
        os.close(shown)
        _redirecting.release()


_redirecting = threading.Lock()


@contextmanager
def rust_errors(what: str) -> Iterator[None]:
    """Raise what the library refuses as ``DataError``. It raises bare Exception, or panics: that is no Exception."""
    try:
        with no_traces():
            yield
    except BaseException as error:
        if type(error) is Exception or is_panic(error) or isinstance(error, UnicodeDecodeError):
            text = " ".join(str(error).split())[:300]
            raise DataError(f"{what} ({text})", fix="save it again with Tokenizer.save()") from error
        raise
