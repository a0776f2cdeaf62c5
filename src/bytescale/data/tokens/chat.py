"""Chat templates: from the messages of a conversation to its text, and to what the assistant said in it.

A template is the Jinja program that comes with a tokenizer. It is run as transformers runs it, in a sandbox, with one
exception: it is told no date, so that a corpus is the same on every day (templates have a date of their own for this).

What the assistant said is found in one of two ways.

1. The template marks it: ``{% generation %} ... {% endgeneration %}``.
2. Otherwise it is what the template writes behind the prompt for the assistant's turn, up to the end of the turn. The
   prompt is the conversation up to that turn with ``add_generation_prompt``. A template that changes earlier turns, so
   that this prompt is not in the text, is refused.

White space that a template writes behind the end of a turn (a line feed behind ``<|im_end|>``) is not trained on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bytescale.common.errors import ConfigError, DataError
from bytescale.data.tokens.tokenizer import token_text, tokenizer_settings

START, STOP = "\ufdd0", "\ufdd1"
"""Marks around what the assistant says: two characters that Unicode promises never to use."""
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

Span = tuple[int, int, int]
"""First character, one past the last one, and the number of the message."""


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template, which can be pickled. ``special_tokens``: by name (``bos_token``), as the template uses them."""

    source: str  # the Jinja program
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    name: str = "the chat template"

    @property
    def fingerprint(self) -> str:
        """16 hex digits, equal for templates that render everything alike."""
        content = json.dumps([self.source, sorted(self.special_tokens.items())])
        return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Any = None, *, add_generation_prompt: bool = False
    ) -> str:
        """Return the text of a conversation. Raises ``DataError`` if the template refuses it."""
        return self._marked(messages, tools, add_generation_prompt).replace(START, "").replace(STOP, "")

    def render_with_spans(self, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> tuple[str, list[Span]]:
        """Return the text of a conversation, and what of it the assistant said.

        Raises:
            DataError: the template refuses the conversation or leaves a message out, or what the assistant said cannot
                be told from the rest. The message does not say where the conversation is.
        """
        marked = self._marked(messages, tools, False)
        turns = [number for number, message in enumerate(messages) if message.get("role") == "assistant"]
        if START in marked:
            text, pairs = _without_marks(marked)
            # A template may mark several runs of one turn; then the number of the message is not known.
            numbers = turns if len(turns) == len(pairs) else [-1] * len(pairs)
            spans = [(start, stop, number) for (start, stop), number in zip(pairs, numbers, strict=True)]
        else:
            text, spans = marked, [self._span(marked, messages, tools, number) for number in turns]
        self._check_complete(text, messages, tools)
        return text, spans

    def _marked(self, messages: Sequence[Mapping[str, Any]], tools: Any, add_generation_prompt: bool) -> str:
        import jinja2

        from bytescale.data.tokens.template_sandbox import compiled

        try:
            return compiled(self.source).render(
                _rounds=[0],
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self.special_tokens,
            )
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise DataError(
                f"{self.name} refuses the conversation ({error or type(error).__name__})",
                so="it cannot be written as the model reads it",
                fix="mend its roles (they are usually system, then user and assistant in turn), or set "
                "data.chat_template to a template that knows them",
            ) from error

    def _span(self, text: str, messages: Sequence[Mapping[str, Any]], tools: Any, number: int) -> Span:
        prompt = self.render(messages[:number], tools, add_generation_prompt=True)
        if not text.startswith(prompt):
            raise self._unknown_span(number)
        if number == len(messages) - 1:
            said = text[len(prompt) :]
        else:
            said = self._said_before_others(text, prompt, messages, tools, number)
        return len(prompt), len(prompt) + len(said.rstrip()), number

    def _said_before_others(
        self, text: str, prompt: str, messages: Sequence[Mapping[str, Any]], tools: Any, number: int
    ) -> str:
        """As the last message of a conversation it may be written with more (its thoughts), but it ends alike."""
        upto = self.render(messages[: number + 1], tools)
        if text.startswith(upto):
            return upto[len(prompt) :]
        content = messages[number].get("content")
        content = content.strip() if isinstance(content, str) else ""
        place, end = text.find(content, len(prompt)), upto.rfind(content)
        tail = upto[end + len(content) :].rstrip()
        if not content or place < 0 or end < 0 or not text.startswith(tail, place + len(content)):
            raise self._unknown_span(number)
        return text[len(prompt) : place + len(content)] + tail

    def _unknown_span(self, number: int) -> DataError:
        return DataError(
            f"{self.name} writes message {number} differently once others follow",
            so="what the assistant says in it cannot be told from the rest",
            fix="put {% generation %} and {% endgeneration %} around it in the template (data.chat_template)",
        )

    def _check_complete(self, text: str, messages: Sequence[Mapping[str, Any]], tools: Any) -> None:
        for number, message in enumerate(messages):
            if message.get("role") == "assistant":
                continue  # some templates leave the thoughts of earlier turns out
            # A template may write a text in another form (a tool's answer as JSON); what it leaves out changes nothing.
            if all(part.strip() in text for part in texts_of_message(message)):
                continue
            try:
                without = self.render([*messages[:number], *messages[number + 1 :]], tools)
            except DataError:  # the conversation is none without the message, so the template has used it
                continue
            if without == text:
                raise DataError(
                    f"{self.name} leaves message {number} out, whose role is {message.get('role')!r}",
                    so="the model would not read what the assistant answers",
                    fix="use a role that the template knows, or set data.chat_template to one that knows this",
                )


def texts_of_message(message: Mapping[str, Any]) -> list[str]:
    """The texts of a message: its content, or those parts of the content that are text."""
    content = message.get("content")
    if isinstance(content, str):
        return [content]
    parts = content if isinstance(content, list) else []
    return [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]


def load_template(setting: str, tokenizer: str) -> ChatTemplate:
    """Return the template in file ``setting``, or if that is empty, the one that lies beside the tokenizer.

    Raises ``ConfigError`` if there is no such file, or the tokenizer has no template; ``DataError`` if a file is not
    what its name says.
    """
    folder = Path(tokenizer).expanduser()
    folder = folder if folder.is_dir() else folder.parent
    is_file = tokenizer not in ("auto", "bytes", "bpe")
    settings = tokenizer_settings(folder) if is_file else {}
    special = {name: text for name in SPECIAL_NAMES if (text := token_text(settings.get(name))) is not None}
    path = Path(setting).expanduser() if setting else folder / "chat_template.jinja"
    if setting and not path.is_file():
        raise ConfigError(f"data.chat_template is {setting!r}, which is no file", fix="name a Jinja file")
    if (setting or is_file) and path.is_file():
        return _checked(ChatTemplate(path.read_text(encoding="utf-8"), special, str(path)))
    source = settings.get("chat_template")
    if isinstance(source, list):  # several with names
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    if not isinstance(source, str):
        raise ConfigError(
            f"tokenizer {tokenizer!r} has no chat template (chat_template.jinja, or chat_template in its "
            "tokenizer_config.json)",
            so="messages cannot be written as the model reads them",
            fix="set data.tokenizer to the folder of a chat model, or data.chat_template to a Jinja file",
        )
    return _checked(ChatTemplate(source, special, f"the chat template of {folder}"))


def _checked(template: ChatTemplate) -> ChatTemplate:
    import jinja2

    from bytescale.data.tokens.template_sandbox import compiled

    try:
        compiled(template.source)
    except jinja2.TemplateError as error:
        raise DataError(f"{template.name} is not a Jinja template ({error})", fix="mend it") from error
    return template


def _without_marks(marked: str) -> tuple[str, list[tuple[int, int]]]:
    """The text without marks, and the ranges of characters that were marked."""
    text, spans = "", []
    for piece in marked.split(START):
        said, found, rest = piece.partition(STOP)
        if found:
            spans.append((len(text), len(text) + len(said)))
        text += said + rest
    return text, spans
