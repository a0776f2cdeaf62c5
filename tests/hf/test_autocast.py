"""``torch.autocast`` around the model and its loss: as exact as transformers' own autocast in one process."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bytescale import HDP
from bytescale.parity import small_model
from tests.helpers.effort import one_of

from .support import documents, on_ranks, plain_update, printed_loop


def bf16() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


def plain(model: nn.Module, batch: list[dict[str, Any]], *, autocast: bool) -> dict[str, Tensor]:
    """Loss and gradients of one process."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = plain_update(model, batch, optimizer, clip=1e9)
    gradients = {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
    return gradients | {"the loss": torch.tensor(loss)}


def error(found: dict[str, Tensor], true: dict[str, Tensor]) -> dict[str, float]:
    """Of every tensor, relative to its norm, or to a thousandth of the largest norm."""
    largest = max(float(value.norm()) for value in true.values())
    return {
        name: float((found[name] - value).norm()) / max(float(value.norm()), 1e-3 * largest)
        for name, value in true.items()
    }


@pytest.mark.parametrize("loss", ["logits", "loss_sum", "logprobs"])
@pytest.mark.parametrize(
    ("name", "tp"),
    one_of([(name, 1) for name in ("llama", "gpt2", "gemma2", "gpt_oss", "deepseek_v3")]
           + [(name, 2) for name in ("llama", "gemma2", "deepseek_v3", "starcoder2")], ("llama", 1)),
)  # fmt: skip
def test_autocast_is_as_exact_as_in_one_process(name: str, tp: int, loss: str) -> None:
    """Documents of 60 and 25 tokens are shared. Another order of sums may round otherwise, but not worse."""
    batch = documents([60, 7, 25, 3])
    total = sum(float(document["weights"].sum()) for document in batch)

    def work(group: Any, model: nn.Module) -> dict[str, Tensor]:
        hdp = HDP(model, group, tp=tp, capacity_tokens=20 * tp if name != "gpt2" else 40)
        hdp.optimizer(torch.optim.SGD, lr=0.0)
        with bf16():
            if loss == "logits":
                found = printed_loop(hdp, model, batch)
            else:
                found = 0.0
                for micro in hdp.plan(batch):
                    value = (
                        micro.loss_sum(model) if loss == "loss_sum" else -(micro.weights * micro.logprobs(model)).sum()
                    ) / total
                    value.backward()
                    found += float(value.detach())
        return hdp.gradients() | {"the loss": hdp.group.all_reduce(torch.tensor(found))}

    model = small_model(name, dtype=torch.float32)
    ours = on_ranks(5 if tp == 1 else 6, model, work)[0]
    true, theirs = (plain(small_model(name, dtype=torch.float32), batch, autocast=on) for on in (False, True))
    wanted, found = error(theirs, true), error(ours, true)
    assert max(wanted.values()) > 1e-3  # autocast was on
    for key, value in found.items():
        assert value <= 1.5 * wanted[key] + 0.004, key


def test_autocast_around_several_steps_takes_the_new_weights() -> None:
    """It keeps copies of weights while it lasts; the second step used to run on those of the first."""

    def losses(*, around_all: bool) -> list[float]:
        model = small_model("llama", dtype=torch.float32)
        hdp = HDP(model, capacity_tokens=64)
        hdp.optimizer(torch.optim.SGD, lr=1.0)
        found = []
        with bf16() if around_all else contextlib.nullcontext():
            for _ in range(2):
                with bf16():
                    found.append(printed_loop(hdp, model, documents([30, 9])))
                hdp.step()
        return found

    assert losses(around_all=True) == losses(around_all=False)
