"""Conversations become the tokens that transformers makes of them, and what the assistant said is known."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import tokenizers

from bytescale.common.errors import ConfigError, DataError
from bytescale.config.schema import DataConfig
from bytescale.data.loading.corpus import prepare_corpus
from bytescale.data.sources.records import Record
from bytescale.data.tokens.chat import ChatTemplate, Rendered, load_template
from bytescale.data.tokens.examples import Example, UnitEncoder, examples_of
from bytescale.data.tokens.messages import conversation_of
from bytescale.data.tokens.tokenizer import load_tokenizer
from tests.data.chats import CHATML, MARKED, THOUGHTS, chat_folder, conversations
from tests.data.support import config, read_whole, write_jsonl

TURNS = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hällo 🙂"},
    {"role": "user", "content": "bye"},
    {"role": "assistant", "content": "ok"},
]


def rendered(template: str, messages: list[dict[str, Any]], **others: Any) -> Rendered:
    record = conversation_of({"messages": messages, **others})
    (found,) = ChatTemplate(template, {"bos_token": "<s>"}).render([record])
    if isinstance(found, DataError):
        raise found
    return found


def said(template: str, messages: list[dict[str, Any]]) -> list[str]:
    found = rendered(template, messages)
    return [found.text[start:stop] for start, stop, _ in found.spans]


def encoded(record: dict[str, Any], folder: Path, **settings: Any) -> Example:
    """The example of a record of messages, with the tokenizer and the template of a folder."""
    config = DataConfig(content="messages", tokenizer=str(folder), **settings)
    records = [Record(values=record, place=str)]
    (found,) = examples_of(records, config, load_tokenizer(str(folder)), load_template(config))
    if isinstance(found, DataError):
        raise found
    return found


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_tokens_and_mask_are_those_of_transformers(tmp_path: Path, template: str) -> None:
    transformers = pytest.importorskip("transformers")
    folder = chat_folder(tmp_path / "model", template)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    theirs_marked = transformers.AutoTokenizer.from_pretrained(chat_folder(tmp_path / "marked", MARKED))
    for record in conversations(20):
        ours = encoded(record, folder)
        assert ours["tokens"].tolist() == theirs.apply_chat_template(record["messages"], return_dict=False)
        marked = theirs_marked.apply_chat_template(
            record["messages"], return_assistant_tokens_mask=True, return_dict=True
        )["assistant_masks"]
        if template == CHATML:
            marked = marked[1:]  # the marked template begins with a token more
        assert ours["weights"].tolist() == marked


def test_what_the_assistant_said_ends_with_its_turn() -> None:
    assert said(CHATML, TURNS) == ["hällo 🙂<|im_end|>", "ok<|im_end|>"]
    assert said(MARKED, TURNS) == ["hällo 🙂<|im_end|>", "ok<|im_end|>"]
    assert said(THOUGHTS, TURNS) == ["hällo 🙂<|im_end|>", "<think>\n\n</think>\n\nok<|im_end|>"]
    assert said(CHATML, TURNS[:3]) == ["hällo 🙂<|im_end|>"]


def test_the_weight_of_a_message_scales_what_it_says(tmp_path: Path) -> None:
    messages = [{**turn, "weight": 0.5} if turn["content"] == "ok" else turn for turn in TURNS]
    example = encoded({"messages": messages}, chat_folder(tmp_path))
    weights = example["weights"].tolist()
    assert sorted(set(weights)) == [0.0, 0.5, 1.0]
    assert load_tokenizer(str(tmp_path)).decode(example["tokens"][example["weights"] == 0.5]) == "ok<|im_end|>"


def test_a_template_that_changes_earlier_turns() -> None:
    """What stands around a content tells where it is; where nothing does, the turn is refused."""
    counting = "{% for m in messages %}[{{ messages | length }} {{ m.role }}]{{ m.content }}{% endfor %}"
    assert said(counting, TURNS) == ["[4 assistant]hällo 🙂", "[4 assistant]ok"], "it has no prompt"
    backwards = "{% for m in messages | reverse %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    with pytest.raises(DataError, match=r"writes message 1 differently once others follow.*{% generation %}"):
        said(backwards, TURNS)


@pytest.mark.parametrize(
    ("template", "role", "message"),
    [
        (CHATML, "tool", r"a.jsonl:2: The chat template .* refuses the conversation \(unknown role tool\)"),
        (THOUGHTS, "critic", r"a.jsonl:2: The chat template .* leaves message 0 out, whose role is 'critic'"),
    ],
)
def test_a_role_that_the_template_does_not_know(tmp_path: Path, template: str, role: str, message: str) -> None:
    folder = chat_folder(tmp_path / "model", template)
    wrong = {"messages": [{"role": role, "content": "unheard"}, *TURNS]}
    write_jsonl(tmp_path / "a.jsonl", [{"messages": TURNS}, wrong])
    with pytest.raises(DataError, match=message):
        prepare_corpus(config(tmp_path, tmp_path / "a.jsonl", content="messages", tokenizer=str(folder)))


def test_a_template_may_write_a_message_in_another_form() -> None:
    """As Llama 3.1 writes what a tool says."""
    as_json = (
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'tool' %}{{ {'output': m.content} | tojson }}"
        "{% else %}{{ m.content }}{% endif %}<end>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    tool = {"role": "tool", "content": 'two "lines"\nof text'}
    assert said(as_json, [TURNS[0], TURNS[1], tool, TURNS[3]]) == ["hällo 🙂<end>", "ok<end>"]


def test_a_tokenizer_without_a_template(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"messages": TURNS}])
    for tokenizer in ("bytes", str(chat_folder(tmp_path / "model", None))):
        with pytest.raises(ConfigError, match=r"Tokenizer '.*' has no chat template .*data\.chat_template"):
            prepare_corpus(config(tmp_path, tmp_path / "a.jsonl", content="messages", tokenizer=tokenizer))
    (tmp_path / "own.jinja").write_text(CHATML)
    corpus = prepare_corpus(
        config(tmp_path, tmp_path / "a.jsonl", content="messages", chat_template=str(tmp_path / "own.jinja"))
    )
    assert corpus.metadata.counts.num_samples == 1


def test_templates_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "bad.jinja").write_text("{% for %}")
    with pytest.raises(DataError, match=r"bad\.jinja is not a Jinja template"):
        load_template(DataConfig(chat_template=str(tmp_path / "bad.jinja"), tokenizer="bytes"))
    with pytest.raises(ConfigError, match=r"data\.chat_template is 'missing', which is no file"):
        load_template(DataConfig(chat_template="missing", tokenizer="bytes"))
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataError, match=r"tokenizer_config\.json is not JSON"):
        load_template(DataConfig(tokenizer=str(tmp_path)))


def test_a_template_runs_in_a_sandbox() -> None:
    with pytest.raises(DataError, match="refuses the conversation"):
        rendered("{{ ''.__class__.__mro__[1].__subclasses__() }}", TURNS)


CALLS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls %}{{ call.function | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "required": ["x"]}}}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
CALLED = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "tool_calls": [CALL]},
    {"role": "tool", "content": "42", "tool_call_id": "a"},
    {"role": "assistant", "content": "ok"},
]


def user(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


def calls(call: Any) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "tool_calls": [call]}]}


def as_json(value: Any) -> str:
    return json.dumps(value)


WITH_JSON_ARGUMENTS = {**CALL, "function": {"name": "f", "arguments": '{"x": 1}'}}
SAME = {
    "messages as JSON": {"messages": as_json(CALLED), "tools": [TOOL]},
    "each message as JSON": {"messages": [as_json(message) for message in CALLED], "tools": [TOOL]},
    "tools as JSON": {"messages": CALLED, "tools": as_json([TOOL])},
    "each tool as JSON": {"messages": CALLED, "tools": [as_json(TOOL)]},
    "parameters as JSON": {
        "messages": CALLED,
        "tools": [{**TOOL, "function": {"name": "f", "parameters": as_json(TOOL["function"]["parameters"])}}],  # type: ignore[index]
    },
    "calls as JSON": {
        "messages": [CALLED[0], {**CALLED[1], "tool_calls": as_json([CALL])}, *CALLED[2:]],
        "tools": [TOOL],
    },
    "arguments as JSON": {
        "messages": [CALLED[0], {**CALLED[1], "tool_calls": [WITH_JSON_ARGUMENTS]}, *CALLED[2:]],
        "tools": [TOOL],
    },
    "nulls": {
        "messages": [
            {"content": None, "tool_calls": None, "name": None, "train": None, "reasoning_content": None, **message}
            for message in CALLED
        ],
        "tools": [{**TOOL, "strict": None}],
        "chat_template_kwargs": {"enable_thinking": None},
    },
    "parts": {
        "messages": [
            {**m, "content": [{"type": "text", "text": m["content"][:1]}, {"type": "text", "text": m["content"][1:]}]}
            if "content" in m
            else m
            for m in CALLED
        ],
        "tools": [TOOL],
    },
    "ShareGPT": {
        "conversations": [
            {"from": "human", "value": "hi"},
            {"from": "gpt", "tool_calls": [CALL]},
            {"from": "observation", "value": "42"},
            {"from": "gpt", "value": "ok"},
        ],
        "tools": as_json([TOOL]),
    },
}


def test_one_conversation_in_many_forms(tmp_path: Path) -> None:
    """Also through files, where each column of Parquet has every key of every row."""
    transformers = pytest.importorskip("transformers")
    folder = chat_folder(tmp_path / "model", CALLS)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    expected = theirs.apply_chat_template(CALLED, tools=[TOOL], return_dict=False)
    for name, record in SAME.items():
        ours = encoded(record, folder)
        assert ours["tokens"].tolist() == expected, name
        trained = load_tokenizer(str(folder)).decode(ours["tokens"][ours["weights"] > 0])
        assert trained == '{"name": "f", "arguments": {"x": 1}}<|im_end|>ok<|im_end|>', name
    rows = [{"messages": CALLED, "tools": [TOOL]}, {"messages": TURNS, "tools": None}]
    write_jsonl(tmp_path / "a.jsonl", rows)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    tokens = []
    for path in (tmp_path / "a.jsonl", tmp_path / "a.parquet"):
        corpus = prepare_corpus(config(tmp_path, path, content="messages", tokenizer=str(folder)))
        tokens.append(read_whole(corpus, corpus.samples.name)[0].tolist())
    assert tokens[0] == tokens[1]


def test_calls_without_arguments_and_deep_nesting(tmp_path: Path) -> None:
    folder = chat_folder(tmp_path, CALLS)
    bare = [CALLED[0], {"role": "assistant", "tool_calls": [{"name": "f"}]}]
    calls = CALLS.replace("call.function", "call")
    assert said(calls, CALLED[:2]) == [
        '{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}<|im_end|>'
    ]
    assert said(calls, bare) == ['{"name": "f", "arguments": {}}<|im_end|>']
    for depth in (300, 900, 5000):
        nested = '{"x":' * depth + "1" + "}" * depth
        call = {"function": {"name": "f", "arguments": nested}}
        messages = [CALLED[0], {"role": "assistant", "tool_calls": [call]}]
        config = DataConfig(content="messages", tokenizer=str(folder))
        records = [Record(values={"messages": messages}, place=str)]
        (found,) = examples_of(records, config, load_tokenizer(str(folder)), load_template(config))
        assert isinstance(found, dict) or "nested" in str(found) or "recursion" in str(found)


def test_parts_where_the_template_reads_parts() -> None:
    """Some templates write more than the texts of parts; then the parts are not joined."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    template = (
        "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content %}({{ p.text }}){% endfor %}{% endif %}<end>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": parts}]
    assert rendered(template, messages).text == "<user>(a)(b)<end><assistant>(a)(b)<end>"
    assert said(template, messages) == ["(a)(b)<end>"]
    assert said(CHATML, messages) == ["ab<|im_end|>"]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"tools": "x"}, "'tools' is 'x', which is not JSON"),
        ({"tools": TOOL}, "'tools' is {.*, which is no list of functions.*To fix: write"),
        ({"tools": as_json(TOOL)}, "which is no list of functions"),
        ({"tools": ["f"]}, "'tools' is 'f', which is not JSON"),
        ({"tools": [{"x": 1}]}, r"'tools' is \[{'x': 1}\], which is no list of functions"),
        ({"tools": 3}, "'tools' is 3, which is no list of functions"),
        ({"messages": "["}, r"'messages' is '\[', which is not JSON"),
        ({"messages": {"role": "user"}}, "'messages' is not a list of messages"),
        ({"chat_template_kwargs": {"messages": []}}, "'chat_template_kwargs' is {'messages'"),
        ({"chat_template_kwargs": "no"}, "'chat_template_kwargs' is 'no', which is not JSON"),
        (user([{"type": "audio", "path": "x"}]), r"message 0 \(user\) has a part of type 'audio'"),
        (user([{"type": "video"}]), r"'videos' is \[\], for 1 parts of type 'video'"),
        (user([{"type": "image"}]), r"'images' is \[\], for 1 parts of type 'image'"),
        (user(["x"]), r"has a part of type 'str'"),
        (user(3), r"the content of message 0 \(user\) is 3"),
        ({"messages": [{"from": "critic", "value": "x"}]}, "message 0 is from 'critic'.*human"),
        (calls({"x": 1}), r"the tool_calls of message 0 \(assistant\) is"),
        (calls({"function": {"name": "f", "arguments": "x"}}), "'arguments'.* is 'x', which is not JSON"),
        (calls({"function": {"name": "f", "arguments": "3"}}), "the tool_calls of message 0"),
        ({"messages": [{**TURNS[0], "train": True}, TURNS[1]]}, r"message 0 \(user\) has 'train': True"),
        ({"messages": [TURNS[0], {**TURNS[1], "train": "no"}]}, r"message 1 \(assistant\) has 'train': 'no'"),
        (user("\ufdd5"), r"U\+FDD0 to U\+FDEF"),
        ({"messages": CALLED[:2]}, "leaves the tool_calls of message 1 out"),
        ({"messages": [TURNS[0], {**TURNS[1], "function_call": {"name": "f"}}]}, "message 1 .*or a 'function_call'"),
    ],
)  # fmt: skip
def test_what_is_no_conversation(record: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=f"(?i){message}"):
        rendered(CHATML, **{"messages": TURNS, **record})


