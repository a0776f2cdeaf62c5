"""The check of flash-linear-attention's kernels: what our adapter asks of them, and whether Triton compiles them.

Triton is given a driver that only says which GPU there is. A launch compiles the kernel for the tensors that it is
given, to PTX and machine code, and launches nothing. Of several configurations the first one is compiled, which on a
GPU would be tuned.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from bytescale.recurrence.cuts import OneProcessCuts
from bytescale.recurrence.kernels import KERNELS
from tests.cuda import fake
from tests.recurrence.reference import gated_delta_rule

BF16, FP32 = torch.bfloat16, torch.float32
H, K, V = 4, 128, 128
FRAGMENTS, DOCUMENTS = [0, 130, 130, 301], [slice(301, 302), slice(302, 379)]
CAPABILITY = 90
CHUNK = 64


def fla_packs() -> str:
    """Gated delta rule and KDA: packs, states before and after documents, gradients of both; compiled for sm_90."""
    version = importlib.metadata.version("fla-core")
    kernels: dict[str, int] = {}
    with stand_in_driver(kernels):
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
        from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule
        from fla.ops.kda import chunk_kda
        from fla.ops.kda.naive import naive_recurrent_kda

        same_recurrence(naive_recurrent_gated_delta_rule, (H,))
        same_recurrence(naive_recurrent_kda, (H, K))
        for function, name, heads, decays in (
            (chunk_gated_delta_rule, "torch_chunk_gated_delta_rule", 2, (H,)),
            (chunk_kda, "chunk_kimi_delta_attention", H, (H, K)),
        ):
            states_and_their_gradients(function, heads, decays)
            through_our_adapter(function, name, heads, decays)
    return f"fla-core {version}: {len(kernels)} Triton kernels compiled for sm_{CAPABILITY}, forward and backward"


def same_recurrence(naive: Callable[..., Any], decays: tuple[int, ...]) -> None:
    """fla's own reference and our slow twin have one layout of states, one scale and one order of keys."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(9, H, width) for width in (K, K, V))
    k = torch.nn.functional.normalize(k, dim=-1)
    g, beta, state = -torch.rand(9, *decays), torch.rand(9, H), torch.randn(H, K, V)
    given = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "initial_state": state}
    out, after = naive(**{name: rows[None] for name, rows in given.items()}, output_final_state=True)
    expected, last = gated_delta_rule(q * K**-0.5, k, v, g, beta, state)
    torch.testing.assert_close(out[0], expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(after[0], last, rtol=1e-4, atol=1e-4)


def inputs(heads: int, decays: tuple[int, ...]) -> list[Tensor]:
    """q, k, v, g and beta of all rows, on the fake GPU."""
    rows = DOCUMENTS[-1].stop
    shapes = [((heads, K), BF16), ((heads, K), BF16), ((H, V), BF16), (decays, FP32), ((H,), BF16)]
    return [torch.empty(1, rows, *s, dtype=d, device=fake.DEVICE).requires_grad_() for s, d in shapes]


def states_and_their_gradients(function: Callable[..., Any], heads: int, decays: tuple[int, ...]) -> None:
    """A state before each document that has a gradient, and a state after each that gets one."""
    with fake.fake_gpu():
        given = inputs(heads, decays)
        before = torch.empty(2, H, K, V, device=fake.DEVICE).requires_grad_()
        edges = torch.empty(3, dtype=torch.int64, device=fake.DEVICE)
        with chunks_of([302, 77]):
            out, after = function(
                *given, initial_state=before, output_final_state=True, use_qk_l2norm_in_kernel=True, cu_seqlens=edges
            )
            fake.expect(out, tuple(given[2].shape), BF16)
            fake.expect(after, tuple(before.shape), FP32)
            (out.float().sum() + after.sum()).backward()
        for leaf in (*given, before):
            assert leaf.grad is not None
            fake.expect(leaf.grad, tuple(leaf.shape), leaf.dtype)


def through_our_adapter(function: Callable[..., Any], name: str, heads: int, decays: tuple[int, ...]) -> None:
    """Two fragments with rows, an empty one and two documents are two calls."""
    calls: list[tuple[int, bool]] = []
    lengths = [130, 171], [rows.stop - rows.start for rows in DOCUMENTS]

    def stock(*args: Any, **options: Any) -> Any:
        calls.append((len(options["cu_seqlens"]) - 1, options["initial_state"] is not None))
        with chunks_of(lengths[len(calls) - 1]):
            return implementation(*args, **options)

    implementation, is_new_implementation = function, True  # names of transformers, by which the adapter knows it

    def wrapped(*args: Any, **options: Any) -> Any:
        assert is_new_implementation
        return stock(*args, **options) if implementation else None

    with fake.fake_gpu():
        given = inputs(heads, decays)
        q, k, v, g, beta = given
        cuts = OneProcessCuts(FRAGMENTS, DOCUMENTS)
        out, _ = KERNELS[name](cuts, wrapped, q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)
        fake.expect(out, tuple(v.shape), BF16)
        with chunks_of(lengths[0]):  # of both calls, whose chunks are known by now
            out.backward(torch.empty_like(out))
        for leaf in given:
            assert leaf.grad is not None
            fake.expect(leaf.grad, tuple(leaf.shape), leaf.dtype)
    assert calls == [(2, True), (2, False)], calls


@contextmanager
def chunks_of(lengths: list[int]) -> Iterator[None]:
    """fla reads from its documents' places how many chunks they have; fake ones have no numbers."""
    from fla.ops.utils import index

    count = sum(-(-length // CHUNK) for length in lengths)

    def arange(counts: Tensor) -> tuple[Tensor, Tensor]:
        return counts.new_empty(count), counts.new_empty(count)

    with mock.patch.object(index, "_segmented_arange", arange):
        yield


@contextmanager
def stand_in_driver(kernels: dict[str, int]) -> Iterator[None]:
    """Launches compile. ``kernels`` gets the size of each kernel's machine code, by its name."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction, MockTensor

    properties = {"multiprocessor_count": 132, "max_shared_mem": 232448, "warpSize": 32}
    stand_in = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device=0: 0,
        get_current_target=lambda: GPUTarget("cuda", CAPABILITY, 32),
        get_active_torch_device=lambda: fake.DEVICE,
        get_benchmarker=lambda: None,
        utils=SimpleNamespace(get_device_properties=lambda device: properties),
    )
    hopper = SimpleNamespace(
        name="NVIDIA H100", major=9, minor=0, multi_processor_count=132, shared_memory_per_block=49152,
        shared_memory_per_block_optin=232448,
    )  # fmt: skip
    answers: dict[str, Callable[..., Any]] = {
        "get_device_name": lambda *_: hopper.name,
        "get_device_capability": lambda *_: (9, 0),
        "get_device_properties": lambda *_: hopper,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "_exchange_device": lambda _: 0,
        "_maybe_exchange_device": lambda _: 0,
    }
    compile_and_launch = JITFunction.run

    def launch(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        def described(value: Any) -> Any:
            return MockTensor(value.dtype, list(value.shape)) if isinstance(value, Tensor) else value

        given = {name: described(value) for name, value in options.items()}
        made = compile_and_launch(kernel, *map(described, args), grid=grid, warmup=True, **given)
        assert f".target sm_{CAPABILITY}" in made.asm["ptx"]
        kernels[kernel.fn.__name__] = len(made.asm["cubin"])
        return made

    def first_configuration(kernel: Any, *args: Any, **options: Any) -> Any:
        kernel.nargs = dict(zip(kernel.arg_names, args, strict=False))
        (config, *_) = kernel.prune_configs(options) if len(kernel.configs) > 1 else kernel.configs
        return kernel.fn.run(*args, **options, **config.all_kwargs())

    driver.set_active(stand_in)
    patches = mock.patch.object(JITFunction, "run", launch), mock.patch.object(Autotuner, "run", first_configuration)
    with mock.patch.multiple(torch.cuda, **answers), patches[0], patches[1]:
        yield
