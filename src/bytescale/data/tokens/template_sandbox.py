"""The program that renders conversations in a process of its own, which ``chat.py`` starts and asks.

Chat templates come with strangers' models. jinja2's sandbox keeps them from attributes, files and code. The limits of
the process end what the sandbox lets pass: an answer that takes more than ``MOST_SECONDS`` of CPU time (SIGPROF kills C
code, too), and a rendering that needs more than ``MOST_BYTES`` of memory. It imports nothing of
bytescale, so that it starts fast.

Requests and answers are lines of JSON. The first request is the template; each further one a list of conversations. The
answer to one has its ``text``; ``spans``, what of it the assistant said; and ``spelled``, where it holds special tokens
that are a user's text. Or it is an ``error``: what, consequence, remedy.

What the assistant said in a turn begins behind the prompt for it and ends with the turn. A template may write earlier
turns differently once others follow, and leave thoughts out. Then a sentinel in place of what a message contains shows
where it is in the conversation; what lies around it comes from the template. No content is searched for.
"""

from __future__ import annotations

import json
import os.path
import re
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

FIRST_SECONDS, SECONDS_A_MESSAGE, MOST_SECONDS = 1.0, 0.02, 8.0  # of CPU, for an answer: all renderings of a request
MOST_BYTES, MOST_CHARACTERS = 2**29, 2**24  # of memory beyond that at the start; of a rendering
START, STOP, OPEN, CLOSE = "\ufdd0\ufdd1\ufdd2\ufdd3"  # characters that Unicode promises never to use, as are sentinels
HERE, BEFORE = ("\ufdd4", "\ufdd5", "\ufdd6"), ("\ufdd7", "\ufdd8", "\ufdd9")  # for thoughts, content and arguments
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
AS_THEY_ARE, JOINED, LISTED = range(3)  # contents: a text may be a list of parts, and a list of texts one text
FORMS = tuple((contents, as_json) for contents in range(3) for as_json in (False, True))  # whether arguments are JSON
TAGS = re.compile(r"[<\[◁]/?think[>\]▷]", re.IGNORECASE)  # that an assistant's content may have around its thoughts

Message = dict[str, Any]
Span = tuple[int, int, int]
"""First character, one past the last one, and the number of the message (-1: not known)."""


class Refused(Exception):
    """Arguments: what is wrong, behind the template's name; the consequence; the remedy."""


class Template:
    """A compiled template. ``variables``: what it is told beside the conversation. ``day``: YYYY-MM-DD.

    ``tool_use``: the source for conversations with tools, if it is another one.
    """

    def __init__(self, source: str, variables: dict[str, Any], day: str, tool_use: str = "") -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": datetime.fromisoformat(day).strftime,
        }
        # Of conversations by their shape, if it leaves nothing of them out.
        self.forms: dict[tuple[Any, ...], tuple[int, bool]] = {}
        self._variables = variables
        with _limits("is not a Jinja template", "mend it"):
            self._compiled = environment.from_string(source)
        self.for_tools = Template(tool_use, variables, day) if tool_use else self

    def render(self, messages: Sequence[Message], prompt: bool = False, **others: Any) -> str:
        """The text, with ``START`` and ``STOP`` around the blocks of ``{% generation %}``. Raises ``Refused``."""
        with _limits(
            "refuses the conversation",
            "mend its roles (they are usually system, then user and assistant in turn), or set data.chat_template to a "
            "template that knows them",
        ):
            variables = {"documents": None, **self._variables, "add_generation_prompt": prompt, **others}
            text = self._compiled.render(messages=messages, **variables)
            if len(text) > MOST_CHARACTERS:
                raise jinja2.TemplateError(f"it writes {len(text):,} characters, at most {MOST_CHARACTERS:,} are read")
            return text


@contextmanager
def _limits(what: str, fix: str) -> Iterator[None]:
    """Errors of the template become ``Refused``."""
    try:
        yield
    except Exception as error:
        why = "it needs too much memory" if isinstance(error, MemoryError) else str(error) or type(error).__name__
        raise Refused(f"{what} ({why[:300]})", "it cannot be written as the model reads it", fix) from None


