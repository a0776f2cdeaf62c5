"""Conversations become the tokens that transformers makes of them, and what the assistant said is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bytescale.common.errors import ConfigError, DataError
from bytescale.config import DataConfig
from bytescale.data.loading.corpus import prepare_corpus
from bytescale.data.sources.records import Record
from bytescale.data.tokens.chat import ChatTemplate, load_template
from bytescale.data.tokens.examples import Example, example_of
from bytescale.data.tokens.tokenizer import load_tokenizer
from tests.data.chats import CHATML, MARKED, THOUGHTS, chat_folder, conversations
from tests.data.support import config, write_jsonl

TURNS = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hällo 🙂"},
    {"role": "user", "content": "bye"},
    {"role": "assistant", "content": "ok"},
]


def said(template: str, messages: list[dict[str, Any]]) -> list[str]:
    text, spans = ChatTemplate(template, {"bos_token": "<s>"}).render_with_spans(messages)
    return [text[start:stop] for start, stop, _ in spans]


def encoded(record: dict[str, Any], folder: Path) -> Example:
    """The example of a record of messages, with the tokenizer and the template of a folder."""
    tokenizer, template = load_tokenizer(str(folder)), load_template("", str(folder))
    return example_of(Record(values=record, place=str), DataConfig(content="messages"), tokenizer, template)


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


def test_a_template_that_changes_earlier_turns_is_refused() -> None:
    changing = "{% for m in messages %}[{{ messages | length }} {{ m.role }}]{{ m.content }}{% endfor %}"
    with pytest.raises(DataError, match=r"writes message 1 differently once others follow.*{% generation %}"):
        said(changing, TURNS)


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
        load_template(str(tmp_path / "bad.jinja"), "bytes")
    with pytest.raises(ConfigError, match=r"data\.chat_template is 'missing', which is no file"):
        load_template("missing", "bytes")
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataError, match=r"tokenizer_config\.json is not JSON"):
        load_template("", str(tmp_path))


def test_a_template_runs_in_a_sandbox() -> None:
    with pytest.raises(DataError, match="refuses the conversation"):
        ChatTemplate("{{ ''.__class__.__mro__[1].__subclasses__() }}").render(TURNS)


@pytest.mark.parametrize(
    ("work", "message"),
    [
        ("{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}", "more than 10,000,000 rounds"),
        ("{% set a = 9 ** 10000000 %}", "a power of more than 1,000,000 bits"),
        ("{% set a = 'x' * 10 ** 11 %}", "a repetition of more than 100,000,000"),
        ("{% set a = 10 ** 11 * [1] %}", "a repetition of more than 100,000,000"),
    ],
)
def test_a_template_that_works_without_end_is_refused(work: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        ChatTemplate(work + CHATML).render(TURNS)


def test_loops_know_their_length_although_their_rounds_are_counted() -> None:
    loops = "{% for m in messages %}{{ loop.index }}/{{ loop.length }} {{ loop.last }} {% endfor %}"
    users = "{% for m in messages | selectattr('role', 'eq', 'user') %}{{ loop.length }}{% endfor %}"
    assert ChatTemplate(loops + users).render(TURNS) == "1/4 False 2/4 False 3/4 False 4/4 True 22"
