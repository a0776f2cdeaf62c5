"""Muon on shards: the momentum of a whole matrix is made orthogonal by one rank, and every rank updates its own part.

Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) needs whole matrices, while a rank has parts of
them (``runtime.optimizer.zero``). So the matrices are dealt out over the ranks by the operations that they take. An
update

1. adds the reduced gradients to the momentum, part by part, and puts what is to be orthogonalised in their place;
2. gathers these sums, as parameters are gathered;
3. lets each rank orthogonalise its matrices, and sends the results to those who hold the parts, as gradients are.

Matrices of the decoder's layers are updated so, the experts of a stack one by one; all other parameters get AdamW. 0.2
times the root of the longer side gives a step AdamW's size (Liu et al. 2025, https://arxiv.org/abs/2502.16982).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bytescale.runtime.group import RankGroup
from bytescale.runtime.optimizer.flat import Entry, FlatParameters

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic Newton-Schulz iteration, chosen for a steep slope at zero."""
NUM_ITERATIONS = 5
EPS = 1e-7


def is_hidden_matrix(name: str, parameter: Tensor) -> bool:
    """Whether Muon updates this parameter: a matrix, or a stack of matrices, in a numbered layer."""
    return parameter.dim() >= 2 and re.search(r"\.\d+\.", name) is not None


def orthogonalised(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """``[n, m]`` with singular values near 1 (between 0.7 and 1.2), by products in ``dtype``."""
    a, b, c = COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    found = (matrix.T if is_tall else matrix).to(dtype)
    found = found / found.norm().clamp(min=EPS)  # no singular value is above 1 then
    for _ in range(NUM_ITERATIONS):
        gram = found @ found.T
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.T if is_tall else found


class DealtMatrices:
    """The matrices of one ``FlatParameters``, each with the rank of ``group`` that orthogonalises it."""

    def __init__(self, parameters: FlatParameters, group: RankGroup) -> None:
        self.parameters = parameters
        self.group = group
        pairs = zip(parameters.entries, parameters.parameters, strict=True)
        entries = [entry for entry, parameter in pairs if is_hidden_matrix(entry.name, parameter)]
        self.owners = deal(entries, group.size)
        # A GPU multiplies BF16 fastest. Many CPUs compute it in software.
        self.dtype = torch.bfloat16 if group.device.type == "cuda" else parameters.master_dtype

    def orthogonalise(self) -> None:
        """Replace the sums in this rank's parts of the gradients by the parts of the orthogonalised matrices.

        The gradients of other parameters are undefined afterwards. Every rank of the group calls it.
        """
        buffer = self.parameters.gradients
        buckets = [buffer[self.parameters.held(bucket)] for bucket in self.parameters.buckets]
        for pending in [self.group.start_all_gather(bucket) for bucket in buckets]:
            pending.wait()
        for entry, owner in self.owners.items():
            matrices = buffer[entry.start : entry.stop].view(-1, *entry.shape[-2:])
            for matrix in matrices if owner == self.group.rank else ():
                matrix.copy_(orthogonalised(matrix, self.dtype)).mul_(0.2 * math.sqrt(max(matrix.shape)))
            if owner != self.group.rank:
                matrices.zero_()
        for pending in [self.group.start_reduce_scatter(bucket) for bucket in buckets]:
            pending.wait()


def deal(entries: Sequence[Entry], num_ranks: int) -> dict[Entry, int]:
    """Each entry's rank: the largest first, to the rank that has the fewest operations so far."""
    loads = [0] * num_ranks
    owners = {}
    for entry in sorted(entries, key=_operations, reverse=True):
        owners[entry] = loads.index(min(loads))
        loads[owners[entry]] += _operations(entry)
    return owners


class MuonOnShards(torch.optim.Optimizer):
    """Muon for the parameter groups whose ``muon`` is true, AdamW for the others.

    Both have states of the same names, for checkpoints: Muon's momentum is ``exp_avg``, its ``exp_avg_sq`` stays zero.
    """

    def __init__(self, groups: Any, *, matrices: DealtMatrices, momentum: float, **adam: Any) -> None:
        """``momentum``: Muon's, with Nesterov's look ahead. ``adam``: AdamW's; Muon takes its rate and decay."""
        super().__init__(groups, {"muon": False, **adam})
        self.matrices, self.momentum = matrices, momentum
        self._muon = [group for group in self.param_groups if group["muon"]]
        others = [group for group in self.param_groups if not group["muon"]]
        self._adam = torch.optim.AdamW(others, **adam) if others else None
        if self._adam is not None:
            self._adam.state = self.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # nobody computes the loss here
        """One update. The gradients are used up."""
        if self._adam is not None:
            self._adam.step()
        for group in self._muon:
            for piece in group["params"]:
                state = self.state[piece]
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float32)
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(piece), torch.zeros_like(piece)
                state["step"] += 1
                state["exp_avg"].lerp_(piece.grad, 1 - self.momentum)
                piece.grad.lerp_(state["exp_avg"], self.momentum)
        self.matrices.orthogonalise()
        for group in self._muon:
            for piece in group["params"]:
                piece.mul_(1 - group["lr"] * group["weight_decay"]).add_(piece.grad, alpha=-group["lr"])


def _operations(entry: Entry) -> int:
    *many, rows, columns = entry.shape
    return math.prod(many) * rows * columns * min(rows, columns)
