"""Chat templates: from the messages of a conversation to its text, and to what the assistant said in it.

A template is the Jinja program that comes with a tokenizer. It is run as transformers runs it, in a sandbox in a
process of its own (``template_sandbox``), with one exception: the day that it may ask for is a setting, so that a
corpus is the same on every day.

What the assistant said is what the template marks, ``{% generation %} ... {% endgeneration %}``. Otherwise it is what
the template writes behind the prompt for the assistant's turn (``add_generation_prompt``), up to the end of the turn.
White space that a template writes behind the end of a turn (a line feed behind ``<|im_end|>``) is not trained on.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from bytescale.common.errors import ConfigError, DataError, typed_path
from bytescale.common.parsing import read_text
from bytescale.config.schema import CorpusConfig
from bytescale.data.tokens.messages import OWN_VARIABLES, Conversation
from bytescale.data.tokens.tokenizer import token_text, tokenizer_settings

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
NOTHING = re.compile("(?!)")
_RESERVED = re.compile("[\ufdd0-\ufdef\ud800-\udfff]")
"""Characters that Unicode promises never to use, with which the sandbox marks texts; and what has no UTF-8 form."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as the model reads it."""

    text: str
    spans: list[tuple[int, int, int]]
    """What the assistant said: first character, one past the last one, and the number of the message (-1: unknown)."""
    spelled: list[tuple[int, int]]
    """Special tokens that messages spell: first character, and one past the last one. They are text."""


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template, which can be pickled. ``variables``: what it may use (``bos_token``, ``enable_thinking``)."""

    source: str  # the Jinja program
    variables: Mapping[str, Any] = field(default_factory=dict)
    name: str = "the chat template"
    day: str = CorpusConfig().chat_template_date  # YYYY-MM-DD, for templates that ask
    tool_use: str = ""  # the program for conversations with tools, if it is another one

    @property
    def fingerprint(self) -> str:
        """16 hex digits, equal for templates that render everything alike."""
        return hashlib.blake2b(self._as_json.encode(), digest_size=8).hexdigest()

    @property
    def _as_json(self) -> str:
        parts = {"source": self.source, "tool_use": self.tool_use, "day": self.day, "variables": self.variables}
        return json.dumps(parts, sort_keys=True)

    def check(self) -> None:
        """Raise ``DataError`` unless the sources are Jinja templates."""
        list(_sandbox_of(self._as_json, self.name, os.getpid()).ask([]))

    def render(
        self, conversations: Sequence[Conversation | DataError], special: re.Pattern[str] = NOTHING
    ) -> Iterator[Rendered | DataError]:
        """Write conversations, or say what is wrong with one. ``special``: the tokenizer's special tokens.

        Wrong is a conversation that the template refuses, of which it leaves a message out, or on which it works too
        long; or in which what the assistant said cannot be told from the rest. No error says where it is. An error in
        place of a conversation is handed on.
        """
        requests = [one if isinstance(one, DataError) else _request(one, special) for one in conversations]
        asked = [request for request in requests if isinstance(request, str)]
        answers = _sandbox_of(self._as_json, self.name, os.getpid()).ask(asked)
        return (next(answers) if isinstance(request, str) else request for request in requests)


def _request(conversation: Conversation, special: re.Pattern[str]) -> str | DataError:
    others = {"tools": conversation.tools, **conversation.variables}
    request = {"messages": conversation.messages, "others": others, "special": ""}
    try:
        content = json.dumps(request, ensure_ascii=False)
    except RecursionError:
        return DataError("it is nested too deeply", fix="mend the record")
    if _RESERVED.search(content):
        return DataError("it holds half a surrogate pair (\\ud8..) or one of U+FDD0 to U+FDEF", fix="mend the record")
    return json.dumps({**request, "special": special.pattern}) if special.search(content) else content


class _Sandbox:
    """The process that renders. It is started when it is needed, and again after a template has ended it."""

    def __init__(self, template: str, name: str) -> None:
        self._template, self._name = template, name
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def ask(self, requests: Sequence[str]) -> Iterator[Rendered | DataError]:
        """Yield answers to requests, in their order. Raises ``DataError`` if the template is none."""
        with self._lock:
            process, self._process = self._process or self._started(), None
            answers = self._exchange(process, f"[{','.join(requests)}]")
            if isinstance(answers, list):  # of an exchange that was interrupted, the answer would still be in the pipe
                self._process = process
        if isinstance(answers, list):
            yield from (Rendered(**one) if "text" in one else self._error(one) for one in answers)
        elif len(requests) == 1:
            yield answers
        else:
            yield from itertools.chain.from_iterable(self.ask([request]) for request in requests)

    def _started(self) -> subprocess.Popen[bytes]:
        program = [sys.executable, "-S", "-P", str(Path(__file__).with_name("template_sandbox.py"))]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        pipe = subprocess.PIPE
        process = subprocess.Popen(program, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=environment)
        answer = self._exchange(process, self._template)
        if isinstance(answer, DataError):
            raise answer
        if answer:
            raise self._error(answer[0])
        return process

    def _exchange(self, process: subprocess.Popen[bytes], request: str) -> list[dict[str, Any]] | DataError:
        assert process.stdin is not None, "it is a pipe"
        assert process.stdout is not None, "it is a pipe"
        try:
            process.stdin.write(request.encode() + b"\n")
            process.stdin.flush()
            answers = json.loads(process.stdout.readline())
        except (OSError, ValueError):  # the pipe is closed: the process has ended
            process.kill()
            code = process.wait()
            why = "works too long" if code == -signal.SIGPROF else f"ends the process that renders (exit code {code})"
            fix = "mend its loops, or set data.chat_template to another"
            return DataError(f"{self._name} {why}", so="it may never end", fix=fix)
        if isinstance(answers, str):
            raise RuntimeError(f"the program that renders has a mistake: {answers}")
        return list(answers)

    def _error(self, answer: dict[str, Any]) -> DataError:
        what, so, fix = answer["error"]
        return DataError(f"{self._name} {what}", so=so, fix=fix)


@functools.lru_cache(maxsize=2)
def _sandbox_of(template: str, name: str, process_id: int) -> _Sandbox:
    """The sandbox of this process: a process that is forked from it needs a pipe of its own."""
    return _Sandbox(template, name)


def load_template(config: CorpusConfig) -> ChatTemplate:
    """Return the template in ``data.chat_template``, or if that is empty, the one that lies beside the tokenizer.

    Raises ``ConfigError`` if there is no such file, or the tokenizer has no template, or a template cannot be told what
    a setting says; ``DataError`` if a file is not what its name says.
    """
    setting, tokenizer = config.chat_template, config.tokenizer
    folder = typed_path(tokenizer)
    folder = folder if folder.is_dir() else folder.parent
    is_file = tokenizer not in ("auto", "bytes", "bpe")
    settings = tokenizer_settings(folder) if is_file else {}
    special = {name: text for name in SPECIAL_NAMES if (text := token_text(settings.get(name))) is not None}
    path = typed_path(setting) if setting else folder / "chat_template.jinja"
    if setting and not path.is_file():
        raise ConfigError(f"data.chat_template is {setting!r}, which is no file", fix="name a Jinja file")
    sources: Any = settings.get("chat_template")
    name = f"the chat template of {folder}"
    if (setting or is_file) and path.is_file():
        try:
            sources, name = read_text(path), str(path)
        except UnicodeDecodeError as error:
            raise DataError(f"{path} is no text in UTF-8 ({error.reason})", fix="save it in UTF-8") from error
    if isinstance(sources, list):  # several with names
        sources = {entry.get("name"): entry.get("template") for entry in sources if isinstance(entry, dict)}
    elif isinstance(sources, str):
        sources = {"default": sources}
    if not isinstance(sources, dict) or not isinstance(sources.get("default"), str):
        raise ConfigError(
            f"tokenizer {tokenizer!r} has no chat template (chat_template.jinja, or chat_template in its "
            "tokenizer_config.json)",
            so="messages cannot be written as the model reads them",
            fix="set data.tokenizer to the folder of a chat model, or data.chat_template to a Jinja file",
        )
    template = ChatTemplate(
        sources["default"],
        {**special, **_variables(config)},
        name,
        config.chat_template_date,
        sources.get("tool_use", ""),
    )
    template.check()
    return template


def _variables(config: CorpusConfig) -> dict[str, Any]:
    """What settings tell a template. Raises ``ConfigError``."""
    kwargs, day = config.chat_template_kwargs, config.chat_template_date
    with suppress(ValueError):
        date.fromisoformat(day)
        if kwargs.keys().isdisjoint(OWN_VARIABLES):
            return kwargs
    raise ConfigError(
        f"data.chat_template_kwargs is {kwargs!r} and data.chat_template_date is {day!r}",
        so="a chat template cannot be told both",
        fix=f"leave {', '.join(OWN_VARIABLES)} out, and write a day as {CorpusConfig().chat_template_date}",
    )
