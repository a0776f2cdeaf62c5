"""Reads conversations as they lie in data: OpenAI's form or ShareGPT's, JSON in strings (as TRL prefers it), nulls.

A part of a content may be a picture or a video: {"type": "image"} or {"type": "video"} with its path or its bytes, or
without them the next one of the record's ``images`` or ``videos``. A video may be a list of pictures, its frames, with
``fps`` beside it. The chat template is told the part's type alone.

A key with a null is a missing key, because a column of Parquet gives every row all keys. In a string of JSON, tools and
arguments keep their nulls.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from bytescale.common.errors import DataError
from bytescale.common.parsing import parse_json

_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"}
_ROLES = ("user", "assistant", "system", "tool", "function", "developer")
_KINDS = {"image": "image", "image_url": "image", "video": "video", "video_url": "video"}
"""Types of parts that are pictures or videos, and keys of them."""
_ITEM_KEYS = ("bytes", "base64", "path", "url", *_KINDS)
_REASONING = ("reasoning_content", "thinking", "reasoning")
OWN_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt")


class Source(NamedTuple):
    """Where a picture or a video is: its path, a data URL or bytes; a list of these: a video's frames."""

    kind: str
    content: Any
    fps: float | None = None  # of a list of frames


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a chat template is told of a record, and how much each message counts."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    variables: dict[str, Any]
    weights: list[float]
    pictures: list[Source] = field(default_factory=list)
    """In their order in the messages."""


def conversation_of(values: Mapping[str, Any]) -> Conversation:
    """Return the conversation of a record. Raises ``DataError`` if it is none."""
    (name,) = [name for name in ("messages", "conversations") if name in values]
    found = _without_nulls(_parsed(values[name], repr(name)))
    if not isinstance(found, list) or not found:
        raise _wrong(f"{name!r} is not a list of messages", "[{'role': ..., 'content': ...}, ...]")
    messages = [_message(_parsed(message, f"message {number}"), number) for number, message in enumerate(found)]
    columns = {name: _without_nulls(_parsed(values.get(name) or [], f"{name!r}")) for name in ("images", "videos")}
    pictures = _take_pictures(messages, columns)
    variables = _without_nulls(_parsed(values.get("chat_template_kwargs") or {}, "'chat_template_kwargs'"))
    if not isinstance(variables, dict) or not variables.keys().isdisjoint(OWN_VARIABLES):
        raise _wrong(f"'chat_template_kwargs' is {_shown(variables)}", f"{{...}} without {', '.join(OWN_VARIABLES)}")
    tools = _functions(_without_nulls(values.get("tools")), "'tools'", "parameters")
    return Conversation(messages, tools, variables, [_weight(*numbered) for numbered in enumerate(messages)], pictures)


def _take_pictures(messages: list[dict[str, Any]], columns: Mapping[str, Any]) -> list[Source]:
    """Leave the types of pictures in ``messages``; return what they are. ``columns``: of parts that do not say it."""
    found = list[Source]()
    rest = {name[:-1]: iter(own if isinstance(own, list) else [own]) for name, own in columns.items()}
    for message in messages:
        parts = message["content"] if isinstance(message.get("content"), list) else []
        for place, part in enumerate(parts):
            if (kind := _KINDS.get(part.get("type"))) is not None:
                said = part if part.keys() & set(_ITEM_KEYS) else next(rest[kind], None)
                found.append(Source(kind, _content(said), part.get("fps")))
                parts[place] = {"type": kind}
    for kind, unused in rest.items():
        own = [source.content for source in found if source.kind == kind]
        if None in own or next(unused, None) is not None:
            num_parts = f"{len(own)} parts of type {kind!r} in its messages"
            raise _wrong(
                f"'{kind}s' is {_shown(columns[f'{kind}s'])}, for {num_parts}", "as many, or each into its part"
            )
    for fps in (source.fps for source in found):
        if fps is not None and not (isinstance(fps, int | float) and 0 < fps < math.inf):
            raise _wrong(f"'fps' of a video is {_shown(fps)}", "the number of its frames in a second")
    return found


