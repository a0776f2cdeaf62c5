"""Tensor parallelism of transformers' decoders: any mesh gives the loss and gradients of one process.

Norms and routers that compute in fp32 are kept in fp64 (``WideCasts``), so that one tolerance holds for all types.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from bytescale.checkpoint.checkpointer import Checkpointer
from bytescale.checkpoint.manifest import RunState
from bytescale.checkpoint.reading import CheckpointReader, wanted_by
from bytescale.common.errors import ConfigError
from bytescale.config.schema import CheckpointConfig, OptimizerConfig
from bytescale.hf.model import tensor_parallel
from bytescale.hf.model.beside_products import BesideProducts
from bytescale.hf.model.decoder import HFDecoder
from bytescale.hf.model.tensor_parallel import apply_tensor_parallelism
from bytescale.hf.model.token_rows import TokenRows
from bytescale.parity import small_model
from bytescale.parity.compare import Document, difference, plain_step, random_plan
from bytescale.parity.families import FAMILIES
from bytescale.plan import Plan
from bytescale.plan.plan import GroupSpec
from bytescale.runtime.group import RankGroup
from bytescale.runtime.loss import PlainHead
from bytescale.runtime.mesh import Mesh, MeshShape
from bytescale.runtime.optimizer.flat import FlatParameters
from bytescale.runtime.optimizer.sharded_optimizer import ShardedOptimizer
from bytescale.runtime.token_shards import TokenShards
from tests.helpers.effort import examples, one_in, one_of
from tests.helpers.ranks import run_mesh, run_ranks

from .mesh_steps import mesh_step
from .support import documents

TOLERANCE = 1e-10
LENGTHS = [9, 1, 14, 3, 6]
WORDS = {"vocab_size": 68}
"""Which 2 and 4 ranks share. 67 words they do not: embedding and head stay whole."""
MODELS: dict[str, dict[str, Any]] = {
    "llama": WORDS,
    "gemma2": {},  # a soft cap, so the loss is the model's own
    "gemma3_text": WORDS | {"sliding_window": 5},  # tied and scaled
    "qwen3_moe": WORDS,
    "mimo_v2_flash": {"n_routed_experts": 4},  # sinks of heads
    "glm4_moe": WORDS | {"n_routed_experts": 4, "first_k_dense_replace": 1, "n_shared_experts": 1},
    "deepseek_v3": {},  # attention without a plan
    "phi3": WORDS,  # fused, so that attention computes on every rank
    "starcoder2": WORDS,  # biases of row-wise parts
    "minimax": {},  # a recurrence
}
THREE_HEADS = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}
MESHES = [MeshShape(hdp=1, tp=2), MeshShape(hdp=1, tp=4), MeshShape(hdp=2, tp=2)]


def model_of(name: str) -> nn.Module:
    return small_model(name, **MODELS[name])


def documents_of(lengths: Sequence[int]) -> list[Document]:
    """With a fifth of the labels masked."""
    found = []
    for document in documents(lengths):
        labels = torch.cat([document["tokens"][1:], torch.tensor([-100])])
        labels[torch.rand(len(labels), generator=torch.Generator().manual_seed(len(labels))) < 0.2] = -100
        found.append({**document, "labels": labels})
    found[0]["labels"][0] = 5
    return found


def worst(shape: MeshShape, model: nn.Module, lengths: Sequence[int], plan: Plan, checkpointing: str = "none") -> float:
    given = documents_of(lengths)
    ours = mesh_step(model, given, shape, plan, checkpointing)
    return difference(plain_step(copy.deepcopy(model), given), ours).worst


def whole_plan(lengths: Sequence[int]) -> Plan:
    """Two micro-batches on one rank; the first has a single token, fewer than there are tensor-parallel ranks."""
    short = list(lengths).index(1)
    rest = [number for number in range(len(lengths)) if number != short]
    groups = [GroupSpec(sequences=[short], ranks=[0]), GroupSpec(sequences=rest, ranks=[0])]
    return Plan.build(lengths=lengths, capacity_tokens=[sum(lengths)], groups=groups, schedule=[[[0], [1]]])


def ring_plan(lengths: Sequence[int]) -> Plan:
    """Two ranks share all documents, each in its own micro-batch; of a document of one token one of them has none."""
    groups = [GroupSpec(sequences=[number], ranks=[1, 0]) for number in range(len(lengths))]
    schedule = [[[number] for number in range(len(lengths))]] * 2
    return Plan.build(lengths=lengths, capacity_tokens=[sum(lengths)] * 2, groups=groups, schedule=schedule)


CASES = [(name, shape, mode) for mode in ("none", "full", "attention") for shape in MESHES for name in MODELS]


@pytest.mark.parametrize(("name", "shape", "checkpointing"), one_in(42, CASES))
def test_any_mesh_gives_the_numbers_of_one_process(name: str, shape: MeshShape, checkpointing: str) -> None:
    plan = whole_plan(LENGTHS) if shape.hdp == 1 else ring_plan(LENGTHS)
    assert worst(shape, model_of(name), LENGTHS, plan, checkpointing) <= TOLERANCE


@examples(1, 25)
@given(
    name=st.sampled_from(sorted(MODELS)),
    shape=st.sampled_from([*MESHES, MeshShape(hdp=2, tp=4), MeshShape(hdp=3, tp=2)]),
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=6),
    seed=st.integers(0, 10_000),
    checkpointing=st.sampled_from(["none", "full", "attention"]),
)
def test_any_plan(name: str, shape: MeshShape, lengths: list[int], seed: int, checkpointing: str) -> None:
    plan = random_plan(lengths, shape.hdp, seed, weighted=True)
    assert worst(shape, model_of(name), lengths, plan, checkpointing) <= TOLERANCE


def test_a_rank_has_its_heads_and_words() -> None:
    """Two heads of keys on four ranks: neighbours have the same one."""
    model = model_of("llama")

    def work(tp: RankGroup) -> HFDecoder:
        decoder = HFDecoder(copy.deepcopy(model))
        cuts = apply_tensor_parallelism(decoder, TokenShards(tp))
        assert (cut := cuts["model.layers.1.self_attn.k_proj.weight"]).index == tp.rank // 2
        assert (cut.count, cut.replicas, cut.replica) == (2, 2, tp.rank % 2)
        decoder.require_unchanged(with_training=True)
        assert all(parameter.grad is None for parameter in decoder.model.parameters())
        return decoder

    for decoder in run_ranks(4, work):
        assert {(layer.num_heads, layer.num_kv_heads) for layer in decoder.structure.layers} == {(1, 1)}
        assert isinstance(decoder.head, PlainHead)
        assert not decoder.splits_loss
        assert decoder.head.weight.shape == (17, 32)
        assert decoder.model.model.embed_tokens.weight.shape == (17, 32)
        assert decoder.spec.total == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("model", "attention", "feed_forward"),
    [
        (lambda: model_of("llama"), (True, True, 3), (True, True, 2)),
        (lambda: model_of("starcoder2"), (True, False, 3), (True, False, 1)),  # a bias behind the last product
        pytest.param(lambda: model_of("phi3"), (False, False, 0), (False, False, 0), marks=pytest.mark.exhaustive),
        (lambda: small_model("glm4_moe_lite", **FAMILIES["deepseek_v3"]), (False, True, 0), (True, True, 2)),
    ],
    ids=["llama", "starcoder2", "phi3", "latents"],
)
def test_messages_travel_beside_products(
    model: Callable[[], nn.Module], attention: tuple[bool, bool, int], feed_forward: tuple[bool, bool, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Rows that something else than products needs are gathered as a whole. The slow twin sends around regions."""
    given, own, found = documents_of(LENGTHS), model(), {}
    remember = BesideProducts.end

    def noting(self: BesideProducts, result: Tensor) -> bool:
        found[id(self)] = self
        return remember(self, result)

    with monkeypatch.context() as patch:
        patch.setattr(BesideProducts, "end", noting)
        fast = mesh_step(own, given, MESHES[0], whole_plan(LENGTHS), "full")
    ways = {(region.gathers, region.scatters, len(region._first)) for region in found.values()}
    assert ways == {attention, feed_forward}
    monkeypatch.setattr(tensor_parallel._Plan, "_beside", lambda *_: None)
    slow = mesh_step(own, given, MESHES[0], whole_plan(LENGTHS), "full")
    assert difference(slow, fast).worst <= 1e-14


