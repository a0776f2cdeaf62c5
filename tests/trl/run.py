"""``make check-trl``: TRL's trainers alone and over HDP, on one rank and on two, in an environment of its own.

It needs Python and the network (TRL, torch and what they need: 3 GB in .trl/, once). ``PYTHON_OF_TRL`` names a Python
that has TRL already.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.helpers.environments import ROOT, python_with

KINDS = ("sft", "dft", "images", "dpo", "grpo", "refused", "resume", "accelerators")
ON_MESHES = ("sft", "dpo")
MESHES: list[tuple[int, list[str]]] = [(2, ["--tp"]), (2, ["--pp"]), (4, ["--tp", "--pp"])]
"""Ranks, and what of the model they share."""
PACKAGES = ("trl==1.16.0", "peft>=0.15", "pillow")
TOLERANCE = 2e-4
"""Relative, of fp32 with sums in another order, over updates of AdamW; 1e-4 of sums over a document."""
WAITS = {"sft": 0, "dft": 0, "dpo": 0, "grpo": 0, "images": 2}
"""Of the host in a micro-batch on a simulated accelerator: transformers counts placeholders and rows of images."""
LEFT_OUT = ("runtime", "per_second", "step_time", "flos")


def main() -> int:
    """Exit code 1 if a trainer over HDP differs from TRL's own under as many ranks."""
    python = python_with("trl", PACKAGES)
    failed = 0
    for kind in sys.argv[1:] or KINDS:
        if kind == "resume":
            failed += resumed(python)
            continue
        if kind == "refused":
            with tempfile.TemporaryDirectory() as folder:
                run(python, kind, 1, Path(folder))
            print("sampling and adapters are refused where ranks share the model", flush=True)
            continue
        if kind == "accelerators":
            failed += on_accelerators(python)
            continue
        for ranks, shared in ((1, []), (2, []), *(MESHES if kind in ON_MESHES else [])):
            with tempfile.TemporaryDirectory() as folder:
                plain = run(python, kind, ranks, Path(folder) / "plain", "--plain")
                ours = run(python, kind, ranks, Path(folder) / "ours", *shared)
                differences = of_models(Path(folder) / "plain", Path(folder) / "ours")
            differences += [told for a, b in zip(plain, ours, strict=True) for told in compared(a, b)]
            failed += bool(differences)
            result = "; ".join(differences[:6]) or f"{len(ours) - 1} lines of the log and the saved model are equal"
            print(f"{kind} on {ranks} rank(s) {' '.join(shared)}: {result}", flush=True)
    return 1 if failed else 0


def resumed(python: str) -> int:
    """How many runs differ from one on two ranks that was not stopped, once they go on on another number of ranks."""
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        whole = run(python, "global", 2, Path(folder) / "whole")
        for (before, shared), (after, later) in (
            ((2, []), (1, [])),
            ((1, []), (2, [])),
            ((2, ["--pp"]), (2, ["--tp"])),
        ):
            out = Path(folder) / f"from-{before}{''.join(shared)}"
            run(python, "global", before, out, "--stop", *shared)
            both = run(python, "global", after, out, "--resume", *later)
            wanted, found = (
                [
                    {name: value for name, value in line.items() if name != "num_tokens"}
                    for line in lines
                    if "loss" in line
                ]
                for lines in (whole, both)
            )  # TRL counts tokens from the start of a process
            differences = [told for a, b in zip(wanted, found, strict=True) for told in compared(a, b)]
            failed += bool(differences)
            result = "; ".join(differences[:6]) or f"{len(found)} updates are equal"
            told = f"{before} rank(s) {' '.join(shared)} and resumed on {after} {' '.join(later)}"
            print(f"sft stopped on {told}: {result}", flush=True)
    return failed


def on_accelerators(python: str) -> int:
    """How many trainers over HDP, on two simulated accelerators, differ from TRL's on CPUs, race, or wait too often."""
    failed = 0
    for kind, waits in WAITS.items():
        with tempfile.TemporaryDirectory() as folder:
            plain = run(python, kind, 2, Path(folder) / "plain", "--plain", "--no-evaluation")
            ours = run(python, kind, 2, Path(folder) / "ours", "--simulated", "--no-evaluation")
            told = [json.loads((Path(folder) / "ours" / f"told-{rank}.json").read_text("utf-8")) for rank in range(2)]
        wrong = [difference for a, b in zip(plain, ours, strict=True) for difference in compared(a, b)]
        wrong += [fault for own in told for fault in own["faults"]]
        if any(sum(own["waits"].values()) != waits * own["micro_batches"] for own in told):
            wrong.append(f"the host waits for {told[0]['waits']} in {told[0]['micro_batches']} micro-batches")
        failed += bool(wrong)
        result = "; ".join(wrong[:6]) or (
            f"{len(ours) - 1} updates are equal, no fault, {waits} waits in each of "
            f"{', '.join(str(own['micro_batches']) for own in told)} micro-batches, {told[0]['beside']} beside them"
        )
        print(f"{kind} on 2 simulated accelerators: {result}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        run(python, "sft", 1, Path(folder), "--simulated", "--planted", "--no-evaluation")
        told = [json.loads((Path(folder) / "told-0.json").read_text("utf-8"))]
    print(
        f"a loss that is looked at in every micro-batch: {sum(told[0]['waits'].values())} waits are found", flush=True
    )
    return failed + (sum(told[0]["waits"].values()) < told[0]["micro_batches"])


def run(python: str, kind: str, ranks: int, out: Path, *options: str) -> list[dict[str, float]]:
    """The log of every update."""
    port = 29400 + os.getpid() % 400
    command = [python, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", f"--master-port={port}"]
    command += [str(ROOT / "tests/trl/check.py"), kind, str(out), *options]
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    if done.returncode:
        raise SystemExit(f"{kind}, {options}, {ranks} rank(s) failed:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")
    logged: list[dict[str, float]] = json.loads((out / "log.json").read_text(encoding="utf-8"))
    return logged


def of_models(plain: Path, ours: Path) -> list[str]:
    """What differs between two saved models: on average, for AdamW divides by small numbers."""
    wanted, found = (json.loads((folder / "weights.json").read_text("utf-8")) for folder in (plain, ours))
    told = [f"only one model has {name}" for name in wanted.keys() ^ found.keys()]
    for name in wanted.keys() & found.keys():
        if len(wanted[name]) != len(found[name]):
            told.append(f"{name} has {len(found[name])} numbers and not {len(wanted[name])}")
            continue
        off = sum(abs(a - b) for a, b in zip(wanted[name], found[name], strict=True)) / len(found[name])
        if off > 1e-5:
            told.append(f"{name} is {off:.1e} off on average")
    return told


def compared(plain: dict[str, float], ours: dict[str, float]) -> list[str]:
    """What differs in one line of the log, which has to have the same metrics."""
    told = [f"only one has {name}" for name in plain.keys() ^ ours.keys()]
    for name in plain.keys() & ours.keys():
        if any(part in name for part in LEFT_OUT):
            continue
        a, b = float(plain[name]), float(ours[name])
        if abs(a - b) > TOLERANCE * max(abs(a), abs(b)) + 1e-4 and not (a != a and b != b):
            told.append(f"{name} is {b} and not {a} at update {plain.get('step')}")
    return told


if __name__ == "__main__":
    sys.exit(main())
