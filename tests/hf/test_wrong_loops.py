"""Loops that would train on something else than one process are told, before the weights change."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import bytescale
from bytescale.common.errors import ConfigError, DataError, RankFailure
from bytescale.parity import small_model

from .support import documents, on_ranks

Hdp = bytescale.HDP


def attached(capacity: int = 30) -> tuple[nn.Module, Hdp]:
    model = small_model("qwen3")
    hdp = Hdp(model, capacity_tokens=capacity)
    hdp.adamw(lr=1e-2)
    return model, hdp


def without_the_keyword(model: nn.Module, hdp: Hdp) -> None:
    for micro in hdp.plan(documents([20, 9])):
        model(input_ids=micro.inputs["input_ids"], position_ids=micro.inputs["position_ids"]).logits.sum().backward()


def one_without_the_keyword(model: nn.Module, hdp: Hdp) -> None:
    for micro in hdp.plan(documents([20, 19])):
        inputs = micro.inputs if micro.index else {"input_ids": micro.inputs["input_ids"]}
        model(**inputs).logits.sum().backward()


def nothing_is_run(model: nn.Module, hdp: Hdp) -> None:
    assert len(list(hdp.plan(documents([20, 19])))) == 2


def one_is_skipped(model: nn.Module, hdp: Hdp) -> None:
    for micro in hdp.plan(documents([20, 19])):
        if micro.index:
            micro.loss_sum(model).backward()


def ends_early(model: nn.Module, hdp: Hdp) -> None:
    for micro in hdp.plan(documents([20, 19])):
        micro.loss_sum(model).backward()
        break


@pytest.mark.parametrize(
    ("loop", "message"),
    [
        (without_the_keyword, "run forward and backward outside of a plan"),
        (one_without_the_keyword, "run forward and backward outside of a plan"),
        (nothing_is_run, "micro-batch 0 of rank 0 was not run by the model"),
        (one_is_skipped, "micro-batch 0 of rank 0 was not run by the model"),
        (ends_early, "ended after 1 of its 2 micro-batches"),
    ],
)
def test_tokens_that_the_gradient_would_lack(loop: Callable[[nn.Module, Hdp], None], message: str) -> None:
    model, hdp = attached()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    loop(model, hdp)
    with pytest.raises((RankFailure, ConfigError), match=message):
        hdp.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_loop_may_look_at_a_batch_first_and_evaluate_between() -> None:
    """Looking, scoring, and passes outside of the plan are no errors; nor is a rank without micro-batches."""

    def work(group: Any, model: nn.Module) -> float:
        hdp = Hdp(model, group, capacity_tokens=30)
        hdp.adamw(lr=0.0)
        planned = hdp.plan(documents([20]))  # on one of both ranks
        assert sum(micro.num_rows for micro in planned) in (0, 20)
        with torch.no_grad():
            for micro in planned:
                model(input_ids=micro.tokens[None])
                micro.logprobs(model)
        for micro in planned:
            micro.loss_sum(model).backward()
        return hdp.step().grad_norm

    first, second = on_ranks(2, small_model("qwen3"), work)
    assert first == second > 0


def test_a_batch_that_was_scored_is_forgotten() -> None:
    """Also by a rank that has rows of it, and none of the batch that is trained on."""

    def work(group: Any, model: nn.Module) -> float:
        hdp = Hdp(model, group, capacity_tokens=30)
        hdp.adamw(lr=0.0)
        with torch.no_grad():
            for micro in hdp.plan(documents([20, 19])):
                micro.logprobs(model)
        assert not hdp.pending._passes, "a loop that scores for ever keeps nothing"
        for micro in hdp.plan(documents([20])):
            micro.loss_sum(model).backward()
        return hdp.step().grad_norm

    first, second = on_ranks(2, small_model("qwen3"), work)
    assert first == second > 0


def test_what_a_plan_cannot_run() -> None:
    model, hdp = attached()
    (micro,) = hdp.plan(documents([9]))
    with pytest.raises(ConfigError, match=r"it is given labels together with micro\.inputs"):
        model(**micro.inputs, labels=micro.inputs["input_ids"])
    with pytest.raises(
        ConfigError, match=r"it is given pixel_values together with micro\.inputs.*documents of text alone"
    ):
        model(**micro.inputs, pixel_values=torch.zeros(1))
    with pytest.raises(DataError, match="The tokens of document 1 have 67; the model has 67 words"):
        hdp.plan([{"tokens": [5]}, {"tokens": [5, 67]}])
    with pytest.raises(DataError, match="The labels of document 0 have -7"):
        hdp.plan([{"tokens": [5, 6], "labels": [6, -7]}])
    with pytest.raises(DataError, match="The weights of the batch sum to nan"):
        hdp.plan([{"tokens": [5, 6], "weights": [1.0, float("nan")]}])
    plan = bytescale.make_planner(num_ranks=1, capacity_tokens=30)([2])
    with pytest.raises(DataError, match="The tokens of document 0 have 99"):
        hdp.run(bytescale.cut(plan, 0, [{"tokens": [5, 99]}]))
    hdp.detach()
    with pytest.raises(ConfigError, match="This HDP was detached"):
        list(hdp.plan(documents([9])))


def by_logprobs(micro: Any, model: nn.Module) -> object:
    return micro.logprobs(model)


def by_loss_sum(micro: Any, model: nn.Module) -> object:
    return micro.loss_sum(model)


def by_forward(micro: Any, model: nn.Module) -> object:
    return model(**micro.inputs)


@pytest.mark.parametrize("run", [by_logprobs, by_loss_sum, by_forward])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_reference_model_needs_an_hdp_of_its_own(
    run: Callable[[Any, nn.Module], object], implementation: str
) -> None:
    """It would compute the parts of a shared document that this rank holds, as if they were documents."""
    reference = small_model("llama")
    reference.config._attn_implementation = implementation
    (micro,) = attached()[1].plan(documents([9]))
    with pytest.raises(ConfigError, match="was given a micro-batch of an HDP that is not attached to it"):
        run(micro, reference)
    Hdp(reference, capacity_tokens=30)
    with pytest.raises(ConfigError, match=r"not attached to it|was not part of the model when"):
        run(micro, reference)


def test_a_loss_of_whole_documents_takes_two_passes() -> None:
    """The loop of docs/own_loop.md: GSPO's ratio is the mean over a document, which no rank holds."""
    batch = documents([40, 3, 9])
    for number, document in enumerate(batch):
        document |= {"old_logprobs": torch.full((len(document["tokens"]),), -4.0), "advantage": 1.0 - number}

    def one_process(model: nn.Module) -> dict[str, torch.Tensor]:
        for document in batch:
            logits = model(document["tokens"][None]).logits[0, :-1]
            ratios = logits.log_softmax(-1).gather(1, document["tokens"][1:, None])[:, 0] + 4.0
            (-document["advantage"] * ratios.mean().exp() / len(batch)).backward()
        return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}

    def work(group: Any, model: nn.Module) -> dict[str, torch.Tensor]:
        hdp = Hdp(model, group, capacity_tokens=20)
        hdp.adamw(lr=0.0)
        with torch.no_grad():
            for micro in hdp.plan(batch):
                hdp.collect(micro, micro.logprobs(model) - micro.old_logprobs)
        given = []
        for document, ratios in zip(batch, hdp.collected(), strict=True):
            factor = -document["advantage"] * float(ratios[:-1].mean().exp()) / (len(ratios) - 1) / len(batch)
            given.append({**document, "factor": factor})
        for micro in hdp.plan(given):
            (micro.factor * micro.logprobs(model)).sum().backward()
        return hdp.gradients()

    model = small_model("qwen3")
    ours, wanted = on_ranks(3, model, work)[0], one_process(model)
    for name, gradient in wanted.items():
        # Numbers of whole documents are fp32 fields.
        torch.testing.assert_close(ours[name], gradient, rtol=0, atol=1e-6 * float(gradient.abs().max()))


