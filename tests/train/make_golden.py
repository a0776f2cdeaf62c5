"""Writes golden_losses.json: one process, one rank, static packing. Run it when a change is MEANT to move the losses.

.venv/bin/python -m tests.train.make_golden
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from bytescale.config.schema import PlannerConfig
from tests.train.runs import on_ranks, run, small_run, write_corpus


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        corpus = write_corpus(Path(folder) / "corpus")
        config = replace(
            on_ranks(small_run(corpus, Path(folder) / "run", steps=100), 1), planner=PlannerConfig(name="static")
        )
        losses = run(config)
    golden = {"torch": torch.__version__, "losses": [round(loss, 7) for loss in losses]}
    Path(__file__).with_name("golden_losses.json").write_text(json.dumps(golden, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