class Rendering:
    """One conversation under a template. ``others``: further variables, such as tools."""

    def __init__(self, template: Template, messages: list[Message], others: dict[str, Any]) -> None:
        self._template, self._messages, self._others = template, messages, others

    def text(self, messages: Sequence[Message], prompt: bool = False) -> str:
        rendered = self._template.render(messages, prompt, **self._others)
        return rendered.replace(START, "").replace(STOP, "") if START in rendered else rendered

    def read(self, special: str) -> dict[str, Any]:
        """The answer. ``special``: a pattern of special tokens, if any is spelled in it. Raises ``Refused``."""
        self._choose_form()
        text, pairs = _without(self._template.render(self._messages, **self._others), START, STOP)
        turns = [number for number, message in enumerate(self._messages) if message["role"] == "assistant"]
        # A template may mark several runs of one turn; then the number of the message is not known.
        numbers = turns if len(turns) == len(pairs) else [-1] * len(pairs)
        spans = [(*pair, number) for pair, number in zip(pairs, numbers, strict=True)]
        spans = spans if pairs else [self._span(text, number) for number in turns]
        return {"text": text, "spans": spans, "spelled": self._spelled(text, re.compile(special)) if special else []}

    def _spelled(self, text: str, special: re.Pattern[str]) -> list[tuple[int, int]]:
        """Where ``text`` holds special tokens that a message or a tool spells. An assistant's thoughts have tags."""

        def marked(value: Any, tags: bool = False) -> Any:
            if isinstance(value, str):
                return special.sub(
                    lambda found: found[0] if tags and TAGS.fullmatch(found[0]) else f"{OPEN}{found[0]}{CLOSE}", value
                )
            if isinstance(value, list):
                return [marked(item, tags) for item in value]
            return {key: marked(item, tags) for key, item in value.items()} if isinstance(value, dict) else value

        messages = [{**marked(m, m["role"] == "assistant"), "role": m["role"]} for m in self._messages]
        others = {**self._others, "tools": marked(self._others.get("tools"))}
        shown, spelled = _without(Rendering(self._template, messages, others).text(messages), OPEN, CLOSE)
        if shown != text:
            raise Refused(
                "writes the conversation differently where special tokens are spelled in it",
                "it cannot be told which of them are text",
                "take them out of the messages",
            )
        return spelled

    def _span(self, text: str, number: int) -> Span:
        """Where the template writes turn ``number``; white space behind the end of a turn is not of it."""
        prompt = self.text(self._messages[:number], prompt=True)
        start = len(prompt) if text.startswith(prompt) else self._start(text, number)
        stop = len(text) if number == len(self._messages) - 1 else self._stop(text, number, prompt)
        if start > stop:
            raise _unknown(number)
        return start, start + len(text[start:stop].rstrip()), number

    def _start(self, text: str, number: int) -> int:
        """Behind that part of the prompt which is in the conversation.

        1. ``prompt`` is what follows the message before the turn; ``shorter`` is it without the generation prompt.
        2. In the conversation, ``follows`` stands behind that message.
        3. What both begin with is prompt. A template may leave its rest out, such as the ``<think>`` of earlier turns.
        """
        if not number:
            raise _unknown(number)
        try:  # a content shows where the header ends, also in front of a call; some templates allow no content there
            here = _with(self._messages, number, HERE, always=True)
            shown = self.text(here)
        except Refused:
            here = _with(self._messages, number, HERE)
            shown = self.text(here)
        both = _with(here, number - 1, BEFORE)
        before = self.text(both[:number], prompt=True)
        prompt, kind, count = _behind_last(before, BEFORE, number)
        shorter = _behind(self.text(both[:number]), kind, count, number)
        follows = _behind(self.text(both), kind, count, number)
        place = len(shown) - len(follows)
        if not shown.endswith(follows) or shown[:place] != text[:place]:
            raise _unknown(number)
        if text.startswith(prompt, place):
            return place + len(prompt)
        common = len(_common(prompt, follows, text[place : place + len(prompt)]))
        if common <= len(_common(prompt, shorter)):
            raise _unknown(number)
        return place + common

    def _stop(self, text: str, number: int, prompt: str) -> int:
        """Behind what the template writes at the end of the turn.

        1. As the last message of a conversation, the turn ends with ``tail``; or with what then stands before a prompt.
        2. In the conversation, ``follows`` stands behind what the message contains. It begins with the tail.
        3. The rest of it is other messages', and stands at the end of ``text``, too.
        """
        upto, message = self.text(self._messages[: number + 1]), self._messages[number]
        content = message.get("content")
        if isinstance(content, str) and not message.get("tool_calls") and upto.startswith(prompt):
            written = upto[len(prompt) :].rstrip()
            if text.startswith(upto) and not written.endswith(content.strip()):
                return len(upto)  # most templates: the conversation begins with it, as it is, and something ends it
        here = _with(self._messages, number, HERE)
        shown = self.text(here)
        alone, kind, count = _behind_last(self.text(here[: number + 1]), HERE, number)
        follows = _behind(shown, kind, count, number)
        begun = _behind(self.text(here[: number + 1], prompt=True), kind, count, number)
        header = prompt.removeprefix(self.text(self._messages[:number]))
        tails = [alone.rstrip(), begun.removesuffix(header).rstrip() if header not in ("", prompt) else ""]
        fitting = [tail for tail in tails if tail and follows.startswith(tail)]
        if not fitting and alone.strip():  # it ends with more as the last one, perhaps with the end of all
            fitting = re.findall(r"\A(.*[>\]])", _common(alone, follows), re.DOTALL)
            if not fitting:
                raise _unknown(number)
        rest = follows[len(max(fitting, key=len, default="")) :]
        if not text.endswith(rest):
            raise _unknown(number)
        return len(text) - len(rest)

    def _choose_form(self) -> None:
        """Write contents and arguments as the template reads them. Raises ``Refused`` if it leaves a message out.

        Templates read a content as a list of parts or as one text, and arguments of calls as an object or as JSON. In
        the right form, a conversation in whose messages sentinels stand shows all of them.
        """
        shape = tuple(
            (m["role"], isinstance(m.get("content"), list), bool(m.get("tool_calls"))) for m in self._messages
        )
        if shape not in self._template.forms:
            lost = dict[tuple[int, bool], tuple[list[int], int]]()
            for form in FORMS:
                lost[form] = self._left_out(_in_form(self._messages, *form))
                if not any(lost[form]):
                    break
            best = min(lost, key=lambda form: (len(lost[form][0]), lost[form][1]))
            if 0 < len(lost[best][0]) <= len(shape):
                number = min(lost[best][0])
                calls = "the tool_calls of " if shape[number][2] else ""
                raise Refused(
                    f"leaves {calls}message {number} out, whose role is {shape[number][0]!r}",
                    "the model would not read what is answered, or not learn what is called",
                    "use a role that the template knows, or set data.chat_template to one that knows this",
                )
            self._template.forms[shape] = best
        self._messages = _in_form(self._messages, *self._template.forms[shape])

    def _left_out(self, messages: list[Message]) -> tuple[list[int], int]:
        """The messages of which something is not written; one more than there are, if the template refuses sentinels.

        What an assistant only says may be left out, as its thoughts are. In how many messages it is, is the second.
        """
        names = [tuple(f"{kind}{number}{BEFORE[0]}" for kind in HERE) for number in range(len(messages))]
        try:
            shown = self.text([_replaced(message, own) for message, own in zip(messages, names, strict=True)])
        except Refused:
            return list(range(len(messages) + 1)), 0
        found, unsaid = [], 0
        for number, (message, (_, content, arguments)) in enumerate(zip(messages, names, strict=True)):
            parts = message.get("content")
            texts = [part for part in parts if "text" in part] if isinstance(parts, list) else None
            needed = message["role"] != "assistant" if texts is None else len(texts)
            if arguments not in shown if message.get("tool_calls") else shown.count(content) < needed:
                found.append(number)
            unsaid += bool(parts) and content not in shown
        return found, unsaid


