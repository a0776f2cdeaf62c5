"""Other people's trainers on simulated accelerators: batches of all ranks (TRL, verl), and coupled losses.

No race, early free or mix, no wait from the first micro-batch of a pass to its last one, and one process's numbers.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForTokenClassification

from bytescale import HDP
from bytescale.attention.kernels import CudaFlashKernel
from bytescale.attention.rings.exchange import Transfer
from bytescale.hf.loop import coupled, whole_documents
from bytescale.hf.loop.micro_batch import Micro
from bytescale.integrations.whole_batch import IS_TOP1, WholeBatch, value_columns, word_columns
from bytescale.parity.compare import WideCasts
from tests.accelerator.device import Machine
from tests.accelerator.groups import Communicator, run_machines
from tests.accelerator.loops import micro_batches_are_parts, waits_amid
from tests.accelerator.test_meshes import blocking, numbers_alone, unpinned
from tests.hf import test_whole_batch as batches
from tests.hf import test_whole_documents as wholes
from tests.hf.support import small_model

EXACT = 1e-10
Fields = dict[str, list[Tensor]]
Loss = Callable[[list[dict[str, Tensor]], list[Tensor]], Tensor]
Numbers = tuple[float, dict[str, Tensor], list[Tensor]]
"""The loss, gradients, and values of all tokens of each document."""


def attached(own: Machine, group: Communicator, model: nn.Module, **options: Any) -> tuple[HDP, Any]:
    ours: Any = copy.deepcopy(model).to(own.device)
    hdp = HDP(ours, group, kernel="math", **{"capacity_tokens": 40, **options})
    hdp.engine._kernel = lambda dtype: CudaFlashKernel()  # type: ignore[method-assign, assignment]
    hdp.adamw(lr=0.0)
    return hdp, ours


def require_same(found: Numbers, wanted: Numbers, tolerance: float = EXACT) -> None:
    assert found[0] == pytest.approx(wanted[0], rel=tolerance)
    largest = max(1.0, *(float(value.abs().max()) for value in wanted[1].values()))
    assert all(float((found[1][name] - value).abs().max()) < tolerance * largest for name, value in wanted[1].items())
    assert all(float((a - b).abs().max()) < tolerance for a, b in zip(found[2], wanted[2], strict=True))


def require_clean(machines: list[Machine], waits: list[Counter[str]]) -> None:
    assert not [fault for own in machines for fault in own.faults]
    assert not any(waits), waits


def rows_of(fields: Fields) -> list[dict[str, Tensor]]:
    return [{name: column[place] for name, column in fields.items()} for place in range(len(fields["tokens"]))]


def words(logits: Tensor, tokens: Tensor) -> Tensor:
    """``[S, 4]`` as ``word_columns`` has them, of the next tokens."""
    log_p, next_tokens = logits.log_softmax(1)[:-1], tokens[1:, None]
    columns = [log_p.gather(1, next_tokens)[:, 0], -(log_p.exp() * log_p).sum(1)]
    columns += [(logits[:-1].argmax(1) == tokens[1:]).to(log_p), logits[:-1].mean(1)]
    return nn.functional.pad(torch.stack(columns, dim=1), (0, 0, 0, 1))


def of_values(documents: list[dict[str, Tensor]], values: list[Tensor]) -> Tensor:
    """A critic's: squares of what its numbers lack to the sequence's reward."""
    return torch.stack([(v - d["reward"]).square().mean() for d, v in zip(documents, values, strict=True)]).sum()


def critic() -> nn.Module:
    """One number for each token, by a model for token classification."""
    config = copy.deepcopy(small_model("llama").config)
    config.num_labels, config.classifier_dropout = 1, 0.0
    torch.manual_seed(0)
    made: nn.Module = AutoModelForTokenClassification.from_config(config, dtype=torch.float64)
    return made


def alone(model: nn.Module, loss: Loss, of_logits: Callable[[Tensor, Tensor], Tensor]) -> Numbers:
    """Every rank's batch in one process, one sequence after the other."""
    model, total, values = copy.deepcopy(model), torch.zeros((), dtype=torch.float64), list[Tensor]()
    with WideCasts():
        for rank in range(2):
            rows = rows_of(batches.fields_of(rank))
            own = [of_logits(model(input_ids=d["tokens"][None]).logits[0], d["tokens"]) for d in rows]
            total = total + loss(rows, own)
            values += own
        total.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return float(total.detach()), gradients, [own.detach() for own in values]


