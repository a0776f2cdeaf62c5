"""``bytescale.HDP`` in a loop of the caller's: equal to one process, and clear where it cannot be."""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bytescale
from bytescale.common.errors import BytescaleError, ConfigError, DataError, NonFiniteError, PlanError, RankFailure
from bytescale.hf.batch.documents import Documents
from tests.helpers.effort import one_of

from .support import documents, on_ranks, parameters_of, plain_update, printed_loop, small_model

LENGTHS = [37, 1, 8, 3, 60]


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    return small_model("llama")


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_the_printed_loop_trains_like_one_process(llama: nn.Module, num_ranks: int) -> None:
    """Three updates with AdamW and clipping, then scoring; weights, losses and log-probabilities are equal."""
    batches = [documents(LENGTHS[seed:], seed) for seed in range(3)]
    reference = copy.deepcopy(llama)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    losses = [plain_update(reference, batch, optimizer, clip=0.05) for batch in batches]

    def work(group: Any, model: nn.Module) -> tuple[list[float], dict[str, torch.Tensor], list[torch.Tensor]]:
        hdp = bytescale.HDP(model, group, capacity_tokens=120 // num_ranks)
        hdp.adamw(lr=1e-2)
        shares = []
        for batch in batches:
            shares.append(printed_loop(hdp, model, batch))
            hdp.step(max_grad_norm=0.05)
        with torch.no_grad():
            for micro in hdp.plan(batches[0]):
                hdp.collect(micro, micro.logprobs(model))
        return shares, parameters_of(model), hdp.collected()

    results = on_ranks(num_ranks, llama, work)
    for step, loss in enumerate(losses):
        assert sum(shares[step] for shares, _, _ in results) == pytest.approx(loss, rel=1e-10)
    for name, parameter in reference.named_parameters():
        # Adam divides by the root of the squared gradient, so that the rounding of tiny gradients shows.
        torch.testing.assert_close(results[-1][1][name], parameter.detach(), rtol=0, atol=1e-6)
    for ours, document in zip(results[0][2], batches[0], strict=True):
        logits = reference(input_ids=document["tokens"][None]).logits[0, :-1]
        expected = -F.cross_entropy(logits, document["tokens"][1:], reduction="none")
        torch.testing.assert_close(ours[:-1], expected.detach(), rtol=0, atol=1e-5)
        assert ours[-1] == 0  # the last token has no label


@pytest.mark.exhaustive
def test_fifty_steps_of_qwen3_give_the_curve_of_one_process() -> None:
    qwen3 = small_model("qwen3")
    batches = [documents(LENGTHS, seed % 5) for seed in range(50)]
    reference = copy.deepcopy(qwen3)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    losses = [plain_update(reference, batch, optimizer, clip=1.0) for batch in batches]

    def work(group: Any, model: nn.Module) -> list[float]:
        hdp = bytescale.HDP(model, group, capacity_tokens=45)
        hdp.adamw(lr=1e-2)
        shares = []
        for batch in batches:
            shares.append(printed_loop(hdp, model, batch))
            hdp.step(max_grad_norm=1.0)
        return shares

    ours = [sum(shares) for shares in zip(*on_ranks(3, qwen3, work), strict=True)]
    assert ours == pytest.approx(losses, rel=1e-5)
    assert ours[-1] < 0.8 * ours[0]


def test_a_fields_rows_come_back_in_the_callers_order(llama: nn.Module) -> None:
    """Whatever field a batch has, its rows lie beside the tokens; a number of a document is repeated for its tokens."""
    batch = [
        {**document, "place": torch.arange(len(document["tokens"])) + 1000 * number, "reward": 0.5 * number, "id": "a"}
        for number, document in enumerate(documents(LENGTHS))
    ]

    def work(group: Any, model: nn.Module) -> list[torch.Tensor]:
        hdp = bytescale.HDP(model, group, capacity_tokens=50)
        for micro in hdp.plan(batch):
            assert torch.equal(micro.place % 1000, micro.position_ids)
            assert torch.equal(micro.reward, 0.5 * (micro.place // 1000))
            with pytest.raises(AttributeError, match="no field 'id'"):
                micro.id  # noqa: B018
            hdp.collect(micro, torch.stack([micro.place, micro.tokens], dim=1))
        return hdp.collected()

    for rank_result in on_ranks(3, llama, work):
        for document, rows in zip(batch, rank_result, strict=True):
            assert torch.equal(rows[:, 0], document["place"])
            assert torch.equal(rows[:, 1], document["tokens"])


def test_outside_of_a_plan_the_model_is_as_before(llama: nn.Module) -> None:
    model = copy.deepcopy(llama).eval()
    tokens = torch.arange(2, 12)[None]
    logits, text = model(tokens).logits, model.generate(tokens, max_new_tokens=5, do_sample=False)
    hdp = bytescale.HDP(model, capacity_tokens=50)
    assert torch.equal(model(tokens).logits, logits)
    assert torch.equal(model.generate(tokens, max_new_tokens=5, do_sample=False), text)
    padded = torch.ones_like(tokens)
    padded[:, :3] = 0
    with_mask = model(tokens, attention_mask=padded).logits
    hdp.detach()
    assert torch.equal(model(tokens, attention_mask=padded).logits, with_mask)
    assert model.config._attn_implementation == "sdpa"


def updates(hdp: bytescale.HDP, model: nn.Module, number: int) -> dict[str, torch.Tensor]:
    """The parameters after so many updates."""
    for _ in range(number):
        printed_loop(hdp, model, documents(LENGTHS))
        hdp.step()
    return parameters_of(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_detached_model_is_trained_by_others(llama: nn.Module, dtype: torch.dtype) -> None:
    """Hooks that stayed took the gradients of a bf16 model away, and its weights never changed."""
    model = copy.deepcopy(llama).to(dtype)
    hdp = bytescale.HDP(model, capacity_tokens=200)
    hdp.adamw(lr=1e-3)
    before = updates(hdp, model, 1)
    hdp.detach()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.arange(2, 12)[None], labels=torch.arange(2, 12)[None]).loss.backward()
    optimizer.step()
    assert any(not torch.equal(value, before[name]) for name, value in parameters_of(model).items())
    model.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert hdp.state()["num_updates"] == 1
    with pytest.raises(ConfigError, match="was detached"):
        hdp.step()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_later_optimizer_takes_a_model_over(llama: nn.Module, dtype: torch.dtype) -> None:
    wanted, model = copy.deepcopy(llama).to(dtype), copy.deepcopy(llama).to(dtype)
    alone = bytescale.HDP(wanted, capacity_tokens=200)
    alone.adamw(lr=1e-2)
    first, second = (bytescale.HDP(model, capacity_tokens=200) for _ in range(2))
    first.adamw(lr=1e-2)
    second.adamw(lr=1e-2)
    expected = updates(alone, wanted, 2)
    for name, value in updates(second, model, 2).items():
        assert torch.equal(value, expected[name]), name
    for refused in (first.step, first.state, first.zero_grad, lambda: first.load_state(second.state())):
        with pytest.raises(ConfigError, match="another HDP has made an optimizer"):
            refused()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_state_has_the_weights_that_were_loaded_into_the_model(llama: nn.Module, dtype: torch.dtype) -> None:
    """Without an update in between, the state of a bf16 model had the weights of before."""
    model = copy.deepcopy(llama).to(dtype)
    hdp = bytescale.HDP(model, capacity_tokens=200)
    hdp.adamw(lr=1e-3)
    updates(hdp, model, 1)
    model.load_state_dict({name: torch.full_like(value, 0.5) for name, value in model.state_dict().items()})
    for states in hdp.state()["tensors"].values():
        assert (states["master"] == 0.5).all()


def test_what_would_not_reach_a_moved_model_is_not_loaded(llama: nn.Module) -> None:
    model = copy.deepcopy(llama)
    hdp = bytescale.HDP(model, capacity_tokens=200)
    hdp.adamw(lr=1e-3)
    state = hdp.state()
    model.to(torch.bfloat16)
    with pytest.raises(ConfigError, match="moved or replaced"):
        hdp.load_state(state)


@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.Adagrad, torch.optim.SGD])
def test_a_model_goes_back_to_where_it_began(llama: nn.Module, cls: type[torch.optim.Optimizer]) -> None:
    """The optimizer's states went on from the first trial."""
    model = copy.deepcopy(llama)
    hdp = bytescale.HDP(model, capacity_tokens=200)
    hdp.optimizer(cls, lr=1e-2)
    start = hdp.state()
    first = updates(hdp, model, 3)
    hdp.load_state(start)
    for name, value in updates(hdp, model, 3).items():
        assert torch.equal(value, first[name]), name


def test_zero_grad_means_zero(llama: nn.Module) -> None:
    """It used to take the gradients out of the flat buffer, silently."""
    model = copy.deepcopy(llama)
    hdp = bytescale.HDP(model, capacity_tokens=200)
    optimizer = hdp.adamw(lr=1e-3)
    batch = documents([9, 5])
    printed_loop(hdp, model, batch)
    wanted = {name: gradient.clone() for name, gradient in hdp.gradients().items()}
    for forget in (model.zero_grad, hdp.zero_grad, lambda: nn.Module.zero_grad(model), optimizer.zero_grad):
        if forget == optimizer.zero_grad:
            hdp.zero_grad()
        forget()
        printed_loop(hdp, model, batch)
        for name, gradient in hdp.gradients().items():
            torch.testing.assert_close(gradient, wanted[name], rtol=1e-12, atol=1e-15)
    before = parameters_of(model)
    assert hdp.step().grad_norm > 0
    assert any(not torch.equal(before[name], p) for name, p in model.named_parameters())
    nn.Module.zero_grad(model)
    assert hdp.step().grad_norm == 0.0


@pytest.mark.parametrize(
    "cls", one_of([torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop], torch.optim.Adagrad)
)
def test_any_elementwise_optimizer(llama: nn.Module, cls: type[torch.optim.Optimizer]) -> None:
    batch = documents(LENGTHS)
    reference = copy.deepcopy(llama)
    plain = cls(
        [
            {"params": [p for p in reference.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in reference.parameters() if p.dim() < 2]},
        ],
        lr=0.01,
    )
    for _ in range(2):
        plain_update(reference, batch, plain, clip=1.0)

    def work(group: Any, model: nn.Module) -> dict[str, torch.Tensor]:
        hdp = bytescale.HDP(model, group, capacity_tokens=50)
        hdp.optimizer(cls, lr=0.01, group_options=lambda name, p: {"weight_decay": 0.1} if p.dim() > 1 else {})
        for _ in range(2):
            printed_loop(hdp, model, batch)
            hdp.step()
        return parameters_of(model)

    for parameters in on_ranks(3, llama, work):
        for name, parameter in reference.named_parameters():
            torch.testing.assert_close(parameters[name], parameter.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("cls", [torch.optim.Adafactor, torch.optim.Muon, torch.optim.LBFGS])
def test_optimizers_of_whole_matrices_are_refused(llama: nn.Module, cls: type[torch.optim.Optimizer]) -> None:
    hdp = bytescale.HDP(copy.deepcopy(llama), capacity_tokens=50)
    with pytest.raises(ConfigError, match=cls.__name__):
        hdp.optimizer(cls, lr=0.1)


def test_state_moves_between_numbers_of_ranks(llama: nn.Module) -> None:
    """Two updates, then one; or two on three ranks, and after a restore one on two ranks: the same weights."""

    def straight(group: Any, model: nn.Module) -> dict[str, torch.Tensor]:
        hdp = bytescale.HDP(model, group, capacity_tokens=60)
        hdp.adamw(lr=1e-2)
        return updates(hdp, model, 3)

    def first(group: Any, model: nn.Module) -> dict[str, Any]:
        hdp = bytescale.HDP(model, group, capacity_tokens=50)
        hdp.adamw(lr=1e-2)
        updates(hdp, model, 2)
        return hdp.state()

    def then(group: Any, model: nn.Module) -> dict[str, torch.Tensor]:
        hdp = bytescale.HDP(model, group, capacity_tokens=60)
        hdp.adamw(lr=1e-2)
        hdp.load_state(states[-1])
        return updates(hdp, model, 1)

    states = pickle.loads(pickle.dumps(on_ranks(3, llama, first)))
    wanted, ours = on_ranks(2, llama, straight)[0], on_ranks(2, llama, then)[0]
    for name, value in wanted.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-7)


def test_equal_counts_and_foreign_plans(llama: nn.Module) -> None:
    """A driver plans and cuts; workers get their rows. With equal counts all of them run equally many passes."""
    batch = documents([*LENGTHS, 5, 4, 9])
    planner = bytescale.make_planner(num_ranks=3, capacity_tokens=40, equal_counts=True)
    plan = planner([len(d["tokens"]) for d in batch])
    parts = [pickle.loads(pickle.dumps(bytescale.cut(plan, rank, batch))) for rank in range(3)]

    def work(group: Any, model: nn.Module) -> tuple[int, dict[str, torch.Tensor]]:
        hdp = bytescale.HDP(model, group, capacity_tokens=40, equal_counts=True)
        hdp.optimizer(torch.optim.SGD, lr=0.1)
        passes = 0
        for micro in hdp.run(parts[group.rank()]):
            losses = F.cross_entropy(model(**micro.inputs).logits[0, : micro.num_rows], micro.labels, reduction="sum")
            losses.backward()
            passes += 1
        return passes, hdp.gradients()

    results = on_ranks(3, llama, work)
    assert len({passes for passes, _ in results}) == 1
    reference = copy.deepcopy(llama)
    for document in batch:
        logits = reference(input_ids=document["tokens"][None]).logits[0, :-1]
        F.cross_entropy(logits, document["tokens"][1:], reduction="sum").backward()
    for name, parameter in reference.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(results[0][1][name], parameter.grad, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([], "no documents"),
        ({"tokens": [1]}, "a list of documents"),
        ([{"text": "a"}], "Which of them holds its tokens"),
        ([{"tokens": []}], "at least one token"),
        ([{"tokens": [1, 2], "weights": [1.0]}], r"Field 'weights' of document 0 has shape \[1\]"),
        ([{"tokens": [1, 2]}, {"tokens": [1], "labels": [3]}], "differ in the fields 'labels'"),
        ([{"tokens": [1, 2], "weights": [0.0, 0.0]}], "sum to zero"),
        ([{"tokens": [5, 6, 7], "labels": [5, 6, 7]}], "shift_labels=True"),
        ([{"tokens": [5, 6], "inputs": [1, 2]}], "another name"),
        ([{"tokens": [5, 6], "position_ids": [0, 1]}], "counted from 0 in every document"),
        ([{"input_ids": [5, 0], "attention_mask": [1, 0]}], "without its padding"),
    ],
)
def test_bad_documents(batch: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Documents.of(batch)


def test_hugging_faces_labels_are_shifted_on_request() -> None:
    found = Documents.of(
        [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "weights": [0.0, 1.0, 2.0]}], shift_labels=True
    )
    assert found.fields["labels"][0].tolist() == [6, 7, -100]
    assert found.fields["weights"][0].tolist() == [1.0, 2.0, 0.0]


