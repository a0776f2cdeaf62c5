"""The command ``bytescale`` in a copy of this process: a new one would need seconds for its imports."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn

import psutil

from bytescale.cli.main import main

_NEW_PROCESS = """
import faulthandler, signal, sys
from bytescale.cli.main import main
faulthandler.register(signal.SIGUSR2)
sys.exit(main(sys.argv[1:]))
"""


def _has_used_ray() -> bool:
    """Whether this process has been one of Ray's, whose threads of C++ stay behind ``ray.shutdown``."""
    ray = sys.modules.get("ray")
    return ray is not None and getattr(ray._private.worker.global_worker, "listener_thread", None) is not None


class Command:
    """What tests use of ``subprocess.Popen``. ``before`` is called in the copy, before the command is."""

    def __init__(self, arguments: Sequence[str], before: Callable[[], object] = list) -> None:
        self._streams = [tempfile.TemporaryFile("w+") for _ in range(2)]  # noqa: SIM115 - closed with this object
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            self._run(arguments, before)

    def _run(self, arguments: Sequence[str], before: Callable[[], object]) -> NoReturn:
        code: object = 1
        try:
            for number, stream in enumerate(self._streams, start=1):
                os.dup2(stream.fileno(), number)
            sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
            faulthandler.register(signal.SIGUSR2, sys.stderr)  # ranks that are copies of it have it, too
            before()
            if before is list and _has_used_ray():  # its copies cannot begin Ray: they end by SIGSEGV
                os.execv(sys.executable, [sys.executable, "-c", _NEW_PROCESS, *arguments])
            code = main(arguments)
        except SystemExit as end:
            code = end.code
        except BaseException:
            traceback.print_exc()
        finally:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(code if isinstance(code, int) else 0 if code is None else 1)

    def poll(self) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode

    def communicate(self, timeout: float) -> tuple[str, str]:
        """What it printed, and its errors, when it has ended.

        After ``timeout`` seconds, it and its ranks are killed, and the test fails with all that they printed and with
        the stack of every thread.
        """
        until = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > until:
                self._show_stacks()
                raise AssertionError(f"it had not ended after {timeout:.0f} s:\n" + "\n".join(self._printed()))
            time.sleep(0.02)
        return self._printed()

    def _printed(self) -> tuple[str, str]:
        for stream in self._streams:
            stream.seek(0)
        out, errors = (stream.read() for stream in self._streams)
        return out, errors

    def _show_stacks(self) -> None:
        """Have all processes write their stacks, unless they are stopped, and end them."""
        own = psutil.Process(self.pid)
        processes = [own, *own.children(recursive=True)]
        for process in processes:
            if process.status() != psutil.STATUS_ZOMBIE:
                process.send_signal(signal.SIGUSR2)
        time.sleep(1.0)
        states = [f"{process.pid} {process.status()} {process.name()}" for process in processes]
        for process in processes[1:]:
            process.kill()
        self.kill()
        self._streams[1].seek(0, os.SEEK_END)
        self._streams[1].write("\n".join(["", *states]))

    def kill(self) -> None:
        """End it, if it has not ended."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
            _, status = os.waitpid(self.pid, 0)
            self.returncode = os.waitstatus_to_exitcode(status)

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)
