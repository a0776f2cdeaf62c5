"""What keeps a text, or a stranger's tokenizer, from filling the memory before anything of it is encoded.

The tokenizers library needs 100 to 400 bytes for a token of a text, and for a character that a normalizer makes. A long
text is not encoded in pieces, because cutting it could change its tokens.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Sequence, Sized
from typing import Any

from bytescale.common.errors import DataError

MOST_TOKENS = 2**22
"""Tokens of the longest text that is encoded: twice those of a context of 2M."""
MOST_GROWTH = 16.0
"""Characters that a tokenizer may make of one before it cuts text. Those of well-known models make up to 4."""
_MOST_CHARACTERS = 2**25  # that it makes of a text
_SURE_CHARACTERS, _SAMPLES = 2**20, 16  # of a text that may be encoded unseen; of a longer one


def checked_growth(tokenizer: Any, name: str) -> float:
    """How many characters a tokenizer of the library makes of one. Raises ``DataError`` for too many."""
    parts = [part for part in (tokenizer.normalizer, tokenizer.pre_tokenizer) if part is not None]
    found = _growth([json.loads(part.__getstate__()) for part in parts])
    if found > MOST_GROWTH:
        raise DataError(
            f"tokenizer {name} makes up to {found:.3g} characters of one before it cuts text",
            so="a short text could fill the memory",
            fix="take the steps that do it out of the normalizer and the pre_tokenizer of its tokenizer.json",
        )
    return found


def check_room(text: str, growth: float, encode: Callable[[Sequence[str]], Sequence[Sized]]) -> None:
    """Raise ``DataError`` for a text that has too many tokens, judged by samples of it.

    ``growth``: as ``checked_growth``. ``encode``: from texts to their tokens.
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