def test_mistakes_in_a_loop_are_told(llama: nn.Module) -> None:
    model = copy.deepcopy(llama)
    hdp = bytescale.HDP(model, capacity_tokens=100)
    batch = documents([5, 9])
    with pytest.raises(ConfigError, match="has no optimizer"):
        hdp.step()
    hdp.adamw(lr=1e-3)
    with pytest.raises(ConfigError, match="has an optimizer"):
        hdp.adamw(lr=1e-3)
    for micro in hdp.plan(batch):
        loss = model(**micro.inputs).logits.sum()
    with pytest.raises(RankFailure, match="backward has not run"):
        hdp.step()
    (loss * float("nan")).backward()
    before = parameters_of(model)
    with pytest.raises(NonFiniteError, match="weights are as before"):
        hdp.step()
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    with pytest.raises(PlanError, match="101 tokens"):
        hdp.plan(documents([101]))
    other = bytescale.make_planner(num_ranks=1, capacity_tokens=100)([7])
    with pytest.raises(PlanError, match="the batch has 2 documents"):
        hdp.plan(batch, plan=other)
    for micro in hdp.plan(batch):
        with pytest.raises(PlanError, match="one result per row"):
            hdp.collect(micro, torch.zeros(3))


def test_ranks_with_different_documents_are_told(llama: nn.Module) -> None:
    def work(group: Any, model: nn.Module) -> None:
        hdp = bytescale.HDP(model, group, capacity_tokens=100)
        with pytest.raises(RankFailure, match="the documents of a batch"):
            hdp.plan(documents([5, 9], seed=group.rank()))

    on_ranks(2, llama, work)


