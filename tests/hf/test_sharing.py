"""Layers whose parameters a lockstep domain shares: the numbers of one process, for any domain and any loop."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import bytescale
from bytescale.common.errors import ConfigError, PlanError
from bytescale.cost.memory.device_memory import States
from bytescale.cost.memory.measured import MeasuredRows
from bytescale.hf.model.measure import measured_memory
from bytescale.parity.compare import Setup, WideCasts, compare, random_plan
from tests.helpers.effort import one_of

from .support import documents, on_ranks, plain_update, printed_loop, small_model

LENGTHS = [50, 7, 3, 12, 1, 9, 20]


def shared(model: nn.Module, group: dist.ProcessGroup, domain: int, **options: Any) -> bytescale.HDP:
    return bytescale.HDP(model, group, capacity_tokens=40, shard="parameters", domain=domain, **options)


FAMILIES = ("llama", "qwen3", "gemma2", "gpt2", "deepseek_v3", "qwen3_next", "zamba2")
ALL = [
    (name, ranks, domain, seed) for name in FAMILIES for ranks, domain in ((2, 2), (4, 2), (4, 4)) for seed in range(3)
]


@pytest.mark.parametrize(
    ("name", "num_ranks", "domain", "seed"),
    [("llama", 4, 2, 3), ("qwen3_moe", 4, 4, 5), *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in ALL)],
)
def test_gradients_are_those_of_one_process(name: str, num_ranks: int, domain: int, seed: int) -> None:
    setup = Setup(num_ranks=num_ranks, domain=domain, seed=seed, lengths=tuple(LENGTHS))
    assert compare(small_model(name), setup).worst < 1e-10


def updates(hdp: bytescale.HDP, model: nn.Module, seeds: range) -> list[float]:
    """Clipped updates with AdamW. Returns the gradients' norms."""
    return [
        hdp.step(max_grad_norm=0.05).grad_norm
        for seed in seeds
        if printed_loop(hdp, model, documents(LENGTHS, seed)) >= 0
    ]


@pytest.mark.parametrize("checkpointing", one_of(["none", "full", "attention", "hugging face"], "full"))
def test_updates_are_those_of_one_process(checkpointing: str) -> None:
    """Clipped, with weight decay on matrices alone. What the ranks yield for inference are the same weights."""

    def decayed(name: str, parameter: Tensor) -> dict[str, Any]:
        return {} if parameter.dim() > 1 else {"weight_decay": 0.0}

    model = small_model("qwen3", num_hidden_layers=3)
    plain = copy.deepcopy(model)
    matrices = [p for p in plain.parameters() if p.dim() > 1]
    vectors = [p for p in plain.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=1e-2)
    for seed in range(2):
        plain_update(plain, documents(LENGTHS, seed), optimizer, 0.05)

    def train(group: dist.ProcessGroup, own: nn.Module) -> tuple[list[float], dict[str, Tensor], dict[str, Any]]:
        if checkpointing == "hugging face":
            own.gradient_checkpointing_enable()  # type: ignore[operator]
        kind: Any = "none" if checkpointing == "hugging face" else checkpointing
        hdp = shared(own, group, 2, checkpointing=kind)
        hdp.adamw(lr=1e-2, group_options=decayed)
        norms = updates(hdp, own, range(1))
        own(input_ids=torch.arange(5)[None])  # outside of a plan, with gradients that nobody asks for
        norms += updates(hdp, own, range(1, 2))
        return norms, {name: value.clone() for name, value in hdp.weights()}, hdp.state()

    results = on_ranks(4, model, train)
    assert len({tuple(norms) for norms, _, _ in results}) == 1
    for _, weights, state in results:
        for name, value in plain.named_parameters():
            torch.testing.assert_close(weights[name], value, rtol=1e-9, atol=1e-10)
            assert torch.equal(state["tensors"][name]["master"], weights[name])


def test_any_domain_continues_what_another_has_begun() -> None:
    """From four ranks in one domain through two domains to two ranks without one, as if nothing had happened."""
    model = small_model("llama", num_hidden_layers=3)

    def train(group: Any, own: nn.Module, domain: int, state: Any, seeds: range) -> tuple[list[float], Any]:
        hdp = shared(own, group, domain) if domain > 1 else bytescale.HDP(own, group, capacity_tokens=60)
        hdp.adamw(lr=1e-2)
        if state is not None:
            hdp.load_state(state)
        return updates(hdp, own, seeds), hdp.state()

    norms, state = [], None
    for number, (ranks, domain) in enumerate(((4, 4), (4, 2), (2, 1))):
        own, state = on_ranks(ranks, model, lambda g, m: train(g, m, domain, state, range(number, number + 1)))[0]  # noqa: B023
        norms += own
    wanted, final = on_ranks(1, model, lambda group, own: train(group, own, 1, None, range(3)))[0]
    assert norms == pytest.approx(wanted, rel=1e-9)
    for name, states in final["tensors"].items():
        for kind, value in states.items():
            torch.testing.assert_close(state["tensors"][name][kind], value, rtol=1e-8, atol=1e-10)


