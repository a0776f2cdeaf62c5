"""Chooses the flash implementation that runs attention on a GPU: PyTorch's own, FlashAttention 3 or FlashAttention 4.

PyTorch ships FlashAttention 2, and has a registry of the two newer ones, which are separate packages. The active
implementation serves PyTorch's flash operators in the whole process, so ``CudaFlashKernel`` calls the same operators
for all of them. Each is tried before it is used: a forward and a backward of two short sequences with the model's heads
are compared with the slow twin's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch.nn.attention import (
    activate_flash_attention_impl,
    current_flash_attention_impl,
    list_flash_attention_impls,
    register_flash_attention_impl,
    restore_flash_attention_impl,
)

from bytescale.attention.blocks import BlockSet, causal_triangles
from bytescale.attention.choose import select_kernel
from bytescale.attention.kernels import AttentionKernel, CudaFlashKernel, MathKernel, OfQueries
from bytescale.common.errors import ConfigError

TRIAL_LENGTHS = (70, 26)
"""Two sequences, neither of which fills the kernels' tiles."""
TRIAL_WINDOW = 19
TRIAL_ERROR = 0.03
"""Largest relative error, in 2-norms, of a trial's result against the slow twin's. BF16 keeps 8 bits, which puts a
right kernel within 0.01; one that masks or scales wrongly is off by 0.1 and more."""


@dataclass(frozen=True)
class FlashImplementation:
    """An implementation in PyTorch's registry that is not PyTorch's own."""

    name: str
    """Its name in ``kernels.attention``."""
    registered: str
    """Its name in PyTorch's registry."""
    module: str
    """The Python module that its package installs."""
    capabilities: tuple[int, ...]
    """Major compute capabilities of the GPUs that PyTorch lets it run on."""
    install: str
    """How to install it, for messages."""


FA3 = FlashImplementation(
    name="fa3",
    registered="FA3",
    module="flash_attn_interface",
    capabilities=(9,),
    install="install FlashAttention 3 (python setup.py install in hopper/ of its repository)",
)
FA4 = FlashImplementation(
    name="fa4",
    registered="FA4",
    module="flash_attn.cute",
    capabilities=(9, 10),
    install="pip install --pre flash-attn-4",
)
FASTEST_FIRST = (FA3, FA4)
"""On Hopper FlashAttention 3 is ahead of 4, which was written for Blackwell, where 3 does not run."""
_OUR_FA4 = "FA4 (bytescale)"


@dataclass(frozen=True)
class Heads:
    """The heads of one rank: H query heads and G key/value heads, each of width D."""

    queries: int
    keys: int
    width: int
    windowed: bool = False
    """Whether any layer has a sliding window: an implementation is only tried with one if it will be given one."""


@dataclass(frozen=True)
class AttentionChoice:
    """The kernel of a run, and for the run's log how it was chosen."""

    kernel: AttentionKernel
    name: str
    """``fa3``, ``fa4``, ``flash`` (PyTorch's own) or ``math``."""
    passed_over: tuple[str, ...] = ()
    """One sentence for each faster implementation that ``auto`` did not take, with the reason."""

    def lines(self) -> list[str]:
        """Lines for people: which kernels run, and why faster ones do not."""
        return [f"kernels attention {self.name}", *(f"        {reason}" for reason in self.passed_over)]


@contextmanager
def open_attention(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    heads: Heads | None,
    everywhere: Callable[[Sequence[float]], Sequence[float]] = list,
) -> Iterator[AttentionChoice]:
    """Activate the implementation that ``kernels.attention`` names, until the block ends.

    ``heads`` are this rank's; None: there are none to try an implementation for. ``everywhere`` takes this rank's
    numbers and returns the smallest of any rank, once per trial: so all ranks choose the same implementation.

    Raises ``ConfigError`` if the implementation was asked for by name and cannot run on every rank.
    """
    wanted = {implementation.name: implementation for implementation in FASTEST_FIRST}
    if name in wanted and device.type != "cuda":
        raise _not_usable(wanted[name], "needs a GPU, and this run is on the CPU")
    if heads is None or device.type != "cuda" or (name != "auto" and name not in wanted):
        plain = "flash" if name in wanted else name
        yield AttentionChoice(select_kernel(plain, device, dtype), "math" if name == "math" else "flash")
        return
    kernel = select_kernel("flash", device, dtype)  # refuses fp32
    candidates = FASTEST_FIRST if name == "auto" else (wanted[name],)
    major, _ = torch.cuda.get_device_capability(device)
    with chosen_implementation(candidates, major, device, dtype, heads, everywhere) as (chosen, reasons):
        if chosen is None and name != "auto":
            raise _not_usable(wanted[name], reasons[0])
        used = "flash" if chosen is None else chosen.name
        passed = [f"{other.name} {reason}" for other, reason in zip(candidates, reasons, strict=False)]
        yield AttentionChoice(kernel, used, tuple(passed))


@contextmanager
def chosen_implementation(
    candidates: Sequence[FlashImplementation],
    major: int,
    device: torch.device,
    dtype: torch.dtype,
    heads: Heads,
    everywhere: Callable[[Sequence[float]], Sequence[float]] = list,
) -> Iterator[tuple[FlashImplementation | None, list[str]]]:
    """Activate the first candidate that works on every rank, and say why the candidates before it do not.

    ``major`` is the major compute capability of ``device``.
    """
    passed: list[str] = []
    for candidate in candidates:
        reason = why_not(candidate, major, device, dtype, heads)
        (works,) = everywhere([float(reason is None)])
        if works:
            with active(candidate):
                yield candidate, passed
            return
        passed.append(reason or "does not work on every rank: the log of another one says why")
    yield None, passed


