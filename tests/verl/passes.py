"""What ``make check-verl`` runs on one gloo rank and on two: verl's losses in one pass and in two, in fp64.

torchrun --nproc-per-node N passes.py OUT

Loss, metrics and gradients of one update are the same, for every policy loss of verl. Losses that are no sums over
sequences take a second pass.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from check import LENGTHS, make_model, our_engine, rollouts, worker
from tensordict import TensorDict
from torch import Tensor
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from verl.utils import tensordict_utils as tu
from verl.workers.config import ActorConfig, CriticConfig, PolicyLossConfig
from verl.workers.utils.losses import ppo_loss, sft_loss, value_loss

from bytescale.common.errors import ConfigError

TOLERANCE, WITH_A_SECOND_PASS = 1e-10, 1e-6
"""Llama's norms compute in fp32, so that the gradients of two backwards do not add up to those of one in fp64."""
OF_BATCH = ("clip_cov", "kl_cov", "geo_mean", "mean of sequences", "mean of ranks")
"""Means, correlations or largest ones of a batch's tokens: verl computes them of a micro-batch."""
LEFT_OUT = ("bypass_mode", "gdpo")
"""They need other fields of a batch."""
Loss = Callable[..., tuple[Tensor, dict[str, Any]]]


def policy_loss(mode: str, aggregation: str = "token-mean") -> Loss:
    policy = PolicyLossConfig(loss_mode=mode, clip_cov_lb=0.0, kl_cov_ratio=0.05, dro_beta=0.1)
    config = ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, policy_loss=policy, entropy_coeff=0.01,
        loss_agg_mode=aggregation, use_kl_loss=True, kl_loss_coef=0.1, clip_ratio=0.2,
    )  # fmt: skip
    return partial(ppo_loss, config=config)


def mean_of_sequences(
    model_output: dict[str, Tensor], data: TensorDict, dp_group: Any
) -> tuple[Tensor, dict[str, Any]]:
    """It depends on how many sequences are in a batch."""
    return torch.stack([own.mean() for own in model_output["log_probs"].unbind()]).mean(), {}


def mean_of_ranks(model_output: dict[str, Tensor], data: TensorDict, dp_group: Any) -> tuple[Tensor, dict[str, Any]]:
    """It asks the other ranks."""
    total = model_output["log_probs"].values().sum()
    of_all = total.detach().clone()
    dist.all_reduce(of_all, group=dp_group)
    return total * (1.0 + of_all / 1e3), {}


def of_prompts(model_output: dict[str, Tensor], data: TensorDict, dp_group: Any) -> tuple[Tensor, dict[str, Any]]:
    return len(data["uid"]) * torch.stack([own.values().sum() for own in model_output.values()]).sum(), {}


def batch() -> TensorDict:
    """In fp64, with log-probabilities of a reference."""
    data = rollouts(dist.get_rank(), 0)
    for name in ("old_log_probs", "advantages", "values", "returns"):
        data[name] = data[name].double()
    data["ref_log_prob"] = data["old_log_probs"] + 0.1 * data["returns"]
    tu.assign_non_tensor(data, global_token_num=LENGTHS, uid=[f"prompt {number}" for number in range(len(data))])
    return data


def gradients_of(made: Any, loss: Loss) -> tuple[list[float], dict[str, Tensor], int]:
    """Loss and metrics, gradients by name, and with how many passes."""
    engine, forwards = made.engine, [0]

    def count(*_: Any) -> None:
        forwards[0] += 1

    hook = engine.module.model.layers[0].register_forward_hook(count)

    def drawn_alike(**given: Any) -> Any:
        torch.manual_seed(0)  # clip_cov draws tokens
        return loss(**given)

    with engine.train_mode():
        found = engine.forward_backward_batch(batch(), drawn_alike)
        gradients = engine.hdp.gradients()
    hook.remove()
    numbers = [found["loss"], *(found["metrics"][name] for name in sorted(found["metrics"]))]
    flat = [float(getattr(value, "values", [value])[0]) for (value,) in numbers]
    return flat, gradients, forwards[0]


def compare(name: str, loss: Loss, once: Any, twice: Any) -> float:
    """The largest difference between one pass and two."""
    ours, gradients, forwards = gradients_of(once, loss)
    wanted, theirs, twice_forwards = gradients_of(twice, loss)
    expected = twice_forwards if name in OF_BATCH else twice_forwards // 2
    assert forwards == expected, f"{name}: {forwards} forwards, and {twice_forwards} in two passes"
    pairs = [*zip(map(torch.tensor, ours), map(torch.tensor, wanted), strict=True)]
    pairs += [(gradients[key], theirs[key]) for key in theirs]
    apart = [float((a - b).abs().max() / b.abs().max().clamp(min=1e-3)) for a, b in pairs]
    tolerance = TOLERANCE if forwards == twice_forwards // 2 else WITH_A_SECOND_PASS
    assert all(one < tolerance for one in apart), f"{name}: one pass and two differ by {apart}"
    assert all(float(gradient.abs().max()) > 0 for gradient in gradients.values()), f"{name}: gradients are zero"
    return max(apart)


def refusal(made: Any, loss: Loss) -> str:
    try:
        made.engine.forward_backward_batch(batch(), loss)
    except ConfigError as error:
        return str(error)
    raise AssertionError("a loss was called without the texts that it asks for")


def main() -> None:
    out = Path(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder = out / f"model of {dist.get_world_size()}"
    if dist.get_rank() == 0:
        make_model(folder)
    dist.barrier()
    kinds: dict[str, dict[str, Loss]] = {
        "ppo": {
            "sft": partial(sft_loss, config=None),
            **{mode: policy_loss(mode) for mode in POLICY_LOSS_REGISTRY if mode not in LEFT_OUT},
            "gspo of sequences": policy_loss("gspo", "seq-mean-token-mean"),
            "sums of sequences": policy_loss("vanilla", "seq-mean-token-sum-norm"),
        },
        "critic": {
            "critic": partial(
                value_loss, config=CriticConfig(strategy="fsdp", ppo_micro_batch_size_per_gpu=1, rollout_n=1)
            )
        },
    }
    ranks = dist.get_world_size()
    for pp, (kind, losses) in itertools.product(range(1, ranks + 1), kinds.items()):
        engine = our_engine(pp=pp)
        config = dataclasses.replace(engine, dtype="float64", max_token_len_per_gpu=64 * pp // ranks)
        once, twice = (worker(folder, kind, dataclasses.replace(config, one_pass=one)) for one in (True, False))
        others = {"mean of sequences": mean_of_sequences, "mean of ranks": mean_of_ranks} if kind == "ppo" else {}
        for name, loss in (losses | others).items():
            once.engine._one_pass = True  # after a loss that needed two
            worst = compare(name, loss, once, twice)
            if dist.get_rank() == 0:
                print(f"{name}, pp {pp}: one pass and two within {worst:.1e}", flush=True)
        once.engine._one_pass = True
        if pp == 1:  # of stages, the last one alone would tell, and the others wait for it
            assert "uid" in refusal(once, of_prompts)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
