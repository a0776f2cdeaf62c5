"""The program ``bytescale``: it picks the command and turns an expected error into one message."""

from __future__ import annotations

import importlib
import os
import select
import sys
from collections.abc import Sequence

from bytescale import __version__
from bytescale.common.errors import BytescaleError
from bytescale.common.failures import SystemRefusal, foreseen, unexpected

# name: (module with `run(arguments) -> exit code`, one line of help)
COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("bytescale.cli.demo", "the first run: train on 8 ranks, measure the planners, simulate a cluster"),
    "train": ("bytescale.cli.train", "train a model: bytescale train CONFIG [--section.key value ...]"),
    "init": ("bytescale.cli.init", "write a commented config to start from"),
    "plan": ("bytescale.cli.plan", "plan one batch for any number of ranks and compare planners"),
    "simulate": ("bytescale.cli.simulate", "simulate a training step on a modelled cluster of up to 16,384 GPUs"),
    "profile": ("bytescale.cli.profile", "measure a model's layers and links on this machine, for planning"),
    "report": ("bytescale.cli.report", "write one HTML file about one or several runs"),
    "score": ("bytescale.cli.score", "log-probabilities of documents under a model of Hugging Face"),
    "convert": ("bytescale.cli.convert", "turn a checkpoint into a Hugging Face folder"),
    "checkpoint": ("bytescale.cli.checkpoint", "list, verify or upload checkpoints"),
    "data": ("bytescale.cli.data", "tokenise a corpus, show its lengths or what is trained on"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Return the exit code: 0 done, 1 failed while running, 2 bad input."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if arguments else 2
    if arguments[0] in ("-V", "--version"):
        print(f"bytescale {__version__}")
        return 0
    command, rest = arguments[0], arguments[1:]
    if command not in COMMANDS:
        from bytescale.config.load import nearest  # reading all settings would take half the time of `--help`

        print(f"bytescale: there is no command {command!r}; {nearest(command, COMMANDS)}\n\n{usage()}", file=sys.stderr)
        return 2
    try:
        return importlib.import_module(COMMANDS[command][0]).run(rest)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError as error:
        # 141 is the exit code that shells give to a program that SIGPIPE has ended.
        return 141 if reader_is_gone() else report(command, error)
    except Exception as error:
        return report(command, error)


def report(command: str, error: Exception) -> int:
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


def usage() -> str:
    """Return the text that ``bytescale --help`` prints."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(
        [
            f"bytescale {__version__}: hybrid data parallel training on mixed short and very long sequences",
            "",
            "commands:",
            *lines,
            "",
            "`bytescale COMMAND --help` lists its options. A first run: bytescale demo",
        ]
    )
