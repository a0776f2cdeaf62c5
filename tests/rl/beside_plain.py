"""Losses of other projects over ``HDP``, beside the same losses of a plain model in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from tests.helpers.forks import run_forked
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen3Config

import bytescale

WORDS = 67
PROMPTS, RESPONSES = (5, 9, 2, 5, 3, 7), (60, 4, 17, 2, 11, 30)
CAPACITY = 72
"""Tokens of all ranks together in a micro-batch: on two ranks, the longest rollout is shared."""

Rollout = Mapping[str, Tensor]
"""``tokens [S]``, ``prompt []`` (its length), and of the response ``[A]`` ``advantages``, ``old`` and ``reference``."""
Loss = Callable[[Sequence[Rollout], Sequence[Tensor]], Tensor]
"""From rollouts and the log-probabilities of their responses, ``[A]``, to a scalar."""


def rollouts() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for number, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        old, reference = (-4.2 + 0.3 * torch.randn(2, response, generator=generator, dtype=torch.float64)).unbind()
        made.append({
            "tokens": torch.randint(1, WORDS, (prompt + response,), generator=generator),
            "prompt": torch.tensor(prompt),
            "advantages": torch.full((response,), (-1.0) ** number * (0.5 + number), dtype=torch.float64),
            "old": old,
            "reference": reference,
        })  # fmt: skip
    return made


def small_model() -> nn.Module:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=WORDS, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, eos_token_id=0, pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).double()


def padded(rows: Sequence[Tensor]) -> Tensor:
    """``[B, L]``, zeros on the right."""
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


def mask_of(rows: Sequence[Tensor]) -> Tensor:
    """``[B, L]``: 1.0 where there is a token of a response."""
    return padded([torch.ones(len(own), dtype=torch.float64) for own in rows])


def _own(loss: Loss, batch: Sequence[Rollout], rows: Sequence[Tensor]) -> Tensor:
    """Of ``[S]`` log-probabilities of next tokens those of the responses."""
    return loss(batch, [own[int(given["prompt"]) - 1 : -1] for given, own in zip(batch, rows, strict=True)])


def plainly(model: nn.Module, batch: Sequence[Rollout], loss: Loss, *, alone: bool) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of transformers' model, one rollout at a time."""
    model.zero_grad()
    rows = []
    for given in batch:
        tokens = given["tokens"]
        scores = model(input_ids=tokens[None]).logits[0].log_softmax(-1)
        rows.append(torch.cat([scores[:-1].gather(1, tokens[1:, None])[:, 0], scores.new_zeros(1)]))
    parts = [[own] for own in range(len(batch))] if alone else [[*range(len(batch))]]
    total = sum((_own(loss, [batch[n] for n in part], [rows[n] for n in part]) for part in parts), torch.zeros(()))
    total.backward()
    return float(total.detach()), {name: own.grad.clone() for name, own in model.named_parameters()}


def check_losses(ranks: int, losses: Mapping[str, Loss], alone: Sequence[str] = ()) -> int:
    """Compare all losses and their gradients on so many ranks with those of one process. Returns how many differ.

    Args:
        losses: by name.
        alone: those that are sums over rollouts are called for each, in one pass; all others for the whole batch.
    """
    batch, start = rollouts(), small_model()

    def over_hdp(rank: int) -> Any:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        model = copy.deepcopy(start)
        hdp = bytescale.HDP(model, capacity_tokens=CAPACITY // ranks)
        hdp.adamw(lr=0.0)
        found = {}
        for name, loss in losses.items():
            together = list(range(len(batch))) if name in alone else None
            # What a loss is given travels with the plan; batch is the same on all ranks.
            fields = [{"tokens": own["tokens"]} for own in batch]

            def of_documents(documents: Any, rows: Any, loss: Loss = loss, fields: Any = fields) -> Tensor:
                places = [next(n for n, own in enumerate(fields) if own is document) for document in documents]
                return _own(loss, [batch[place] for place in places], rows)

            result = hdp.backward(fields, of_documents, together=together)
            gradients = {key: own.numpy() for key, own in hdp.gradients().items()}
            found[name] = result.loss, result.passes, gradients
            hdp.zero_grad()
        return found

    wrong = 0
    for found in run_forked(ranks, over_hdp)[:1]:
        for name, loss in losses.items():
            expected, gradients = plainly(start, batch, loss, alone=name in alone)
            ours, passes, own = found[name]
            scale = max(float(grad.abs().max()) for grad in gradients.values())
            far = max(float((torch.from_numpy(own[key]) - grad).abs().max()) for key, grad in gradients.items()) / scale
            off = abs(ours - expected) / max(1.0, abs(expected))
            good = off < 1e-10 and far < 1e-10 and scale > 0
            wrong += not good
            print(
                f"{ranks} rank(s): {name}: loss {ours:.6f}, {off:.0e} off; gradients {far:.0e} off; {passes} pass(es)"
                f"{'' if good else ' FAILED'}",
                flush=True,
            )
    return wrong
