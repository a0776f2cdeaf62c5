"""``HDP(model, pp=...)``: the loop's body as a function, on stages of a pipeline, gives the numbers of one process."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import bytescale
from bytescale.common.errors import ConfigError
from bytescale.config.sharing import REFUSED_WITH_PP
from bytescale.hf.loop.micro_batch import Micro
from bytescale.parity.compare import Setup, WideCasts, compare, difference, plain_step, planned_step, random_documents
from bytescale.parity.families import FAMILIES
from bytescale.runtime.optimizer import take_over
from bytescale.runtime.pipeline import StageLinks
from bytescale.runtime.tied import TiedHead
from tests.helpers.effort import one_in, one_of
from tests.helpers.forks import run_forked

from .support import documents, on_ranks, plain_update, small_model
from .test_tp_loops import LENGTHS, NAMES, TOLERANCE, TREE, assert_same_weights, require_use_in_plans_alone, trained

MESHES = [(4, 1, 2), (4, 2, 2), (2, 1, 2), (6, 1, 3), (8, 2, 2)]
"""Ranks, tensor-parallel ranks and stages among them."""


@pytest.mark.parametrize(
    ("name", "mesh", "seed"),
    one_in(29, [(name, mesh, seed) for seed in range(3) for mesh in MESHES for name in NAMES]),
)
def test_any_plan_gives_the_numbers_of_one_process(name: str, mesh: tuple[int, int, int], seed: int) -> None:
    """Loss, every gradient, and log-probabilities that ``hdp.collected`` gives back, under random plans."""
    ranks, tp, pp = mesh
    setup = Setup(num_ranks=ranks, tp=tp, pp=pp, lengths=tuple(LENGTHS), seed=seed)
    assert compare(small_model(name, num_hidden_layers=4), setup).worst <= TOLERANCE


def test_ranks_without_documents_take_part() -> None:
    setup = Setup(num_ranks=6, pp=2, lengths=(5,), planner="adaptive")
    assert compare(small_model("llama", tie_word_embeddings=True), setup).worst <= TOLERANCE


def test_the_fullest_stage_decides_the_capacity() -> None:
    """Here the last one, which has a large head."""

    def told(group: dist.ProcessGroup, own: nn.Module) -> tuple[bool, int, int]:
        room = bytescale.HDP(own, group, capacity_tokens="auto", device_gib=0.05, pp=2).room
        assert room.memory is not None
        assert room.memory.first_stage is not None
        return room.memory.has_head, room.capacity_tokens, room.memory.first_stage.capacity_tokens(0.05 * 2**30)

    (has_head, capacity, of_first), other = on_ranks(2, small_model("llama", vocab_size=8192), told)
    assert (has_head, capacity, of_first) == other
    assert has_head
    assert 0 < capacity < of_first


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_a_model_type_gives_the_numbers_of_one_process_or_is_refused(name: str) -> None:
    try:
        assert compare(small_model(name, **FAMILIES[name]), Setup(num_ranks=4, pp=2, seed=1)).worst <= TOLERANCE
    except ConfigError as error:
        if not re.search(r"ipeline|cannot be attached", str(error)):
            raise


CHAINS: list[list[tuple[int, dict[str, Any]]]] = [
    [(4, {"pp": 2}), (2, {"tp": 2}), (4, {"tp": 2, "pp": 2})],
    [(2, {"tp": 1}), (3, {"pp": 3, "checkpointing": "full"}), (4, {"pp": 2, "checkpointing": "attention"})],
]


@pytest.mark.parametrize(
    ("name", "chain", "last"),
    one_in(13, [(name, chain, last) for last in (True, False) for chain in (0, 1) for name in NAMES]),
)
def test_any_mesh_continues_what_another_has_begun(
    name: str, chain: int, last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three clipped updates with AdamW, each on another mesh, are those of plain transformers in one process."""
    monkeypatch.setattr(take_over, "BUCKET_BYTES", 4096)  # so that there is something to overlap
    model = small_model(name, num_hidden_layers=4)
    plain = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    state: dict[str, Any] | None = None
    for seed, (num_ranks, options) in enumerate(CHAINS[chain]):
        results = on_ranks(num_ranks, model, lambda g, m: trained(g, m, state, seed, last=last, **options))  # noqa: B023
        with WideCasts():
            loss = plain_update(plain, documents(LENGTHS, seed), optimizer, 0.05)
        state = results[0]["state"]
        for own in results:
            assert own["loss"] == pytest.approx(loss, rel=TOLERANCE)
            assert own["norm"] == results[0]["norm"]
            assert_same_weights(own, plain)
            assert own["weights"].keys() == results[0]["weights"].keys()


