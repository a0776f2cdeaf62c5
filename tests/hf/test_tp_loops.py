"""``HDP(model, tp=...)``: a loop of one's own on a mesh gives the numbers of one process."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForTokenClassification

import bytescale
from bytescale.common.errors import ConfigError, RankFailure
from bytescale.config.sharing import REFUSED_WITH_TP
from bytescale.parity.compare import Setup, WideCasts, compare
from bytescale.parity.families import FAMILIES
from bytescale.runtime.optimizer import take_over, zero
from tests.helpers.effort import one_in, one_of

from .support import documents, on_ranks, plain_update, printed_loop, small_model

TOLERANCE = 1e-10
LENGTHS = [9, 1, 14, 3, 6]
NAMES = ["qwen3_moe", "llama", "gemma2", "gemma3_text"]
"""A mixture, heads of keys of which there are fewer than ranks, a soft cap, and an embedding that is the head."""
MESHES = [(4, 2), (2, 2), (4, 4), (6, 2)]
"""Ranks, and tensor-parallel ranks among them."""


@pytest.mark.parametrize(
    ("name", "mesh", "seed"),
    one_in(29, [(name, mesh, seed) for seed in range(3) for mesh in MESHES for name in NAMES]),
)
def test_any_plan_gives_the_numbers_of_one_process(name: str, mesh: tuple[int, int], seed: int) -> None:
    """Loss, every gradient, and log-probabilities that ``hdp.collected`` gives back, under random plans."""
    setup = Setup(num_ranks=mesh[0], tp=mesh[1], lengths=tuple(LENGTHS), seed=seed)
    assert compare(small_model(name), setup).worst <= TOLERANCE


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_a_model_type_gives_the_numbers_of_one_process_or_is_refused(name: str) -> None:
    try:
        assert compare(small_model(name, **FAMILIES[name]), Setup(num_ranks=4, tp=2, seed=1)).worst <= TOLERANCE
    except ConfigError as error:
        if not re.search("cannot be (cut for tensor parallelism|attached)", str(error)):
            raise


def test_a_head_of_numbers_and_not_of_words() -> None:
    """A critic's: one number for each token, and a loss of its own."""
    torch.manual_seed(0)
    config = small_model("llama").config
    config.num_labels = 1
    model = AutoModelForTokenClassification.from_config(config, dtype=torch.float64)
    batch = documents(LENGTHS)

    def work(group: dist.ProcessGroup, own: nn.Module) -> dict[str, torch.Tensor]:
        hdp = bytescale.HDP(own, group, capacity_tokens=24, tp=2)
        hdp.adamw(lr=0.0)
        for micro in hdp.plan(batch):
            with WideCasts():
                own(**micro.inputs).logits[0, : micro.num_rows, 0].exp().sum().backward()
        return hdp.gradients()

    found = on_ranks(4, model, work)[0]
    with WideCasts():
        for document in batch:
            model(input_ids=document["tokens"][None], use_cache=False).logits.exp().sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=TOLERANCE, atol=TOLERANCE)


def trained(
    group: dist.ProcessGroup, model: nn.Module, state: dict[str, Any] | None, seed: int, *, last: bool, **options: Any
) -> dict[str, Any]:
    """One update of a loop that goes on from ``state``, and what there is to be told of it afterwards."""
    with WideCasts():
        num_parts = options.get("tp", 1) * options.get("pp", 1)
        hdp = bytescale.HDP(model, group, capacity_tokens=12 if num_parts < group.size() else 40, **options)
        hdp.adamw(lr=1e-2)
        if state is not None:
            hdp.load_state(state)
        loss = printed_loop(hdp, model, documents(LENGTHS, seed), last=last)
        norm = hdp.step(max_grad_norm=0.05).grad_norm
        weights = {name: value.clone() for name, value in hdp.weights()}
        return {"loss": hdp.group.sum_of([loss])[0], "norm": norm, "state": hdp.state(), "weights": weights}


CHAINS: list[list[tuple[int, dict[str, Any]]]] = [
    [(4, {"tp": 2}), (2, {"tp": 1}), (4, {"tp": 4})],
    [(2, {"tp": 2}), (4, {"tp": 2, "shard": "parameters", "domain": 2}), (6, {"tp": 2, "checkpointing": "full"})],
]


