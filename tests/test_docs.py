"""Every command, file and example in the documents exists and works."""

from __future__ import annotations

import ast
import functools
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from torch.distributed.run import get_args_parser

from bytescale.cli import options as cli_options
from bytescale.cli.options import parse
from bytescale.config.schema import Config

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
FOLDERS = ("*.md", "decisions/*.md", "benchmarks/*.md")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(page for each in FOLDERS for page in sorted(DOCS.glob(each)))]
EXAMPLES = sorted((DOCS / "examples").iterdir())


def load_generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


GENERATE = load_generator()


def commands_of(text: str) -> Iterator[list[str]]:
    """The arguments of every ``bytescale ...`` in blocks of code and, where it has an argument, in `code`."""
    blocks = re.findall(r"^ *```(?:sh|bash|console|text)?\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    lines += [" ".join(code.split()) for code in re.findall(r"(?<!`)`([^`]*)`(?!`)", text)]
    for line in lines:
        found = re.match(r"(?:\$ )?(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?bytescale (.+)", line.strip())
        if found and "..." not in found[1]:
            words = shlex.split(found[1], comments=True)
            if words[0].islower():
                yield words


@functools.cache
def check_command(*arguments: str) -> None:
    """Let the command's own parser read the arguments. Raises ``SystemExit`` or ``ConfigError`` where it refuses."""
    name = " ".join(arguments[:2]) if arguments[0] in ("data", "checkpoint") else arguments[0]
    rest = list(arguments[len(name.split()) :])
    if not {"--help", "--help-all"}.isdisjoint(rest) or rest == ["--version"]:
        return
    assert name in GENERATE.OPTIONS, f"`bytescale {name}` is no command"
    takes_config = name in ("train", "demo", "plan", "simulate", "profile")
    if takes_config and rest and not rest[0].startswith("-"):
        rest = rest[1:]  # the config file, which need not exist
    kind = GENERATE.OPTIONS[name]
    if takes_config:
        parse(kind, rest, prog=f"bytescale {name}", default=kind(config=Config()))
    elif not set("".join(rest)) <= set("[] ") and rest:
        parse(kind, rest, prog=f"bytescale {name}")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_in_the_documents_have_options_that_exist(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_options, "local_folder", lambda model, **_: model)  # nothing is downloaded
    for arguments in commands_of(page.read_text(encoding="utf-8")):
        try:
            check_command(*arguments)
        except SystemExit as error:
            pytest.fail(f"{page.name}: bytescale {shlex.join(arguments)} is refused ({error})")


def commands_in(source: str) -> Iterator[list[str]]:
    """The commands that texts of a module name, whole: between `backticks`, or a line that ends with the command."""
    tree = ast.parse(source)
    told = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
    told |= {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in (node for node in ast.walk(tree) if id(node) not in told):
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        pieces = [part.value if isinstance(part, ast.Constant) else "2" for part in parts]
        if not isinstance(node, ast.JoinedStr | ast.Constant) or not all(isinstance(piece, str) for piece in pieces):
            continue
        text = "".join(pieces)
        for quoted, plain in re.findall(
            r"`bytescale ([^`]+)`|(?:^|: ) *bytescale ([^`]+?)(?:   .*)?$", text, re.MULTILINE
        ):
            words = shlex.split((quoted or plain).replace("'", ""))
            is_prose = not quoted and len(words) > 2 and not any(word.startswith("--") for word in words)
            if (
                not is_prose
                and not re.search(r"[|\[]|\.\.\.", " ".join(words))
                and words[0].islower()
                and words[1:] != ["2"]
            ):
                yield words


def test_commands_that_are_printed_have_options_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every suggestion in a message of ours is one that its command's parser takes."""
    monkeypatch.setattr(cli_options, "local_folder", lambda model, **_: model)
    suggested = []
    for path in sorted((ROOT / "src/bytescale").rglob("*.py")):
        for arguments in commands_in(path.read_text(encoding="utf-8")):
            try:
                if len(arguments) > 1:
                    check_command(*arguments)
                assert arguments[0] in {name.split()[0] for name in GENERATE.OPTIONS}
            except (SystemExit, AssertionError, ValueError) as error:
                pytest.fail(f"{path.name}: bytescale {shlex.join(arguments)} is refused ({error})")
            suggested.append(shlex.join(arguments))
    assert {"init", "train --resume 2", "train CONFIG.toml --cost.profile 2"} <= set(suggested)
    with pytest.raises(ValueError, match="did you mean"):
        check_command(*next(commands_in('print(f"next: bytescale train {path} --trainer.step 1")')))


def test_a_wrong_option_would_be_found() -> None:
    assert list(commands_of("```sh\nbytescale plan --rank 4  # no\n```")) == [["plan", "--rank", "4"]]
    with pytest.raises(ValueError, match=r"did you mean --parallel.ranks"):
        check_command("plan", "--rank", "4")
    with pytest.raises(SystemExit):
        check_command("plan", "--planners", "best")
    with pytest.raises(ValueError, match=r"did you mean --data.batch-tokens"):
        check_command("train", "CONFIG.toml", "--data.batch-token", "4K")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_and_make_targets_in_the_documents_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    names = set(re.findall(r"\b((?:src/bytescale|tests|benchmarks|docs)/[\w/.-]*\w)", text))
    folders = {folder.name for folder in (ROOT / "src/bytescale").iterdir() if folder.is_dir()}
    inside = re.findall(r"`((\w+)/[\w/]+\.(?:py|toml))`", text)  # `plan/layout.py` is below src/bytescale
    names |= {f"src/bytescale/{name}" for name, folder in inside if folder in folders}
    names -= {name for name in names if (DOCS / name).exists()}  # links between pages
    missing = [name for name in sorted(names) if not (ROOT / name).exists() and not name.startswith("benchmarks/out")]
    assert not missing, page.name
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"`make ([\w-]+)`", text):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{page.name}: make {target}"


def test_the_example_of_the_api_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (DOCS / "reference/api.md").read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(block, "docs/reference/api.md", "exec"), {})
    assert float(capsys.readouterr().out) >= 1


def test_every_page_is_in_the_sites_menu() -> None:
    pages = {str(page.relative_to(DOCS)) for page in PAGES if page.is_relative_to(DOCS)}
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    listed = {name for name in re.findall(r": ([\w/]+\.md)$", menu, re.MULTILINE) if not name.startswith("reference/")}
    assert pages == listed


def test_the_index_of_decisions_has_every_question_with_its_verdict() -> None:
    folder = DOCS / "decisions"
    index = " ".join((folder / "index.md").read_text(encoding="utf-8").split())
    for page in sorted(folder.glob("*.md")):
        _, *decisions = re.split(r"^## ", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
        for decision in decisions if page.name != "index.md" else ():
            found = re.fullmatch(r"(.+?)\n.*\*\*Verdict:\*\* (.+?)\n*", decision, re.DOTALL)
            assert found, f"{page.name}: a decision without a verdict"
            question, verdict = found.groups()
            first = re.split(r";|\.$", " ".join(verdict.split()))[0]
            row = rf"\[{re.escape(question)}\]\({page.name}#[\w-]+\) {re.escape(first[0].upper() + first[1:])}\."
            assert re.search(row, index), f"docs/decisions/index.md lacks a line: {question} {first}."


def test_reference_pages_name_every_setting_and_command() -> None:
    settings, commands = GENERATE.settings_page(), GENERATE.commands_page()
    for text in (
        "| `capacity_tokens` | count or `auto` | `8K` |",
        "| `name` | `adaptive`, `paper`, `greedy`, `naive`, `static` |",
    ):
        assert text in settings
    for text in ("`--gpus-per-node`", "`--json` | flag", "## bytescale data audit", "| `SOURCE` |"):
        assert text in commands
    for page in (settings, commands):
        rows = [line for line in page.splitlines() if line.startswith("| `")]
        assert len(rows) > 60
        assert not [row for row in rows if "|  |" in row.rpartition(" | ")[2]], "an option without a text"


@pytest.mark.parametrize("script", [path for path in EXAMPLES if path.suffix == ".sh"], ids=lambda path: path.name)
def test_example_scripts_are_valid_shell_and_start_what_exists(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=60)
    text = script.read_text(encoding="utf-8").replace("\\\n", " ")
    torchruns = re.findall(r"^\s*(?:srun )?torchrun (.*)$", text, re.MULTILINE)
    trains = re.findall(r"^\s*bytescale (train .*)$", text, re.MULTILINE)
    assert torchruns or trains
    for check, lines in ((check_torchrun, torchruns), (check_command, trains)):
        for line in lines:
            line = re.sub(r'"\$\{what\[@\]\}"', "--resume FOLDER", line)
            check(*shlex.split(re.sub(r"\$\{?\w+(:-\w+)?\}?", "2", line)))


def check_torchrun(*arguments: str) -> None:
    """torchrun's own parser takes its options, and ours those of what it starts."""
    options = get_args_parser().parse_args(list(arguments))
    assert options.module
    assert options.training_script == "bytescale"
    check_command(*options.training_script_args)


def test_the_slurm_script_joins_nodes_and_resumes(tmp_path: Path) -> None:
    """With stand-ins for Slurm's commands, which print how they were called."""
    (tmp_path / "srun").write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    (tmp_path / "scontrol").write_text(
        '#!/bin/bash\n[ "$3" = "node[7-10]" ] && printf "node7\\nnode8\\nnode9\\nnode10\\n"\n'
    )
    for name in ("srun", "scontrol"):
        (tmp_path / name).chmod(0o755)
    given = {
        "SLURM_JOB_NODELIST": "node[7-10]",
        "SLURM_NNODES": "4",
        "SLURM_GPUS_ON_NODE": "8",
        "SLURM_JOB_ID": "12",
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
    }

    def started() -> list[str]:
        command = ["bash", str(DOCS / "examples/slurm.sh"), "my.toml", str(tmp_path / "run")]
        return subprocess.run(command, env=given, check=True, capture_output=True, text=True).stdout.split()

    first = started()
    assert first[0] == "torchrun"
    options = get_args_parser().parse_args(first[1:])
    assert (options.nnodes, options.nproc_per_node, options.rdzv_endpoint) == ("4", "8", "node7:29500")
    assert options.training_script_args == ["train", "my.toml", "--trainer.run-dir", str(tmp_path / "run")]
    check_torchrun(*first[1:])
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.toml").touch()
    again = started()
    assert again[-3:] == ["train", "--resume", str(tmp_path / "run")]
    check_torchrun(*again[1:])


def test_the_kubernetes_manifest_names_options_that_exist() -> None:
    service, job = yaml.safe_load_all((DOCS / "examples/kubernetes.yaml").read_text(encoding="utf-8"))
    spec = job["spec"]
    pod = spec["template"]["spec"]
    container = pod["containers"][0]
    assert (service["kind"], job["kind"], spec["completionMode"]) == ("Service", "Job", "Indexed")
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}, "Kubernetes labels a job's pods so"
    assert pod["subdomain"] == service["metadata"]["name"], "or pods have no names"
    assert container["command"][0] == "torchrun"
    check_torchrun(*container["command"][1:])
    options = get_args_parser().parse_args(container["command"][1:])
    assert int(options.nnodes) == spec["completions"] == spec["parallelism"]
    assert int(options.nproc_per_node) == int(container["resources"]["limits"]["nvidia.com/gpu"])
    assert options.rdzv_endpoint == f"{job['metadata']['name']}-0.{service['metadata']['name']}:29500"
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def test_no_merge_was_left_half_done() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
        path = ROOT / name
        if path.is_file():
            marked = re.search(rb"^(<{7}|>{7}) ", path.read_bytes(), re.MULTILINE)
            assert marked is None, f"{name} has the marks of a merge"