def test_ranks_with_different_weights_are_told(llama: nn.Module) -> None:
    """Without a seed every rank makes another model: nothing would fail, and nothing would be right."""

    def work(group: Any, model: nn.Module) -> None:
        with torch.no_grad():
            next(model.parameters())[3, 4] += 1e-3 * group.rank()
        with pytest.raises(RankFailure, match="the weights of the model"):
            bytescale.HDP(model, group, capacity_tokens=100)
        assert model.config._attn_implementation == "sdpa"

    on_ranks(2, llama, work)


def test_a_skipped_backward_of_a_shared_document_is_told(llama: nn.Module) -> None:
    batch = documents([60])

    def work(group: Any, model: nn.Module) -> None:
        hdp = bytescale.HDP(model, group, capacity_tokens=40)
        micros = iter(hdp.plan(batch))
        model(**next(micros).inputs)
        with pytest.raises(RankFailure, match="its backward has not run"):
            next(micros)

    on_ranks(2, llama, work)


@pytest.fixture
def large_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every batch counts as large: a rank looks at its own documents and the next rank's."""
    monkeypatch.setattr("bytescale.hf.loop.batch_plan.ALL_DOCUMENTS", 0)


def test_of_a_large_batch_a_rank_looks_at_its_own_documents(llama: nn.Module, large_batches: None) -> None:
    """Three of four ranks and more do not read a document: its fields are never touched there. The step is the same."""
    batch = [{**own, "reward": float(number)} for number, own in enumerate(documents([40, 3, 5, 2, 30, 6, 7, 4, 9, 8]))]
    expected = copy.deepcopy(llama)
    plain_update(expected, batch, torch.optim.SGD(expected.parameters(), lr=0.5), clip=1.0)

    read: list[int] = []

    class Watched(dict[str, Any]):
        def items(self) -> Any:
            read.append(int(self["reward"]))
            return super().items()

    def work(group: Any, model: nn.Module) -> dict[str, Tensor]:
        hdp = bytescale.HDP(model, group, capacity_tokens=25)
        hdp.optimizer(torch.optim.SGD, lr=0.5)
        printed_loop(hdp, model, [Watched(own) for own in batch])
        hdp.step(max_grad_norm=1.0)
        return parameters_of(model)

    results = on_ranks(4, llama, work)
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(results[0][name], parameter.detach(), rtol=1e-9, atol=1e-11)
    assert set(read) == set(range(len(batch)))
    assert len(read) < 4 * len(batch)


