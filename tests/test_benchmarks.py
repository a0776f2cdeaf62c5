"""Benchmarks at their smallest sizes: a change of the library must not leave one that does not run."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import pytest
from benchmarks.cluster.network import missing

FOLDER = Path(__file__).parent.parent / "benchmarks"
SMALLEST = [
    "checkpoint.py io --gib 0.01 --rounds 1",
    "checkpoint.py pause --gib 0.01 --rounds 1",
    "chosen_keys_gain.py --cells 64:128K --seeds 1 --data github",
    "entropy.py --words 1024 --tokens 32 --rounds 1",
    "experts.py --repeats 1",
    "cluster gradient_overlap.py --micro-batches 1 --bucket-mib 1 --rounds 1",
    "cluster grid_attention.py --ranks 4 --tokens 16 --rounds 1 --mbit 1000",
    "cluster grpo.py --ranks 4 --rounds 1 --mbit 1000",
    "hdp_plan.py --documents 300 --ranks 8 --repeat 1",
    "loader.py plan",
    "torchrun:4 long_documents.py prefill --rounds 1",
    "long_documents.py simulate",
    "longest_context.py",
    "lost_ranks.py cost --ranks 2 --steps 8 --tokens 2048",
    "lost_ranks.py stall --ranks 3 --steps 6 --tokens 2048",
    "lost_ranks.py effective",
    "nccl_campaign.py --plans 2",
    "torchrun:2 own_loop.py trainer --steps 2 --batch-tokens 1024",
    "torchrun:2 own_loop.py padded --batches 1",
    "torchrun:2 own_loop.py window --steps 1 --tokens 512 --windows 64",
    "torchrun:2 own_loop.py invariant --steps 1 --batch-tokens 1024",
    "torchrun:2 own_loop.py host --steps 1 --tokens 64",
    "paper_assumptions.py",
    "paper_tables.py --batches 1 --only-2m --out {out}",
    "pictures.py planned --ranks 32 --seeds 1 --shares 0.2",
    "cluster pictures.py measured --ranks 4 --rounds 1 --tokens 2048 --shares 0.2",
    "pipeline.py --rounds 1 --batches 1 --only overhead",
    "pipeline.py --rounds 1 --batches 1 --only bubble",
    "pipeline.py --rounds 1 --batches 1 --only objective",
    "planned_trees.py --ranks 16 --trajectories 200",
    "planner_compare.py . --kinds small --seeds 50000:50001 --ranks 64",
    "planner_peers.py",
    "planner_quality.py rivals --count 1",
    "planner_quality.py hang --count 1",
    "planner_quality.py grids --count 1",
    "planner_rounds.py --ranks 8 --seeds 50000:50001 --tokens 8192",
    "planner_suite.py --ranks 32",
    "planners.py --ranks 16 --tokens 256K --seeds 1 --data github --only adaptive --out {out}",
    "prefixes.py --length 64 --samples 2 --groups 1 --steps 1 --shares 0.5",
    "random_plans.py --plans 2 --every 1",
    "recurrence.py --ranks 2 --rounds 1",
    "cluster recurrent_cluster.py layer --ranks 2 --tokens 256 --rounds 1 --mbit 1000",
    "cluster recurrent_cluster.py mixture --ranks 2 --tokens 1024 --rounds 1 --mbit 1000",
    "recurrent_gain.py --cells 64:128K --seeds 1 --data github",
    "report.py --ranks 64",
    "cluster shared_trees.py --ranks 2 --rounds 1 --mbit 1000",
    "torchrun:2 sharing.py --steps 1 --tokens 1024 --capacity 512",
    "cluster sharing_cluster.py --rounds 1 --mbit 1000",
    "soak.py --kills 1 --steps 10 --limit-seconds 100",
    "strong_scaling.py --seeds 1 --models 7B --contexts 256K --data github --ranks 64 --out {out}",
    "cluster tp_overlap.py --mbit 1000 --tokens 64 --rounds 1",
    "torchrun:2 weight_parts.py --rates 1e-4 --updates 1",
]
"""After `python benchmarks/`; on nodes of their own with root, or with so many ranks of torchrun."""
ELSEWHERE = {
    "gpu": "tests/train/test_gpu_benchmark.py",
    "large_models": "takes minutes, and has no smaller size",
    "planner_batches": "has no main",
    "planner_megatron": "needs a checkout of Megatron-LM",
    "planner_ratio": "needs megatron-core",
    "predict_gloo": "waits for an idle machine",
    "published_profiles": "writes what the package ships: tests/cost/test_profile.py",
}
"""Those that are not run here, and why."""


def loaded(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(FOLDER)
    for neighbour in FOLDER.glob("*.py"):  # an example of the same name may be there, and none of these may stay
        monkeypatch.setitem(sys.modules, neighbour.stem, ModuleType(neighbour.stem))
        monkeypatch.delitem(sys.modules, neighbour.stem)
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.name)
def test_a_benchmark_starts(path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With ``--help`` where it has options."""
    assert any(path.name in line.split() for line in SMALLEST) != (path.stem in ELSEWHERE)
    module = loaded(path.stem, monkeypatch)
    if "ArgumentParser(" in path.read_text(encoding="utf-8") and hasattr(module, "main"):
        monkeypatch.setattr(sys, "argv", [str(path), "--help"])
        with pytest.raises(SystemExit) as ended:
            module.main()
        assert ended.value.code == 0
        assert "usage:" in capsys.readouterr().out


@pytest.mark.exhaustive
@pytest.mark.parametrize("line", SMALLEST)
def test_a_benchmark_runs_at_its_smallest_size(line: str, tmp_path: Path) -> None:
    name, *arguments = line.format(out=tmp_path).split()
    if name == "cluster" and (reasons := missing()):
        pytest.skip("; ".join(reasons))
    launcher = list[str]()
    if name == "cluster" or name.startswith("torchrun"):
        *_, ranks = name.split(":")
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks] if ranks.isdigit() else []
        name, *arguments = arguments
    environment = {
        **os.environ,
        "PYTHONPATH": f"{FOLDER.parent / 'src'}:{FOLDER.parent}:{FOLDER}",
        "OMP_NUM_THREADS": "1",
    }
    with (tmp_path / "printed").open("w+") as printed:
        process = subprocess.Popen(
            [sys.executable, *launcher, str(FOLDER / name), *arguments],
            cwd=FOLDER.parent, env=environment, stdout=printed, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(timeout=280.0)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        printed.seek(0)
        assert code == 0, printed.read()[-3000:]
