"""``make check-cuda``: runs the checks of ``check.py`` in separate environments and writes the result to docs/gpu.md.

It needs Python, pip and the network, but no GPU and nothing of bytescale's own environment. Each environment is a
folder of 5 GB in .cuda/. It has one CUDA build of torch, which is the build that PyPI has for Linux, and the Triton
that torch requires. ``===`` selects exactly this release, even if pip also finds a local build such as 2.13.0+cpu.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import venv
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
ENVIRONMENTS = ROOT / ".cuda"
PAGE = ROOT / "docs" / "gpu.md"
BEGIN, END = "<!-- make check-cuda: begin -->", "<!-- make check-cuda: end -->"
OLDEST_TORCH = "2.11.0"  # the oldest that pyproject.toml allows; constraints.txt pins the one of the tests
NEWEST_TORCH = "2.14.1"
OURS = ("numpy", "safetensors", "transformers", "xxhash")  # what the checked code imports
FLASH_4 = "flash-attn-4===4.0.0b36"
FLASH_4_GPUS = ("90", "100")
FLA = ("fla-core===0.6.0", "packaging")  # which it needs and does not name


@dataclass(frozen=True)
class Run:
    """One environment, and what is checked in it."""

    packages: tuple[str, ...]
    only: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()


def main() -> int:
    """Exit code 1 when a check failed; the page tells which, either way."""
    runs = planned_runs((ROOT / "constraints.txt").read_text(encoding="utf-8"))
    reports = []
    for run in runs:
        python = prepared(run.packages)
        reports.append(checked(python, run))
    write_page(reports)
    failed = [row["check"] for report in reports for row in report["checks"] if not row["passed"]]
    print(f"wrote {PAGE.relative_to(ROOT)}: " + (f"{len(failed)} checks failed" if failed else "all checks passed"))
    return 1 if failed else 0


def planned_runs(constraints: str) -> list[Run]:
    """The oldest torch, that of the tests, and the newest; and beside that of the tests FlashAttention 4, for each kind
    of GPU that it is for, and flash-linear-attention."""
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", constraints, flags=re.MULTILINE))
    ours = tuple(f"{name}==={pins[name]}" for name in OURS)
    pinned = (f"torch==={pins['torch']}", *ours)
    flash_4 = [
        Run(
            packages=(*pinned, FLASH_4),
            only=("flash_4_compiles",),
            environment=(
                *(("FLASH_ATTENTION_ARCH", f"sm_{gpu}"), ("CUTE_DSL_ARCH", f"sm_{gpu}a")),
                ("FLASH_ATTENTION_NUM_SMS", "132"),
            ),
        )
        for gpu in FLASH_4_GPUS
    ]
    fla = Run(packages=(*pinned, *FLA), only=("fla_packs",))
    others = [Run((f"torch==={version}", *ours)) for version in (OLDEST_TORCH, NEWEST_TORCH)]
    return [others[0], Run(pinned), others[1], *flash_4, fla]


def prepared(packages: tuple[str, ...]) -> Path:
    """The Python of the environment with these packages, which is made where there is none."""
    torch = next(package for package in packages if package.startswith("torch"))
    folder = ENVIRONMENTS / torch.replace("===", "-")
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    ready = folder / "packages.json"
    installed = set(json.loads(ready.read_text(encoding="utf-8"))) if ready.exists() else set()
    if not installed >= set(packages):
        print(f"installing {', '.join(packages)} into {folder.relative_to(ROOT)}", flush=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
        ready.write_text(json.dumps(sorted(installed | set(packages))), encoding="utf-8")
    return python


def checked(python: Path, run: Run) -> dict[str, Any]:
    """The report of ``check.py``."""
    print(f"checking with {' '.join(run.packages)} {' '.join(value for _, value in run.environment)}", flush=True)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "report.json"
        # A cache of its own: kernels are compiled in this run, and not found from the one before.
        settings = {"PYTHONPATH": str(ROOT / "src"), "TRITON_CACHE_DIR": folder, "CUDA_VISIBLE_DEVICES": ""}
        environment = {**os.environ, **dict(run.environment), **settings}
        command = [python, "-W", "ignore", "-m", "tests.cuda.check", "--out", out]
        subprocess.run([*command, "--only", *run.only], cwd=ROOT, env=environment, check=False)
        if not out.exists():
            raise SystemExit("the checks could not be run: the first error above says why")
        report: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    report["seconds"] = time.monotonic() - started
    return report


def write_page(reports: list[dict[str, Any]]) -> None:
    """Put the table of all reports between the page's two marks, or at its end."""
    lines = [
        BEGIN,
        f"Last run: {date.today().isoformat()}, Python {reports[0]['python']}, no GPU, "
        f"{sum(report['seconds'] for report in reports):.0f} s.",
        "",
        "| torch | check | result | seconds |",
        "|---|---|---|---|",
    ]
    for report in reports:
        for row in report["checks"]:
            mark = "" if row["passed"] else "**failed**: "
            lines.append(f"| {report['torch']} | `{row['check']}` | {mark}{row['result']} | {row['seconds']:.0f} |")
    table = "\n".join([*lines, END])
    page = PAGE.read_text(encoding="utf-8") if PAGE.exists() else "# GPUs\n"
    if BEGIN in page:
        page = page[: page.index(BEGIN)] + table + page[page.index(END) + len(END) :]
    else:
        page = f"{page}\n## make check-cuda\n\n{table}\n"
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