def test_a_kernel_that_does_not_exist() -> None:
    model = small_model("qwen3")
    with pytest.raises(ConfigError, match="There is no attention kernel 'fast'"):
        Hdp(model, capacity_tokens=30, kernel="fast")
    Hdp(model, capacity_tokens=30)  # it was left as it was


def no_position_ids(model: nn.Module, hdp: Hdp) -> None:
    for micro in hdp.plan(documents([20, 9])):
        model(**{name: value for name, value in micro.inputs.items() if name != "position_ids"})


def routers_losses(model: nn.Module, hdp: Hdp) -> None:
    for micro in hdp.plan(documents([20, 9])):
        model(**micro.inputs, output_router_logits=True)


def a_plain_pass(model: nn.Module, hdp: Hdp) -> None:
    for micro in hdp.plan(documents([20, 9])):
        micro.loss_sum(model).backward()
    model(documents([9])[0]["tokens"][None]).logits.sum().backward()
    hdp.step()


def a_plain_loss(model: nn.Module, hdp: Hdp) -> None:
    tokens = documents([9])[0]["tokens"][None]
    model(tokens, labels=tokens).loss.backward()
    hdp.step()


def clipped(model: nn.Module, hdp: Hdp) -> None:
    for micro in hdp.plan(documents([20, 9])):
        micro.loss_sum(model).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    hdp.step()


