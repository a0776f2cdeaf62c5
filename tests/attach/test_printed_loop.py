"""The loop that README and docs print is run as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from tests.helpers.forks import run_forked

from .support import documents, small_model

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
    """On two ranks, in bf16 as printed; every rank has the scores of all documents and the same weights."""
    small_model("llama", dtype=torch.float32).save_pretrained(tmp_path / "model")
    batch = documents([40, 7, 21])
    names: dict[str, Any] = {
        "dist": dist,
        "torch": torch,
        "F": F,
        "AutoModelForCausalLM": AutoModelForCausalLM,
        "path": tmp_path / "model",
        "loader": [batch, batch],
    }

    def one_rank(rank: int) -> tuple[list[list[float]], dict[str, list[float]]]:
        torch.set_num_threads(1)
        mine = {**names, "out": tmp_path / f"out-{rank}"}
        exec(printed_loop("README.md"), mine)
        dist.destroy_process_group()
        weights = {name: p.detach().float().flatten().tolist() for name, p in mine["model"].named_parameters()}
        return [scores.tolist() for scores in mine["scores"]], weights

    first, second = run_forked(2, one_rank, timeout_seconds=120)
    assert first == second
    assert [len(scores) for scores in first[0]] == [40, 7, 21]
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "out-0", dtype=torch.bfloat16)
    assert saved.config._attn_implementation == "sdpa"
    changed = [not torch.equal(a, b) for a, b in zip(before.parameters(), saved.parameters(), strict=True)]
    assert any(changed)
    for name, parameter in saved.named_parameters():
        assert parameter.detach().float().flatten().tolist() == pytest.approx(first[1][name])
