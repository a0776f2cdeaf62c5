from __future__ import annotations

import json
import pickle
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from bytescale.common.errors import ConfigError, DataError
from bytescale.config.schema import DataConfig
from bytescale.config.validate import check_batches
from bytescale.data.loading.corpus import prepare_corpus
from bytescale.data.sources.files import expand_sources
from bytescale.data.tokens.progress import Progress, ignore_progress
from bytescale.data.tokens.tokenizer import ByteTokenizer, JsonTokenizer, cached_bpe, load_tokenizer, train_bpe
from tests.data.support import write_jsonl

WORDS = "the quick brown fox jumps over the lazy dog and the dog does not mind " * 20


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> JsonTokenizer:
    folder = tmp_path_factory.mktemp("bpe")
    (folder / "a.txt").write_text(WORDS)
    trained = train_bpe(expand_sources([str(folder)]), DataConfig(bpe_vocab_size=300), ignore_progress)
    return JsonTokenizer(trained, name="trained")


def word_level(*tokens: str) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({token: i for i, token in enumerate(tokens)}, "[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return tokenizer


@given(text=st.text(st.characters(codec="utf-8")))
def test_bytes_and_back(text: str) -> None:
    tokenizer = ByteTokenizer()
    (ids,) = tokenizer.encode_batch([text])
    assert ids.tolist() == list(text.encode())
    assert tokenizer.decode([*ids.tolist(), tokenizer.eos_id]) == text
    assert tokenizer.vocab_size == tokenizer.eos_id + 1 == 257


@given(text=st.text(st.characters(codec="utf-8")))
def test_bpe_and_back(trained: JsonTokenizer, text: str) -> None:
    (ids,) = trained.encode_batch([text])
    assert trained.decode(ids) == text
    assert trained.eos_id not in ids
    assert ids.max(initial=0) < trained.vocab_size <= 300


def test_bpe_compresses_what_it_was_trained_on(trained: JsonTokenizer) -> None:
    assert len(trained.encode_batch([WORDS])[0]) < len(WORDS) / 3


def test_the_name_of_eos_in_text_is_text(trained: JsonTokenizer) -> None:
    (ids,) = trained.encode_batch(["a document about <|endoftext|> and more"])
    assert trained.eos_id not in ids
    assert trained.decode(ids) == "a document about <|endoftext|> and more"


def test_a_tokenizer_survives_pickling(trained: JsonTokenizer) -> None:
    copy = pickle.loads(pickle.dumps(trained))
    text = "the lazy <|endoftext|>"
    assert copy.encode_batch([text])[0].tolist() == trained.encode_batch([text])[0].tolist()
    assert (copy.eos_id, copy.vocab_size, copy.fingerprint) == (trained.eos_id, trained.vocab_size, trained.fingerprint)


def test_truncation_and_padding_of_the_file_are_switched_off(tmp_path: Path) -> None:
    tokenizer = word_level("</s>", "a", "[UNK]")
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=4)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(str(tmp_path))
    assert [ids.tolist() for ids in loaded.encode_batch(["a a a", "a"])] == [[1, 1, 1], [1]]


@pytest.mark.parametrize("eos", ["</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "[SEP]"])
def test_eos_is_found_by_its_usual_names(tmp_path: Path, eos: str) -> None:
    word_level("a", "[UNK]", eos).save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert (tokenizer.eos_id, tokenizer.vocab_size) == (2, 3)


@pytest.mark.parametrize("entry", ["b", {"content": "b"}])
def test_tokenizer_config_says_which_eos(tmp_path: Path, entry: object) -> None:
    word_level("</s>", "b", "c").save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": entry}))
    assert load_tokenizer(str(tmp_path)).eos_id == 1


def test_vocab_size_counts_holes(tmp_path: Path) -> None:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "</s>": 9}, "a"))
    assert JsonTokenizer(tokenizer, name="holes").vocab_size == 10


