"""The choice of a flash implementation: by trial, with the reasons in the log, and refused with its name.

The tests need no GPU. PyTorch's registry puts stand-ins behind its flash operators on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.machinery import ModuleSpec
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.library import Library
from torch.nn.attention import current_flash_attention_impl, register_flash_attention_impl

from bytescale.attention import flash, select_kernel
from bytescale.attention.blocks import BlockSet, causal_triangles
from bytescale.attention.flash import FA3, FA4, FASTEST_FIRST, FlashImplementation, Heads
from bytescale.attention.kernels import CpuFlashKernel, MathKernel, OfQueries
from bytescale.common.errors import ConfigError
from bytescale.config.schema import Config, DataConfig, KernelsConfig
from bytescale.train.parts.run_kernels import open_kernels

CPU, FP32 = torch.device("cpu"), torch.float32
HEADS = Heads(queries=4, keys=2, width=8)
HOPPER, BLACKWELL, AMPERE = 9, 10, 8


class StandIn:
    """A flash implementation on the CPU: the slow twin's numbers, times ``factor``, behind PyTorch's operators.

    ``knows_windows``: otherwise it takes a window and ignores it.
    """

    def __init__(self, factor: float = 1.0, knows_windows: bool = True) -> None:
        self.factor = factor
        self.knows_windows = knows_windows
        self.num_calls = 0
        self._library: Library | None = None

    def register(self) -> StandIn:
        library = Library("aten", "IMPL", "CPU")
        library.impl("_flash_attention_forward", self.forward, "CPU")
        library.impl("_flash_attention_backward", self.backward, "CPU")
        self._library = library
        return self

    def remove(self) -> None:
        self._library = None

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_q: Tensor,
        cu_k: Tensor,
        max_q: int,
        max_k: int,
        dropout: float,
        causal: bool,
        mask: bool,
        *,
        scale: float,
        window_size_left: int = -1,
        window_size_right: int = 0,
    ) -> tuple[Tensor, ...]:
        self.num_calls += 1
        blocks = blocks_of(cu_q, cu_k, causal, self.window(window_size_left))
        out, lse = MathKernel().forward(q, k, v, blocks, scale)
        nothing = torch.empty(0)
        return out * self.factor, lse.T.contiguous(), nothing, nothing, nothing

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        cu_q: Tensor,
        cu_k: Tensor,
        max_q: int,
        max_k: int,
        dropout: float,
        causal: bool,
        rng: Tensor,
        unused: Tensor,
        *,
        scale: float,
        window_size_left: int = -1,
        window_size_right: int = 0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        blocks = blocks_of(cu_q, cu_k, causal, self.window(window_size_left))
        return MathKernel().backward(OfQueries(dout, q, out, lse.T), k, v, blocks, scale)

    def window(self, size_left: int) -> int | None:
        return size_left + 1 if self.knows_windows and size_left >= 0 else None


def blocks_of(cu_q: Tensor, cu_k: Tensor, causal: bool, window: int | None = None) -> BlockSet:
    def ranges(edges: Tensor) -> list[tuple[int, int]]:
        numbers = edges.tolist()
        return list(pairwise(numbers))

    return BlockSet(ranges(cu_q), ranges(cu_k), causal, window)


def broken() -> None:
    raise ValueError("too many values to unpack (expected 2)\nand a stack of it")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Call it with the implementations that shall be there, each with what PyTorch's registry calls for it."""

    def install(**register: Callable[[], object]) -> None:
        modules = {implementation.module: implementation.name for implementation in FASTEST_FIRST}
        modules["flash_attn"] = "fa4"

        def find(module: str) -> ModuleSpec | None:
            return ModuleSpec(module, None) if modules[module] in register else None

        monkeypatch.setattr(flash, "find_spec", find)
        if "fa3" in register:
            monkeypatch.setitem(registry(), "FA3", register["fa3"])
        if "fa4" in register:
            monkeypatch.setattr(flash, "_register_fa4", register["fa4"])

    yield install
    assert current_flash_attention_impl() is None, "the implementation outlived the run"


def registry() -> dict[str, Callable[[], object]]:
    from torch.nn.attention import _registry

    return _registry._FLASH_ATTENTION_IMPLS