def _content(said: Any) -> Any:
    """``Source.content``, from a part, or from {"bytes": ..., "path": ...} as a column of Parquet has it."""
    while isinstance(said, dict):
        key = next((key for key in _ITEM_KEYS if key in said), "none")
        said = f"data:,{said[key]}" if key == "base64" else said.get(key)
    return [_content(frame) for frame in said] or None if isinstance(said, list) else said


def _message(message: Any, number: int) -> dict[str, Any]:
    if isinstance(message, dict) and "from" in message and "role" not in message:  # ShareGPT
        names = {"from": "role", "value": "content"}
        message = {names.get(key, key): value for key, value in message.items()}
        message["role"] = _SHAREGPT_ROLES.get(message["role"], message["role"])
        if message["role"] not in _ROLES:
            known = ", ".join((*_SHAREGPT_ROLES, *_ROLES))
            raise _wrong(
                f"message {number} is from {message['role']!r}", f"one of {known}; human is user, gpt assistant"
            )
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise _wrong(f"message {number} has no role", "{'role': ..., 'content': ...}")
    place = f"message {number} ({message['role']})"
    if ("content" not in message and "tool_calls" not in message) or "function_call" in message:
        raise _wrong(f"{place} has no content, or a 'function_call'", "text under 'content', calls under 'tool_calls'")
    content = message.get("content", "")
    if not isinstance(content, (str, list)):
        raise _wrong(f"the content of {place} is {_shown(content)}", "text, which may be JSON")
    for part in content if isinstance(content, list) else ():
        if isinstance(part, dict) and part.get("type") in _KINDS:
            continue
        if not isinstance(part, dict) or part.get("type", "text") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise _wrong(
                f"{place} has a part of type {kind!r}: {_shown(part)}",
                "{'type': 'text', 'text': ...}, {'type': 'image', 'path': ...} or {'type': 'video', 'path': ...}",
            )
    if "tool_calls" in message:
        calls = _functions(message["tool_calls"], f"the tool_calls of {place}", "arguments")
        message = {**message, "tool_calls": calls}
    # transformers gives thoughts the names that templates read them by.
    thoughts = next((message[name] for name in _REASONING if name in message), None)
    return message if thoughts is None else {"thinking": thoughts, **message, "reasoning_content": thoughts}


def _functions(given: Any, name: str, inner: str) -> list[dict[str, Any]] | None:
    """Tools, or calls of them: ``inner`` is what a function has besides its name, an object. Raises ``DataError``."""
    if given is None:
        return None
    form = f'[{{"type": "function", "function": {{"name": ..., "{inner}": {{...}}}}}}], which may be JSON text'
    wrong = _wrong(f"{name} is {_shown(given)}, which is no list of functions", form)
    entries, read = _parsed(given, name), []
    for entry in entries if isinstance(entries, list) else ({},):
        entry = _parsed(entry, name)
        function = _parsed(entry.get("function", entry), name) if isinstance(entry, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise wrong
        if inner in function or inner == "arguments":
            function = {**function, inner: _parsed(function.get(inner, {}), f"{inner!r} of {name}")}
            if not isinstance(function[inner], dict):
                raise wrong
        read.append({**entry, "function": function} if "function" in entry else function)
    return read


def _weight(number: int, message: Mapping[str, Any]) -> float:
    """How much the loss of what the message says counts."""
    weight, train, place = message.get("weight", 1.0), message.get("train", True), f"message {number}"
    if not isinstance(train, bool) or (message.get("train") and message["role"] != "assistant"):
        only = "true or false for the assistant's messages alone: others are never trained on"
        raise _wrong(f"{place} ({message['role']}) has 'train': {_shown(train)}", only)
    if not isinstance(weight, (bool, int, float)) or not math.isfinite(weight):
        raise _wrong(f"the weight of {place} is {weight!r}", "a finite number, or leave it out for 1")
    return float(weight) * train


def _wrong(what: str, form: str) -> DataError:
    return DataError(what, so="the chat template could not write it as it is meant", fix=f"write {form}")


def _parsed(value: Any, name: str) -> Any:
    """What a string of JSON says; another value as it is."""
    try:
        return parse_json(value) if isinstance(value, str) else value
    except ValueError as error:
        raise _wrong(f"{name} is {_shown(value)}, which is not JSON ({error})", "JSON") from error


def _without_nulls(value: Any) -> Any:
    """A value without keys that hold nulls."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
