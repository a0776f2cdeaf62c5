"""slime's policy losses (``slime.utils.ppo_utils``) over ``HDP``: ``slime.py RANKS``, its sources in ``PYTHONPATH``.

They are put together as slime's ``policy_loss_function`` does, which itself needs Megatron: a mean over the tokens of
a rollout, and over rollouts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # the losses are compiled otherwise, for minutes

import torch
from slime.utils.ppo_utils import compute_cispo_loss, compute_gspo_kl, compute_policy_loss
from tests.rl.beside_plain import RESPONSES, Loss, Rollout, check_losses
from torch import Tensor


def loss_of(name: str) -> Loss:
    def loss(batch: Sequence[Rollout], rows: Sequence[Tensor]) -> Tensor:
        old, masks = [own["old"] for own in batch], [torch.ones_like(own["old"]) for own in batch]
        logprobs, advantages = torch.cat([*rows]), torch.cat([own["advantages"] for own in batch])
        ppo_kl = torch.cat(old) - logprobs
        if name == "gspo":
            ppo_kl = compute_gspo_kl([*rows], old, [*rows], masks)
        if name == "cispo":
            each, _ = compute_cispo_loss(ppo_kl, logprobs, advantages, 1.0, 0.2)
        else:
            each, _ = compute_policy_loss(ppo_kl, advantages, 0.2, 0.28, 1.05 if name == "dual clip" else None)
        means = [own.mean() for own in each.split([len(row) for row in rows])]
        return torch.stack(means).sum() / len(RESPONSES)

    return loss


def main(ranks: int) -> int:
    losses = {name: loss_of(name) for name in ("ppo", "dual clip", "gspo", "cispo")}
    return check_losses(ranks, losses, alone=[*losses])


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
