"""Tokens and masks of 20 shapes of chat templates are those of transformers, and of marks that were set by hand."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from bytescale.common.errors import DataError
from bytescale.config.schema import DataConfig
from bytescale.data.sources.records import Record
from bytescale.data.tokens.chat import ChatTemplate, Rendered
from bytescale.data.tokens.examples import Example, examples_of
from bytescale.data.tokens.messages import conversation_of
from bytescale.data.tokens.tokenizer import JsonTokenizer
from tests.data.chats import byte_level_bpe
from tests.data.templates import ADDED, FAMILIES, SPECIAL, plain
from tests.helpers.effort import pairs

VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}
DAY = DataConfig().chat_template_date
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
    }
]


def turns(*contents: Any, system: str = "") -> list[dict[str, Any]]:
    """Question, answer, question, ...; a dictionary is more than a content."""
    messages = [{"role": "system", "content": system}] if system else []
    for number, content in enumerate(contents):
        role = "assistant" if number % 2 else "user"
        messages.append({"role": role, **(content if isinstance(content, dict) else {"content": content})})
    return messages


def call(number: int, content: str = "", **arguments: Any) -> dict[str, Any]:
    function = {"name": "weather", "arguments": arguments}
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"id": f"call{number:05}", "type": "function", "function": function}],
    }


def answer(number: int, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call{number:05}", "name": "weather", "content": content}


CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one turn": turns("what is the answer ?", "it is 42"),
    "system prompt": turns("hi", "hällo 🙂", "bye", "ok", system="Be kind."),
    "parts of special tokens": turns("a", "d", "b", "end", "c", "im", "d", "user", "e", "assistant"),
    "brackets": turns("a", ">", "b", "<|im", "c", "|>", "d", "</", "e", "<"),
    "empty answers": turns("a", "", "b", "ok", "c", ""),
    "white space": turns(" a \n", "\n b \n\n", "\tc ", "  d", "e", " "),
    "inline thoughts": turns("a", "<think>\nhm\n</think>\n\nb", "c", "<think>\nso\n</think>\n\nd"),
    "thoughts": turns(
        "a", {"content": "b", "reasoning_content": "hm"}, "c", {"content": "d", "reasoning_content": "so, end"}
    ),
    "a call": [*turns("weather in Paris ?"), call(0, city="Paris"), answer(0, "12 °C"), *turns("", "It is 12 °C.")[1:]],
    "calls in two turns": [
        *turns("Paris ?", system="Call tools."),
        call(0, "I look.", city="Paris"),
        answer(0, '{"t": "12"}'),
        call(1, city="Paris", day=2),
        answer(1, "13"),
        *turns("", "12, then 13", "and Rome ?")[1:],
        call(2, city="Rome"),
        answer(2, "20"),
        *turns("", "20")[1:],
    ],
    "all alike": turns("hi", "hi", "hi", "hi", "hi", "hi"),
    "code, and a last question": turns("{{ x }} {% if %}", '{"a": [1]}', "世界 \\n", "'über' \"b\"", "more ?"),
}
THINKING = (None, False, True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    made = byte_level_bpe(["what is the answer it is 42 weather in Paris function name arguments"], SPECIAL)
    made.add_tokens([tokenizers.AddedToken(text, special=False) for text in ADDED])
    made.save(str(path / "tokenizer.json"))
    return path


def example(record: dict[str, Any], source: str, folder: Path, **settings: Any) -> Example:
    config = DataConfig(content="messages", **settings)
    template, tokenizer = ChatTemplate(source, VARIABLES), JsonTokenizer.from_file(folder)
    (found,) = examples_of([Record(values=record, place=str)], config, tokenizer, template)
    if isinstance(found, DataError):
        raise found
    return found


@pytest.fixture
def utils(monkeypatch: pytest.MonkeyPatch) -> Any:
    """transformers' module of chat templates, on our day."""
    module = pytest.importorskip("transformers.utils.chat_template_utils")

    class Today(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Today:
            return cls.fromisoformat(DAY)

    monkeypatch.setattr(module, "datetime", Today)
    return module


def spans_by_hand(marked: str) -> list[tuple[int, int]]:
    spans, length = [], 0
    for piece in marked.split("⟦"):
        said, found, rest = piece.partition("⟧")
        if found:
            spans.append((length, length + len(said.rstrip())))  # as docs/data.md says
        length += len(said) + len(rest)
    return spans


def spans_by_prefixes(render: Any, messages: list[dict[str, Any]]) -> list[tuple[int, int]]:
    text, spans = render(messages), []
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt, upto = render(messages[:number], add_generation_prompt=True), render(messages[: number + 1])
            assert text.startswith(upto)
            assert upto.startswith(prompt)
            spans.append((len(prompt), len(upto.rstrip())))
    return spans


@pytest.mark.parametrize(("name", "title"), pairs(list(FAMILIES), list(CONVERSATIONS)))
def test_tokens_and_masks(name: str, title: str, folder: Path, utils: Any) -> None:
    transformers = pytest.importorskip("transformers")
    family, messages = FAMILIES[name], CONVERSATIONS[title]
    has_calls = any("tool_calls" in message for message in messages)
    tools = TOOLS if has_calls else None
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **VARIABLES)
    for thinking in THINKING if "enable_thinking" in family.marked else THINKING[:1]:
        variables = {} if thinking is None else {"enable_thinking": thinking}
        record = {"messages": messages, "tools": tools, "chat_template_kwargs": variables}
        if has_calls and not family.tools:
            with pytest.raises(DataError, match=r"(leaves the tool_calls of message . out|refuses the conversation)"):
                example(record, plain(family.marked), folder)
            continue
        # What this template takes of a call: an object, or its JSON.
        given = with_json(messages) if "deepseek" in name else messages

        def render(shown: list[dict[str, Any]], source: str = plain(family.marked), **others: Any) -> str:
            others |= {"chat_template": source, "tools": tools, **VARIABLES, **variables}  # noqa: B023
            return str(utils.render_jinja_template(conversations=[shown], **others)[0][0])

        marked = render(given, family.marked)
        spans = spans_by_hand(marked)
        if family.stable:
            assert spans == spans_by_prefixes(render, given)
        tokens = theirs.apply_chat_template(
            given, tools=tools, chat_template=plain(family.marked), return_dict=False, **variables
        )
        offsets = theirs(plain(marked), add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        mask = [float(any(first < stop and last > start for start, stop in spans)) for first, last in offsets]
        (rendered,) = ChatTemplate(plain(family.marked), VARIABLES).render([conversation_of(record)])
        assert isinstance(rendered, Rendered)
        assert [tuple(span[:2]) for span in rendered.spans] == spans
        ours = example(record, plain(family.marked), folder)
        assert ours["tokens"].tolist() == tokens
        assert ours["weights"].tolist() == mask, f"enable_thinking {thinking}"


def with_json(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    changed = json.loads(json.dumps(messages))
    for message in changed:
        for one in message.get("tool_calls", ()):
            one["function"]["arguments"] = json.dumps(one["function"]["arguments"])
    return list(changed)
