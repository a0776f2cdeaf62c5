"""Batches of all ranks as one global batch under ``HDP``: what trainers and engines of other people run as a model.

``WholeBatch.run`` gathers the sequences of all ranks, plans them together, and returns the values of this rank's, such
as log-probabilities, as if a model had computed them. A loss goes backward into these values. ``finish`` then goes
backward through the model, on the same plan.

That takes one forward more than a model would, unless ``run`` is given the loss: it is then called on the whole
documents of each micro-batch, and backward runs in the first pass. That is right for a loss that is a sum over
documents. ``finish`` compares its gradient with the one that has come into the values. Where they differ, as they do
for a loss with a mean over its batch, the second pass makes up for the difference. So the gradients are the same.

Shape letters: S tokens of a sequence, N of all sequences of this rank; K values of a token, D of them differentiable.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from bytescale.common.labels import IGNORE_INDEX
from bytescale.hf.loop.coupled import Values, backward_from, sums_of_rows
from bytescale.hf.loop.hdp import HDP
from bytescale.hf.loop.micro_batch import Micro
from bytescale.hf.loop.planned_batch import PlannedBatch
from bytescale.plan import MicroBatch
from bytescale.runtime.group import RankGroup
from bytescale.runtime.plain_data import all_gather_json

IMAGES = ("pixel_values", "image_grid_thw", "image_sizes", "pixel_attention_mask")
COMPUTED = ("mm_token_type_ids", "token_type_ids", "images_seqlens")
"""What processors make of images, and what they say beside it, which ``HDP`` finds by itself."""
LOG_PROBS, ENTROPY, IS_TOP1, MEAN_LOGITS = range(4)
"""Values that ``word_columns`` gives; the first two are differentiable."""
_ROWS = ("tokens", "labels", "number", "routed_experts", "images")

Fields = Mapping[str, Sequence[Any]]
"""By name, a tensor of any shape for each sequence of this rank; of ``images`` a list of items, ``hf.model.encoders``.

``tokens [S]``, ``labels [S]`` (what the model has to predict at each token; -100 for nothing) and, perhaps, ``number
[S]``, which micro-batches have. All else is for the loss.
"""
Loss = Callable[[list[dict[str, Tensor]], list[Tensor]], Tensor]
"""From the fields of documents and their values ``[S, D]`` to their part of the loss."""


class _Call(NamedTuple):
    planned: PlannedBatch
    lengths: list[int]
    values: Tensor  # [N, D], a leaf
    applied: dict[int, tuple[slice, Tensor]] | None
    """Of each micro-batch this rank's rows and the gradient ``[T, D]`` that went backward in the first pass."""