def test_no_eos(tmp_path: Path) -> None:
    word_level("a", "[UNK]").save(str(tmp_path / "t.json"))
    with pytest.raises(
        ConfigError, match=r"t.json has none of the usual end-of-text tokens.*name the token.*tokenizer_config.json"
    ):
        load_tokenizer(str(tmp_path / "t.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<stop>"}')
    with pytest.raises(ConfigError, match=r"t.json has no token '<stop>'"):
        load_tokenizer(str(tmp_path / "t.json"))


def test_no_such_tokenizer() -> None:
    with pytest.raises(ConfigError, match=r"data.tokenizer is 'gpt2', which is no file.*'bytes', 'bpe'"):
        load_tokenizer("gpt2")


def test_not_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text('{"no": "tokenizer"}')
    with pytest.raises(DataError, match=r"t.json is not a tokenizer.json"):
        load_tokenizer(str(tmp_path / "t.json"))


def test_a_broken_tokenizer_config(tmp_path: Path) -> None:
    word_level("</s>").save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(DataError, match=r"tokenizer_config.json is not JSON"):
        load_tokenizer(str(tmp_path))


def test_training_is_cached_and_follows_its_sources(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text/a.txt").write_text(WORDS)
    settings = DataConfig(bpe_vocab_size=300, cache_dir=str(tmp_path / "cache"))
    calls: list[Progress] = []

    def train() -> JsonTokenizer:
        return cached_bpe(expand_sources([str(tmp_path / "text")]), settings, calls.append)

    first = train()
    assert len(calls) == 1
    assert train().fingerprint == first.fingerprint
    assert len(calls) == 1, "the second call trains nothing"
    (tmp_path / "text/b.txt").write_text("something else entirely " * 50)
    assert train().fingerprint != first.fingerprint
    assert first.vocab_size <= 300


def test_training_needs_room_for_all_bytes_and_some_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    files = expand_sources([str(tmp_path)])
    with pytest.raises(ConfigError, match=r"data.bpe_vocab_size is 256.*at least 257"):
        check_batches(DataConfig(bpe_vocab_size=256))
    with pytest.raises(DataError, match=r"no text to train a tokenizer on"):
        cached_bpe(files, DataConfig(bpe_vocab_size=300, cache_dir=str(tmp_path / "cache")), ignore_progress)


def test_decode_takes_arrays(trained: JsonTokenizer) -> None:
    (ids,) = trained.encode_batch(["the dog"])
    assert trained.decode(np.append(ids, trained.eos_id).astype(np.uint16)) == "the dog"


@pytest.mark.parametrize(
    ("call_puts_it", "said", "bos", "puts_it"),
    [
        (True, None, "auto", True), (False, None, "auto", False), (False, True, "auto", True),
        (True, False, "auto", False), (False, None, "always", True), (True, None, "never", False),
    ],
)  # fmt: skip
def test_documents_begin_as_the_tokenizers_own_call_has_them(
    tmp_path: Path, call_puts_it: bool, said: bool | None, bos: str, puts_it: bool
) -> None:
    """Texts and prompts, not conversations; and the cache does not mix both."""
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "</s>": 1, "a": 2, "?": 3}, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(["<s>", "</s>"])
    if call_puts_it:
        made.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    made.save(str(tmp_path / "tokenizer.json"))
    settings: dict[str, object] = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    settings |= {} if said is None else {"add_bos_token": said}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    if bos == "auto" and said is None:
        own = AutoTokenizer.from_pretrained(tmp_path)("a a")["input_ids"]
        assert (own[0] == 0) == puts_it
    write_jsonl(tmp_path / "x.jsonl", [{"text": "a a", "prompt": "a", "completion": "a a"}])
    for content, weights in (("text", [1.0] * 3), ("prompt", [0.0, 1.0, 1.0, 1.0])):
        data = DataConfig(
            sources=(str(tmp_path / "x.jsonl"),), content=content, tokenizer=str(tmp_path), bos=bos,  # type: ignore
            cache_dir=str(tmp_path / "cache"),
        )  # fmt: skip
        corpus = prepare_corpus(data)
        (document,) = corpus.documents(corpus.samples)
        words = [2, 2, 1] if content == "text" else [2, 2, 2, 1]
        assert document["tokens"].tolist() == [0] * puts_it + words
        assert document["weights"].tolist()[: len(weights) - 1 + puts_it] == ([0.0] * puts_it + weights)[1:]
        assert corpus.metadata.puts_bos == puts_it


def test_a_bos_that_a_tokenizer_does_not_have(tmp_path: Path) -> None:
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"</s>": 0}, unk_token="</s>"))
    made.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match=r'data.bos is "always", and .* names no bos_token'):
        load_tokenizer(str(tmp_path), "always")


def test_blank_text_trains_no_bpe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Newlines, or a text without any space, are one word to the library, whose pairs it would merge for minutes."""
    given: list[str] = []

    class Counting:
        def __init__(self, *parts: object) -> None: ...

        def train_from_iterator(self, texts: Iterable[list[str]], trainer: object) -> None:
            given.extend(text for some in texts for text in some)

    monkeypatch.setattr(tokenizers, "Tokenizer", Counting)
    (tmp_path / "blank.txt").write_text("\n \n" * 1000)
    files = expand_sources([str(tmp_path / "blank.txt")])
    with pytest.raises(DataError, match="hold no text to train a tokenizer on"):
        train_bpe(files, DataConfig(), ignore_progress)
    assert given == []
    long = "a" * 600
    (tmp_path / "words.txt").write_text(f"a word{' ' * 900}{long} b")
    train_bpe(expand_sources([str(tmp_path)]), DataConfig(), ignore_progress)
    (text,) = given
    assert text == f"a word{' ' * 256}{long[:256]}\n{long[256:512]}\n{long[512:]} b"
