"""Bad input to every command: one message with a cause and a remedy, no stack trace, nothing that steers a terminal.

Every case is a command line in a folder of bad files. A message ends in exit code 1 or 2.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from bytescale.cli.main import main
from bytescale.config.load import config_to_toml
from bytescale.report.runs import NEEDED
from tests.helpers.effort import REST
from tests.train.runs import on_ranks, small_run, write_corpus

DEEP = "[" * 100_000
LONG = "n" * 300
ESCAPE = "\x1b[2J"
STEP = "step-000003"

FILES: dict[str, str | bytes] = {
    "file": "x",
    "deep.toml": f"a = {DEEP}",
    "binary.toml": b"\0\0\xff",
    "empty.toml": "",
    "section.toml": "data = 3",
    "key.toml": f'[data]\n"so{ESCAPE}urces" = 1'.replace(ESCAPE, "\\u001b[2J"),
    "infinite.toml": '[data]\nsources = ["corpus"]\n[optimizer]\nlr = inf',
    "huge.toml": '[data]\nsources = ["corpus"]\nbatch_tokens = 99999999999999999999999',
    "lengths.txt": "100 200 3000 50",
    "cut.npy": b"\x93NUMPYxx",
    "nan.txt": "1 nan 3",
    "inf.txt": "1 inf",
    "negative.txt": "-3 5",
    "none.txt": "",
    "words.txt": "a b c",
    "large.txt": "1e30",
    "object.json": '{"a": 1}',
    "nested.json": "[[1, 2], [3]]",
    "deep.json": DEEP,
    "deep.jsonl": f'{{"text": "fine"}}\n{{"text": {DEEP}}}\n',
    "escape.jsonl": f"{ESCAPE}{{bad\n",
    "key.jsonl": '{"a\\u001b[2Jb": "x"}\n',
    "array.jsonl": "[1]\n",
    "bad.parquet": b"PAR1xxxxPAR1",
    "bad.jsonl.gz": b"\x1f\x8b\x08 nothing",
    "bad.bin": b"\0" * 100,
    "cut.tar": b"d/1.txt" + b"\0" * 93 + b"0000644\0" * 3 + b"00000100000\0" + b"\0" * 300,
    "role.jsonl": json.dumps({"messages": [{"role": f"us{ESCAPE}er", "content": "hi"}]}),
    "chat.jsonl": json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}),
    "range.jinja": "{% for i in range(10**9) %}x{% endfor %}",
    "bad.jinja": "{% for %}",
    "undefined.jinja": "{{ a.b.c }}",
    "escape.jinja": "{{ ''.__class__.__mro__ }}",
    "zero.jinja": "{{ 1 // 0 }}",
    "latin.jinja": b"{{ '\xe9' }}",
    "nul.toml": '[data]\nsources = ["corpus"]\ncache_dir = "a\\u0000b"',
    "complex.npy": b"\x93NUMPY\x01\0\x76\0" + b"{'descr': '<c16', 'fortran_order': False, 'shape': (1,), }".ljust(134),
    "object-tokenizer.json": "{}",
    "profile.toml": "x = 1",
    "no-type/config.json": "{}",
    "no-shape/config.json": '{"model_type": "llama"}',
    "deep-model/config.json": DEEP,
    "list-model/config.json": "[1]",
    "unknown-model/config.json": '{"model_type": "nope\\u001b[2J"}',
}

CONFIGS = [
    "deep.toml", "binary.toml", "empty.toml", "section.toml", "key.toml", "infinite.toml", "huge.toml", "nothing.toml",
    "file/x.toml", f"{LONG}.toml", "/dev/null", "corpus", "nul.toml",
]  # fmt: skip
LENGTHS = [
    "cut.npy", "nan.txt", "inf.txt", "negative.txt", "none.txt", "words.txt", "large.txt", "object.json", "nested.json",
    "deep.json", "nothing.txt", "corpus", LONG, "complex.npy",
]  # fmt: skip
SOURCES = [
    "deep.jsonl", "escape.jsonl", "key.jsonl", "array.jsonl", "bad.parquet", "bad.jsonl.gz", "bad.bin", "nothing", LONG,
    "file/x", "nope://x", "tar://d/1.txt::cut.tar", "zip://x::cut.tar", "/dev/zero", "~no-such-user/x.txt",
]  # fmt: skip
TEMPLATES = [
    "range.jinja",
    "bad.jinja",
    "undefined.jinja",
    "escape.jinja",
    "zero.jinja",
    "nothing.jinja",
    "latin.jinja",
]
MODELS = ["no-type", "no-shape", "deep-model", "list-model", "unknown-model", "nothing", "file", "corpus"]
OUTPUTS = ["/proc/x/y", "file/out", LONG, "/sys/out"]
SETTINGS = [
    ("--optimizer.lr", "inf"), ("--optimizer.lr", "nan"), ("--optimizer.lr", "1e999"), ("--optimizer.lr", "x"),
    ("--optimizer.weight-decay", "-inf"), ("--data.batch-tokens", "1e30"), ("--data.batch-tokens", "-5"),
    ("--data.batch-tokens", "9" * 30), ("--data.batch-tokens", "8Q"), ("--parallel.ranks", "0"),
    ("--cost.profile", "profile.toml"), ("--cost.profile", "deep.toml"), ("--cost.profile", "nothing"),
    ("--model.config", "rope_theta=-1"), ("--model.config", "rms_norm_eps=-1"),
    ("--init", "nothing"), ("--init", "checkpoint:nothing"),
    ("--trainer.epochs", "1000000000000"), ("--data.bpe-vocab-size", "2000000000"), ("--optimizer.options", "eps=1"),
    ("--parallel.ranks", "65536"), ("--trainer.run-dir", "~no-such-user/run"), ("--data.text-key", "\udce9"),
]  # fmt: skip
DRAWN = (
    *("plan", "--parallel.ranks", "4", "--data.batch-tokens", "64K", "--data.context-length", "16K"),
    *("--model.preset", "7b", "--model.config", "num_hidden_layers=1"),
)
PLANS = [
    ("--parallel.capacity-tokens", "-1"), ("--memory.device-gib", "0"), ("--parallel.tp", "0"), ("--parallel.pp", "-1"),
    ("--parallel.ranks", "0"), ("--gpus-per-node", "0"), ("--data.batch-tokens", "7"), ("--data.context-length", "0"),
    ("--batch.seed", "-1"), ("--rates.flops-per-second", "0"), ("--rates.flops-per-second", "nan"),
    ("--rates.intra-node-bytes-per-second", "-1"), ("--rates.latency-seconds", "1e15"),
    ("--model.config", "num_hidden_layers=0"), ("--model.config", "hidden_size=-1"),
    ("--model.config", "num_local_experts=7"), ("--model.config", "x"),
    ("--parallel.ranks", "1000000000000"), ("--rates.flops-per-second", "1e-300"),
    ("--model.config", "num_hidden_layers=1000000000"),
    ("--model.config", "hidden_size=1000000000000000000"),
]  # fmt: skip


def alternating(commands: Sequence[str], words: Sequence[str]) -> list[tuple[str, ...]]:
    """Each word with one of the commands in turn; in the rest, with all of them."""
    return [
        (command, word)
        for number, word in enumerate(words)
        for command in (commands if REST else commands[number % len(commands) :][:1])
    ]


def cases() -> list[tuple[str, ...]]:
    """All command lines but those about runs and checkpoints."""
    lines: list[tuple[str, ...]] = [
        *alternating(("train", "plan", "simulate"), CONFIGS),
        *(("plan", "--parallel.ranks", "4", "--batch.lengths", lengths) for lengths in LENGTHS),
        *(("data", "tokenize", source, "--output", "out") for source in SOURCES),
        *(("data", "show", "chat.jsonl", "--content", "messages", "--tokenizer", "bytes", "--chat-template", template)
          for template in TEMPLATES),
        ("data", "show", "role.jsonl", "--content", "messages", "--tokenizer", "bytes"),
        *(("data", "tokenize", "corpus", "--output", "out", "--tokenizer", tokenizer)
          for tokenizer in ("object-tokenizer.json", "deep.json", "nothing.json", "file")),
        *(("train", "c.toml", "--init", f"hf:{model}") for model in MODELS),
        *(("score", model, "corpus", "--out", "scores.parquet") for model in MODELS),
        *(("plan", "c.toml", "--model.preset", f"hf:{model}") for model in MODELS),
        *(("train", "c.toml", "--dry-run", *setting) for setting in SETTINGS),
        *((*DRAWN, *option) for option in PLANS),
        *(("train", "c.toml", "--trainer.run-dir", place) for place in (*OUTPUTS, "a\x1bb")),
        *(("init", place) for place in (*OUTPUTS, "c.toml")),
        *(("simulate", "c.toml", "--trace", place) for place in (*OUTPUTS, "corpus")),
        *((*DRAWN, "--png", place) for place in (OUTPUTS if REST else OUTPUTS[:1])),  # drawn before it is refused
        *((*DRAWN, "--save", place) for place in OUTPUTS),
        *(("report", "run", "--out", place) for place in (*OUTPUTS, "corpus")),
        *(("convert", f"run/checkpoints/{STEP}", place) for place in (*OUTPUTS, "corpus")),
        *(("data", "tokenize", "corpus", "--output", place) for place in OUTPUTS),
        ("simulate", "c.toml", "--parallel.ranks", "0"),
        ("simulate", "c.toml", "--gpus-per-node", "0"),
        ("train", "c.toml", "--parallel.ranks", "5000"),
        ("profile", "--parallel.ranks", "0"),
        ("checkpoint", "list", "nothing"),
        ("checkpoint", "upload", "run", "nope://x"),
        ("checkpoint", "upload", f"run/checkpoints/{STEP}", "nope://x"),
        ("simulate", "c.toml", "--trace", "nothing/trace.json"),
        *([(*DRAWN, "--png", "picture.nope")] if REST else []),
        ("convert", f"run/checkpoints/{STEP}", "converted", "--base", "no-type"),
        ("report", "nothing"),
        ("report", "file"),
        ("data", "audit", "run"),
    ]  # fmt: skip
    return lines


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bad files, a corpus, a config of one rank, and its run of three steps."""
    folder = tmp_path_factory.mktemp("bad")
    for name, content in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    config = on_ranks(small_run(write_corpus(folder / "corpus", 20), folder / "run", steps=3), 1)
    (folder / "c.toml").write_text(config_to_toml(config), encoding="utf-8")
    assert main(["train", str(folder / "c.toml")]) == 0
    return folder


