"""Checks of what ranks share, on fake CUDA tensors: layers of a domain, experts, states, and a host's optimizer.

Rank 1 of two. Its messages go nowhere: what is checked are operators, shapes, dtypes, devices, and that only the counts
of rows for experts are read from the device.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from bytescale.attention import Exchange, PackedAttention
from bytescale.attention.kernels import CudaFlashKernel
from bytescale.config.schema import OptimizerConfig
from bytescale.hf.model.decoder import HFDecoder
from bytescale.parity import small_model
from bytescale.plan import MicroBatch, Plan, RankPlan
from bytescale.plan.plan import GroupSpec
from bytescale.runtime.group import RankGroup
from bytescale.runtime.loss import accumulated_at_once
from bytescale.runtime.mesh import Mesh, MeshShape
from bytescale.runtime.optimizer import zero
from bytescale.runtime.optimizer.flat import FlatParameters
from bytescale.runtime.optimizer.lockstep import shard_parts
from bytescale.runtime.optimizer.sharded_optimizer import ShardedOptimizer
from bytescale.runtime.saved.activations import Activations
from bytescale.runtime.token_shards import TokenShards
from tests.cuda import fake
from tests.helpers.reference_loss import linear_cross_entropy

BF16, FP32 = torch.bfloat16, torch.float32
SIZES: dict[str, Any] = {
    "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "intermediate_size": 384,
    "vocab_size": 320,
}  # fmt: skip


def shared_micro_batch(rank: int = 1) -> MicroBatch:
    """Of a document that both ranks share and one of this rank's own."""
    plan = Plan.build(
        lengths=[301, 77, 40],
        capacity_tokens=[512] * 2,
        groups=[
            GroupSpec(sequences=[0], ranks=[1, 0]),
            GroupSpec(sequences=[1], ranks=[1]),
            GroupSpec(sequences=[2], ranks=[0]),
        ],
        schedule=[[[0, 2]], [[0, 1]]],
    )
    return RankPlan.of(plan, rank).micro_batches[0]


def train(decoder: HFDecoder, group: dist.ProcessGroup, checkpointing: str) -> None:
    """Forward, loss and backward of the micro-batch, as the executor's."""
    micro_batch = shared_micro_batch()
    activations = Activations(list(decoder.layers), checkpointing=checkpointing, device=fake.DEVICE)  # type: ignore[arg-type]
    activations.begin_step([micro_batch])
    exchange = Exchange(group, 1, batched=True)
    attention = PackedAttention(micro_batch, CudaFlashKernel(), exchange, activations.attention_memory)
    tokens, places = (torch.zeros(micro_batch.num_tokens, dtype=torch.int64, device=fake.DEVICE) for _ in range(2))
    labels = torch.zeros(micro_batch.num_tokens, dtype=torch.int64)
    with activations.forward(micro_batch):
        hidden, weight = accumulated_at_once(decoder(tokens, places, attention), decoder.head_weight)
        total = linear_cross_entropy(hidden, weight, labels)
    total.backward()
    activations.remove()


def sharded(family: str, *, experts: bool = False, on_host: bool = False) -> tuple[int, int]:
    """Two steps of a domain of two, with recomputation in the second one. Returns units and numbers of this rank."""
    from tests.cuda.check import on_gpu, recorded_launches

    the_norm = mock.patch.object(zero, "float", create=True, return_value=1.0)  # the step's one number that is read
    with fake.fake_ranks(1, 2) as group:
        model = small_model(family, dtype=FP32, **SIZES)
        decoder = HFDecoder(model.train())
        _ = decoder.head  # found by a pass
        with fake.fake_gpu(), recorded_launches([]), the_norm:
            on_gpu(model)
            if experts:
                decoder.require_experts(2)
                model.set_experts_implementation("grouped_mm")
            mesh = Mesh.of(RankGroup(group, device=fake.DEVICE), MeshShape(hdp=2), lambda *_: group, domain=2)
            mixtures = decoder.experts if experts else ()
            named, more, units = shard_parts(list(model.named_parameters()), decoder.parts, mesh, experts=mixtures)
            flat = FlatParameters(named, 2) if named else None
            own = [*([flat] if flat is not None else []), *more]
            adam = ShardedOptimizer.of_config(own[0], OptimizerConfig(offload=on_host), mesh, more=own[1:], units=units)
            for checkpointing in ("none", "full"):
                train(decoder, group, checkpointing)
                norm = adam.reduce_gradients()
                adam.update(max(norm, 2.0), 1.0, 1e-3)
            units.begin()
            for store in units.stores:
                fake.expect(store.values, tuple(store.values.shape), BF16)
            for part in adam.zeros:
                for states in adam.states(part).values():
                    assert all(state.values.device.type == ("cpu" if on_host else "cuda") for state in states)
            held = sum(store.values.numel() for store in units.stores)
            return sum(len(store.units) for store in units.stores), held