def scaled_in_place(model: nn.Module, hdp: Hdp) -> None:
    for micro in hdp.plan(documents([20, 9])):
        micro.loss_sum(model).backward()
    for parameter in model.parameters():
        parameter.grad /= 2
    hdp.step()


@pytest.mark.parametrize(
    ("loop", "message"),
    [
        (no_position_ids, r"it is given no position_ids.*call model\(\*\*micro\.inputs\)"),
        (routers_losses, "output_router_logits is True.*even use of experts.*trained by your own loss alone"),
        (a_plain_pass, "run forward and backward outside of a plan.*added up over ranks"),
        (a_plain_loss, "run forward and backward outside of a plan.*added up over ranks"),
        (clipped, r"gradients were changed between backward and step\(\).*hdp\.step\(max_grad_norm=\.\.\.\)"),
        (scaled_in_place, r"gradients were changed between backward and step\(\).*multiply the loss"),
    ],
)
def test_calls_that_would_give_other_results(loop: Callable[[nn.Module, Hdp], None], message: str) -> None:
    model, hdp = attached()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(ConfigError, match=f"(?i){message}"):
        loop(model, hdp)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    hdp.zero_grad()  # and the loop may go on
    for last in (False, True):
        for micro in hdp.plan(documents([20, 9]), last=last):
            micro.loss_sum(model).backward()
            with torch.no_grad():
                model(micro.tokens[None])
        if not last:
            nn.utils.clip_grad_norm_(model.parameters(), torch.inf)  # as transformers' Trainer does, for the norm
        hdp.step()


def test_what_is_no_backward_outside_of_a_plan() -> None:
    """Another model's, a pass that is only looked at, and heads of our own losses, of parts of the model, too."""
    model, hdp = attached()
    small_model("qwen3", seed=1)(documents([9])[0]["tokens"][None]).logits.sum().backward()
    (gradient,) = torch.autograd.grad(
        model.model(documents([9])[0]["tokens"][None])[0].sum(), [model.model.norm.weight]
    )
    hdp.zero_grad()
    model(documents([9])[0]["tokens"][None])
    for micro in hdp.plan(documents([20, 9])):
        (micro.logprobs(model, entropy=True).entropy.sum() + micro.loss_sum(model)).backward()
    assert hdp.step().grad_norm > 0 < float(gradient.abs().max())


def test_documents_that_have_more_tokens_than_the_model_has_positions() -> None:
    for name, limit in (("gpt2", 128), ("opt", 128), ("biogpt", 128), ("gpt_bigcode", 128)):
        model = small_model(name).eval()
        hdp = Hdp(model, capacity_tokens=300, forward_only=True)
        for micro in hdp.plan(documents([limit])):
            assert micro.loss_sum(model) > 0
        long = documents([9, limit + 1])
        part = bytescale.cut(bytescale.make_planner(num_ranks=1, capacity_tokens=300)([9, limit + 1]), 0, long)
        for use in (
            partial(hdp.plan, long),
            partial(hdp.prefill, [document["tokens"] for document in long]),
            partial(list, bytescale.score(hdp, long)),
            partial(hdp.backward, long, lambda own, values: values[0].sum()),
            partial(hdp.run, part),
        ):
            with pytest.raises(
                DataError, match=f"Document 1 has {limit + 1} tokens; the model has positions for {limit}"
            ):
                use()