def choose(
    major: int, candidates: tuple[FlashImplementation, ...] = FASTEST_FIRST, everywhere: Callable = list
) -> tuple[str | None, list[str]]:
    with flash.chosen_implementation(candidates, major, CPU, FP32, HEADS, everywhere) as (chosen, reasons):
        return None if chosen is None else chosen.name, reasons


def test_the_fastest_that_works_is_taken_and_undone(installed: Callable[..., None]) -> None:
    fa3, fa4 = StandIn(), StandIn()
    installed(fa3=fa3.register, fa4=fa4.register)
    assert choose(HOPPER) == ("fa3", [])
    name, reasons = choose(BLACKWELL)
    assert name == "fa4"
    assert reasons == ["needs a GPU of compute capability 9.x, and this one has 10.x"]
    name, reasons = choose(AMPERE)
    assert name is None
    assert len(reasons) == 2
    # One trial each, of both kinds of blocks: 4 is not tried where 3 works, and neither where the GPU is too old.
    assert fa3.num_calls == fa4.num_calls == 2
    with pytest.raises(NotImplementedError):
        flash.trial_error(flash.CudaFlashKernel(), CPU, FP32, HEADS)


def test_one_that_fails_or_computes_something_else_is_passed_over(installed: Callable[..., None]) -> None:
    good = StandIn()
    installed(fa3=broken, fa4=good.register)
    assert choose(HOPPER) == (
        "fa4",
        ["is installed but fails (ValueError: too many values to unpack (expected 2))"],
    )
    installed(fa3=StandIn(factor=1.1).register, fa4=good.register)
    name, reasons = choose(HOPPER)
    assert name == "fa4"
    assert reasons == ["is installed but computes something else (relative error 0.1 in a trial)"]


def test_a_trial_within_a_run_leaves_the_runs_implementation(installed: Callable[..., None]) -> None:
    """Two loops in one process: what the second one tries and gives back is not what the first one has."""
    installed(fa3=StandIn().register, fa4=StandIn().register)
    with flash.active(FASTEST_FIRST[0]):
        assert current_flash_attention_impl() == "FA3"
        assert choose(BLACKWELL)[0] == "fa4"
        assert current_flash_attention_impl() == "FA3"
    assert current_flash_attention_impl() is None


def test_all_ranks_take_what_all_ranks_have(installed: Callable[..., None]) -> None:
    """FlashAttention 3 is missing on another rank, 4 is on all."""
    installed(fa3=StandIn().register, fa4=StandIn().register)
    others = iter([0.0, 1.0])
    name, reasons = choose(HOPPER, everywhere=lambda usable: [next(others)])
    assert name == "fa4"
    assert reasons == ["does not work on every rank: the log of another one says why"]


def test_what_is_not_there_is_refused_by_name(installed: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    installed()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (HOPPER, 0))
    gpu = torch.device("cuda")
    for name, fix in (("fa3", "To fix: install FlashAttention 3"), ("fa4", "To fix: pip install --pre flash-attn-4")):
        with (
            pytest.raises(ConfigError, match=f'kernels.attention = "{name}", but it is not installed.*{fix}'),
            flash.open_attention(name, gpu, torch.bfloat16, HEADS),
        ):
            pass
    with flash.open_attention("auto", gpu, torch.bfloat16, HEADS) as choice:
        assert choice.name == "flash"
        assert choice.passed_over == (
            "fa3 is not installed (no module flash_attn_interface)",
            "fa4 is not installed (no module flash_attn.cute)",
        )
    with flash.open_attention("flash", gpu, torch.bfloat16, HEADS) as choice:
        assert (choice.name, choice.passed_over) == ("flash", ())


def test_an_implementation_that_this_torch_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(registry(), "FA4")
    reason = flash.why_not(FA4, HOPPER, CPU, FP32, HEADS)
    assert reason == f"is unknown to torch {torch.__version__}"


def test_a_package_that_was_built_for_another_torch_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looking for ``flash_attn.cute`` imports ``flash_attn``."""
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").write_text("raise ImportError('undefined symbol: _ZN3c104cuda')\n")
    monkeypatch.syspath_prepend(tmp_path)
    reason = flash.why_not(FA4, HOPPER, CPU, FP32, HEADS)
    assert reason == "is installed but fails (ImportError: undefined symbol: _ZN3c104cuda)"


def test_a_gpu_of_amd_is_no_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its capability is 9, too."""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert flash.why_not(FA3, HOPPER, CPU, FP32, HEADS) == "needs a GPU of NVIDIA"