class WholeBatch:
    """Runs of one model in one training step. Every rank makes the same."""

    def __init__(self, hdp: HDP, columns: Values, *, num_trained: int) -> None:
        """``columns``: a micro-batch's values ``[T, K]``. ``num_trained``: D; 0: none, as for a second model."""
        self.hdp, self._columns, self._num_trained = hdp, columns, num_trained
        self._calls: list[_Call] = []

    def run(
        self, fields: Fields, *, loss: Loss | None = None, capacity_tokens: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run the sequences of all ranks. Returns ``[N, D]``, a leaf where gradients are enabled, and ``[N, K - D]``.

        Args:
            loss: what the trainer will compute of all values, as a sum over documents. None: not known.
            capacity_tokens: as ``HDP.plan`` takes it.
        """
        group = self.hdp.group
        trains = torch.is_grad_enabled() and self._num_trained > 0
        first, rows = delivered(group, {name: fields[name] for name in _ROWS if name in fields})
        # Weights are a loss's own affair: they may sum to zero here.
        documents = [
            {name: values.cpu() if isinstance(values, Tensor) else values for name, values in own.items()}
            | {"weights": torch.ones(len(own["labels"]))}
            for own in rows.values()
        ]
        planned = self.hdp.plan(documents, capacity_tokens=capacity_tokens, share_prefixes=True)
        loss, applied = loss if trains else None, dict[int, tuple[slice, Tensor]]()
        if loss is not None:
            of_loss = {name: values for name, values in fields.items() if name != "images"}
            _, rows = delivered(group, of_loss, _documents_of(planned))

        def of_micro(micro: Micro) -> Tensor | None:
            columns = self._columns(micro)
            self.hdp.collect(micro, columns)
            if loss is None:
                return None
            values = columns[:, : self._num_trained]
            values.register_hook(lambda gradient: applied.update({micro.index: (micro.rows, gradient)}))
            documents, total = micro.documents(values), values[:0].sum()
            if len(documents):
                total = total + loss([rows[number] for number in documents.numbers], list(documents))
            return total

        with torch.set_grad_enabled(loss is not None):
            planned.forward_backward(of_micro)
        lengths = [len(tokens) for tokens in fields["tokens"]]
        found = self.hdp.collected()[first : first + len(lengths)]
        whole = torch.cat(found) if found else torch.zeros(0, self._num_trained, device=group.device)
        values, rest = whole[:, : self._num_trained].clone(), whole[:, self._num_trained :]
        if trains:
            values.requires_grad_()
            self._calls.append(_Call(planned, lengths, values, applied if loss else None))
        return values, rest

    def finish(self, share: float = 1.0) -> bool:
        """Go backward through the model, after the loss has gone backward into the values of all runs.

        Args:
            share: what gradients are multiplied with: 1 / ranks where those of all ranks are averaged.

        Returns whether a second pass ran: no loss was given, or one that is no sum over documents.
        """
        calls, self._calls = self._calls, []
        ran_again = False
        for call in calls:
            gradient = torch.zeros_like(call.values) if call.values.grad is None else call.values.grad * share
            own = {"gradient": gradient.split(call.lengths)}
            _, found = delivered(self.hdp.group, own, _documents_of(call.planned))
            of_documents = {number: fields["gradient"] for number, fields in found.items()}
            gradients = [sums_of_rows(plan, of_documents) for plan in _of_last_stage(call.planned)]
            if call.applied is not None:
                scale, rest = _largest(gradients), list[Tensor]()
                for index, (rows, applied) in call.applied.items():
                    wanted = gradients[index]
                    wanted[rows] -= applied.to(wanted).reshape(wanted[rows].shape)
                    rest.append(wanted[rows])
                wrong, scale = self.hdp.group.max_of([_largest(rest), scale])
                if not wrong > 1e-5 * scale:
                    continue  # also where they are not numbers: a second pass would not make them so
            ran_again = True
            backward_from(call.planned, gradients, lambda micro: self._columns(micro)[:, : self._num_trained])
        return ran_again


def _of_last_stage(planned: PlannedBatch) -> list[MicroBatch]:
    """The micro-batches whose loss this rank computes."""
    return planned.micro_batches if planned.hdp.mesh.is_last_stage else []


def _documents_of(planned: PlannedBatch) -> list[int]:
    return sorted({number for plan in _of_last_stage(planned) for number in plan.documents})


def _largest(tensors: Sequence[Tensor]) -> float:
    return max((float(own.abs().max()) for own in tensors if own.numel()), default=0.0)


def delivered(
    group: RankGroup, own: Fields, asked: Sequence[int] | None = None
) -> tuple[int, dict[int, dict[str, Any]]]:
    """Fields of the sequences that this rank has ``asked`` for, by number, whoever has them. Every rank calls it.

    Sequences have numbers in rank order. Returns the number of this rank's first one, too. ``asked``: None: all.
    """
    told = all_gather_json([len(next(iter(own.values()))), asked], group.group, group.device)
    starts = [0, *itertools.accumulate(count for count, _ in told)]
    here = range(starts[group.rank], starts[group.rank + 1])
    parts = []
    for _, numbers in told:
        wanted = here if numbers is None else [number for number in numbers if number in here]
        packed = save({key: value.clone() for n in wanted for key, value in _named(own, n - here.start, str(n))})
        parts.append(torch.frombuffer(bytearray(packed), dtype=torch.uint8).to(group.device))
    counts = [int(row[group.rank]) for row in group.share([float(len(part)) for part in parts])]
    found: dict[int, dict[str, Any]] = {}
    for part in group.all_to_all(torch.cat(parts), [len(part) for part in parts], counts).split(counts):
        for key, values in load(part.cpu().numpy().tobytes()).items():
            number, name, *place = key.split("/")
            document = found.setdefault(int(number), {})
            if place:
                items = document.setdefault(name, [])
                items += [{} for _ in range(int(place[0]) + 1 - len(items))]
                items[int(place[0])][place[1]] = values
            else:
                document[name] = values.to(group.device)
    return here.start, dict(sorted(found.items()))


def _named(own: Fields, place: int, number: str) -> Iterator[tuple[str, Tensor]]:
    """What is packed of the sequence at a ``place``, by keys that begin with its ``number``."""
    for name, rows in own.items():
        if isinstance(rows[place], Tensor):
            yield f"{number}/{name}", rows[place]
        else:
            for item, given in enumerate(rows[place]):
                yield from ((f"{number}/{name}/{item}/{key}", value) for key, value in given.items())


def word_columns(model: nn.Module, temperature: float | None = 1.0, *, count: int = 4) -> Values:
    """``[T, count]``: log-probability, entropy, whether the label is the likeliest word, mean of logits.

    0 without a label. Fewer than four are the first ones.

    Args:
        temperature: None: the micro-batches' field ``number`` has it.
    """

    def columns(micro: Micro) -> Tensor:
        divisor = micro.number if temperature is None else temperature
        if count == 1:
            return micro.logprobs(model, temperature=divisor)[:, None]
        rest = count > IS_TOP1
        scores: Any = micro.logprobs(model, temperature=divisor, entropy=True, top=int(rest), mean_logits=rest)
        found = [scores.logprobs, scores.entropy]
        if rest:
            hit = (scores.top_words[:, 0] == micro.labels).to(scores.entropy)
            found += [hit, scores.mean_logits]
        return torch.stack(found[:count], dim=1) * (micro.labels != IGNORE_INDEX)[:, None]

    return columns


def value_columns(model: nn.Module) -> Values:
    """``[T, 1]``: the only number that a model for token classification gives each token."""

    def columns(micro: Micro) -> Tensor:
        logits: Tensor = model(**micro.inputs).logits[0, : micro.num_rows]
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    return columns


def resume_schedule(schedule: Any, num_steps: int) -> None:
    """Give a schedule of learning rates (``LambdaLR``) and its optimizer the rates after ``num_steps``."""
    schedule.last_epoch = num_steps - 1
    schedule.step()
