"""ZeRO-1 over all HDP ranks (paper section 5.1): each rank keeps the optimizer state of one slice of the flat buffer.

Ranks of one HDP group hold the same parameters: all of the model, or a pipeline stage's, or a tensor-parallel part.

A step is: reduce-scatter the gradient sums, agree on the global norm, update the own slice in fp32, all-gather the
parameters. No collective lies inside forward or backward, hence ranks may run any number of micro-batches.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bytescale.config import OptimizerConfig
from bytescale.runtime.flat import FlatParameters
from bytescale.runtime.mesh import Mesh
from bytescale.runtime.replicas import TiedHead, sum_replicas

_SQUARES_AT_A_TIME = 2**22


class ShardedAdamW:
    """AdamW (decoupled weight decay on matrices) whose states and master weights are sharded over the HDP group."""

    def __init__(
        self, parameters: FlatParameters, config: OptimizerConfig, mesh: Mesh, tied_head: TiedHead | None = None
    ) -> None:
        """``tied_head``: where the embedding is used on the first stage and on the last."""
        self.parameters = parameters
        self.config = config
        self.mesh = mesh
        self.hdp = hdp = mesh.hdp
        self.tied_head = tied_head
        own = parameters.shard(parameters.values, hdp.rank)
        # With fp32 parameters the master weights are the parameters themselves.
        same_dtype = own.dtype == parameters.master_dtype
        self.master = own if same_dtype else own.to(parameters.master_dtype)
        self.master.grad = torch.zeros_like(self.master)
        self._adam = torch.optim.AdamW(
            [self.master],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=0.0,  # applied in `update`, to the slice's matrices only
            fused=True,
        )
        start = hdp.rank * parameters.shard_size
        self._num_decayed = min(max(parameters.num_decayed - start, 0), parameters.shard_size)
        self._counted = _slices_by_replicas(parameters, start)

    def reduce_gradients(self) -> float:
        """Sum gradients over ranks; returns this rank's share of the squared norm: every parameter counts once."""
        if self.tied_head is not None:
            self.tied_head.bring_gradient_home()
        sum_replicas(self.parameters, self.mesh.tp)
        shard = self.hdp.reduce_scatter(self.parameters.gradients)
        self.master.grad = shard
        return sum(_sum_of_squares(shard[own]) / replicas for own, replicas in self._counted)

    def update(self, learning_rate: float, grad_norm: float) -> None:
        """One AdamW update with gradients scaled so that their global norm is at most ``clip_grad_norm``."""
        assert self.master.grad is not None, "update() before reduce_gradients()"
        clip = self.config.clip_grad_norm
        if clip > 0 and grad_norm > clip:
            self.master.grad.mul_(clip / (grad_norm + 1e-6))
        with torch.no_grad():
            self.master[: self._num_decayed].mul_(1.0 - learning_rate * self.config.weight_decay)
        for group in self._adam.param_groups:
            group["lr"] = learning_rate
        self._adam.step()
        self._publish()

    def states(self) -> dict[str, Tensor]:
        """This rank's slices ``[shard_size]``: master weights and both moments, to be read or filled in place."""
        state = self._adam.state[self.master]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=self.master.device)
            state["exp_avg"] = torch.zeros_like(self.master)
            state["exp_avg_sq"] = torch.zeros_like(self.master)
        return {"master": self.master.data, "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}

    def restore(self, num_updates: int) -> None:
        """Call after ``states()`` have been filled in place: sets the update count and publishes the parameters."""
        self.states()
        self._adam.state[self.master]["step"].fill_(num_updates)
        self._publish()

    def _publish(self) -> None:
        own = self.parameters.shard(self.parameters.values, self.hdp.rank)
        if own.data_ptr() != self.master.data_ptr():
            own.copy_(self.master)
        self.hdp.all_gather(self.parameters.values, own)
        if self.tied_head is not None:
            self.tied_head.lend()


def _sum_of_squares(values: Tensor) -> float:
    """In fp64, some at a time: whole, the two copies would be as large as all states of the optimizer."""
    total = torch.zeros((), dtype=torch.float64, device=values.device)
    for piece in values.split(_SQUARES_AT_A_TIME):
        total += piece.double().square().sum()
    return float(total)


def _slices_by_replicas(parameters: FlatParameters, start: int) -> list[tuple[slice, int]]:
    """The slice that begins at ``start``, in pieces of parameters with equally many replicas."""
    pieces: list[tuple[slice, int]] = []
    for entry in parameters.entries:
        low = max(entry.start - start, 0)
        high = min(entry.stop - start, parameters.shard_size)
        if low >= high:
            continue
        if pieces and pieces[-1][1] == entry.cut.replicas:
            low = pieces.pop()[0].start  # what lies between two parameters is zero
        pieces.append((slice(low, high), entry.cut.replicas))
    return pieces
