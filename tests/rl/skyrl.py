"""SkyRL's policy losses, from its registry, over ``HDP``: ``skyrl.py RANKS``.

A loss is called as SkyRL's worker does, on padded log-probabilities of the responses of a mini-batch, whose advantages
``apply_loss_reduction_to_advantages_minibatch`` has scaled.
"""

from __future__ import annotations

import sys
import typing
from collections.abc import Sequence

import torch
import typing_extensions
from torch import Tensor

if sys.version_info < (3, 12):  # or pydantic refuses SkyRL's types: it takes this one alone there
    typing.TypedDict = typing_extensions.TypedDict

from skyrl.backends.skyrl_train.utils.ppo_utils import (
    PolicyLossRegistry,
    apply_loss_reduction_to_advantages_minibatch,
    compute_approx_kl,
)
from skyrl.train.config import AlgorithmConfig, ClipCovConfig
from tests.rl.beside_plain import Loss, Rollout, check_losses, mask_of, padded, rollouts

SUMS = ("regular", "dual_clip", "sapo", "gspo", "cispo", "dppo", "rollout_is", "cross_entropy", "importance_sampling")
UNUSUAL = ("sapo, token_mean", "gspo, token_mean")
"""SkyRL warns of them."""
COUPLED = ("clip_cov", "kl_cov")


def loss_of(name: str, reduction: str) -> Loss:
    """Of a batch, or of one rollout of it: advantages are scaled for the whole batch."""
    config = AlgorithmConfig(policy_loss_type=name, loss_reduction=reduction, clip_ratio_c=1.05)
    config.clip_cov = ClipCovConfig(clip_ratio=0.3, clip_cov_lb=-9.0, clip_cov_ub=9.0)  # of so few tokens, some
    whole = rollouts()
    scaled = apply_loss_reduction_to_advantages_minibatch(
        padded([own["advantages"] for own in whole]), mask_of([own["old"] for own in whole]), reduction, 1, 100
    )
    by_text = {tuple(own["tokens"].tolist()): scaled[place] for place, own in enumerate(whole)}

    def loss(batch: Sequence[Rollout], rows: Sequence[Tensor]) -> Tensor:
        torch.manual_seed(0)  # clip_cov draws tokens
        size = max(map(len, rows))
        advantages = torch.stack([by_text[tuple(own["tokens"].tolist())][:size] for own in batch])
        old, mask = padded([own["old"] for own in batch]), mask_of(rows)
        function = PolicyLossRegistry.get(name)
        total, _ = function(padded(rows), old, advantages, config=config, loss_mask=mask, rollout_logprobs=old)
        reference = padded([own["reference"] for own in batch])
        return total + config.kl_loss_coef * (compute_approx_kl(padded(rows), reference, mask, "k3") * mask).sum()

    return loss


def main(ranks: int) -> int:
    losses = {f"{name}, {kind}": loss_of(name, kind) for name in SUMS for kind in ("token_mean", "sequence_mean")}
    losses = {key: own for key, own in losses.items() if key not in UNUSUAL}
    coupled = {name: loss_of(name, "token_mean") for name in COUPLED}
    return check_losses(ranks, losses | coupled, alone=[*losses])


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