def test_adapters_are_trained_and_frozen_layers_are_gathered() -> None:
    """Low-rank adapters in another dtype than the weights, below an embedding that is not trained."""
    model = get_peft_model(
        small_model("llama", num_hidden_layers=3), LoraConfig(r=2, lora_dropout=0.0, target_modules=["q_proj"])
    )
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)

    def train(group: Any, own: nn.Module, domain: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        hdp = shared(own, group, domain) if domain > 1 else bytescale.HDP(own, group, capacity_tokens=60)
        hdp.adamw(lr=1e-2)
        updates(hdp, own, range(2))
        printed_loop(hdp, own, documents(LENGTHS))
        gradients = hdp.gradients()
        return gradients, {name: value.clone() for name, value in hdp.weights()}

    for ours, wanted in zip(
        on_ranks(2, model, lambda group, own: train(group, own, 2))[0],
        on_ranks(1, model, lambda group, own: train(group, own, 1))[0],
        strict=True,
    ):
        assert ours.keys() == wanted.keys()
        for name, value in wanted.items():
            torch.testing.assert_close(ours[name], value.to(ours[name]), rtol=1e-8, atol=1e-9)


def scores_prefill_and_gradients(
    hdp: bytescale.HDP, own: nn.Module, batch: list[dict[str, Any]]
) -> tuple[list[Tensor], Tensor, dict[str, Tensor]]:
    """Of passes without gradients, and of a loss that couples documents, in one pass and in two."""

    def loss(own: Any, values: list[Tensor]) -> Tensor:
        return torch.stack([value.sum() for value in values]).logsumexp(0)

    with torch.no_grad():
        for micro in hdp.plan(batch):
            hdp.collect(micro, micro.logprobs(own))
    scores = hdp.collected()
    for passes in (1, 2):
        hdp.backward(batch, loss, together=[0, 0, 1, 1, 2, 2, 2], passes=passes)
    return scores, hdp.prefill([d["tokens"] for d in batch]).next_tokens, hdp.gradients()


def test_scoring_prefill_and_losses_of_whole_documents() -> None:
    """Passes without gradients, between updates, and losses that couple documents."""
    model = small_model("llama", num_hidden_layers=3)
    batch = documents(LENGTHS)

    def work(group: Any, own: nn.Module, domain: int) -> tuple[list[Tensor], Tensor, dict[str, Tensor]]:
        hdp = shared(own, group, domain) if domain > 1 else bytescale.HDP(own, group, capacity_tokens=60)
        hdp.adamw(lr=1e-2)
        updates(hdp, own, range(1))
        return scores_prefill_and_gradients(hdp, own, batch)

    (scores, tokens, gradients), *_ = on_ranks(4, model, lambda group, own: work(group, own, 2))
    (wanted, their_tokens, theirs), *_ = on_ranks(1, model, lambda group, own: work(group, own, 1))
    assert torch.equal(tokens, their_tokens)
    for ours, value in zip([*scores, *gradients.values()], [*wanted, *(theirs[n] for n in gradients)], strict=True):
        torch.testing.assert_close(ours, value, rtol=1e-8, atol=1e-9)


def with_head(kind: str) -> nn.Module:
    """A model whose head is plain, tied, or the model's own code; trained, frozen, or with adapters."""
    if kind in ("tied", "tied with a soft cap"):
        return small_model("gemma2" if "soft" in kind else "llama", tie_word_embeddings=True)
    model = small_model("gemma2" if kind == "soft cap" else "llama", tie_word_embeddings=False)
    if kind == "frozen":
        model.get_output_embeddings().requires_grad_(False)  # type: ignore[operator]
        model.get_input_embeddings().requires_grad_(False)  # type: ignore[operator]
    if kind == "trained alone":
        model.requires_grad_(False)
        model.get_output_embeddings().requires_grad_(True)  # type: ignore[operator]
    if kind == "adapters":
        modules = ["embed_tokens", "lm_head", "v_proj"]
        model = get_peft_model(model, LoraConfig(r=2, lora_dropout=0.0, target_modules=modules))
    if kind == "replaced":
        more = ["embed_tokens", "lm_head"]
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["v_proj"], modules_to_save=more))
    return model


