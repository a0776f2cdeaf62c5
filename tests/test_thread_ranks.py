"""Ranks as threads (``parity.thread_ranks``), where PyTorch expects processes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from bytescale.parity import thread_ranks

PROGRAM = """
import runpy, sys, time
import torch, torch._ops
from torch.utils._python_dispatch import TorchDispatchMode

run_ranks = runpy.run_path(sys.argv[1])["run_ranks"]  # without the rest of its package, which takes seconds
make = torch._ops.OpOverload.__init__

def make_slowly(self, *args, **kwargs):
    make(self, *args, **kwargs)
    time.sleep(0.02 if self.namespace == "c10d" else 0.0)

class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))

def work(group):
    own, everybodys = torch.ones(2), torch.empty(8)
    with Mode():
        for _ in range(3):
            group.allreduce([own]).wait()
            group._allgather_base(everybodys, own).wait()
            group._reduce_scatter_base(own, everybodys).wait()
    return own.tolist()

torch._ops.OpOverload.__init__ = make_slowly
print(run_ranks(4, work))
"""


@pytest.mark.exhaustive
def test_threads_under_a_dispatch_mode_do_not_crash() -> None:
    """PyTorch calls a freed operator when two threads are the first to use it, unless all operators exist already."""
    command = [sys.executable, "-X", "faulthandler", "-c", PROGRAM, thread_ranks.__file__]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.stdout.strip() == str([[4096.0, 4096.0]] * 4), ended.stderr