def cut_alone(model: nn.Module, num_ranks: int = 2) -> None:
    """Raises what one of the ranks raises."""
    try:
        run_ranks(num_ranks, lambda tp: apply_tensor_parallelism(HFDecoder(copy.deepcopy(model)), TokenShards(tp)))
    except AssertionError as error:
        raise error.__cause__ or error from None


def planned(model: nn.Module, changes: dict[str, str | None]) -> nn.Module:
    """The model with other styles in its plan; None: no style."""
    plan = {**model._tp_plan, **{f"model.layers.*.{key}": style for key, style in changes.items()}}
    model._tp_plan = {key: style for key, style in plan.items() if style is not None}
    return model


def bias_on_every_rank(patch: pytest.MonkeyPatch) -> nn.Module:
    patch.setattr(tensor_parallel, "_without_bias", lambda module, rows: F.linear(rows, module.weight, module.bias))
    return model_of("starcoder2")


def shared_expert_on_every_rank(patch: pytest.MonkeyPatch) -> nn.Module:
    """The whole mixture as one region: what the plan leaves whole in it is added once by each rank."""
    without = dict.fromkeys([f"mlp.shared_experts.{key}_proj" for key in ("gate", "up", "down")])
    whole = {"mlp.experts": None, "mlp": "moe_tp_experts"}
    dense = dict.fromkeys([f"mlp.{key}_proj" for key in ("gate", "up", "down")])
    return planned(model_of("glm4_moe"), {**without, **whole, **dense})