def losses_of(micro: Any, model: nn.Module, way: str) -> Tensor:
    """The sum of a micro-batch's losses, which the head computes all at once, in chunks, or beside its own forward."""
    if way == "loss_sum":
        result: Tensor = micro.loss_sum(model)
        return result
    if way == "logprobs":
        return -(micro.weights * micro.logprobs(model, rows_at_a_time=5)).sum()
    if way == "own chunks":
        hidden = model.model(**micro.inputs).last_hidden_state[0, : micro.num_rows]  # type: ignore[operator]
        logits = torch.cat([model.lm_head(rows) for rows in hidden.split(5)])  # type: ignore[operator]
    else:
        logits = model(**micro.inputs).logits[0, : micro.num_rows]
    losses = nn.functional.cross_entropy(logits, micro.labels, reduction="none", ignore_index=-100)
    return (micro.weights * losses).sum()


HEADS = ("plain", "tied", "soft cap", "tied with a soft cap", "frozen", "adapters", "replaced", "trained alone")
WAYS = ("logits", "loss_sum", "logprobs", "own chunks")


@pytest.mark.parametrize(
    ("head", "way"),
    [
        ("tied", "loss_sum"),
        ("plain", "logprobs"),
        *(pytest.param(head, way, marks=pytest.mark.exhaustive) for head in HEADS for way in WAYS),
    ],
)
def test_any_head_in_any_loop(head: str, way: str) -> None:
    """One backward after each pass, after two passes, and one through two passes. No rank has a whole matrix."""
    if way == "own chunks" and head in ("soft cap", "tied with a soft cap", "adapters", "replaced"):
        pytest.skip("the loop would compute another head")
    model = with_head(head)
    batch = documents([20, 11, 4])

    def work(group: Any, own: nn.Module, domain: int) -> tuple[dict[str, Tensor], list[str]]:
        hdp = bytescale.HDP(own, group, capacity_tokens=60)
        if domain > 1:
            hdp = shared(own, group, domain)
        hdp.adamw(lr=1e-2)
        whole = [name for name, p in own.named_parameters() if p.dim() > 1 and not p.isnan().all()]
        for micro in hdp.plan(batch):
            losses_of(micro, own, way).backward()
            first, second = losses_of(micro, own, way), 2 * losses_of(micro, own, way)
            first.backward()
            second.backward()
            (3 * losses_of(micro, own, way) + 4 * losses_of(micro, own, way)).backward()
        return hdp.gradients(), whole

    def wide(group: Any, own: nn.Module, domain: int) -> tuple[dict[str, Tensor], list[str]]:
        with WideCasts():
            return work(group, own, domain)

    (gradients, whole), *_ = on_ranks(2, model, lambda group, own: wide(group, own, 2))
    wanted, _ = on_ranks(1, model, lambda group, own: wide(group, own, 1))[0]
    assert gradients.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(gradients[name], value, rtol=1e-9, atol=1e-10)
    assert whole == (["lm_head.weight"] if head == "trained alone" else [])


