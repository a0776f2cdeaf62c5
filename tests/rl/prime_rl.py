"""prime-rl's ``compute_loss`` over ``HDP``: ``prime_rl.py RANKS``, with prime-rl's sources in ``PYTHONPATH``.

It is called as prime-rl's trainer does, on the log-probability of each token of whole rollouts, of any number of them
at once: each component is divided by the number of its tokens in the global batch.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import torch
from prime_rl.configs.trainer import DefaultLossConfig, IPOLossConfig
from prime_rl.trainer.rl.loss import compute_loss, setup_rl_loss_fn
from tests.rl.beside_plain import WORDS, Loss, Rollout, check_losses, rollouts
from torch import Tensor


def loss_of(config: DefaultLossConfig | IPOLossConfig, *, mixed: bool) -> Loss:
    """``mixed``: with distillation towards a reference, and cross-entropy on prompts."""
    function = setup_rl_loss_fn(config)
    tokens = sum(len(own["old"]) for own in rollouts())
    prompts = sum(int(own["prompt"]) - 1 for own in rollouts())

    def loss(batch: Sequence[Rollout], rows: Sequence[Tensor]) -> Tensor:
        whole = [_behind(own, row, -math.log(WORDS)) for own, row in zip(batch, rows, strict=True)]
        masks = [_behind(own, torch.ones(len(own["old"]))) for own in batch]
        in_prompt = [1.0 - own for own in masks]
        for own in in_prompt:
            own[0] = 0.0
        total, _ = compute_loss(
            trainer_logprobs=whole,
            inference_logprobs=[_behind(own, own["old"]) for own in batch],
            ref_logprobs=[_behind(own, own["reference"]) for own in batch] if mixed else None,
            advantages=[_behind(own, own["advantages"]) for own in batch],
            loss_mask=[own > 0 for own in masks],
            rl_weights=[0.5 * own for own in masks] if mixed else None,
            ce_weights=in_prompt if mixed else None,
            ref_kl_weights=[2.0 * own for own in masks] if mixed else None,
            rl_loss_fn=function,
            rl_scale=tokens,
            ce_scale=prompts,
            ref_kl_scale=tokens,
        )
        return total

    return loss


def _behind(own: Rollout, row: Tensor, before: float = 0.0) -> Tensor:
    """``[S]``: numbers of the response behind those of the prompt."""
    return torch.cat([torch.full((int(own["prompt"]),), before, dtype=torch.float64), row.double()])


def main(ranks: int) -> int:
    near = {"dppo_mask_low": 0.005, "dppo_mask_high": 0.005}  # so that some tokens are masked
    losses = {
        "default": loss_of(DefaultLossConfig(), mixed=False),
        "default, some masked": loss_of(DefaultLossConfig(**near), mixed=False),
        "ipo": loss_of(IPOLossConfig(ipo_threshold=0.005), mixed=False),
        "default, ref_kl and ce": loss_of(DefaultLossConfig(**near), mixed=True),
    }
    return check_losses(ranks, losses, alone=[*losses])


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
