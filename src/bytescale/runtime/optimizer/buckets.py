"""The collectives of ZeRO-1, bucket by bucket, overlapped with compute.

::

    backward   head | layer 3 | layer 2 | layer 1 | layer 0 | embedding |            next step's forward
    reduce           bucket 4 | bucket 3 | bucket 2 | bucket 1 | | bucket 0 | update | embedding | layer 0 | layer 1
    gather                                                                    bucket 0 | bucket 1 | bucket 2 | ...

A bucket (``runtime.optimizer.flat``) is reduced, last to first, as soon as the step's last gradient in it is complete.
Updated parameters are gathered first to last, and the forward of a layer waits only for the parameters of that layer.
Both orders are the same on all ranks, whatever each has to compute. When a bucket is summed does not change its sums.

A rank starts to reduce only after its last point-to-point message: ``plan.last_message`` has the rule and the proof
that nothing hangs. Therefore:

* a rank whose last micro-batch holds whole sequences reduces during the backward of that micro-batch, layer by layer;
* every other rank, including one without micro-batches, posts all of these buckets after its last message;
* the first buckets (norms, replicas, routers, the embedding) are reduced at the end of the step.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from bytescale.common.errors import RankFailure
from bytescale.plan import RankPlan
from bytescale.plan.last_message import last_backward_is_silent
from bytescale.runtime.group import PendingCollective, RankGroup
from bytescale.runtime.optimizer.flat import Bucket, FlatParameters


class BucketCollectives:
    """One rank's reductions of all buckets, last to first, and its gathers of all buckets, first to last."""

    def __init__(self, parameters: FlatParameters, group: RankGroup) -> None:
        self.parameters = parameters
        self.group = group
        self._to_reduce = list(parameters.buckets)  # still to do in this step; the next one is at the end
        self._reducing: deque[tuple[Bucket, PendingCollective]] = deque()
        self._gathering: deque[tuple[Bucket, PendingCollective]] = deque()

    def reduce_from(self, start: int) -> None:
        """Start to reduce the buckets that begin at ``start`` or later and have not been started in this step."""
        while self._to_reduce and self._to_reduce[-1].start >= start:
            bucket = self._to_reduce.pop()
            pending = self.group.start_reduce_scatter(self.parameters.gradients[self.parameters.held(bucket)])
            self._reducing.append((bucket, pending))

    @property
    def reducing_from(self) -> float:
        """Where the gradients begin whose reduction has started in this step."""
        if len(self._to_reduce) == len(self.parameters.buckets):
            return math.inf
        return self._to_reduce[-1].stop if self._to_reduce else 0

    def reduced(self) -> Iterator[Bucket]:
        """Start the remaining reductions, then wait for and yield one bucket after another. Ends the step."""
        self.reduce_from(0)
        while self._reducing:
            bucket, pending = self._reducing.popleft()
            pending.wait()
            yield bucket
        self._to_reduce = list(self.parameters.buckets)

    def gather(self, bucket: Bucket) -> None:
        """Start to gather a bucket. All ranks take the buckets in order."""
        assert not self._gathering or self._gathering[-1][0].start < bucket.start, "parameters are gathered in order"
        held = self.parameters.values[self.parameters.held(bucket)]
        self._gathering.append((bucket, self.group.start_all_gather(held)))

    def wait_for_parameters(self, stop: int | None = None) -> None:
        """Wait until all parameters that lie before ``stop`` are gathered. None: until all parameters are."""
        while self._gathering and (stop is None or self._gathering[0][0].start < stop):
            self._gathering.popleft()[1].wait()


Chunk = tuple[nn.Module, Sequence[nn.Module]]
"""A part of the model, and its layers in order, whose parameters lie one after the other in the flat buffers.

Each layer is given the hidden states as its first argument, or as ``hidden_states`` where all have names. All other
modules run before or after the layers."""