def sharded_domain() -> str:
    """Gathers of layers, of the embedding and of the head; reductions of their gradients; updates of the shards."""
    units, held = sharded("llama")
    return f"{units} units of a domain of two, {held} numbers on this rank; kept and recomputed"


def experts_all_to_all() -> str:
    """Rows to the ranks that have their experts, grouped products there, and rows back, forward and backward."""
    reads: list[int] = []
    choices = 2 * shared_micro_batch().num_tokens

    def counts(tensor: Tensor) -> list[list[int]]:
        """The one read of a layer: how many rows leave and arrive."""
        assert tensor.shape == (2, 2), f"numbers of shape {list(tensor.shape)} are read from the device"
        reads.append(len(reads))
        return [[choices // 2, choices - choices // 2], [choices // 3, choices // 3]]

    with mock.patch.object(FakeTensor, "tolist", counts):
        _, held = sharded("mixtral", experts=True)
    layers = 2
    assert len(reads) == layers * 3, f"{len(reads)} reads: one a layer, and once more where it is recomputed"
    return (
        f"{len(reads)} reads of counts in two steps of {layers} layers (the second recomputed), {held} numbers shared"
    )


def host_optimizer() -> str:
    """Gradients come down, weights go up, bucket by bucket; beside shared layers, and of whole models."""
    from tests.cuda.check import SIZES as PLAIN
    from tests.cuda.check import on_gpu
    from tests.helpers.decoder import PlainDecoder

    the_norm = mock.patch.object(zero, "float", create=True, return_value=1.0)
    before = fake.Stream.waits
    with fake.fake_ranks(1, 2) as group, fake.fake_gpu(), the_norm:
        flat = FlatParameters(on_gpu(PlainDecoder(PLAIN)).named_parameters(), 2, bucket_bytes=2**20)
        mesh = Mesh.of_hdp(RankGroup(group, device=fake.DEVICE))
        adam = ShardedOptimizer.of_config(flat, OptimizerConfig(offload=True), mesh)
        for _ in range(2):
            flat.zero_gradients()
            adam.update(max(adam.reduce_gradients(), 2.0), 1.0, 1e-3)
        for states in adam.states(adam.zeros[0]).values():
            assert all((own.values.dtype, own.values.device.type) == (FP32, "cpu") for own in states)
    waits = fake.Stream.waits - before
    assert waits > 0, "copies wait for gradients"
    sharded("llama", on_host=True)
    return f"{waits} waits between streams in two updates of whole parameters; fp32 masters and states in host memory"


def recurrent_layers() -> str:
    """Delta rules and convolutions by transformers' own code, with states and halos of a document that ranks share."""
    from tests.cuda.check import on_gpu, recorded_launches

    names = ("qwen3_next", "falcon_h1")
    for name in names:
        with fake.fake_ranks(1, 2) as group:
            model = small_model(name, dtype=FP32)
            decoder = HFDecoder(model.train())
            _ = decoder.head
            with fake.fake_gpu(), recorded_launches([]):
                on_gpu(model)
                if model._can_set_experts_implementation():  # type: ignore[operator]
                    model.set_experts_implementation("grouped_mm")  # type: ignore[operator]
                flat = FlatParameters(model.named_parameters(), 1)
                for checkpointing in ("none", "full"):
                    train(decoder, group, checkpointing)
                fake.expect(flat.gradients, tuple(flat.values.shape), FP32)
    return f"{', '.join(names)}: states and halos of a shared document, kept and recomputed"


def products_in_slices() -> str:
    """Tensor parallelism whose messages run beside products: four slices of rows, gathered and summed."""
    with fake.fake_ranks(1, 2) as group, fake.fake_gpu():
        shards = TokenShards(RankGroup(group, device=fake.DEVICE, name="TP"), least_work=1.0)
        shards.begin(301)
        rows = torch.empty(150, 256, dtype=BF16, device=fake.DEVICE).requires_grad_()
        wide = [nn.Linear(256, 192, bias=False, dtype=BF16, device=fake.DEVICE) for _ in range(2)]
        down = nn.Linear(192, 256, bias=False, dtype=BF16, device=fake.DEVICE)
        gate, up = shards.gather_and_project(rows, wide)
        fake.expect(gate, (301, 192), BF16)
        out = shards.project_and_scatter(nn.functional.silu(gate) * up, down)
        fake.expect(out, (150, 256), BF16)
        out.backward(torch.empty_like(out))
        for leaf in (rows, *(linear.weight for linear in (*wide, down))):
            assert leaf.grad is not None
            fake.expect(leaf.grad, tuple(leaf.shape), BF16)
    return "gathers and sums of 301 rows in four slices, and their gradients"