def gradients_on_one_rank(patch: pytest.MonkeyPatch) -> nn.Module:
    """Results stay as they are; the gradients of the other ranks' rows are lost."""
    patch.setattr(TokenRows, "gathered", lambda self, rows: self.shards.gather_for_loss(rows[: len(self._own())]))
    return model_of("qwen3_moe")


FAULTS = [bias_on_every_rank, shared_expert_on_every_rank, gradients_on_one_rank]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_refused_by_name(fault: Callable[..., nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    model = fault(monkeypatch)
    with pytest.raises(ConfigError, match=f"{type(model).__name__} cannot be cut .*: as its plan cuts it, it differs"):
        cut_alone(model)


@pytest.mark.parametrize("fault", one_of(FAULTS, gradients_on_one_rank))
def test_these_tests_would_find_a_fault(fault: Callable[..., nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_parallel, "difference", lambda *_: None)
    model = fault(monkeypatch)
    assert worst(MESHES[0], model, LENGTHS, whole_plan(LENGTHS)) > 1e-3


@pytest.mark.parametrize(
    ("model", "num_ranks", "why"),
    [
        (lambda: small_model("gpt2"), 2, "GPT2LMHeadModel .*has no plan"),
        (lambda: model_of("llama"), 3, r"q_proj.weight has 4 heads, which 3 ranks"),
        (lambda: small_model("llama", intermediate_size=49), 2, "gate_proj.weight is 49 wide, which 2 ranks"),
        (lambda: small_model("llama", **THREE_HEADS), 2, "k_proj.weight has 3 heads, which 2 ranks"),
        (lambda: planned(model_of("llama"), {"mlp.up_proj": "some_style"}), 2, "style 'some_style', which"),
        (lambda: planned(model_of("llama"), {"self_attn.k_proj": None}), 2, "the cut model fails"),
    ],
)  # fmt: skip
def test_what_cannot_be_cut_is_refused_by_name(model: Callable[[], nn.Module], num_ranks: int, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        cut_alone(model(), num_ranks)


def test_half_precision_is_compared_in_single_and_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model("qwen3_moe", dtype=torch.bfloat16)

    def work(tp: RankGroup) -> None:
        decoder = HFDecoder(copy.deepcopy(model))
        cuts, whole = apply_tensor_parallelism(decoder, TokenShards(tp)), dict(model.named_parameters())
        for name, own in decoder.model.named_parameters():
            assert own.dtype == torch.bfloat16
            assert torch.equal(own, cuts[name].of(whole[name]))
        decoder.require_unchanged(with_training=True)

    run_ranks(2, work)
    with pytest.raises(ConfigError, match="it differs in "):
        cut_alone(shared_expert_on_every_rank(monkeypatch).to(torch.bfloat16))


@pytest.mark.parametrize("name", one_of(["qwen3_moe", "llama", "mimo_v2_flash"], "qwen3_moe"))
def test_a_checkpoint_is_of_the_whole_model(name: str, tmp_path: Path) -> None:
    """Packed experts too, of which a rank has a part of each half."""
    model = model_of(name).float()

    def one_rank(mesh: Mesh) -> None:
        decoder = HFDecoder(copy.deepcopy(model))
        cuts = apply_tensor_parallelism(decoder, TokenShards(mesh.tp))
        flat = FlatParameters(decoder.model.named_parameters(), mesh.hdp.size, cuts)
        optimizer = ShardedOptimizer.of_config(flat, OptimizerConfig(), mesh)
        optimizer.require_states()
        assert mesh.world.group is not None
        checkpoints = Checkpointer(tmp_path, mesh.world.group, CheckpointConfig())
        checkpoints.save(RunState(step=1, sampler={}, architecture={}, mesh={}), optimizer)
        checkpoints.finish()
        before = {(one.parameter, one.box): one.target.clone() for one in wanted_by(optimizer) if one.state == "master"}
        for one in wanted_by(optimizer):
            one.target.zero_()
        path = checkpoints.newest()
        assert path is not None
        checkpoints.restore(path, optimizer, {})
        for one in wanted_by(optimizer):
            if one.state == "master":
                assert torch.equal(one.target, before[one.parameter, one.box])

    run_mesh(MeshShape(hdp=2, tp=2), one_rank)
    reader = CheckpointReader(next(path for path in tmp_path.iterdir() if path.is_dir()))
    for key, parameter in model.named_parameters():
        # Making the optimizer's states has moved the weights by one step of weight decay.
        torch.testing.assert_close(reader.read(f"master.{key}"), parameter.detach(), rtol=0, atol=1e-5)