def _joined(parts: list[dict[str, str]]) -> str | list[dict[str, str]]:
    """The text of a content, which stays as it is with a picture in it."""
    return "".join(part["text"] for part in parts) if all("text" in part for part in parts) else parts


def _in_form(messages: list[Message], contents: int, as_json: bool) -> list[Message]:
    if as_json:
        messages = [_with_arguments(m, lambda value: json.dumps(value, ensure_ascii=False)) for m in messages]
    if contents:
        texts = [m.get("content") for m in messages]
        if contents == LISTED:
            texts = [[{"type": "text", "text": text}] if isinstance(text, str) else text for text in texts]
        else:
            texts = [_joined(text) if isinstance(text, list) else text for text in texts]
        messages = [m if text is None else {**m, "content": text} for m, text in zip(messages, texts, strict=True)]
    return messages


def _with_arguments(message: Message, change: Callable[[Any], Any]) -> Message:
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        own = {**function, "arguments": change(function["arguments"])}
        calls.append({**call, "function": own} if "function" in call else own)
    return {**message, "tool_calls": calls} if calls else message


def _replaced(message: Message, sentinels: Sequence[str], always: bool = False) -> Message:
    """A message with sentinels in place of what it contains. A content beside calls that is empty stays so, or not."""
    thoughts, content, arguments = sentinels
    changed = _with_arguments(
        message, lambda value: {**value, arguments: arguments} if isinstance(value, dict) else arguments
    )
    changed = changed | {key: thoughts for key in THOUGHTS if message.get(key)}
    own = message.get("content")
    if isinstance(own, list):
        return {**changed, "content": [{**part, "text": content} if "text" in part else part for part in own]}
    return {**changed, "content": content} if own or always or not message.get("tool_calls") else changed


