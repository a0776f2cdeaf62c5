"""Checks of one installed CUDA build of torch, without a GPU: ``python -m tests.cuda.check --out report.json``.

A check that fails raises ``AssertionError`` or an error of torch. Otherwise it returns a line for the report.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import inspect
import itertools
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch.nn.attention import _fa3, _fa4
from torch.utils._python_dispatch import TorchDispatchMode

from bytescale.attention import Exchange, PackedAttention
from bytescale.attention.blocks import BlockSet, causal_triangles
from bytescale.attention.kernels import CudaFlashKernel, OfQueries
from bytescale.attention.rings.exchange import Message
from bytescale.attention.trees import blocks_between
from bytescale.config.schema import OptimizerConfig
from bytescale.hf.model import tensor_parallel as cutting
from bytescale.hf.model.beside_products import BesideProducts
from bytescale.hf.model.decoder import HFDecoder
from bytescale.hf.model.tensor_parallel import apply_tensor_parallelism
from bytescale.parity import small_model
from bytescale.plan import MicroBatch, Plan, RankPlan, SharedGroup
from bytescale.plan.plan import GroupSpec
from bytescale.plan.trees import Forest
from bytescale.runtime.group import RankGroup
from bytescale.runtime.loss import accumulated_at_once
from bytescale.runtime.mesh import Mesh
from bytescale.runtime.optimizer import zero
from bytescale.runtime.optimizer.flat import FlatParameters
from bytescale.runtime.optimizer.sharded_optimizer import ShardedOptimizer
from bytescale.runtime.saved.activations import Activations
from bytescale.runtime.saved.host_pool import HostPool
from bytescale.runtime.token_shards import TokenShards
from tests.cuda import fake
from tests.cuda.recurrences import fla_packs
from tests.cuda.shared import experts_all_to_all, host_optimizer, products_in_slices, recurrent_layers, sharded_domain
from tests.helpers.decoder import PlainDecoder, Sizes
from tests.helpers.reference_loss import linear_cross_entropy

BF16, FP32 = torch.bfloat16, torch.float32
SIZES = Sizes(
    vocab_size=320, num_layers=3, hidden_size=256, num_heads=8, num_kv_heads=4, head_dim=32, ffn_hidden_size=384
)
LENGTHS = (301, 1, 77)


def flash_calls() -> str:
    """Forward and backward of PyTorch's flash operators: schemas, shapes, dtypes and strides."""
    kernel, calls = CudaFlashKernel(), 0
    for (heads, kv_heads), width, dtype in itertools.product(
        [(8, 8), (8, 2), (8, 1)], (32, 64, 128), (BF16, torch.float16)
    ):
        rows = sum(LENGTHS)
        for blocks, num_queries, num_keys in (*block_sets(), (causal_triangles(LENGTHS, 50), rows, rows)):
            with fake.fake_gpu():
                q, dout = (empty(num_queries, heads, width, dtype=dtype) for _ in range(2))
                kv = empty(num_keys, 2, kv_heads, width, dtype=dtype)  # strided, as in the ring
                out, lse = kernel.forward(q, kv[:, 0], kv[:, 1], blocks, width**-0.5)
                fake.expect(out, (blocks.num_query_rows, heads, width), dtype)
                fake.expect(lse, (blocks.num_query_rows, heads), FP32)
                whole, sums = torch.empty_like(q), empty(heads, num_queries, dtype=FP32).T
                dq, dk, dv = kernel.backward(OfQueries(dout, q, whole, sums), kv[:, 0], kv[:, 1], blocks, width**-0.5)
                fake.expect(dq, (blocks.num_query_rows, heads, width), dtype)
                for gradient in (dk, dv):
                    fake.expect(gradient, (blocks.num_key_rows, kv_heads, width), dtype)
                calls += 1
    return f"{calls} pairs of forward and backward, 5 kinds of blocks"


