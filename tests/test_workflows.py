"""GitHub's workflows, the hooks and the public API's page agree with what they speak of."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import bytescale

ROOT = Path(__file__).resolve().parent.parent
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PYTHONS = [one.rpartition(" ")[2] for one in PROJECT["classifiers"] if re.search(r"Python :: 3\.\d+$", one)]


def parsed(path: Path) -> dict[Any, Any]:
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(content, dict), path
    return content


def scripts_of(workflow: dict[Any, Any]) -> list[str]:
    """All that its steps run in a shell."""
    jobs = workflow["jobs"].values()
    return [step["run"] for job in jobs for step in job.get("steps", []) if "run" in step]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_is_whole_and_calls_what_exists(path: Path) -> None:
    workflow = parsed(path)
    assert True in workflow, "YAML reads the key `on` as true"
    assert workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        needed = job.get("needs", [])
        assert {needed} <= set(workflow["jobs"]) if isinstance(needed, str) else not needed, name
        if "uses" in job:
            assert (ROOT / job["uses"]).is_file(), name
        else:
            assert job["timeout-minutes"], name
            assert all(("run" in step) != ("uses" in step) for step in job["steps"]), name
    for script in scripts_of(workflow):
        plain = re.sub(r"\$\{\{.*?\}\}", "value", script)
        subprocess.run(["bash", "-n", "-c", plain], check=True)
        for target in re.findall(r"\bmake ([\w-]+)", script):
            assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE), target


def test_the_tests_run_on_every_python_and_torch_that_the_package_allows() -> None:
    jobs = parsed(ROOT / ".github/workflows/tests.yml")["jobs"]
    assert PROJECT["requires-python"] == f">={PYTHONS[0]}"
    assert jobs["tests"]["strategy"]["matrix"]["python"] == jobs["docs"]["strategy"]["matrix"]["python"] == PYTHONS
    (asked,) = [one for one in PROJECT["dependencies"] if one.startswith("torch>=")]
    oldest = asked.removeprefix("torch>=")
    assert jobs["tests"]["strategy"]["matrix"]["torch"] == [f"=={oldest}.*", f">={oldest}"]


def test_a_job_takes_the_newest_versions_of_all_packages() -> None:
    """Without constraints.txt, with the same extras; the tests of every change would be broken by other projects."""
    jobs = parsed(ROOT / ".github/workflows/tests.yml")["jobs"]
    newest, tests = (scripts_of({"jobs": {name: jobs[name]}}) for name in ("newest", "tests"))
    assert not re.search("constraint", " ".join(newest))
    assert re.findall(r"--editable .*", newest[0]) == re.findall(r"--editable .*", tests[0])
    assert newest[-1] == tests[-1]
    assert jobs["newest"]["if"] == jobs["rest"]["if"]


def test_a_release_publishes_what_was_tested_without_a_password() -> None:
    jobs = parsed(ROOT / ".github/workflows/release.yml")["jobs"]
    tested = parsed(ROOT / ".github/workflows/tests.yml")["jobs"]["package"]["steps"][-1]["with"]["name"]
    assert jobs["tests"]["needs"] == "version"
    assert jobs["publish"]["needs"] == "tests"
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert jobs["publish"]["steps"][0]["with"]["name"] == tested
    assert "with" not in jobs["publish"]["steps"][-1]


def test_the_hooks_are_the_linters_of_make_lint() -> None:
    (repository,) = parsed(ROOT / ".pre-commit-config.yaml")["repos"]
    (recipe,) = re.findall(r"^lint: .*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
    linters = [line.strip().replace("$(BIN)", ".venv/bin") for line in recipe.splitlines()]
    assert [hook["entry"] for hook in repository["hooks"]] == linters
    assert all(hook["language"] == "system" and not hook["pass_filenames"] for hook in repository["hooks"])


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_a_form_for_issues_is_whole(path: Path) -> None:
    form = parsed(path)
    assert {"name", "description", "body"} <= set(form)
    asked = [item for item in form["body"] if item["type"] != "markdown"]
    assert asked
    assert all(item["attributes"]["label"] for item in asked)
    assert len({item["id"] for item in asked}) == len(asked)


def test_the_version_is_told_alike_everywhere() -> None:
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert bytescale.__version__ == PROJECT["version"]
    assert re.findall(r"^## (\S+)", changes, re.MULTILINE)[0] == bytescale.__version__


def test_the_page_about_the_public_api_names_all_of_it() -> None:
    page = (ROOT / "docs/public_api.md").read_text(encoding="utf-8")
    (names,) = re.findall(r"They are\s((?:.|\n)*?)\. The other", page)
    assert re.findall(r"`(\w+)`", names) == sorted(bytescale.__all__)
