"""Models of the Hub by name, from a server on loopback that speaks its protocol."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import tokenizers
import torch
from huggingface_hub import constants

from bytescale.cli.main import main
from bytescale.config.load import config_to_toml, load_config
from bytescale.config.schema import ModelConfig
from bytescale.parity import small_model
from tests.data.remote_files import LOOK_SECONDS
from tests.data.support import write_jsonl
from tests.helpers.effort import one_of
from tests.train.runs import losses, on_ranks, small_run, write_corpus

COMMIT = "5e1f" * 10
SECRET_CODE = "raise SystemExit('code of the model was run')"


class Hub(BaseHTTPRequestHandler):
    """``acme/tiny`` can be read; ``acme/gated`` says that it is gated; there is nothing else."""

    def __init__(self, *arguments: Any, folder: Path) -> None:
        self.folder = folder
        super().__init__(*arguments)

    def log_message(self, *_: Any) -> None:
        """Nothing."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path.startswith(("/api/models/acme/gated", "/acme/gated")):
            self.answer(403, b"", {"X-Error-Code": "GatedRepo", "X-Error-Message": "ask first"})
        elif path in ("/api/models/acme/tiny/revision/main", f"/api/models/acme/tiny/revision/{COMMIT}"):
            files = [{"rfilename": file.name} for file in sorted(self.folder.iterdir())]
            self.json({"id": "acme/tiny", "sha": COMMIT, "siblings": files})
        elif path == "/api/datasets/acme/chats" or path.startswith("/api/datasets/acme/chats/revision/"):
            self.json({"id": "acme/chats", "sha": COMMIT, "siblings": []})
        elif path == "/api/datasets/acme/chats/tree/~parquet/default":
            self.json([{"type": "directory", "path": "default/train", "oid": COMMIT}])
        elif path.startswith(("/api/models/acme/tiny/tree/", "/api/datasets/acme/chats/tree/")):
            files = sorted(self.folder.iterdir())
            inside = (
                "default/train/" if "~parquet" in path else ""
            )  # what the Hub converts lies in a revision of its own
            self.json(
                [{"type": "file", "path": inside + f.name, "size": f.stat().st_size, "oid": etag(f)} for f in files]
            )
        elif path.startswith("/api/models/acme/tiny/revision/"):
            self.answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
        elif path.startswith(("/acme/tiny/resolve/", "/datasets/acme/chats/resolve/")):
            file = self.folder / path.rpartition("/")[2]
            headers = {"ETag": f'"{etag(file)}"', "X-Repo-Commit": COMMIT}
            content, wanted = file.read_bytes(), re.match(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            if wanted is None:
                self.answer(200, content, headers)
            else:
                first, last = int(wanted[1]), min(int(wanted[2]), len(content) - 1)
                headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
                self.answer(206, content[first : last + 1], headers)
        else:
            self.answer(404, b"", {"X-Error-Code": "RepoNotFound"})

    def json(self, content: Any) -> None:
        self.answer(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def answer(self, code: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def etag(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Variables of the environment with which a command uses a server that has one small Qwen3."""
    folder = tmp_path / "served"
    small_model("qwen3", dtype=torch.float32, vocab_size=320).save_pretrained(folder)
    words = {"<eos>": 0, "?": 1} | {f"w{n}": n for n in range(2, 300)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "?"))
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    (folder / "modeling_qwen3.py").write_text(SECRET_CODE)
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Hub, folder=folder))
    Thread(target=server.serve_forever, args=(LOOK_SECONDS,), daemon=True).start()
    yield {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path / "home")}
    server.shutdown()
    server.server_close()


def bytescale(*arguments: str, hub: dict[str, str]) -> subprocess.CompletedProcess[str]:
    without = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
    return subprocess.run(
        [sys.executable, "-m", "bytescale", *arguments], env=without | hub, capture_output=True, text=True, timeout=300
    )


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, hub: dict[str, str]) -> None:
    """This process uses the server, as if it had been started with these variables."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix(constants.ENDPOINT)
    for name, value in {
        "ENDPOINT": hub["HF_ENDPOINT"],
        "HUGGINGFACE_CO_URL_TEMPLATE": hub["HF_ENDPOINT"] + template,
        "HF_HUB_CACHE": f"{hub['HF_HOME']}/hub",
        "HF_TOKEN_PATH": f"{hub['HF_HOME']}/token",
        "HF_HUB_OFFLINE": False,
    }.items():
        assert hasattr(constants, name)
        monkeypatch.setattr(constants, name, value)


def written_config(tmp_path: Path) -> Path:
    config = on_ranks(small_run(write_corpus(tmp_path / "corpus"), tmp_path / "run", steps=2), 1, 256)
    config = replace(config, model=ModelConfig())
    (tmp_path / "config.toml").write_text(config_to_toml(config), encoding="utf-8")
    return tmp_path / "config.toml"


@pytest.mark.usefixtures("here")
def test_train_downloads_a_model_by_name_and_pins_its_commit(tmp_path: Path) -> None:
    assert main(["train", str(written_config(tmp_path)), "--init", "hf:acme/tiny"]) == 0
    init = load_config(tmp_path / "run" / "config.toml").trainer.init
    assert init.endswith(f"snapshots/{COMMIT}")
    folder = Path(init.removeprefix("hf:"))
    assert folder.is_relative_to(tmp_path / "home")
    assert {file.name for file in folder.iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    }  # fmt: skip
    assert load_config(tmp_path / "run" / "config.toml").data.tokenizer == str(folder), "the model's own"
    assert len(losses(tmp_path / "run")) == 2
    write_jsonl(tmp_path / "a.jsonl", [{"text": "a b"}])
    assert main(["data", "show", str(tmp_path / "a.jsonl"), "--tokenizer", "acme/tiny"]) == 0


@pytest.mark.exhaustive
def test_plan_downloads_no_weights(tmp_path: Path, hub: dict[str, str]) -> None:
    told = bytescale(
        "plan",
        "--parallel.ranks",
        "4",
        "--model.preset",
        f"hf:acme/tiny@{COMMIT}",
        "--data.batch-tokens",
        "4K",
        hub=hub,
    )
    assert told.returncode == 0, told.stderr
    assert not list((tmp_path / "home").rglob("*.safetensors"))


@pytest.mark.parametrize(
    ("name", "said"),
    one_of(
        [
            ("acme/gated", "acme/gated is a gated model.*hf auth login"),
            ("acme/nothing", "acme/nothing is no folder here, and http.* has no model acme/nothing.*correct the name"),
            ("acme/tiny@v9", "acme/tiny has no revision v9.*a branch, a tag or a commit"),
        ],
        ("acme/gated", "acme/gated is a gated model.*hf auth login"),
    ),
)
@pytest.mark.usefixtures("here")
def test_a_name_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, said: str) -> None:
    assert main(["train", str(written_config(tmp_path)), "--init", f"hf:{name}"]) == 2
    told = capsys.readouterr().err
    assert "Traceback" not in told
    assert re.search(said, told.replace("\n", " ")), told


@pytest.mark.exhaustive
def test_without_a_network(tmp_path: Path, hub: dict[str, str]) -> None:
    """One message, which says how to bring the model here."""
    nowhere = hub | {"HF_ENDPOINT": "http://127.0.0.1:9"}
    told = bytescale("train", str(written_config(tmp_path)), "--init", "hf:acme/tiny", hub=nowhere)
    assert told.returncode == 2
    assert "hf download acme/tiny --local-dir FOLDER" in told.stderr
    assert "Traceback" not in told.stderr


@pytest.mark.exhaustive
def test_a_dataset_of_the_hub_is_a_source(tmp_path: Path, hub: dict[str, str]) -> None:
    """By the URL that huggingface_hub gives to fsspec."""
    records = [{"text": "the ring waits for none " * n} for n in range(1, 20)]
    write_jsonl(tmp_path / "served" / "chats.jsonl", records)
    for name in ("hf://datasets/acme/chats/*.jsonl", "hf://datasets/acme/chats@~parquet/default/train/*.jsonl"):
        told = bytescale("data", "stats", name, hub=hub)
        assert told.returncode == 0, told.stderr
        assert f"19 documents, {sum(len(r['text']) + 1 for r in records)} tokens" in told.stdout
