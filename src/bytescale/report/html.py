"""Small pieces of HTML. Every text that comes from a run is escaped here."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape


def section(name: str, heading: str, content: str) -> str:
    """A section with an anchor; nothing without content."""
    return f'<section id="{name}"><h2>{escape(heading)}</h2>\n{content}</section>\n' if content else ""


def prose(text: str) -> str:
    """A text with `code` in it."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", escape(text))


def note(text: str) -> str:
    """A remark in small print."""
    return f'<p class="note">{prose(text)}</p>'


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, css: str = "") -> str:
    """A table of texts whose first column names the rows. It scrolls sideways where the page is narrow."""
    top = "".join(f"<th>{escape(text)}</th>" for text in head)
    body = "".join(
        "<tr>" + f"<th>{escape(row[0])}</th>" + "".join(f"<td>{escape(text)}</td>" for text in row[1:]) + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table class="{css}"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def details(summary: str, content: str) -> str:
    """Something that opens on a click."""
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"


def per_run(blocks: Sequence[tuple[str, str]]) -> str:
    """Blocks of (name of the run, content), side by side where there is room. Empty blocks are left out."""
    some = [(name, content) for name, content in blocks if content]
    if len(blocks) == 1 or not some:
        return "".join(content for _, content in some)
    return '<div class="runs">' + "".join(f"<div><h3>{escape(n)}</h3>{c}</div>" for n, c in some) + "</div>"