def _with_first(own: dict[str, Any], number: int) -> dict[str, Any]:
    return {**own, "tokens": torch.cat([torch.tensor([number]), own["tokens"][1:]])}


PLANTED = {
    "a token": (lambda own: _with_first(own, int(own["tokens"][0]) ^ 1), "different contents"),
    "a weight": (lambda own: {**own, "weights": own["weights"] * 1.001}, "different contents"),
    "a length": (lambda own: {name: values[1:] for name, values in own.items()}, "the documents of a batch"),
    "a field": (lambda own: {**own, "reward": torch.zeros(len(own["tokens"]))}, "differ in the fields"),
    "a word": (lambda own: _with_first(own, 10**6), "words"),
    "no number": (lambda own: {**own, "weights": own["weights"] * float("nan")}, "not be numbers|different contents"),
}


@pytest.mark.parametrize("fault", PLANTED)
@pytest.mark.parametrize("where", one_of([0, 1, 2], 1))
def test_what_one_rank_has_otherwise_stops_all_of_them(
    llama: nn.Module, large_batches: None, fault: str, where: int
) -> None:
    """One rank's copy of a document that it trains on differs, or of one that the next rank trains on."""
    batch = documents([9, 8, 7])
    change, message = PLANTED[fault]

    def work(group: Any, model: nn.Module) -> str:
        hdp = bytescale.HDP(model, group, capacity_tokens=9)
        mine = {number for own in hdp.plan(batch).micro_batches for number in own.documents}
        assert len(mine) == 1
        given = [change(own) if group.rank() == where and number in mine else own for number, own in enumerate(batch)]
        with pytest.raises(BytescaleError) as told:
            hdp.plan(given)
        for micro in hdp.plan(batch):  # and nothing hangs
            model(**micro.inputs).logits.sum().backward()
        return str(told.value)

    for text in on_ranks(3, llama, work):
        assert re.search(message, text), text


def test_a_large_batch_without_weights_is_refused_by_all(llama: nn.Module, large_batches: None) -> None:
    batch = [{"tokens": [5, 6, 7], "weights": [0.0, 0.0, 0.0]} for _ in range(4)]
    unshifted = [{"tokens": [5, 6, 7], "labels": [5, 6, 7]} for _ in range(4)]

    def work(group: Any, model: nn.Module) -> None:
        hdp = bytescale.HDP(model, group, capacity_tokens=6)
        with pytest.raises(DataError, match="sum to zero"):
            hdp.plan(batch)
        with pytest.raises(DataError, match="shift_labels=True"):
            hdp.plan(unshifted)
        hdp.plan(unshifted, shift_labels=True)

    on_ranks(2, llama, work)


def test_a_model_without_experts_may_count_them_as_it_likes() -> None:
    """A config.json may say null of what its family does not have."""
    model = small_model("llama", num_experts_per_tok=None)
    assert len(list(bytescale.HDP(model, capacity_tokens=30).plan(documents([20])))) == 1