def test_offloaded_activations_and_one_backward_through_two_passes() -> None:
    model = small_model("llama", num_hidden_layers=5)
    batch = documents([30, 11, 4, 35])

    def work(group: Any, own: nn.Module, domain: int) -> tuple[dict[str, Tensor], int]:
        hdp = bytescale.HDP(own, group, capacity_tokens=60)
        if domain > 1:
            hdp = bytescale.HDP(own, group, capacity_tokens=16, shard="parameters", domain=domain, host_gib=0.25)
        hdp.adamw(lr=1e-2)
        for micro in hdp.plan(batch):
            (micro.loss_sum(own) + 2 * micro.loss_sum(own)).backward()
        offload = hdp.engine.activations.offload
        return hdp.gradients(), 0 if offload is None else offload.bytes_moved

    gradients, moved = on_ranks(2, model, lambda group, own: work(group, own, 2))[0]
    wanted, _ = on_ranks(1, model, lambda group, own: work(group, own, 1))[0]
    assert moved > 0
    for name, value in wanted.items():
        torch.testing.assert_close(gradients[name], value, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("dtype", one_of([torch.float32, torch.bfloat16], torch.bfloat16))
@pytest.mark.parametrize(
    ("name", "experts"), one_of([("llama", "gathered"), ("qwen3_moe", "parallel")], ("llama", "gathered"))
)
def test_a_rank_holds_what_the_memory_model_says(name: str, experts: str, dtype: torch.dtype) -> None:
    """Bytes of weights, gradients and states, counted, with the layers that are open at a time; of adapters, too."""
    model = small_model(name, dtype=dtype, num_hidden_layers=4)
    model.model.layers[0].requires_grad_(False)  # type: ignore[union-attr]

    def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
        return {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}

    def work(group: Any, own: nn.Module) -> tuple[list[int], States]:
        hdp = shared(own, group, 2, experts=experts)
        hdp.adamw(lr=1e-2)
        zeros, units = hdp.sharded().zeros, hdp.sharded().units
        assert units is not None
        most = [0, 0]

        def count(function: Any, *given: Any) -> Any:
            result = function(*given)
            for kind in range(2):
                full = [(unit.full, unit.gradients)[kind] for store in units.stores for unit in store.units]
                most[kind] = max(most[kind], sum(storages(full).values()))
            return result

        for unit in (unit for store in units.stores for unit in store.units):
            unit.start_gather = partial(count, unit.start_gather)  # type: ignore[method-assign]
            unit.begin_gradients = partial(count, unit.begin_gradients)  # type: ignore[method-assign]
        updates(hdp, own, range(1))
        stores = [*units.stores, *(zero.parameters for zero in zeros)]
        values = sum(storages([*own.parameters(), *(store.values for store in stores)]).values())
        gradients = sum(storages(store.gradients for store in stores).values())
        optimizer = hdp.sharded().torch_optimizer
        states = [value for state in optimizer.state.values() for value in state.values() if value.dim()]
        masters = [piece for piece in hdp.sharded()._pieces if piece.dtype != dtype]
        held = [values + most[0], gradients + most[1], sum(storages([*states, *masters]).values())]
        rows = MeasuredRows(saved_per_token=0, peak_per_token=0, fixed=0)
        memory = measured_memory(hdp.engine.decoder, rows, kind="cpu", num_ranks=4)
        return held, replace(memory.states, domain=2, experts_in_parallel=experts == "parallel")

    results = on_ranks(4, model, work)
    states = results[0][1]
    padding = 64 * 4 * 8  # elements of each of the four layers, of the rest, and of what is open
    assert states.num_frozen == states.frozen_of_units[1] > 0
    for held, _ in results:
        assert 0 <= held[0] - states.parameter_bytes <= padding * states.element_bytes + 100
        assert 0 <= held[1] - states.gradient_bytes <= padding * 4
        assert held[2] <= states.optimizer_bytes + 12 * padding
    whole = 4 * states.optimizer_bytes
    assert abs(sum(held[2] for held, _ in results) - whole) <= 12 * padding


def test_what_cannot_be_shared_is_told() -> None:
    model = small_model("llama")

    def refused(group: dist.ProcessGroup, own: nn.Module) -> None:
        for options, message in (
            ({"domain": 3}, r"domain of 3 ranks .* does not divide 2 ranks"),
            ({"domain": 2, "equal_counts": True}, r"equal_counts = True with shard = .parameters."),
            ({"domain": 2, "shard": "optimizer"}, r"omain is 2, but shard is .optimizer."),
            ({"shard": "weights"}, r"'weights'.*use one of optimizer, parameters"),
        ):
            with pytest.raises(ConfigError, match=message):
                bytescale.HDP(own, group, capacity_tokens=60, **{"shard": "parameters", **options})
        hdp = bytescale.HDP(own, group, capacity_tokens=60, shard="parameters")
        assert hdp.domain == 2
        hdp.adamw(lr=1e-2)
        lengths = [len(d["tokens"]) for d in documents(LENGTHS)]
        with pytest.raises(PlanError, match="plan is for domains of 1 ranks in lockstep; here they have 2"):
            hdp.plan(documents(LENGTHS), plan=random_plan(lengths, 2, 0))
        with pytest.raises(ConfigError, match="last=True, but"):
            hdp.plan(documents(LENGTHS), last=True)
        with pytest.raises(ConfigError, match=r"no rank has all of them.*hdp.weights\(\)"):
            own.state_dict()
        with pytest.raises(ConfigError, match=r"no rank has all of them"):
            own.load_state_dict(model.state_dict())
        assert own.model.layers[0].self_attn.q_proj.weight.isnan().all()
        hdp.detach()
        for name, value in own.named_parameters():
            assert torch.equal(value, model.get_parameter(name))

    on_ranks(2, model, refused)