def one_trainer(
    model: nn.Module, loss: Loss, given: Loss | None, columns: Callable[[nn.Module], Any], num_trained: int
) -> tuple[Numbers, list[bool], list[Machine], list[Counter[str]]]:
    """A trainer's step on two ranks, twice: the first finds out what stays. Whether ranks ran a second pass, too."""

    def one_rank(own: Machine, group: Communicator) -> tuple[Any, ...]:
        hdp, ours = attached(own, group, model)
        rank = own.device.index
        fields = {name: [value.to(own.device) for value in all_of] for name, all_of in batches.fields_of(rank).items()}
        with WideCasts(), micro_batches_are_parts():
            for _ in range(2):
                before = len(own.waits)
                batch = WholeBatch(hdp, columns(ours), num_trained=num_trained)
                values, rest = batch.run(fields, loss=given)
                total = loss(rows_of(fields), list(values.split(batches.LENGTHS[rank])))
                total.backward()
                ran_again = batch.finish()
                gradients = {name: value.cpu() for name, value in hdp.gradients().items()}
                hdp.zero_grad()
            waits = waits_amid(own, before)
            with torch.no_grad():  # a reference, or an evaluation
                again, _ = WholeBatch(hdp, columns(ours), num_trained=num_trained).run(fields, capacity_tokens=60)
        assert torch.equal(again.cpu().isfinite(), values.detach().cpu().isfinite())
        assert float((again.cpu() - values.detach().cpu()).abs().max()) < EXACT
        whole = torch.cat([values.detach(), rest], dim=1).cpu().split(batches.LENGTHS[rank])
        return float(total.detach()), gradients, whole, ran_again, waits

    results, machines = run_machines(2, one_rank)
    numbers = sum(own[0] for own in results), results[0][1], [value for own in results for value in own[2]]
    return numbers, [own[3] for own in results], machines, [own[4] for own in results]