def why_not(
    implementation: FlashImplementation, major: int, device: torch.device, dtype: torch.dtype, heads: Heads
) -> str | None:
    """Return why an implementation cannot be used here, as the end of a sentence about it, or None if it can."""
    if implementation.registered not in list_flash_attention_impls():
        return f"is unknown to torch {torch.__version__}"
    if torch.version.hip:
        return "needs a GPU of NVIDIA"
    if major not in implementation.capabilities:
        needed = " or ".join(f"{capability}.x" for capability in implementation.capabilities)
        return f"needs a GPU of compute capability {needed}, and this one has {major}.x"
    package, _, inner = implementation.module.partition(".")
    try:
        # Looking for a module inside a package imports the package, which fails if it was built for another torch.
        if find_spec(package) is None or (inner and find_spec(implementation.module) is None):
            return f"is not installed (no module {implementation.module})"
        with active(implementation):
            error = trial_error(CudaFlashKernel(), device, dtype, heads)
    except Exception as failure:  # anything that a package of others may raise
        first_line = (str(failure).splitlines() or [""])[0]
        return f"is installed but fails ({type(failure).__name__}: {first_line})"
    if not error <= TRIAL_ERROR:
        return f"is installed but computes something else (relative error {error:.2g} in a trial)"
    return None


@contextmanager
def active(implementation: FlashImplementation) -> Iterator[None]:
    """Let PyTorch's flash operators run this implementation until the block ends, and then the one from before."""
    before = current_flash_attention_impl()
    if implementation is FA4:
        register_flash_attention_impl(_OUR_FA4, register_fn=_register_fa4)
        activate_flash_attention_impl(_OUR_FA4)
    else:
        activate_flash_attention_impl(implementation.registered)
    try:
        yield
    finally:
        restore_flash_attention_impl() if before is None else activate_flash_attention_impl(before)


def trial_error(kernel: AttentionKernel, device: torch.device, dtype: torch.dtype, heads: Heads) -> float:
    """Return a kernel's largest relative error (2-norms) of output, LSE and gradients against the slow twin in fp32.

    The trial has the blocks that a ring computes: causal triangles, and a rectangle with more keys than queries. With
    windows it also has bands, and a causal block with more keys than queries.
    """
    total = sum(TRIAL_LENGTHS)
    generator = torch.Generator().manual_seed(0)

    def rows(count: int) -> torch.Tensor:
        numbers = torch.randn(total, count, heads.width, generator=generator)
        return numbers.to(dtype)

    tensors = [rows(heads.queries), rows(heads.keys), rows(heads.keys), rows(heads.queries)]  # q, k, v, dout
    here = [tensor.to(device) for tensor in tensors]
    wide = [tensor.float() for tensor in tensors]
    scale = heads.width**-0.5
    first = TRIAL_LENGTHS[0]
    queries, keys = np.array([[0, first // 2]]), np.array([[0, first]])
    block_sets = [causal_triangles(TRIAL_LENGTHS), BlockSet.of(queries, keys, causal=False)]
    if heads.windowed:
        block_sets.append(causal_triangles(TRIAL_LENGTHS, TRIAL_WINDOW))
        block_sets.append(BlockSet.of(queries, keys, causal=True, window=TRIAL_WINDOW))
    worst = 0.0
    for blocks in block_sets:
        expected = _forward_and_backward(MathKernel(), wide, blocks, scale, None)
        ours = _forward_and_backward(kernel, here, blocks, scale, expected[:2])
        for got, wanted in zip(ours, expected, strict=True):
            worst = max(worst, float((got.cpu().float() - wanted).norm() / wanted.norm()))
    return worst


def _forward_and_backward(
    kernel: AttentionKernel,
    tensors: Sequence[torch.Tensor],
    blocks: BlockSet,
    scale: float,
    whole: Sequence[torch.Tensor] | None,
) -> list[torch.Tensor]:
    """Return ``out, lse, dq, dk, dv``. Backward uses ``out, lse`` of ``whole``, or if None of its own forward."""
    q, k, v, dout = tensors
    out, lse = kernel.forward(q, k, v, blocks, scale)
    given_out, given_lse = (out, lse) if whole is None else (whole[0].to(out), whole[1].to(lse))
    full_out, full_lse = torch.zeros_like(q), lse.new_zeros(q.shape[:2])
    picked = blocks.query_rows(q.device)
    full_out[picked], full_lse[picked] = given_out, given_lse
    return [out, lse, *kernel.backward(OfQueries(dout, q, full_out, full_lse), k, v, blocks, scale)]


def _register_fa4() -> Any:
    from torch.nn.attention._fa4 import register_flash_attention_fa4

    return register_flash_attention_fa4("bytescale.attention.flash_4")


def _not_usable(implementation: FlashImplementation, reason: str) -> ConfigError:
    return ConfigError(
        f'kernels.attention = "{implementation.name}", but it {reason}',
        so="the run would stop at its first attention",
        fix=f'{implementation.install}, or set kernels.attention = "auto", which takes the fastest that is there',
    )
