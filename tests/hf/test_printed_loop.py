"""The loop that README and docs print is run as it stands there."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.helpers.forks import run_forked

ROOT = Path(__file__).parents[2]


def printed_loop(page: str) -> str:
    (block,) = (
        block
        for block in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
        if "init_process_group" in block
    )
    return block


def test_both_pages_print_the_same_loop() -> None:
    assert printed_loop("README.md") == printed_loop("docs/own_loop.md")


def test_the_loop_runs_as_it_is_printed(tmp_path: Path) -> None:
    """In torchrun's environment on two ranks: it prints a loss that falls, and saves the trained weights."""
    code = compile(printed_loop("README.md"), "loop.py", "exec")

    def work(rank: int) -> str:
        os.chdir(tmp_path)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(code, {"__name__": "__main__"})
        return printed.getvalue()

    first, second = run_forked(2, work)
    assert second == ""
    assert_learned(first, tmp_path / "trained")


@pytest.mark.exhaustive
def test_the_loop_runs_under_torchrun(tmp_path: Path) -> None:
    """The real one, and the loop in a file of its own."""
    (tmp_path / "loop.py").write_text(printed_loop("README.md"), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "loop.py"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert_learned(done.stdout, tmp_path / "trained")


def assert_learned(printed: str, folder: Path) -> None:
    losses = [float(loss) for loss in re.findall(r"^loss (\d+\.\d+)$", printed, re.MULTILINE)]
    assert len(losses) == 5
    assert losses == sorted(losses, reverse=True)
    saved = AutoModelForCausalLM.from_pretrained(folder)
    tokens = torch.arange(150)[None] % 256
    assert saved(tokens, labels=tokens).loss.item() < losses[-1] + 0.1