class Overlap:
    """Hooks on a model's layers that start reductions during backward and make forward wait for parameters."""

    def __init__(self, collectives: BucketCollectives, chunk: Chunk, *, stage: int, in_steps: bool = True) -> None:
        """Hook the layers.

        Args:
            chunk: all of this stage.
            in_steps: whether ``begin_step`` comes before every step, and parameters are gathered during forward.
                Otherwise ``expect_last_backward`` comes before the last micro-batch, and nothing waits in forward.
        """
        self.collectives = collectives
        self.stage = stage
        self.gathers = in_steps
        self._num_micro_batches = 0
        self._num_forwards = 0  # in this step
        self._silent = False
        self._is_last = False
        """Whether the backward of the forward that runs now is the step's last one, and sends nothing."""
        self._hooks: list[RemovableHandle] = []
        model, layers = chunk
        if in_steps:
            self._hook_parameters(model, layers)
            self._hooks.append(model.register_forward_pre_hook(self._count))
        else:
            self._refuse_late_gradients()
        for layer in layers:
            place = collectives.parameters.extent(layer)
            if place is not None:
                hook = self._finishing_hook(place[0])
                self._hooks.append(layer.register_forward_pre_hook(hook, with_kwargs=True))

    def begin_step(self, rank_plan: RankPlan, overlaps: bool = True) -> None:
        self._num_micro_batches = len(rank_plan.micro_batches)
        self._num_forwards = 0
        self._silent, self._is_last = overlaps and last_backward_is_silent(rank_plan, self.stage), False

    def expect_last_backward(self, silent: bool) -> None:
        """The forwards that follow are those of the step's last micro-batch, whose backward sends nothing if silent."""
        self._is_last = silent

    def after_last_message(self) -> None:
        self._is_last = False
        self.collectives.reduce_from(self.collectives.parameters.late_stop)

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _hook_parameters(self, model: nn.Module, layers: Sequence[nn.Module]) -> None:
        extent = self.collectives.parameters.extent
        of_layers = [extent(layer) for layer in layers]
        whole = extent(model)
        # The late parameters come first in the buffer, then those of the modules that run before the layers.
        in_front = min([place[0] for place in of_layers if place] or [whole[1] if whole else 1])
        self._hooks.append(model.register_forward_pre_hook(self._waiting_hook(max(in_front, 1))))
        for layer, place in zip(layers, of_layers, strict=True):
            if place is not None:
                self._hooks.append(layer.register_forward_pre_hook(self._waiting_hook(place[1])))
        if layers and whole is not None:
            self._hooks.append(layers[-1].register_forward_hook(self._waiting_hook(whole[1])))

    def _count(self, *_: object) -> None:
        self._num_forwards += 1
        self._is_last = self._silent and self._num_forwards == self._num_micro_batches

    def _waiting_hook(self, stop: int) -> Callable[..., None]:
        return lambda *_: self.collectives.wait_for_parameters(stop)

    def _finishing_hook(self, start: int) -> Callable[..., None]:
        """A hook for a layer's forward that reduces the layer's gradients once the gradient of its input exists.

        By then all gradients of the layer's parameters are complete: the input's gradient depends on every operation of
        the layer, and autograd accumulates a parameter's gradient before it runs any other operation that is ready.
        """

        def forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._is_last:
                stream: Tensor = args[0] if args else kwargs["hidden_states"]
                if stream.requires_grad:
                    stream.register_hook(lambda _: self.collectives.reduce_from(start))

        return forward

    def _refuse_late_gradients(self) -> None:
        """Raise from a backward that adds to a gradient whose reduction has begun.

        The hooks of a parameter are in C++, where Python sees no cycle. So they keep nothing alive that has parameters.
        """
        parameters, collectives = self.collectives.parameters, weakref.ref(self.collectives)
        for parameter, entry in zip(parameters.parameters, parameters.entries, strict=True):

            def refuse(_: object, name: str = entry.name, stop: int = entry.stop) -> None:
                held = collectives()
                if held is not None and stop > held.reducing_from:
                    raise RankFailure(
                        f"parameter {name} got a gradient after its reduction had begun",
                        so="the sum over ranks would lack it",
                        fix="run the model once, forward and backward, in the last micro-batch of a batch that is "
                        "planned with last=True, or leave last=True out",
                    )

            self._hooks.append(parameter.register_post_accumulate_grad_hook(refuse))
