"""The loss of indexers: it and every gradient are those of one process with whole matrices, under any plan."""

from __future__ import annotations

import copy
import gc
import inspect
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from bytescale import HDP
from bytescale.attention import earlier
from bytescale.common.errors import ConfigError
from bytescale.hf.model import indexer_loss
from bytescale.hf.model.decoder import HFDecoder
from bytescale.hf.model.selectors import LowestFirst
from bytescale.parity import small_model
from bytescale.parity.compare import WideCasts, random_plan
from bytescale.parity.families import FAMILIES as FAMILIES_OF_PARITY
from tests.helpers.effort import examples, one_of

from .support import documents, on_ranks, printed_loop
from .test_prefixes import OTHER_WAYS, tree
from .test_selected import DEEPER

EXACT = 1e-10
COEFFICIENT = 0.7
FAMILIES = ("deepseek_v32", "glm_moe_dsa", "axk2", "hy_v4")
LENGTHS = [37, 1, 8, 3, 24]


class Reference:
    """Plain transformers in one process: whole matrices of scores and of probabilities, and autograd through all.

    Attributes:
        detaches: ``inputs`` of indexers, and the ``target``.
    """

    def __init__(self, model: nn.Module, stage: str, *, detaches: tuple[str, ...] = ("inputs", "target")) -> None:
        self.model, self.stage, self.detaches = model, stage, detaches
        self.losses: list[Tensor] = []
        self._scores: dict[nn.Module, Tensor] = {}
        model.set_attn_implementation("eager")  # type: ignore[operator]
        for layer in model.modules():
            if "indexer" in dict(layer.named_children()):
                layer.register_forward_hook(self._compare)
                layer.indexer.forward = self._indexer(layer)  # type: ignore[union-attr]

    def _indexer(self, layer: nn.Module) -> Callable[..., Tensor]:
        indexer: Any = layer.indexer
        forward = inspect.unwrap(type(indexer).forward)

        def run(*args: Any, **kwargs: Any) -> Tensor:
            if "inputs" in self.detaches:
                args = tuple(one.detach() if isinstance(one, Tensor) else one for one in args)
            with _Seen() as seen:
                chosen: Tensor = forward(indexer, *args, **kwargs)
            (self._scores[layer],) = seen.scores
            length = chosen.shape[1]
            return torch.arange(length).expand(1, length, -1) if self.stage == "dense" else chosen

        return run

    def _compare(self, layer: nn.Module, args: Any, output: Any) -> None:
        if layer not in self._scores:
            return
        scores, probabilities = self._scores.pop(layer)[0], output[1][0]
        target = probabilities.sum(0)
        if "target" in self.detaches:
            target = target.detach()
        target = target / target.sum(-1, keepdim=True)
        looked_at = target > 0
        log_q = scores.masked_fill(~looked_at, -torch.inf).log_softmax(-1)
        terms = target * (target.clamp_min(1e-300).log() - log_q.masked_fill(~looked_at, 0))
        self.losses.append(terms.sum())

    def step(self, batch: list[dict[str, Any]]) -> tuple[float, float, dict[str, Tensor]]:
        """The model's loss, the indexers' loss and all gradients."""
        total, num_tokens = sum(float(one["weights"].sum()) for one in batch), sum(len(one["tokens"]) for one in batch)
        model_loss = of_indexers = torch.zeros((), dtype=torch.float64)
        with WideCasts(), LowestFirst():
            for one in batch:
                logits = self.model(input_ids=one["tokens"][None], use_cache=False).logits[0]
                labels = torch.cat([one["tokens"][1:], torch.tensor([-100])])
                losses = F.cross_entropy(logits, labels, reduction="none", ignore_index=-100)
                model_loss = model_loss + (one["weights"] * losses).sum() / total
                of_indexers = of_indexers + COEFFICIENT * sum(self.losses) / num_tokens
                self.losses.clear()
            (model_loss + of_indexers).backward()
        gradients = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        return float(model_loss.detach()), float(of_indexers.detach()), gradients


class _Seen(LowestFirst):
    def __init__(self) -> None:
        super().__init__()
        self.scores: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.topk:
            self.scores.append(args[0])
        return super().__torch_function__(func, types, args, kwargs)


def _model(family: str, stage: str, **changes: Any) -> nn.Module:
    like = {} if family in FAMILIES_OF_PARITY else FAMILIES_OF_PARITY["deepseek_v32"] | {"initializer_range": 0.2}
    model = small_model(family, **like | changes)
    if stage == "dense":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".indexer." in name)
    return model


Step = tuple[float, float, dict[str, Tensor]]


