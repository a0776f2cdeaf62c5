"""Nothing between a step's first and last kernel makes the host wait for its GPU.

The runtime runs on the meta device, whose tensors have no numbers. An operation that needs a number (``item``,
``nonzero``, a mask as an index, a copy to the host) raises there. Copies to the device are allowed in one place only,
where memory is pinned.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import bytescale.runtime.executor as executor
from bytescale.attention import Exchange, blocks, copies
from bytescale.cost.memory.device_kernels import HEAD_NUMBERS_PER_CHUNK, LOGITS_PER_CHUNK
from bytescale.hf.loop import micro_batch
from bytescale.hf.loop.micro_batch import Micro
from bytescale.hf.model.decoder import HFDecoder
from bytescale.hf.model.head import ModelHead
from bytescale.parity import small_model
from bytescale.plan import Plan, RankPlan
from bytescale.plan.plan import GroupSpec
from bytescale.runtime import loss
from bytescale.runtime.executor import Decoder
from bytescale.runtime.group import RankGroup
from bytescale.runtime.loss import PlainHead
from bytescale.runtime.mesh import Mesh
from bytescale.runtime.optimizer.flat import FlatParameters
from bytescale.runtime.saved.activations import Activations
from tests.helpers.decoder import PlainDecoder, Sizes
from tests.helpers.effort import one_of
from tests.helpers.reference_loss import linear_cross_entropy
from tests.helpers.steps import random_batch, slice_batch
from tests.nccl.recorder import Log, RecordedGroup, ZeroKernel, batching

META = torch.device("meta")


class NoPageableCopies(TorchDispatchMode):
    """Raises where a tensor moves between host and device by any other way than ``to_device``."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            devices = {leaf.device for leaf in tree_leaves((args, result)) if isinstance(leaf, Tensor)}
            assert len(devices) == 1, f"{func} copies between {devices}: the host waits for the device"
        return result