WAYS: dict[str, tuple[Loss, Loss | None, bool]] = {
    "one pass": (batches.of_sequences, batches.of_sequences, False),
    "two passes": (batches.of_sequences, None, True),
    "a mean over the batch": (batches.of_batch, batches.of_batch, True),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", list(WAYS))
def test_batches_of_all_ranks_are_clean(way: str) -> None:
    """Values, losses of sequences, and gradients; a sequence of 60 tokens is shared by both ranks."""
    loss, given, runs_again = WAYS[way]
    model = small_model("llama")
    found, again, machines, waits = one_trainer(model, loss, given, lambda ours: word_columns(ours, count=4), 2)
    require_clean(machines, waits)
    assert again == [runs_again] * 2
    require_same(found, alone(model, lambda rows, values: loss(rows, [own[:, :IS_TOP1] for own in values]), words))


@pytest.mark.exhaustive
@pytest.mark.parametrize("given", [of_values, None], ids=["one pass", "two passes"])
def test_critics_are_clean(given: Loss | None) -> None:
    model = critic()
    found, _, machines, waits = one_trainer(model, of_values, given, value_columns, 1)
    require_clean(machines, waits)
    require_same(found, alone(model, of_values, lambda logits, tokens: logits))


def coupled_step(
    model: nn.Module, batch: list[dict[str, Any]], loss: Any, labels: list[int], passes: int, **options: Any
) -> tuple[Any, dict[str, Tensor], list[Machine], list[Counter[str]]]:
    """``HDP.backward`` on three ranks, twice."""

    def one_rank(own: Machine, group: Communicator) -> tuple[Any, dict[str, Tensor], Counter[str]]:
        hdp, _ = attached(own, group, model, capacity_tokens=60)
        there = [{n: v.to(own.device) if n == "old" else v for n, v in document.items()} for document in batch]
        with WideCasts(), micro_batches_are_parts():
            for _ in range(2):
                before = len(own.waits)
                result = hdp.backward(there, loss, together=labels, passes=passes, **options)
                gradients = {name: value.cpu() for name, value in hdp.gradients().items()}
                hdp.zero_grad()
        return result, gradients, waits_amid(own, before)

    results, machines = run_machines(3, one_rank)
    assert all(own == results[0][0] for own, *_ in results)
    return results[0][0], results[0][1], machines, [own for *_, own in results]


def contrast(pair: list[Any], values: list[Tensor]) -> tuple[Tensor, dict[str, Any]]:
    """As DPO's, whose metrics are left on the device."""
    chosen, rejected = ((v - d["old"])[:-1].sum() for d, v in zip(pair, values, strict=True))
    return -nn.functional.logsigmoid(0.1 * (chosen - rejected)), {"margin": (chosen - rejected).detach()}


def pairs() -> list[dict[str, Any]]:
    """Two pairs; the documents of each begin alike."""
    batch = wholes.rollouts([50, 44, 40, 48])
    for one, other in (batch[:2], batch[2:]):
        other["tokens"][:36] = one["tokens"][:36]
    return batch


@pytest.mark.exhaustive
@pytest.mark.parametrize("shares", [False, True], ids=["rows of their own", "shared rows"])
@pytest.mark.parametrize("passes", [1, 2])
def test_losses_that_couple_documents_are_clean(passes: int, shares: bool) -> None:
    model, labels = small_model("llama"), [0, 0, 1, 1]
    batch = pairs() if shares else wholes.rollouts([37, 12, 8, 21])
    with mock.patch.object(whole_documents, "of_documents", wraps=whole_documents.of_documents) as of_trees:
        found, gradients, machines, waits = coupled_step(model, batch, contrast, labels, passes, share_prefixes=shares)
    require_clean(machines, waits)
    assert of_trees.called == (shares and passes == 1), "documents share rows, which are put together"
    with WideCasts():
        wanted = wholes.one_process(model, batch, wholes.by_labels(batch, labels, contrast))
    require_same((found.loss, gradients, []), (wanted[0], wanted[1], []))
    assert found.metrics == pytest.approx(wanted[2], rel=EXACT)


@pytest.mark.exhaustive
def test_losses_of_whole_documents_are_clean() -> None:
    """``micro.documents(...).sum``: a loss of each document, some of which ranks share."""
    model, batch = small_model("llama"), wholes.rollouts()

    def one_rank(own: Machine, group: Communicator) -> tuple[float, dict[str, Tensor], Counter[str]]:
        hdp, ours = attached(own, group, model, capacity_tokens=60)

        def loss(micro: Micro) -> Tensor:
            documents = micro.documents(micro.logprobs(ours))
            return documents.sum([own.square().mean() for own in documents])

        with WideCasts(), micro_batches_are_parts():
            for _ in range(2):
                before = len(own.waits)
                total = hdp.plan(batch).forward_backward(loss)
                gradients = {name: value.cpu() for name, value in hdp.gradients().items()}
                hdp.zero_grad()
        return total, gradients, waits_amid(own, before)

    results, machines = run_machines(3, one_rank)
    require_clean(machines, [own for *_, own in results])
    with WideCasts():
        wanted = wholes.one_process(model, batch, lambda values: (sum(own.square().mean() for own in values), {}))
    require_same((results[0][0], results[0][1], []), (wanted[0], wanted[1], []))


def looks_at_once(*arguments: Any) -> Any:
    part, metrics = scalar(*arguments)
    return part * bool(part.detach().isfinite()), metrics


scalar = coupled._scalar
PLANTED: dict[str, tuple[str, Any, str, Any]] = {
    "a loss that is looked at amid micro-batches": ("wait", coupled, "_scalar", looks_at_once),
    "places of rows for which the host waits": ("wait", whole_documents, "to_device", blocking),
    "places of rows from memory that is not page-locked": ("mix", whole_documents, "to_device", unpinned),
    "rows of others that are read before they are there": ("race", Transfer, "wait", numbers_alone),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", list(PLANTED))
def test_faults_that_are_planted_in_coupled_losses_are_found(name: str) -> None:
    kind, owner, what, fault = PLANTED[name]
    with mock.patch.object(owner, what, fault):
        _, _, machines, waits = coupled_step(small_model("llama"), pairs(), contrast, [0, 0, 1, 1], 1)
    assert kind in {own.kind for machine in machines for own in machine.faults} | ({"wait"} if any(waits) else set())