def registered_implementations() -> str:
    """What PyTorch puts in the operators' place takes the arguments that our calls have."""
    calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "_flash_attention_" in str(function):
                calls[function.overloadpacket.__name__] = (args, kwargs or {})
            return function(*args, **(kwargs or {}))

    kernel, blocks = CudaFlashKernel(), causal_triangles(LENGTHS, 50)
    rows = sum(LENGTHS)
    with fake.fake_gpu(), Record():
        q, kv = empty(rows, 8, 64), empty(rows, 2, 64)
        out, lse = kernel.forward(q, kv, kv, blocks, 0.125)
        kernel.backward(OfQueries(out, q, out, lse), kv, kv, blocks, 0.125)
    targets = {
        "_flash_attention_forward": (_fa3._fa3_flash_attention_forward_impl_default, _fa4_forward()),
        "_flash_attention_backward": (_fa3._fa3_flash_attention_backward_impl, _fa4._fa4_flash_attention_backward_impl),
    }
    for name, implementations in targets.items():
        args, kwargs = calls[name]
        for implementation in implementations:
            inspect.signature(implementation).bind(*args, **kwargs)
    return "FA3's and FA4's forward and backward take our arguments"


def flash_4_compiles() -> str:
    """FlashAttention 4's own code, through PyTorch's and ours, compiled for the GPU that the environment names."""
    version = importlib.metadata.version("flash-attn-4")
    import cutlass
    from flash_attn.cute.interface import _get_device_arch

    class Hardware:
        """Stands for what the driver says of the GPU: how many multiprocessors a grid is made for."""

        def get_device_multiprocessor_count(self) -> int:
            return 132

        def get_max_active_clusters(self, cluster_size: int) -> int:
            return 132 // cluster_size

    arch = _get_device_arch()
    shapes = []
    hardware = mock.patch.object(cutlass.utils, "HardwareInfo", Hardware)
    with hardware, mock.patch.object(_fa4, "_FA4_MODULE_PATH", OUR_FA4), fake.fake_gpu():
        for width, (blocks, num_queries, num_keys) in itertools.product((64, 128), block_sets()[:2]):
            flash_4_forward_and_backward(blocks, num_queries, num_keys, width, arch)
            shapes.append(width)
    return f"flash-attn-4 {version}: {len(shapes)} pairs of forward and backward compiled for sm_{arch}"


def ring() -> str:
    """Forward and backward of four members as a ring and as grids; both ends of every message have the same size."""
    counts = [messages_of(columns) for columns in (1, 2, 4)]
    return f"{', '.join(map(str, counts))} messages of 4 members in 1, 2 and 4 columns, both ends alike"