@pytest.mark.parametrize("kind", ["xpu", "mps", "npu"])
@pytest.mark.parametrize("name", ["auto", "math"])
def test_other_devices_are_refused_by_name(kind: str, name: str) -> None:
    with pytest.raises(ConfigError, match=f"no attention for {kind} devices"):
        select_kernel(name, SimpleNamespace(type=kind), FP32)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["fa3", "fa4"])
def test_newer_flash_attention_needs_a_gpu(name: str) -> None:
    config = Config(data=DataConfig(sources=("here",)), kernels=KernelsConfig(attention=name))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="needs a GPU, and this run is on the CPU"), open_kernels(config, CPU, FP32):
        pass


def test_on_a_cpu_the_log_says_flash_or_math() -> None:
    for name, line in (("auto", "flash"), ("flash", "flash"), ("math", "math")):
        config = Config(kernels=KernelsConfig(attention=name))  # type: ignore[arg-type]
        with open_kernels(config, CPU, FP32) as kernels:
            assert kernels.lines() == [f"kernels attention {line}"]


def test_the_trial_passes_right_kernels_and_no_wrong_one() -> None:
    """In BF16 too: what the kernels round stays far below what the trial allows."""

    class NotCausal(CpuFlashKernel):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, blocks: BlockSet, scale: float) -> tuple[Tensor, Tensor]:
            return super().forward(q, k, v, BlockSet(blocks.queries, blocks.keys, causal=False), scale)

    assert flash.trial_error(CpuFlashKernel(), CPU, torch.float32, HEADS) < 1e-5
    assert flash.trial_error(CpuFlashKernel(), CPU, torch.bfloat16, HEADS) < flash.TRIAL_ERROR / 2
    assert flash.trial_error(NotCausal(), CPU, torch.float32, HEADS) > 3 * flash.TRIAL_ERROR


def test_one_that_ignores_windows_is_passed_over_where_a_layer_has_one(installed: Callable[..., None]) -> None:
    """By the calls of ``CudaFlashKernel`` itself, in the form in which PyTorch's operators take a window."""
    fa3, fa4 = StandIn(knows_windows=False), StandIn()
    installed(fa3=fa3.register, fa4=fa4.register)
    with flash.chosen_implementation(FASTEST_FIRST, HOPPER, CPU, FP32, HEADS) as (chosen, _):
        assert chosen is flash.FA3
    windowed = replace(HEADS, windowed=True)
    with flash.chosen_implementation(FASTEST_FIRST, HOPPER, CPU, FP32, windowed) as (chosen, reasons):
        assert chosen is FA4
        assert "computes something else" in reasons[0]
        assert flash.trial_error(flash.CudaFlashKernel(), CPU, FP32, windowed) < 1e-5


def test_flash_calls_with_values_of_another_width(installed: Callable[..., None]) -> None:
    """Padding with zeros changes neither scores nor outputs, with a window as well."""
    installed(fa3=StandIn().register)
    generator = torch.Generator().manual_seed(0)
    blocks = causal_triangles([30, 1, 12], 7)
    for width, value_width in ((8, 4), (4, 8)):
        sizes = [(4, width), (2, width), (2, value_width), (4, value_width)]
        q, k, v, dout = (torch.randn(43, *size, generator=generator, dtype=torch.float64) for size in sizes)
        with flash.chosen_implementation(FASTEST_FIRST, HOPPER, CPU, FP32, HEADS):
            results = []
            for kernel in (flash.CudaFlashKernel(), MathKernel()):
                out, lse = kernel.forward(q, k, v, blocks, 0.3)
                results.append([out, lse, *kernel.backward(OfQueries(dout, q, out, lse), k, v, blocks, 0.3)])
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_registering_ours_leaves_pytorchs_alone() -> None:
    """FlashAttention 4 goes by a name of our own: PyTorch's registration stays as others may use it."""
    before = registry()["FA4"]
    register_flash_attention_impl("a test's", register_fn=broken)
    with (
        pytest.raises(ValueError, match="too many values"),
        flash.active(FlashImplementation("t", "a test's", "m", (9,), "")),
    ):
        pass
    assert registry()["FA4"] is before
    del registry()["a test's"]