@pytest.fixture
def on_meta(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns the sizes of what ``to_device`` has copied."""
    copied: list[int] = []

    def to_device(host: Tensor, device: torch.device) -> Tensor:
        assert host.device.type == "cpu", "what is on the device already must not come back"
        copied.append(host.numel())
        return torch.empty(host.shape, dtype=host.dtype, device=device)

    for module in (blocks, copies, executor, loss, micro_batch):
        monkeypatch.setattr(module, "to_device", to_device)
    monkeypatch.setitem(LOGITS_PER_CHUNK, "meta", 200)
    monkeypatch.setitem(HEAD_NUMBERS_PER_CHUNK, "meta", 500)
    return copied


def two_micro_batches() -> Plan:
    """A shared group of two sequences, so that a ring's rows are not contiguous, then whole sequences."""
    return Plan.build(
        lengths=[30, 17, 9, 4, 6],
        capacity_tokens=[40, 40],
        groups=[
            GroupSpec(sequences=[0, 1], ranks=[0, 1]),
            GroupSpec(sequences=[2, 3], ranks=[0]),
            GroupSpec(sequences=[4], ranks=[1]),
        ],
        schedule=[[[0], [1]], [[0], [2]]],
    )


def run_on_meta(part: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = two_micro_batches()
    batch = random_batch(plan.lengths.tolist(), 61, 0)
    hdp = RankGroup(RecordedGroup(Log(0), "HDP", [0, 1]), device=META)
    hdp.exchange = Exchange(hdp.group, 0, batched=True)
    monkeypatch.setattr("bytescale.attention.rings.exchange.dist", batching())
    monkeypatch.setattr(executor._Run, "result", lambda self: None)  # the one place where the host reads a number
    rank_plan = RankPlan.of(plan, 0)
    data = [slice_batch(batch, micro_batch) for micro_batch in rank_plan.micro_batches]
    with NoPageableCopies():
        run = executor.Executor(part=part, kernel=ZeroKernel(), mesh=Mesh.of_hdp(hdp))
        run.run(rank_plan, data, num_global_targets=batch.num_targets)


@pytest.mark.parametrize("checkpointing", ["none", "full", "attention"])
def test_a_step_never_waits_for_the_device(
    checkpointing: str, on_meta: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with META:
        model = PlainDecoder(Sizes(hidden_size=32, head_dim=8, ffn_hidden_size=32)).to(torch.bfloat16)
    FlatParameters(model.named_parameters(), 2)
    activations = Activations(list(model.layers), checkpointing=checkpointing)  # type: ignore[arg-type]
    run_on_meta(Decoder(module=model, activations=activations), monkeypatch)
    assert on_meta, "tokens were copied"


@pytest.mark.parametrize("checkpointing", one_of(["none", "full", "attention"], "full"))
@pytest.mark.parametrize("name", one_of(["llama", "mixtral", "qwen3_moe", "gpt_oss"], "mixtral"))
def test_a_step_of_a_decoder_of_transformers_never_waits_for_the_device(
    name: str, checkpointing: str, on_meta: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mixtures compute with grouped products, whose sizes the device alone knows."""
    model: Any = small_model(name, dtype=torch.bfloat16)
    if model._can_set_experts_implementation():
        model.set_experts_implementation("grouped_mm")
    decoder = HFDecoder(model)
    assert isinstance(decoder.head, PlainHead)
    assert len(decoder.layers) == 2  # both found by passes on the CPU
    model.to(META)
    FlatParameters(model.named_parameters(), 2)
    activations = Activations(decoder.layers, checkpointing=checkpointing)  # type: ignore[arg-type]
    part = Decoder(module=decoder, activations=activations, head=PlainHead(decoder.head_weight))
    run_on_meta(part, monkeypatch)
    assert on_meta, "tokens were copied"


class OtherHead(nn.Linear):
    """A head whose logits its own code makes (``hf.model.head.ModelHead``)."""

    group, num_words, add_loss, losses = None, 8, ModelHead.add_loss, ModelHead.losses

    def __init__(self) -> None:
        super().__init__(4, self.num_words, device=META)
        self.model = nn.Identity()  # without an output embedding

    @property
    def model(self) -> nn.Module:
        return self

    def parameters(self) -> list[nn.Parameter]:  # type: ignore[override]
        return [self.weight, self.bias]


def test_an_attached_models_micro_batch_and_loss_never_wait_for_the_device(on_meta: list[int]) -> None:
    """Its fields are in CPU memory, as loaders give them; the loss is that of a head of any kind."""
    (plan, *_) = RankPlan.of(two_micro_batches(), 0).micro_batches
    fields = {name: torch.arange(plan.num_tokens) % 5 for name in ("tokens", "labels")}
    hidden = torch.empty(plan.num_tokens, 4, device=META, requires_grad=True)
    mesh = SimpleNamespace(hdp=SimpleNamespace(device=META, exchange=None))
    engine = SimpleNamespace(decoder=SimpleNamespace(token_rows=None), mesh=mesh)
    with NoPageableCopies():
        micro = Micro(plan, fields, None, engine)  # type: ignore[arg-type]
        loss.loss_sum(OtherHead(), hidden, fields["labels"], token_weights=torch.ones(plan.num_tokens)).backward()  # type: ignore[arg-type]
    assert micro.inputs["input_ids"].device == micro.inputs["position_ids"].device == META
    assert len(on_meta) == 5


def test_what_the_meta_device_catches(on_meta: list[int]) -> None:
    """The checks themselves: a wait that comes back fails the test above."""
    hidden = torch.empty(5, 4, device=META, requires_grad=True)
    with pytest.raises(Exception, match="meta"):
        hidden.sum().item()
    with pytest.raises(NotImplementedError), NoPageableCopies():
        linear_cross_entropy(hidden, torch.empty(7, 4, device=META), torch.empty(5, dtype=torch.int64, device=META))
    with NoPageableCopies(), pytest.raises(AssertionError, match="the host waits"):
        torch.arange(3).to(META)