def _ours(model: nn.Module, stage: Any, batch: list[dict[str, Any]], num_ranks: int, seed: int, **way: Any) -> Step:
    lengths = [len(one["tokens"]) for one in batch]

    def work(group: dist.ProcessGroup, own: nn.Module) -> Step:
        options = {"indexer_loss": stage, "indexer_loss_coefficient": COEFFICIENT} | way
        hdp = HDP(own, group, capacity_tokens=-(-sum(lengths) // num_ranks) + max(lengths), **options)
        hdp.adamw(lr=0.0)
        given = {} if "shard" in way or "equal_counts" in way else {"plan": random_plan(lengths, num_ranks, seed)}
        with WideCasts():
            loss = printed_loop(hdp, own, batch, **given)
        return loss, hdp.indexer_loss(), hdp.gradients()

    results = on_ranks(num_ranks, model, work)
    return sum(loss for loss, *_ in results), results[-1][1], results[-1][2]


def _difference(ours: Step, wanted: Step) -> float:
    """The largest: of losses, relative, and of gradients, relative to the parameter's largest."""
    missing = [name for name, value in ours[2].items() if name not in wanted[2] and value.any()]
    assert not missing, f"gradients that the reference does not have: {missing}"
    losses = [abs(a - b) / abs(b) for a, b in zip(ours[:2], wanted[:2], strict=True)]
    largest = max(float(value.abs().max()) for value in wanted[2].values())
    return max(
        *losses,
        *(
            float((ours[2][name] - value).abs().max()) / max(float(value.abs().max()), 1e-3 * largest)
            for name, value in wanted[2].items()
        ),
    )


def _compare(model: nn.Module, stage: str, batch: list[dict[str, Any]], num_ranks: int, seed: int, **way: Any) -> float:
    wanted = Reference(copy.deepcopy(model), stage).step(batch)
    assert wanted[1] > 1e-6, "so small a loss is rounding"
    return _difference(_ours(model, stage, batch, num_ranks, seed, **way), wanted)


@pytest.mark.parametrize("stage", one_of(("dense", "sparse"), quick="sparse"))
@pytest.mark.parametrize("family", one_of(FAMILIES, quick="glm_moe_dsa"))
def test_the_loss_and_all_gradients_are_those_of_one_process(family: str, stage: str) -> None:
    assert _compare(_model(family, stage), stage, documents(LENGTHS), 3, 1) <= EXACT


@pytest.mark.exhaustive
@examples(quick=1, rest=60)
@given(
    stage=st.sampled_from(["dense", "sparse"]),
    family=st.sampled_from(["deepseek_v32", "glm_moe_dsa"]),
    lengths=st.lists(st.integers(1, 45), min_size=1, max_size=4),
    num_keys=st.integers(1, 50),
    num_ranks=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_any_lengths_and_numbers_of_keys(
    stage: str, family: str, lengths: list[int], num_keys: int, num_ranks: int, seed: int
) -> None:
    """Documents of one token, and such as are shorter than the number of keys, whole or on several ranks."""
    model = _model(family, stage, index_topk=max(2, num_keys), seed=seed)
    assert _compare(model, stage, documents([*lengths, 9], seed), num_ranks, seed) <= EXACT


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", OTHER_WAYS, ids=str)
@pytest.mark.parametrize("stage", ["dense", "sparse"])
def test_however_activations_and_parameters_are_held(stage: str, way: dict[str, Any]) -> None:
    """With equal counts of micro-batches, one rank has a row that stands for no token."""
    model, lengths = _model("glm_moe_dsa", stage, **DEEPER["glm_moe_dsa"]), [50, 3, 17, 1]
    assert _compare(model, stage, documents([9] if "equal_counts" in way else lengths), 2, 0, **way) <= EXACT


@pytest.mark.exhaustive
@pytest.mark.parametrize("fault", ["inputs", "target"])
def test_a_graph_through_inputs_or_target_is_caught(fault: str) -> None:
    """In the reference, so that what is compared with it would show either."""
    model, batch = _model("deepseek_v32", "sparse"), documents(LENGTHS)
    detaches = tuple({"inputs", "target"} - {fault})
    wanted = Reference(copy.deepcopy(model), "sparse", detaches=detaches).step(batch)
    assert _difference(_ours(model, "sparse", batch, 3, 1), wanted) > 1e-6


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", ["dense", "sparse"])
@pytest.mark.parametrize("fault", ["local tokens", "gradients stay", "local normalisation"])
def test_planted_faults_are_caught(fault: str, stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = _model("deepseek_v32", stage), documents(LENGTHS)
    parts, give_back = indexer_loss.parts_of, earlier.EarlierRows.give_back

    def local(path: earlier.Path, *more: Any, **share: Any) -> Iterator[tuple[slice, Tensor]]:
        for some, seen in parts(path, *more, **share):
            yield some, seen & (torch.arange(seen.shape[1]) >= path.num_before)

    def stay(self: earlier.EarlierRows, gradients: Tensor, kind: Any) -> Tensor:
        home = give_back(self, gradients.clone(), kind)
        return gradients[: self.num_rows] if gradients.shape[1:] == (8,) else home  # those of index keys

    if fault == "local tokens":
        monkeypatch.setattr(indexer_loss, "parts_of", local)
    elif fault == "gradients stay":
        monkeypatch.setattr(earlier.EarlierRows, "give_back", stay)
    else:
        reset = indexer_loss.IndexerLoss.reset
        monkeypatch.setattr(indexer_loss.IndexerLoss, "reset", lambda self, num_tokens: reset(self, num_tokens // 3))
    assert _compare(model, stage, batch, 3, 1) > 1e-6


@pytest.mark.exhaustive
def test_what_cannot_be_trained_is_refused_by_name() -> None:
    for family, stage, what in (
        ("minimax_m3_vl_text", "sparse", r"layers.1.*does not choose tokens by one topk"),
        ("llama", "sparse", r"The model .*has no indexer"),
        ("deepseek_v32", "sparsely", r"indexer_loss is 'sparsely'.*use one of dense, sparse"),
        ("deepseek_v32", "dense", r"embed_tokens.weight is trained.*model.freeze = ..!\*.indexer.\*"),
    ):
        with pytest.raises(ConfigError, match=what):
            HDP(small_model(family), capacity_tokens=64, indexer_loss=stage)  # type: ignore[arg-type]
    frozen = small_model("deepseek_v32").requires_grad_(False)
    with pytest.raises(ConfigError, match="all of its indexers are frozen"):
        HDP(frozen, capacity_tokens=64, indexer_loss="sparse")
    learning = HDP(small_model("deepseek_v32"), capacity_tokens=300, indexer_loss="sparse")
    learning.adamw(lr=0.0)
    with pytest.raises(ConfigError, match="share_prefixes = True beside indexer_loss"):
        next(iter(learning.plan(tree(), share_prefixes=True)))


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", ["dense", "sparse"])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_nothing_of_a_micro_batch_is_kept_behind_its_backward(stage: Any, checkpointing: Any) -> None:
    """No circle of objects waits for Python's collector, with the inputs of all layers."""
    model = _model("deepseek_v32", stage)
    hdp = HDP(model, capacity_tokens=100, indexer_loss=stage, checkpointing=checkpointing)
    hdp.adamw(lr=0.0)
    kept: list[weakref.ref[Any]] = []
    handle = model.model.layers[1].register_forward_pre_hook(lambda _, args: kept.append(weakref.ref(args[0])))  # type: ignore[union-attr]
    gc.collect()
    gc.disable()
    try:
        printed_loop(hdp, model, documents(LENGTHS))
        assert kept
        assert not any(ref() is not None for ref in kept)
    finally:
        gc.enable()
        handle.remove()


@pytest.mark.exhaustive
def test_autocast_computes_the_same_but_for_rounding() -> None:
    """In backward, which runs outside of the caller's autocast, indexers compute in the dtype of forward."""
    model, batch = small_model("deepseek_v32", dtype=torch.float32), documents(LENGTHS)

    def gradients(enabled: bool) -> dict[str, Tensor]:
        own = copy.deepcopy(model)
        hdp = HDP(own, capacity_tokens=100, indexer_loss="sparse")
        hdp.adamw(lr=0.0)
        for micro in hdp.plan(batch):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
                loss = micro.loss_sum(own)
            loss.backward()
        return {name: value for name, value in hdp.gradients().items() if ".indexer.w" in name}

    exact, rounded = gradients(False), gradients(True)
    for name, value in exact.items():
        assert 0.9 < float(F.cosine_similarity(value.flatten(), rounded[name].flatten(), dim=0)) < 1 - 1e-6, name


@pytest.mark.exhaustive
def test_what_training_indexers_costs_is_counted() -> None:
    """Three more products for each score of an indexer in the sparse stage; in the dense one all keys are looked at."""
    model = _model("deepseek_v32", "dense")
    none, sparse, dense = (HFDecoder(copy.deepcopy(model), indexer_loss=one).spec for one in (
        None, ("sparse", 1.0), ("dense", 1.0)
    ))  # fmt: skip
    for before, after, warm in zip(none.layers, sparse.layers, dense.layers, strict=True):
        index = before.pair_numbers - before.chosen_numbers
        assert after.pair_numbers - after.chosen_numbers == pytest.approx(4 * index)
        assert (after.num_chosen, warm.num_chosen, warm.chosen_numbers) == (before.num_chosen, 0, 0)
        assert warm.key_numbers == before.key_numbers + 4 * (12 + 8)