def _with(messages: list[Message], number: int, sentinels: Sequence[str], always: bool = False) -> list[Message]:
    return [*messages[:number], _replaced(messages[number], sentinels, always), *messages[number + 1 :]]


def _behind_last(text: str, sentinels: Sequence[str], number: int) -> tuple[str, str, int]:
    """What follows the last sentinel of ``text``, which sentinel it is, and how many of this kind there are."""
    place, kind = max((text.rfind(kind), kind) for kind in sentinels)
    if place < 0:
        raise _unknown(number)
    return text[place + len(kind) :], kind, text.count(kind)


def _behind(text: str, kind: str, count: int, number: int) -> str:
    parts = text.split(kind, count)
    if len(parts) <= count:
        raise _unknown(number)
    return parts[count]


def _common(*texts: str) -> str:
    return os.path.commonprefix(texts)  # noqa: RUF071 - these are no paths


def _unknown(number: int) -> Refused:
    return Refused(
        f"writes message {number} differently once others follow",
        "what the assistant says in it cannot be told from the rest",
        "put {% generation %} and {% endgeneration %} around it in the template (data.chat_template)",
    )


def _without(marked: str, start: str, stop: str) -> tuple[str, list[tuple[int, int]]]:
    """The text without marks, and the ranges of characters that were marked."""
    text, spans, length = [], [], 0
    for piece in marked.split(start):
        said, found, rest = piece.partition(stop)
        if found:
            spans.append((length, length + len(said)))
        text += [said, rest]
        length += len(said) + len(rest)
    return "".join(text), spans


class _Generation(Extension):
    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Any) -> str:
        return f"{START}{caller()}{STOP}"


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def main() -> None:
    """Answer requests until the parent process ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process by closing its pipe
    with open("/proc/self/statm", "rb") as file:
        held = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + MOST_BYTES, held + MOST_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    template = None
    for line in sys.stdin.buffer:
        request = json.loads(line)
        num_messages = 0 if template is None else sum(len(conversation["messages"]) for conversation in request)
        seconds = min(FIRST_SECONDS + SECONDS_A_MESSAGE * num_messages, MOST_SECONDS)
        signal.setitimer(signal.ITIMER_PROF, seconds)  # it runs on afterwards, until the next request sets it again
        try:
            if template is None:
                answers: Any = []
                template = Template(**request)
            else:
                answers = [_answer(template, **conversation) for conversation in request]
        except Refused as refused:
            answers = [{"error": refused.args}]
        except Exception:  # a mistake of this program, which the parent raises
            answers = traceback.format_exc()
        sys.stdout.write(json.dumps(answers) + "\n")
        sys.stdout.flush()


def _answer(template: Template, messages: list[Message], others: dict[str, Any], special: str) -> dict[str, Any]:
    try:
        chosen = template if others["tools"] is None else template.for_tools
        return Rendering(chosen, messages, others).read(special)
    except Refused as refused:
        return {"error": refused.args}


if __name__ == "__main__":
    main()