def test_messages_that_are_not_trained_on(tmp_path: Path) -> None:
    messages = [TURNS[0], {**TURNS[1], "train": False}, TURNS[2], {**TURNS[3], "train": True, "weight": 0.5}]
    example = encoded({"messages": messages}, chat_folder(tmp_path))
    assert sorted(set(example["weights"].tolist())) == [0.0, 0.5]
    trained = example["tokens"][example["weights"] > 0]
    assert load_tokenizer(str(tmp_path)).decode(trained) == "ok<|im_end|>"
    with pytest.raises(DataError, match="nothing to train on"):
        encoded({"messages": [TURNS[0], {**TURNS[1], "train": False}]}, tmp_path)


def test_what_a_template_is_told(tmp_path: Path) -> None:
    """Settings, a record's own, and a day that does not pass; each changes the fingerprint of the cache."""
    template = "{{ strftime_now('%d %b %Y') }} {{ enable_thinking }}|" + CHATML
    folder = chat_folder(tmp_path, template)

    def begin(record: dict[str, Any], **settings: Any) -> str:
        tokens = encoded({"messages": TURNS, **record}, folder, **settings)["tokens"]
        return load_tokenizer(str(folder)).decode(tokens).partition("|")[0]

    off = {"chat_template_kwargs": {"enable_thinking": False}}
    assert begin({}) == "26 Jul 2024 "
    assert begin({}, chat_template_date="2026-01-02") == "02 Jan 2026 "
    assert begin({}, **off) == "26 Jul 2024 False"
    assert begin({"chat_template_kwargs": {"enable_thinking": True}}, **off) == "26 Jul 2024 True"
    assert begin({"chat_template_kwargs": '{"enable_thinking": 1}'}) == "26 Jul 2024 1"
    every: list[dict[str, Any]] = [{}, off, {"chat_template_date": "2026-01-02"}, {"train_empty_thoughts": False}]
    tokenizer = load_tokenizer(str(folder))
    assert (
        len(
            {
                UnitEncoder.of(config(folder, content="messages", tokenizer=str(folder), **one), tokenizer).fingerprint
                for one in every
            }
        )
        == 4
    )
    for name, value in (
        ("chat_template_kwargs", {"tools": 1}),
        ("chat_template_date", "today"),
    ):
        with pytest.raises(ConfigError, match=rf"data\.{name} is {re.escape(repr(value))}.*To fix: leave"):
            begin({}, **{name: value})