def copies_keep_their_gradients(patch: pytest.MonkeyPatch) -> None:
    """The gradient of a tied embedding as the head does not come home."""
    patch.setattr(TiedHead, "add_gradient", lambda *_: None)


def losses_are_means(patch: pytest.MonkeyPatch) -> None:
    """The caller divides by the rows of this micro-batch."""
    patch.setattr(F, "cross_entropy", lambda *a, _plain=F.cross_entropy, **o: _plain(*a, **o) / max(1, len(a[0])))


def rows_arrive_late(patch: pytest.MonkeyPatch) -> None:
    """A stage is given the message of another micro-batch."""
    plain = StageLinks.receive

    def receive(self: StageLinks, place: int) -> Tensor | None:
        rows, before = plain(self, place), vars(self).get("before")
        vars(self)["before"] = None if rows is None else rows.clone()
        if before is not None and rows is not None and before.shape == rows.shape:
            rows.copy_(before)
        return rows

    patch.setattr(StageLinks, "receive", receive)


@pytest.mark.parametrize("fault", [copies_keep_their_gradients, losses_are_means, rows_arrive_late])
def test_these_tests_would_find_a_fault(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_model("gemma2")
    setup = Setup(num_ranks=4, pp=2, lengths=(7, 7, 7, 7), planner="adaptive")
    given = random_documents(model, setup)
    reference = plain_step(copy.deepcopy(model), given)
    assert difference(reference, planned_step(model, given, setup)).worst <= TOLERANCE
    fault(monkeypatch)
    assert difference(reference, planned_step(model, given, setup)).worst > 1e-4


class WithValues(nn.Module):
    """A model with a head of its own around it, which the loss alone runs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        torch.manual_seed(1)
        self.value_head = nn.Linear(model.config.hidden_size, 1, dtype=torch.float64)  # type: ignore[arg-type]

    def forward(self, **inputs: Any) -> Any:
        return self.model(**inputs)


def loss_and_scores(
    hdp: bytescale.HDP, model: nn.Module, batch: list[dict[str, Any]], **options: Any
) -> tuple[Any, ...]:
    def loss(micro: Micro) -> Tensor:
        if isinstance(model, WithValues):
            scores = micro.logprobs(model, hidden=True)
            values = model.value_head(scores.hidden)[:, 0]
            return (micro.weights * (values.square() - scores.logprobs)).sum()
        return micro.loss_sum(model)

    total = hdp.plan(batch, **options).forward_backward(loss)
    gradients = hdp.gradients()
    with torch.no_grad():
        hdp.plan(batch, **options).forward_backward(lambda micro: hdp.collect(micro, micro.logprobs(model)))
    return total, gradients, hdp.collected()


def adapted(model: nn.Module) -> nn.Module:
    adapters = LoraConfig(r=2, lora_dropout=0.0, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    return get_peft_model(model, adapters)  # type: ignore[arg-type, return-value]


FEATURES: list[dict[str, Any]] = [
    {"wrapper": WithValues},
    {"wrapper": adapted},
    {"checkpointing": "attention", "host_gib": 0.01, "capacity_tokens": 40},
    {"capacity_tokens": "auto", "device_gib": 0.01},
    {"share_prefixes": True},
    {"share_prefixes": True, "tp": 2},
    {"everywhere": {"indexer_loss": "sparse"}, "name": "deepseek_v32"},
    {"everywhere": {"invariant": True}},
]


@pytest.mark.parametrize("options", one_of(FEATURES, FEATURES[0]))
def test_what_a_loop_may_have_besides(options: dict[str, Any]) -> None:
    """A head around the model, adapters, host memory, a measured capacity, prefixes, indexers, and fixed bits."""
    options, tp = dict(options), options.get("tp", 1)
    everywhere = options.pop("everywhere", {})
    model = small_model(options.pop("name", "qwen3"), num_hidden_layers=8)
    model = options.pop("wrapper", nn.Module.train)(model)
    shares = {"share_prefixes": options.pop("share_prefixes", False)}
    batch = TREE if shares["share_prefixes"] else documents([50, 7, 3, 12, 1, 9, 20])

    def run(group: dist.ProcessGroup, own: nn.Module, pp: int, **settings: Any) -> tuple[Any, ...]:
        with WideCasts():
            hdp = bytescale.HDP(own, group, pp=pp, **{"capacity_tokens": 60, **settings}, **everywhere)
            hdp.optimizer(torch.optim.SGD, lr=0.1)
            return *loss_and_scores(hdp, own, batch, **shares), hdp.indexer_loss()

    wanted = on_ranks(1, model, lambda group, own: run(group, own, 1, capacity_tokens=300))[0]
    for ours in on_ranks(4 * tp, model, lambda group, own: run(group, own, 2, **options)):
        assert ours[0::3] == pytest.approx(wanted[0::3], rel=TOLERANCE)
        assert ours[1].keys() == wanted[1].keys()
        for name, value in wanted[1].items():
            torch.testing.assert_close(ours[1][name], value, rtol=0, atol=TOLERANCE * max(1, float(value.abs().max())))
        for own, other in zip(ours[2], wanted[2], strict=True):
            torch.testing.assert_close(own, other, rtol=0, atol=0 if "invariant" in everywhere else TOLERANCE)


@pytest.mark.parametrize("name", one_of(["gemma2", "qwen3"], "gemma2"))
def test_a_checkpoint_goes_on_on_another_mesh(name: str, tmp_path: Path) -> None:
    """Also after weights, gradients and states have been in host memory, and ``planned`` has planned ahead."""
    model, batches = small_model(name, num_hidden_layers=4), [documents(LENGTHS, seed) for seed in range(3)]
    plain = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    with WideCasts():
        for batch in batches:
            plain_update(plain, batch, optimizer, 1.0)

    def train(steps: slice, **degrees: int) -> dict[str, Any]:
        dist.init_process_group("gloo")
        WideCasts().__enter__()  # to the end of the process
        own = copy.deepcopy(model)
        hdp = bytescale.HDP(own, capacity_tokens=20, **degrees)
        hdp.adamw(lr=1e-2)
        if steps.start:
            assert hdp.load(tmp_path) == {"step": steps.start}
        for planned in hdp.planned(batches[steps]):
            total = sum(float(document["weights"].sum()) for document in planned.batch)
            planned.forward_backward(lambda micro: micro.loss_sum(own) / total)  # noqa: B023
            hdp.to("cpu")
            hdp.to(hdp.group.device)
            hdp.step()
        hdp.save(tmp_path, {"step": hdp.num_updates})
        weights = {key: value.clone().numpy() for key, value in hdp.weights()}
        dist.destroy_process_group()
        return weights

    run_forked(4, lambda _: train(slice(0, 1), pp=2))
    run_forked(2, lambda _: train(slice(1, 2), tp=2))
    for weights in run_forked(4, lambda _: train(slice(2, 3), tp=2, pp=2)):
        assert weights.keys() == {key for key, _ in plain.named_parameters()}
        for key, value in plain.named_parameters():
            torch.testing.assert_close(torch.as_tensor(weights[key]), value.detach(), rtol=0, atol=1e-9)


SECOND = small_model("llama")


def asked(hdp: bytescale.HDP, model: nn.Module, group: dist.ProcessGroup, what: str) -> Any:
    """Ask for what the table of refusals has under this name."""
    batch, options = documents(LENGTHS), {"pp": 2, "capacity_tokens": 60}

    def run(context: Any = None, then: Callable[[Micro], object] = lambda _: None) -> Any:
        def loss(micro: Micro) -> Tensor:
            then(micro)
            return micro.loss_sum(model)

        with context or torch.enable_grad():
            return hdp.plan(batch).forward_backward(loss)

    if what == "layer.compile()":
        vars(model.get_base_model().model.layers[-1])["_compiled_call_impl"] = (
            print  # as compile() does, which takes four seconds
        )
    return {
        "a loop over micro-batches": lambda: next(iter(hdp.plan(batch))),
        'shard = "parameters"': lambda: bytescale.HDP(model, group, shard="parameters", **options),
        "equal_counts = True": lambda: bytescale.HDP(model, group, equal_counts=True, **options),
        "hdp.attach": lambda: hdp.attach(copy.deepcopy(SECOND)),
        "hdp.weights() of adapters": lambda: hdp.weights(),
        "hdp.run": lambda: hdp.run(hdp.plan(batch).part),
        "images, videos or audios in documents": lambda: hdp.plan([batch[0] | {"images": [{}]}]),
        "torch.autocast": lambda: run(torch.autocast("cpu", torch.bfloat16)),
        "layer.compile()": run,
    }[what]()


def test_what_does_not_go_together_is_refused_by_name() -> None:
    def refused(group: dist.ProcessGroup, model: nn.Module) -> None:
        hdp = bytescale.HDP(model, group, pp=2, capacity_tokens=60)
        hdp.adamw(lr=1e-3)
        for what, (so, fix) in REFUSED_WITH_PP.items():
            if what == "routes and chosen keys":
                continue  # below
            with pytest.raises(ConfigError) as caught:
                asked(hdp, model, group, what)
            told = str(caught.value).lower()
            assert all(text.lower() in told for text in (f"{what} with pp = 2", so, fix, "or leave pp at 1")), what

    on_ranks(2, adapted(small_model("llama")), refused)


def wrong_on_the_last_stage(what: str) -> Callable[[dist.ProcessGroup, nn.Module], None]:
    def misused(group: dist.ProcessGroup, model: nn.Module) -> None:
        hdp = bytescale.HDP(model, group, pp=2, capacity_tokens=60)
        hdp.adamw(lr=1e-3)

        def loss(micro: Micro) -> Tensor:
            if what == "not run":
                return model.get_output_embeddings().weight.sum()  # type: ignore[operator]
            if what == "nothing":
                return micro.loss_sum(model).backward()  # type: ignore[no-untyped-call, no-any-return]
            if what == "raises":
                raise KeyError("rewards")
            if what == "routes":
                micro.record_routes()
            if what == "keys":
                micro.record_chosen_keys()
            return micro.loss_sum(model) + micro.loss_sum(model)

        hdp.plan(documents(LENGTHS)).forward_backward(loss)

    return misused


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("not run", "did not run the model, or returned Tensor"),
        ("nothing", "or returned NoneType"),
        ("raises", r"'rewards'\s+Other stages wait for this rank.*hdp\.recover\(\)"),
        ("run twice", r"run outside of a plan, or twice.*forward_backward"),
        ("routes", r"outes and chosen keys with pp = 2.*the last stage's layers alone"),
        ("keys", r"outes and chosen keys with pp = 2"),
    ],
)
def test_a_loss_runs_the_model_once(what: str, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        on_ranks(2, small_model("llama"), wrong_on_the_last_stage(what))


def test_a_stage_is_used_in_plans_alone() -> None:
    def misused(group: dist.ProcessGroup, model: nn.Module) -> None:
        for pp in (0, 3):
            with pytest.raises(ConfigError, match=f"2 ranks are no multiple of tp = 1 x pp = {pp}"):
                bytescale.HDP(model, group, pp=pp, capacity_tokens=60)
        hdp = bytescale.HDP(model, group, pp=2, capacity_tokens=60)
        with pytest.raises(ConfigError, match="no optimizer"):
            hdp.plan(documents(LENGTHS)).forward_backward(lambda micro: micro.loss_sum(model))
        require_use_in_plans_alone(hdp, model, group)

    on_ranks(2, small_model("llama"), misused)


@pytest.mark.parametrize("when", ["before", "after"])
def test_ranks_with_other_weights_are_told(when: str) -> None:
    """A stage's are compared with those of the HDP ranks that have the same."""

    def differ(group: dist.ProcessGroup, model: nn.Module) -> None:
        parameter = model.get_parameter("model.layers.1.mlp.up_proj.weight")

        def change() -> None:
            if group.rank() == 3:
                parameter.data.view(-1)[0] += 1

        if when == "before":
            change()
        hdp = bytescale.HDP(model, group, pp=2, capacity_tokens=60)
        change()
        hdp.plan(documents(LENGTHS))

    told = "anks disagree on the weights of the model" if when == "before" else "ank 1 of 2 has other weights"
    with pytest.raises(AssertionError, match=told):
        on_ranks(4, small_model("llama"), differ)


def test_the_loop_runs_as_it_is_printed() -> None:
    """The one of docs/own_loop.md, on two HDP ranks x two stages."""
    page = (Path(__file__).parents[2] / "docs" / "own_loop.md").read_text(encoding="utf-8")
    (block,) = (code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "pp=2)" in code)
    whole, loader = small_model("llama"), [documents(LENGTHS)] * 2

    def printed(code: str) -> tuple[list[float], list[Any]]:
        dist.init_process_group("gloo")
        names = {"bytescale": bytescale, "torch": torch, "model": copy.deepcopy(whole), "loader": loader}
        exec(compile(code, "own_loop.md", "exec"), names)
        dist.destroy_process_group()
        return names["losses"], [scores.numpy() for scores in names["scores"]]  # type: ignore[return-value, attr-defined]

    (wanted,) = run_forked(1, lambda _: printed(block.replace("pp=2", "pp=1")))
    assert wanted[0][1] < wanted[0][0]
    for losses, scores in run_forked(4, lambda _: printed(block)):
        assert losses == pytest.approx(wanted[0], rel=1e-7)
        for own, other in zip(scores, wanted[1], strict=True):
            assert abs(own - other).max() < 1e-7
