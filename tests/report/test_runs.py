"""Run folders in every state that a run can leave them in."""

from __future__ import annotations

from pathlib import Path

import pytest

from bytescale.common.errors import ConfigError
from bytescale.report import read_runs
from bytescale.report.runs import read_run
from bytescale.train.run_folder import RunFolder
from tests.report.folders import metrics_line, write_run


def lines(count: int) -> list[dict]:
    return [metrics_line(step) for step in range(1, count + 1)]


@pytest.mark.parametrize(
    ("count", "log", "state", "words"),
    [
        (6, "6/6     6.0\ndone    steps 1 to 6\n", "finished", "has finished its 6 steps"),
        (4, "4/6     7.0\n", "killed", "was killed after step 4 of 6"),
        (
            4,
            "4/6     7.0\nstopped by a signal after step 4, which is saved\n",
            "stopped",
            "was stopped after step 4 of 6",
        ),
        (4, "4/6     7.0\nstopped by RankFailure: rank 1 is gone\n", "failed", "RankFailure: rank 1 is gone"),
        (4, "3/6     7.0\nstopped by SIGTERM; ...\nresuming after step 3\n4/6     7\n", "killed", "after step 4 of 6"),
        (0, "", "empty", "has not finished its first step"),
    ],
)
def test_states(tmp_path: Path, count: int, log: str, state: str, words: str) -> None:
    run = read_run(write_run(tmp_path / "run", lines(count), log=log), "run")
    assert (run.state, run.notes) == (state, [])
    assert words in run.state_text
    assert len(run.steps) == count


def test_a_run_that_holds_its_lock_is_running(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", lines(2))
    with RunFolder(path).lock():
        run = read_run(path, "run")
        assert run.state == "running"
        assert "still running: it has done step 2 of 6" in run.state_text
    assert read_run(path, "run").state == "killed"


def test_a_last_line_that_is_cut_off_is_left_out_and_named(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", lines(3))
    file = RunFolder(path).metrics
    file.write_text(file.read_text()[:-40])
    run = read_run(path, "run")
    assert run.step_numbers == [1, 2]
    assert run.notes == ["The last line of metrics.jsonl is cut off, as when a run is killed; it is left out."]


def test_evaluations_are_read_and_their_cut_off_line_is_named(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", lines(4))
    RunFolder(path).evaluations.write_text('{"step": 2, "loss": 7.5, "buckets": []}\n{"step": 4, "lo', encoding="utf-8")
    run = read_run(path, "run")
    assert [line["loss"] for line in run.evaluations] == [7.5]
    assert run.notes == ["The last line of evaluations.jsonl is cut off, as when a run is killed; it is left out."]


def test_a_damaged_line_and_a_damaged_plan_are_named(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", lines(3))
    folder = RunFolder(path)
    content = folder.metrics.read_text().splitlines()
    folder.metrics.write_text("\n".join([content[0], '{"step": 2, "loss": 1.0}', content[2], ""]))
    folder.plan(1).write_bytes(b"no plan")
    run = read_run(path, "run")
    assert run.step_numbers == [1, 3]
    assert run.batches is not None
    assert run.batches.num_plans == 1
    assert len(run.notes) == 2
    assert "Line 2 of metrics.jsonl is damaged" in run.notes[0]
    assert "step-000001.npz is not a plan" in run.notes[1]


def test_folders_that_are_no_runs_are_named_together(tmp_path: Path) -> None:
    good = write_run(tmp_path / "good", lines(1))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError) as error:
        read_runs([good, tmp_path / "empty", tmp_path / "absent"])
    text = str(error.value)
    assert f"{tmp_path / 'empty'}, {tmp_path / 'absent'}: not the folder of a run" in text
    assert "good" not in text
    assert "bytescale train" in text
    with pytest.raises(ConfigError, match=r"(?i)no run is named"):
        read_runs([])


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / parent / "run", lines(1)) for parent in ("a", "b")]
    assert [run.name for run in read_runs(paths)] == ["a/run", "b/run"]
    assert [run.name for run in read_runs([paths[0], paths[0]])] == ["a/run (1)", "a/run (2)"]


def test_the_newest_config_of_a_resumed_run_counts(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", lines(6))
    longer = RunFolder(path).config.read_text().replace("steps = 6", "steps = 9") + "\n[other]\nkey = 1\n"
    (path / "config-resumed-20260101-000000.toml").write_text(longer)
    run = read_run(path, "run")
    assert run.settings["trainer.steps"] == 9
    assert run.settings["other.key"] == 1  # of another version of bytescale
    assert run.state == "killed"


def test_lengths_and_degrees_of_the_plans(tmp_path: Path) -> None:
    batches = read_run(write_run(tmp_path / "run", lines(2)), "run").batches
    assert batches is not None
    assert sorted(zip(batches.lengths.tolist(), batches.degrees.tolist(), strict=True)) == sorted(
        2 * [(3000, 2), (100, 1), (1000, 1)]
    )
    assert sorted(zip(batches.group_degrees.tolist(), batches.group_tokens.tolist(), strict=True)) == sorted(
        2 * [(2, 3000), (1, 100), (1, 1000)]
    )