@pytest.mark.parametrize(
    ("name", "chain", "last"),
    one_in(17, [(name, chain, last) for last in (True, False) for chain in (0, 1) for name in NAMES]),
)
def test_any_mesh_continues_what_another_has_begun(
    name: str, chain: int, last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three clipped updates with AdamW, each on another mesh, are those of plain transformers in one process."""
    monkeypatch.setattr(take_over, "BUCKET_BYTES", 4096)  # so that there is something to overlap
    model = small_model(name)
    plain = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    state: dict[str, Any] | None = None
    for seed, (num_ranks, options) in enumerate(CHAINS[chain]):
        overlapped = last and "shard" not in options
        results = on_ranks(num_ranks, model, lambda g, m: trained(g, m, state, seed, last=overlapped, **options))  # noqa: B023
        with WideCasts():
            loss = plain_update(plain, documents(LENGTHS, seed), optimizer, 0.05)
        state = results[0]["state"]
        for own in results:
            assert own["loss"] == pytest.approx(loss, rel=TOLERANCE)
            assert own["norm"] == results[0]["norm"]
            assert_same_weights(own, plain)


def assert_same_weights(own: dict[str, Any], plain: nn.Module) -> None:
    for key, value in plain.named_parameters():
        torch.testing.assert_close(own["state"]["tensors"][key]["master"], value.detach(), rtol=0, atol=TOLERANCE)
        if key in own["weights"]:  # experts have other names in files
            assert torch.equal(own["weights"][key], own["state"]["tensors"][key]["master"])


def norms_of_one_rank(patch: pytest.MonkeyPatch) -> None:
    """What ranks hold alike is trained on the rows of one of them."""
    patch.setattr(zero, "sum_replicas", lambda *_: None)


def all_rows_on_every_rank(patch: pytest.MonkeyPatch) -> None:
    """A part of the gradient is added up that every rank has in full."""
    plain = zero.whole_of
    patch.setattr(zero, "whole_of", lambda part, cut, mesh, **_: plain(part, cut, mesh, is_sum=True))


@pytest.mark.parametrize("fault", one_of([norms_of_one_rank, all_rows_on_every_rank], norms_of_one_rank))
def test_these_tests_would_find_a_fault(fault: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model("llama")
    plain = copy.deepcopy(model)
    plain_update(plain, documents(LENGTHS), torch.optim.AdamW(plain.parameters(), lr=1e-2), 0.05)
    fault(monkeypatch)
    own = on_ranks(2, model, lambda g, m: trained(g, m, None, 0, last=False, tp=2))[0]
    with pytest.raises(AssertionError, match="not close"):
        assert_same_weights(own, plain)


TREE = [{"tokens": torch.cat([torch.arange(2, 40), torch.full((length,), length)])} for length in (5, 9, 3, 12)]


def loss_and_scores(
    hdp: bytescale.HDP, model: nn.Module, batch: list[dict[str, Any]], **options: Any
) -> tuple[Any, ...]:
    total = 0.0
    for micro in hdp.plan(batch, **options):
        loss = micro.loss_sum(model, micro.weights)
        loss.backward()
        total += float(loss.detach())
    gradients = hdp.gradients()
    with torch.no_grad():
        for micro in hdp.plan(batch, **options):
            hdp.collect(micro, micro.logprobs(model, entropy=True, hidden=True).hidden)
    return hdp.group.sum_of([total])[0], gradients, hdp.collected()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "options",
    [
        {"checkpointing": "full"},
        {"checkpointing": "attention", "host_gib": 0.01, "capacity_tokens": 40},
        {"capacity_tokens": "auto", "device_gib": 0.01},
        {"share_prefixes": True},
    ],
)
def test_what_a_loop_may_have_besides(options: dict[str, Any]) -> None:
    """Layers computed again, activations in host memory, a measured capacity, and prefixes computed once."""
    model, shares = small_model("qwen3", num_hidden_layers=4), {"share_prefixes": options.pop("share_prefixes", False)}
    batch = TREE if shares["share_prefixes"] else documents([50, 7, 3, 12, 1, 9, 20])

    def run(group: dist.ProcessGroup, own: nn.Module, tp: int, **settings: Any) -> tuple[Any, ...]:
        with WideCasts():
            hdp = bytescale.HDP(own, group, tp=tp, **{"capacity_tokens": 60, **settings})
            hdp.optimizer(torch.optim.SGD, lr=0.1)
            return loss_and_scores(hdp, own, batch, **shares)

    wanted = on_ranks(1, model, lambda group, own: run(group, own, 1, capacity_tokens=300))[0]
    for ours in on_ranks(4, model, lambda group, own: run(group, own, 2, **options)):
        assert ours[0] == pytest.approx(wanted[0], rel=TOLERANCE)
        for name, value in wanted[1].items():
            torch.testing.assert_close(ours[1][name], value, rtol=0, atol=TOLERANCE)
        for own, other in zip(ours[2], wanted[2], strict=True):
            torch.testing.assert_close(own, other, rtol=0, atol=TOLERANCE)


CHOOSER = small_model("deepseek_v32")


def asked(hdp: bytescale.HDP, model: nn.Module, group: dist.ProcessGroup, what: str) -> Any:
    """Ask for what the table of refusals has under this name."""
    batch, options = documents(LENGTHS), {"tp": 2, "capacity_tokens": 60}
    if what == "layer.compile()":
        vars(model.model.layers[1])["_compiled_call_impl"] = print  # as compile() does, which takes four seconds
    if what in ("micro.segments", "layer.compile()"):
        return next(iter(hdp.plan(batch))).segments
    return {
        "equal_counts = True": lambda: bytescale.HDP(model, group, equal_counts=True, **options),
        'experts = "parallel"': lambda: bytescale.HDP(model, group, shard="parameters", experts="parallel", **options),
        "indexer_loss": lambda: bytescale.HDP(copy.deepcopy(CHOOSER), group, indexer_loss="sparse", **options),
        "hdp.run": lambda: hdp.run(hdp.plan(batch).part),
    }[what]()


def test_what_does_not_go_together_is_refused_by_name() -> None:
    def refused(group: dist.ProcessGroup, model: nn.Module) -> None:
        hdp = bytescale.HDP(model, group, tp=2, capacity_tokens=60)
        for what, (so, fix) in REFUSED_WITH_TP.items():
            with pytest.raises(ConfigError) as caught:
                asked(hdp, model, group, what)
            told = str(caught.value).lower()
            assert all(text.lower() in told for text in (f"{what} with tp = 2", so, fix, "or leave tp at 1")), what

    on_ranks(2, small_model("llama"), refused)


def require_use_in_plans_alone(hdp: bytescale.HDP, model: nn.Module, group: dist.ProcessGroup) -> None:
    """Of a model that ``hdp`` has cut to a rank's part."""
    with pytest.raises(ConfigError, match="was run outside of a plan"):
        model(input_ids=torch.arange(5)[None])
    for call in (model.state_dict, model.model.state_dict, lambda: model.load_state_dict({})):
        with pytest.raises(ConfigError, match=r"no rank has all of them.*hdp.weights\(\)"):
            call()
    hdp.detach()
    with pytest.raises(ConfigError, match="a rank's part of itself"):
        bytescale.HDP(model, group, capacity_tokens=60)


def test_a_part_of_a_model_is_used_in_plans_alone() -> None:
    def misused(group: dist.ProcessGroup, model: nn.Module) -> None:
        for tp in (0, 3):
            with pytest.raises(ConfigError, match=f"2 ranks are no multiple of tp = {tp} x pp = 1"):
                bytescale.HDP(model, group, tp=tp, capacity_tokens=60)
        hdp = bytescale.HDP(model, group, tp=2, capacity_tokens=60)
        require_use_in_plans_alone(hdp, model, group)

    on_ranks(2, small_model("llama"), misused)


@pytest.mark.parametrize(
    ("parameter", "when", "message"),
    [
        ("model.layers.0.mlp.up_proj.weight", "before", "anks disagree on the weights of the model"),
        (
            "model.layers.0.mlp.up_proj.weight",
            "after",
            "ank 1 of 2 has other weights .*mlp.up_proj.weight is the first",
        ),
        ("model.norm.weight", "after", "ank 2 of 4 has other weights .*model.norm.weight is the first"),
    ],
)
def test_ranks_with_other_weights_are_told(parameter: str, when: str, message: str) -> None:
    """Parts are compared with those of the HDP ranks that have the same, and what all have with all."""

    def differ(group: dist.ProcessGroup, model: nn.Module) -> None:
        def change() -> None:
            if group.rank() == 2:
                model.get_parameter(parameter).data.view(-1)[0] += 1

        if when == "before":
            change()
        hdp = bytescale.HDP(model, group, tp=2, capacity_tokens=60)
        change()
        hdp.plan(documents(LENGTHS))

    with pytest.raises(AssertionError) as caught:
        on_ranks(4, small_model("llama"), differ)
    assert isinstance(caught.value.__cause__, RankFailure)
    assert re.search(message, str(caught.value.__cause__))


@pytest.mark.exhaustive
def test_tensor_parallel_ranks_look_at_all_of_many_documents() -> None:
    """Of a large batch a rank without tensor parallelism looks at some documents alone."""

    def differ(group: dist.ProcessGroup, model: nn.Module) -> None:
        batch = documents([2] * 300)
        hdp = bytescale.HDP(model, group, tp=2, capacity_tokens=400)
        hdp.plan(batch)
        batch[7]["tokens"][0] += group.rank() == 1
        hdp.plan(batch)

    with pytest.raises(AssertionError) as caught:
        on_ranks(4, small_model("llama"), differ)
    assert re.search("disagree on the documents of a batch", str(caught.value.__cause__))


@pytest.mark.parametrize("other", [{"tp": 2}, {"shard": "parameters"}, {"shard": "parameters", "domain": 2}])
def test_ranks_that_are_given_other_meshes_are_told_before_they_make_groups(other: dict[str, Any]) -> None:
    """They would make other groups, and wait for each other up to the groups' limit."""

    def differ(group: dist.ProcessGroup, model: nn.Module) -> None:
        given = {"shard": "parameters"} if "domain" in other and group.rank() != 1 else {}
        bytescale.HDP(model, group, capacity_tokens=400, **(other if group.rank() == 1 else given))

    with pytest.raises(AssertionError) as caught:
        on_ranks(4, small_model("llama"), differ)
    assert re.search("anks disagree on tp, pp, shard, domain or experts", str(caught.value.__cause__))
