"""Text of others, made safe to show on a terminal."""

from __future__ import annotations

import re

_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    r"""Return ``text`` with control characters spelled out, as ``\x1b``; newlines and tabs stay.

    A terminal obeys escape sequences: a file's name or a line of a corpus could clear the screen or hide a message.
    Characters that reverse the direction of writing are spelled out, too.
    """
    return _CONTROLS.sub(lambda found: found.group().encode("unicode_escape").decode(), text)