def complaint(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> str:
    """What is wrong with how a command refuses bad input; empty: nothing is."""
    capsys.readouterr()
    try:
        code: object = main(arguments)
    except SystemExit as end:
        code = end.code
    except BaseException as error:
        code = f"{type(error).__name__}: {error}"
    output = "".join(capsys.readouterr())
    wrong = [
        what
        for what, is_wrong in (
            (f"exit code {code}", code not in (1, 2)),
            ("a stack trace", "Traceback" in output or "Nobody has foreseen" in output),
            ("an escape sequence", ESCAPE in output),
            ("nothing said", not output.strip()),
            ("no remedy", f"bytescale {arguments[0]}:" in output and "To fix:" not in output),
        )
        if is_wrong
    ]
    return f"{' '.join(arguments)[:120]}: {', '.join(wrong)}: {output[-300:]}" if wrong else ""


@pytest.mark.more_examples
def test_every_bad_input_is_one_clear_message(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr("bytescale.storage.retry.FIRST_PAUSE_SECONDS", 0.001)  # bad archives are read four times
    assert len(cases()) >= 150 - 20 * (not REST)
    complaints = [found for arguments in cases() if (found := complaint(arguments, capsys))]
    assert not complaints, "\n\n".join(complaints)


SMALL_FILES: list[tuple[str, ...]] = [
    *(("a.toml", command, "@") for command in ("train", "plan", "simulate", "profile", "demo")),
    ("a.toml", "train", "c.toml", "--dry-run", "--cost.profile", "@"),
    *((f"a.{ending}", "plan", "--parallel.ranks", "4", "--batch.lengths", "@") for ending in ("npy", "json", "txt")),
    ("a.npz", "simulate", "--parallel.ranks", "4", "--plan", "@"),
    ("a.json", "data", "tokenize", "corpus", "--output", "out", "--tokenizer", "@"),
    ("tokenizer.json", "data", "tokenize", "corpus", "--output", "out", "--tokenizer", "|"),
    ("a.jinja", "data", "show", "chat.jsonl", "--content", "messages", "--tokenizer", "bytes", "--chat-template", "@"),
    ("config.json", "score", "|", "corpus", "--out", "s.parquet"),
    ("config.json", "init", "new.toml", "--from", "|"),
    ("config.toml", "train", "--resume", "|"),
    ("config.toml", "data", "audit", "|"),
    ("run_state.json", "convert", "|", "converted"),
    ("run_state.json", "train", "c.toml", "--dry-run", "--init", "checkpoint:|"),
]  # fmt: skip
"""All that read a whole file that a person names, ``@``, or one with this name in a folder that a person names."""


@pytest.mark.parametrize(
    "kind",
    ["fifo", "huge", *(pytest.param(kind, marks=pytest.mark.exhaustive) for kind in ("device", "socket", "folder"))],
)
def test_what_is_no_small_file_is_refused_at_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    """A device or a FIFO would be read for ever, and a file of 50 GiB into memory."""
    complaints = []
    for number, (name, *command) in enumerate(SMALL_FILES):
        path = tmp_path / str(number) / name
        path.parent.mkdir()
        monkeypatch.chdir(path.parent)  # the names of sockets are short
        if kind == "device":
            path.symlink_to("/dev/zero")
        elif kind == "fifo":
            os.mkfifo(path)
        elif kind == "socket":
            socket.socket(socket.AF_UNIX).bind(name)
        elif kind == "folder":
            path.mkdir()
        else:
            with path.open("wb") as file:
                file.truncate(50 * 2**30)
        monkeypatch.chdir(folder)
        words = [word.replace("@", str(path)).replace("|", str(path.parent)) for word in command]
        complaints.append(complaint(tuple(words), capsys))
    assert not any(complaints), "\n\n".join(filter(None, complaints))


def test_what_is_no_file_is_not_written_over(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Root could replace a device, such as /dev/null, by a file for everyone."""
    monkeypatch.chdir(folder)
    place = tmp_path / "fifo"
    os.mkfifo(place)
    drawn = ("plan", "--parallel.ranks", "4", "--batch.lengths", "lengths.txt")
    for command in (
        ("report", "run", "--out"),
        ("simulate", "c.toml", "--trace"),
        (*drawn, "--save"),
        (*drawn, "--png"),
        ("profile", "--out"),
        ("init",),
        ("convert", f"run/checkpoints/{STEP}"),
        ("train", "c.toml", "--trainer.run-dir"),
    ):
        assert complaint((*command, str(place)), capsys) == ""
        assert place.is_fifo(), command


def test_a_dry_run_finds_what_training_would_find(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for option in (("--checkpoint.folder", str(folder / "file")), ("--eval.sources", "nothing-*.txt")):
        command = ("train", str(folder / "c.toml"), "--trainer.run-dir", str(folder / "new"), "--dry-run", *option)
        assert complaint(command, capsys) == ""


def test_blank_text_for_a_bpe(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Refused before anything is trained: tests/data/test_tokenizer.py looks at what the library is given."""
    (tmp_path / "blank.txt").write_text("\n" * 10_000)
    options = ("--data.sources", str(tmp_path / "blank.txt"), "--data.tokenizer", "bpe")
    assert (
        complaint(("train", str(folder / "c.toml"), "--trainer.run-dir", str(tmp_path / "new"), *options), capsys) == ""
    )


def test_keys_of_many_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.toml").write_text("a" + ".a" * 100_000 + " = 1")
    assert complaint(("plan", str(tmp_path / "a.toml")), capsys) == ""


def manifests() -> dict[str, Callable[[bytes], bytes]]:
    """What can be done to ``run_state.json``, by name."""
    changes: dict[str, Callable[[bytes], bytes]] = {
        "empty": lambda content: b"",
        "half": lambda content: content[: len(content) // 2],
        "list": lambda content: b"[]",
        "deep": lambda content: DEEP.encode(),
    }
    values = (("gone", ...), ("null", None), ("text", "x"), ("list", [None]))
    keys = ("step", "sampler", "architecture", "mesh", "format", "layouts", "files", "checksum")
    for number, key in enumerate(keys):
        for name, value in values if REST else values[number % 4 :][:1]:
            changes[f"{key}-{name}"] = lambda content, key=key, value=value: _with(content, key, value)  # type: ignore[misc]
    return changes


def _with(content: bytes, key: str, value: object) -> bytes:
    changed = json.loads(content)
    changed.pop(key)
    return json.dumps(changed if value is ... else {**changed, key: value}).encode()


TENSORS: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "huge-header": lambda content: struct.pack("<Q", 2**62) + content[8:],
    "junk-header": lambda content: struct.pack("<Q", 20) + b"[" * 20 + content[28:],
    "no-tensors": lambda content: struct.pack("<Q", 2) + b"{}" + content[10:],
    "cut": lambda content: content[:-100],
}


ODD = b'{"step": 1e999}\n' + json.dumps({**dict.fromkeys((*NEEDED, "step"), 1), "data_bytes_read": 3}).encode()


@pytest.mark.more_examples
def test_crafted_checkpoints_are_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    complaints = []
    crafted = [("run_state.json", *change) for change in manifests().items()]
    crafted += [("tensors-00000.safetensors", *change) for change in TENSORS.items()]
    for file, name, change in crafted:
        run = tmp_path / f"{file.partition('.')[0]}-{name}"
        shutil.copytree(folder / "run", run)
        path = run / "checkpoints" / STEP / file
        path.write_bytes(change(path.read_bytes()))
        for command in (("train", "--resume", run.name, "--trainer.steps", "4"), ("checkpoint", "verify", run.name)):
            complaints.append(complaint(command, capsys))
        shutil.rmtree(run)
    assert not any(complaints), "\n\n".join(filter(None, complaints))


def test_damaged_records_of_a_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What only tells people of a run neither stops its continuation nor its report."""
    monkeypatch.chdir(tmp_path)
    for number, content in enumerate(
        [
            b'{"step": NaN}\n',
            b"garbage\n[1, 2]\n",
            b"",
            b"\xff\xfe\0\0",
            DEEP.encode(),
            b'{"step": 1, "loss": "x"}\n',
            ODD,
        ]
    ):
        run = tmp_path / f"run-{number}"
        shutil.copytree(folder / "run", run)
        for name in ("metrics.jsonl", "calibration.jsonl", "traces/step-000001.json"):
            (run / name).parent.mkdir(exist_ok=True)
            (run / name).write_bytes(content)
        assert main(["report", run.name, "--out", f"{number}.html"]) == 0
        assert main(["train", "--resume", run.name, "--trainer.steps", "4"]) == 0, capsys.readouterr().err
        assert json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 4