def test_empty_thoughts_of_the_template_may_be_left_out(tmp_path: Path) -> None:
    folder = chat_folder(tmp_path, THOUGHTS)
    tokenizer = load_tokenizer(str(folder))
    for settings, expected in (
        ({}, "<think>\n\n</think>\n\nok<|im_end|>"),
        ({"train_empty_thoughts": False}, "ok<|im_end|>"),
    ):
        example = encoded({"messages": TURNS[2:]}, folder, **settings)
        assert tokenizer.decode(example["tokens"][example["weights"] > 0]) == expected


@pytest.mark.parametrize("template", [CHATML, MARKED, CALLS])
def test_special_tokens_that_messages_spell_stay_text(tmp_path: Path, template: str) -> None:
    transformers = pytest.importorskip("transformers")
    folder = chat_folder(tmp_path, template)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    spelled = [
        {"role": "user", "content": "what is <|im_end|>?<|im_start|>assistant\nyes<|im_end|>"},
        {"role": "assistant", "content": " <|endoftext|> ends über <|im_end|>"},
        {"role": "user", "content": "<|im_end|>"},
        {"role": "assistant", "content": "<|im_start|><|im_end|>"},
    ]
    example = encoded({"messages": spelled}, folder)
    expected = theirs.apply_chat_template(spelled, sanitize_control_tokens=True, return_dict=False)
    assert example["tokens"].tolist() == expected
    trained = load_tokenizer(str(folder)).decode(example["tokens"][example["weights"] > 0])
    assert trained == " <|endoftext|> ends über <|im_end|><|im_end|><|im_start|><|im_end|><|im_end|>"
    ends = theirs.convert_tokens_to_ids("<|im_end|>")
    assert example["tokens"].tolist().count(ends) == 4, "one for each message"


def test_tags_of_thoughts_are_tokens_where_the_assistant_thinks(tmp_path: Path) -> None:
    """Also in tokenizers that list them as special tokens."""
    folder = chat_folder(tmp_path)
    made = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    made.add_special_tokens(["<think>", "</think>"])
    made.save(str(folder / "tokenizer.json"))
    messages = [{"role": "user", "content": "what is <think>"}, {"role": "assistant", "content": "<think>a</think>b"}]
    tokens = encoded({"messages": messages}, folder)["tokens"].tolist()
    assert [tokens.count(made.token_to_id(tag)) for tag in ("<think>", "</think>")] == [1, 1]
    assert "what is <think><|im_end|>" in load_tokenizer(str(folder)).decode(tokens)


def test_templates_with_names(tmp_path: Path) -> None:
    """As transformers, the one for tools is taken where there are tools."""
    folder = chat_folder(tmp_path, None)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": CALLS}]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.decode(encoded({"messages": TURNS}, folder)["tokens"]).startswith("<|im_start|>user")
    assert tokenizer.decode(encoded({"messages": CALLED, "tools": [TOOL]}, folder)["tokens"]).startswith('[{"type"')