def messages_of(columns: int) -> int:
    """The number of messages of a forward and a backward."""
    sizes: dict[tuple[int, int], list[int]] = {}
    received: dict[tuple[int, int], list[int]] = {}
    plan = Plan.build(
        lengths=[*LENGTHS, 40],
        capacity_tokens=[512] * 4,
        groups=[
            GroupSpec(sequences=[0, 1, 2], ranks=[2, 0, 3, 1], columns=columns),
            GroupSpec(sequences=[3], ranks=[1]),
        ],
        schedule=[[[0]], [[0, 1]], [[0]], [[0]]],
    )

    class Recorded(Exchange):
        def _post(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> list[dist.Work]:
            for send, to in sends:
                assert send.is_contiguous()
                sizes.setdefault((self.rank, to), []).append(send.numel() * send.element_size())
            for receive, source in receives:
                assert receive.is_contiguous()
                received.setdefault((source, self.rank), []).append(receive.numel() * receive.element_size())
            return super()._post(sends, receives, tag)

    for rank in range(4):
        (micro_batch,) = RankPlan.of(plan, rank).micro_batches
        with fake.fake_ranks(rank, 4) as group, fake.fake_gpu():
            attention = PackedAttention(micro_batch, CudaFlashKernel(), Recorded(group, rank, batched=True))
            rows = micro_batch.num_tokens
            q = empty(rows, 8, 64).requires_grad_()
            k, v = (empty(rows, 2, 64).requires_grad_() for _ in range(2))
            out = attention(q, k, v)
            fake.expect(out, (rows, 8, 64), BF16)
            out.backward(torch.empty_like(out))
            for leaf in (q, k, v):
                assert leaf.grad is not None
                fake.expect(leaf.grad, tuple(leaf.shape), BF16)
    assert sizes == received, f"sent {sizes}, received {received}"
    return sum(map(len, sizes.values()))


def loss() -> str:
    """The chunked loss with its Triton kernels in place, alone and with the words cut over a group of two."""
    for size in (1, 2):
        launches: list[str] = []
        with fake.fake_ranks(0, size) as group, fake.fake_gpu(), recorded_launches(launches):
            hidden, weight = (empty(rows, 256).requires_grad_() for rows in (5000, 8192 // size))
            labels = all_targets(5000)
            total = linear_cross_entropy(hidden, weight, labels, z_loss=1e-4, group=group if size > 1 else None)
            fake.expect(total, (), FP32)
            total.backward()
            assert hidden.grad is not None
            assert weight.grad is not None
            fake.expect(hidden.grad, (5000, 256), BF16)
            fake.expect(weight.grad, (8192 // size, 256), BF16)
        assert set(launches) == {"_statistics_kernel", "_gradient_kernel"}
    return f"{len(launches)} launches a rank for 5000 tokens of 8192 words"


def offload() -> str:
    """A whole model and its loss, in every mode of checkpointing, half of its activations by lanes to the host."""
    moved = []
    for checkpointing in ("none", "full", "attention"):
        with fake.fake_gpu(), recorded_launches([]):
            model, flat = model_on_gpu()
            pool = HostPool(2**30, pinned=False, page_bytes=2**20)
            activations = Activations(
                list(model.layers),
                checkpointing=checkpointing,  # type: ignore[arg-type]
                pool=pool,
                device=fake.DEVICE,
            )
            train_micro_batch(model, lonely(LENGTHS, ratio=0.5), activations)
            fake.expect(flat.gradients, tuple(flat.values.shape), FP32)
            assert activations.offload is not None
            assert activations.offload.bytes_moved > 0
            assert pool.bytes_in_use == 0
            moved.append(activations.offload.bytes_moved)
    return f"{fake.Stream.waits} waits between streams; bytes moved: " + ", ".join(map(str, moved))


def tensor_parallel() -> str:
    """One of two tensor-parallel ranks: its part of the model, of the loss and of the gradients.

    No stand-in of rows can be made of fake ones, so that they are gathered whole (``products_in_slices`` has the rest).
    """
    launches: list[str] = []
    sizes = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
    model = small_model("llama", dtype=FP32, num_hidden_layers=3, intermediate_size=384, vocab_size=320, **sizes)
    with fake.fake_ranks(1, 2) as group:
        decoder = HFDecoder(model)
        # Fake ranks send nothing, so that the cut model differs from the whole one.
        with mock.patch.object(cutting, "difference", return_value=None):
            cuts = apply_tensor_parallelism(decoder, TokenShards(RankGroup(group, name="TP")))
        whole = mock.patch.object(BesideProducts, "gathers", create=True, new_callable=mock.PropertyMock)
        with fake.fake_gpu(), recorded_launches(launches), whole as gathers:
            gathers.return_value = False
            on_gpu(model)
            assert decoder.token_rows is not None
            decoder.token_rows.shards.tp = RankGroup(group, device=fake.DEVICE, name="TP")
            flat = FlatParameters(model.named_parameters(), 1, cuts)
            train_micro_batch(decoder, lonely(LENGTHS), Activations(decoder.layers), group)
            fake.expect(flat.gradients, tuple(flat.values.shape), FP32)
    return f"{len(cuts)} parameters cut, {len(launches)} launches of the loss"


def optimizer() -> str:
    """Two updates of one of four HDP ranks: gradients reduced, fused AdamW in fp32, parameters gathered."""
    the_norm = mock.patch.object(zero, "float", create=True, return_value=1.0)  # the step's one number that is read
    with fake.fake_ranks(2, 4) as group, fake.fake_gpu(), the_norm:
        model = on_gpu(PlainDecoder(SIZES))
        flat = FlatParameters(model.named_parameters(), 4, bucket_bytes=2**20)
        adam = ShardedOptimizer.of_config(flat, OptimizerConfig(), Mesh.of_hdp(RankGroup(group, device=fake.DEVICE)))
        for _ in range(2):
            flat.zero_gradients()
            norm = adam.reduce_gradients()
            adam.update(max(norm, 2.0), 1.0, 1e-3)
        sizes = [place.stop - place.start for place in flat.shards(2)]
        for state in adam.states(adam.zeros[0]).values():
            assert sum(len(own.values) for own in state) == sum(sizes)
            for own in state:
                fake.expect(own.values, (len(own.values),), FP32)
    return f"{len(sizes)} buckets, shards of {sum(sizes)} numbers together, BF16 parameters, fp32 states"


def triton_cubins() -> str:
    """The loss's Triton kernels to machine code, with the bundled assembler, for the words of 7B and of a shard."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from bytescale.runtime import loss_kernel

    common = {"logits": "*bf16", "row_stride": "i64", "targets": "*i64"}
    signatures = {
        "_statistics_kernel": common | {"lse_out": "*fp32", "target_out": "*fp32"},
        "_gradient_kernel": common | {"lse_in": "*fp32", "z_loss": "fp32"},
    }
    sizes = []
    for (name, signature), vocab, capability in itertools.product(signatures.items(), (32000, 16000), (80, 90, 100)):
        block = min(loss_kernel._BLOCK, triton.next_power_of_2(vocab))
        constants = {"VOCAB": vocab, "BLOCK": block}
        source = ASTSource(
            fn=getattr(loss_kernel, name),
            signature=signature | dict.fromkeys(constants, "constexpr"),
            constexprs=constants,
        )
        made = triton.compile(
            source, target=GPUTarget("cuda", capability, 32), options={"num_warps": loss_kernel._WARPS}
        )
        cubin = made.asm["cubin"]
        assert cubin[:4] == b"\x7fELF"
        assert f".target sm_{capability}" in made.asm["ptx"]
        sizes.append(len(cubin))
    return f"Triton {triton.__version__}: {len(sizes)} cubins of {min(sizes)} to {max(sizes)} bytes, sm_80, 90, 100"


CHECKS: tuple[Callable[[], str], ...] = (
    *(flash_calls, registered_implementations, flash_4_compiles, ring, loss),
    *(offload, tensor_parallel, products_in_slices, optimizer, host_optimizer),
    *(sharded_domain, experts_all_to_all, recurrent_layers, triton_cubins, fla_packs),
)
OUR_FA4 = "bytescale.attention.flash_4"


def empty(*size: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(size, dtype=dtype, device=fake.DEVICE)


def block_sets() -> list[tuple[BlockSet, int, int]]:
    """Triangles of a pack, what a ring member sees of members before and after it, nothing; rows of q and of k."""
    lengths = np.array(LENGTHS)
    numbers = np.arange(len(lengths))
    group = SharedGroup(0, tuple(range(5)), 0, numbers, lengths, np.ones(5, dtype=np.int64))
    tokens, trees = group.tokens_per_member, Forest.without_trees(numbers, lengths)
    return [
        (causal_triangles(LENGTHS), sum(LENGTHS), sum(LENGTHS)),
        (blocks_between(group, trees, 3, 1)[0], int(tokens[3]), int(tokens[1])),
        (blocks_between(group, trees, 1, 3)[0], int(tokens[1]), int(tokens[3])),
        (causal_triangles([]), 0, 0),
    ]


def flash_4_forward_and_backward(blocks: BlockSet, num_queries: int, num_keys: int, width: int, arch: int) -> None:
    """The calls of ``CudaFlashKernel``, given to what PyTorch's registry would put behind the operators."""

    def on_gpu(function: Callable[..., Any]) -> Callable[..., Any]:
        """It asks which GPU there is. Only inside: elsewhere PyTorch would believe it, and look for the driver."""
        answers = {"is_available": lambda: True, "get_device_capability": lambda device=None: (arch // 10, arch % 10)}
        nothing = mock.patch.object(fake_tensor, "init_gpu_context")

        def call(*arguments: Any, **options: Any) -> Any:
            with mock.patch.multiple(torch.cuda, **answers), nothing:
                return function(*arguments, **options)

        return call

    behind = {
        "_flash_attention_forward": on_gpu(_fa4_forward()),
        "_flash_attention_backward": on_gpu(_fa4._fa4_flash_attention_backward_impl),
    }
    with mock.patch.multiple(torch.ops.aten, **behind):
        kernel = CudaFlashKernel()
        q, kv = empty(num_queries, 8, width), empty(num_keys, 2, 2, width)
        out, lse = kernel.forward(q, kv[:, 0], kv[:, 1], blocks, width**-0.5)
        fake.expect(out, (blocks.num_query_rows, 8, width), BF16)
        fake.expect(lse, (blocks.num_query_rows, 8), FP32)
        sums = empty(8, num_queries, dtype=FP32).T
        dq, dk, dv = kernel.backward(
            OfQueries(q, q, torch.empty_like(q), sums), kv[:, 0], kv[:, 1], blocks, width**-0.5
        )
        fake.expect(dq, (blocks.num_query_rows, 8, width), BF16)
        for gradient in (dk, dv):
            fake.expect(gradient, (blocks.num_key_rows, 2, width), BF16)


def _fa4_forward() -> Callable[..., Any]:
    return _fa4._fa4_flash_attention_forward_impl


@contextmanager
def recorded_launches(names: list[str]) -> Iterator[None]:
    """Triton's launches are looked at and left out: there is nothing to launch on."""
    from bytescale.runtime.loss_kernel import TritonRows

    def launch(kernel: Any, logits: Tensor, targets: Tensor, *more: Any) -> None:
        assert logits.dtype == BF16
        assert logits.stride(1) == 1
        assert targets.dtype == torch.int64
        assert len(kernel.arg_names) == 3 + len(more) + 2, "VOCAB and BLOCK are the last two"
        for tensor in (logits, targets, *(value for value in more if isinstance(value, Tensor))):
            assert tensor.device == fake.DEVICE
            assert tensor.shape[0] == logits.shape[0]
        names.append(kernel.__name__)

    with mock.patch.object(TritonRows, "_launch", staticmethod(launch)):
        yield


def lonely(lengths: tuple[int, ...], ratio: float = 0.0) -> MicroBatch:
    """A micro-batch of whole sequences."""
    plan = Plan.build(
        lengths=list(lengths),
        capacity_tokens=[sum(lengths)],
        groups=[GroupSpec(sequences=list(range(len(lengths))), ranks=[0], offload_ratio=ratio)],
        schedule=[[[0]]],
    )
    return RankPlan.of(plan, 0).micro_batches[0]


def positions(micro_batch: MicroBatch) -> Tensor:
    return torch.zeros(micro_batch.num_tokens, dtype=torch.int64, device=fake.DEVICE)


def all_targets(count: int) -> Tensor:
    """Labels in CPU memory, of which none is ignored."""
    return torch.zeros(count, dtype=torch.int64)


def on_gpu(module: Any) -> Any:
    """``module`` on the fake GPU, with BF16 parameters (``Module.to`` cannot swap fake ones that autograd has seen)."""
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            setattr(part, name, nn.Parameter(empty(*parameter.shape)))
        for name, buffer in part.named_buffers(recurse=False):
            setattr(part, name, empty(*buffer.shape, dtype=buffer.dtype))
    return module


def model_on_gpu() -> tuple[Any, FlatParameters]:
    model = on_gpu(PlainDecoder(SIZES))
    return model, FlatParameters(model.named_parameters(), 1)


def train_micro_batch(
    model: Any, micro_batch: MicroBatch, activations: Activations, group: dist.ProcessGroup | None = None
) -> None:
    """Forward, loss and backward, as the executor's."""
    activations.begin_step([micro_batch])
    attention = PackedAttention(micro_batch, CudaFlashKernel(), RankGroup().exchange, activations.attention_memory)
    tokens = torch.zeros(micro_batch.num_tokens, dtype=torch.int64, device=fake.DEVICE)
    with activations.forward(micro_batch):
        hidden, weight = accumulated_at_once(model(tokens, positions(micro_batch), attention), model.head_weight)
        total = linear_cross_entropy(hidden, weight, all_targets(micro_batch.num_tokens), group=group)
    total.backward()


def main() -> int:
    """Run all checks; exit code 1 when one fails."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=[])
    options = parser.parse_args()
    rows = []
    for check in CHECKS:
        if check.__name__ not in options.only if options.only else check in (flash_4_compiles, fla_packs):
            continue  # packages of their own; FlashAttention 4 is told by the environment for which GPU to compile
        started = time.perf_counter()
        try:
            result, passed = check(), True
        except Exception as error:
            result, passed = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}", False
            traceback.print_exc()
        seconds = time.perf_counter() - started
        rows.append({"check": check.__name__, "passed": passed, "result": result, "seconds": seconds})
        print(f"{'ok  ' if passed else 'FAIL'} {check.__name__:28} {seconds:6.1f} s  {result}", flush=True)
    report = {"torch": torch.__version__, "python": sys.version.split()[0], "checks": rows}
    options.out.write_text(json.dumps(report, indent=2), encoding="utf-8")
    return 0 if all(row["passed"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
