"""The program ``bytescale``: it picks the command and turns an expected error into one message."""

from __future__ import annotations

import importlib
import os
import select
import shlex
import sys
from collections.abc import Sequence

from bytescale import __version__
from bytescale.common.errors import BytescaleError, SystemRefusal, foreseen, is_panic, unexpected

COMMANDS: dict[str, tuple[str, str, str]] = {
    "demo": ("demo", "DemoOptions", "the first run: train on 8 ranks, measure the planners, simulate a cluster"),
    "train": ("train", "TrainOptions", "train a model: bytescale train CONFIG [--section.key value ...]"),
    "init": ("init", "InitOptions", "write a commented config to start from"),
    "plan": ("plan", "PlanOptions", "plan one batch for any number of ranks and compare planners"),
    "simulate": ("simulate", "SimulateOptions", "simulate a training step on a modelled cluster of up to 16,384 GPUs"),
    "profile": ("profile", "ProfileOptions", "measure a model's layers and links on this machine, for planning"),
    "report": ("report", "ReportOptions", "write one HTML file about one or several runs"),
    "score": ("score", "ScoreOptions", "log-probabilities of documents under a model of Hugging Face"),
    "serve": ("serve", "ServeOptions", "train and sample for clients of Tinker"),
    "convert": ("convert", "ConvertOptions", "turn a checkpoint into a Hugging Face folder"),
    "checkpoint list": ("checkpoint", "ListOptions", "the checkpoints of a run, and whether every file is there"),
    "checkpoint verify": ("checkpoint", "VerifyOptions", "read every byte of checkpoints and compare checksums"),
    "data tokenize": ("data", "TokenizeConfig", "turn text, JSONL or Parquet into a .bin/.idx pair"),
    "data stats": ("data", "StatsConfig", "how the tokens are distributed over document lengths"),
    "data show": ("data", "ShowConfig", "which tokens are trained on, with which weights"),
    "data audit": ("data", "AuditConfig", "check that a run lost no token and had none twice"),
}
"""The module of a command, the class of its options, and a line of help. A module with a function ``run`` is given the
arguments; elsewhere the options are parsed and have a method ``run``. Both return the exit code."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Return the exit code: 0 done, 1 failed while running, 2 bad input."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if arguments else 2
    if arguments[0] in ("-V", "--version"):
        print(f"bytescale {__version__}")
        return 0
    words = 1 if arguments[0] in COMMANDS else 2
    command, rest = " ".join(arguments[:words]), arguments[words:]
    if command not in COMMANDS:
        group = arguments[0] if any(name.startswith(f"{arguments[0]} ") for name in COMMANDS) else ""
        if group and arguments[1:2] in ([], ["-h"], ["--help"]):
            print(usage(group))
            return 0 if arguments[1:] else 2
        from bytescale.config.load import nearest  # reading all settings would take half the time of `--help`

        print(
            f"bytescale: there is no command {command!r}; {nearest(command, COMMANDS)}\n\n{usage(group)}",
            file=sys.stderr,
        )
        return 2
    try:
        return run(command, rest)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError as error:
        # 141 is the exit code that shells give to a program that SIGPIPE has ended.
        return 141 if reader_is_gone() else report(command, error)
    except BaseException as error:
        if isinstance(error, Exception) or is_panic(error):
            return report(command, error)
        raise


def run(command: str, arguments: Sequence[str]) -> int:
    """Run one of ``COMMANDS``. Returns the exit code; raises what is wrong."""
    module_name, options, _ = COMMANDS[command]
    module = importlib.import_module(f"bytescale.cli.{module_name}")
    if hasattr(module, "run"):
        return int(module.run(arguments))
    from bytescale.cli.options import parse

    return int(parse(getattr(module, options), arguments, prog=f"bytescale {command}").run())


def run_on_ranks(command: str, arguments: Sequence[str], ranks: int, *, modules: Sequence[str], go_on: str) -> int:
    """Run the command again as each of so many ranks of this machine. ``modules, go_on``: see ``launch_ranks``."""
    from bytescale.train.launch.forked import prepare_for_copies
    from bytescale.train.launch.torchrun import launch_ranks

    prepare_for_copies()
    again = f"{go_on} with `{shlex.join(['bytescale', command, *arguments])}`"
    launch_ranks(ranks, [command, *arguments], main=main, modules=modules, again=lambda: again)
    return 0


def report(command: str, error: BaseException) -> int:
    """Print the error as one message, and return the exit code."""
    error = foreseen(error, command)
    if "TORCHELASTIC_ERROR_FILE" in os.environ:  # the launcher prints it once, for all ranks
        from bytescale.train.ranks import record_for_launcher

        record_for_launcher(error)
    else:
        shown = error if isinstance(error, BytescaleError) else unexpected(error)
        print(f"bytescale {command}: {shown}", file=sys.stderr)
    is_bad_input = isinstance(error, BytescaleError) and isinstance(error, ValueError | SystemRefusal)
    return 2 if is_bad_input else 1


def reader_is_gone() -> bool:
    """Return whether standard output is a pipe that nobody reads any more (``| head``).

    In that case standard output is closed off, so that Python does not try to flush it at exit.
    """
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    gone = any(event & select.POLLERR for _, event in poll.poll(0))
    if gone:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return gone


def usage(group: str = "") -> str:
    """Return the text that ``bytescale --help`` prints; of a ``group`` such as ``data``, its commands."""
    shown = {name: text for name, (*_, text) in COMMANDS.items() if name.startswith(f"{group} " if group else "")}
    width = max(map(len, shown), default=0)
    return "\n".join(
        [
            f"bytescale {__version__}: hybrid data parallel training on mixed short and very long sequences",
            "",
            "commands:",
            *(f"  {name:<{width}}  {text}" for name, text in shown.items()),
            "",
            "`bytescale COMMAND --help` lists its options. A first run: bytescale demo",
        ]
    )
