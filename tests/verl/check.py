"""What ``make check-verl`` runs on two gloo ranks and on four: verl's own worker and losses on the engine bytescale.

torchrun --nproc-per-node N check.py OUT

The bodies of verl's test_actor_engine and test_per_tensor_generator, on CPUs; and updates of SFT, PPO, GSPO and a
critic, beside a plain model with the same losses, one sequence after the other, gradients averaged as FSDP does, and
beside verl's own FSDP engine (PyTorch's FSDP2, batches packed by its token budget).
"""

from __future__ import annotations

import copy
import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("VERL_PLATFORM", "cpu")
os.environ["VERL_ENGINE_DEVICE"] = "cuda"  # for the registry alone: verl has its FSDP engine for accelerators only

import torch
import torch.distributed as dist
import verl.utils.model
from tensordict import TensorDict
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, LlamaConfig, LlamaForCausalLM
from verl.checkpoint_engine.delta_sync.sparse_gather import gather_slot_entries_to_rank0
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import (
    ActorConfig,
    CriticConfig,
    EngineConfig,
    EngineRouterReplayConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    PolicyLossConfig,
)
from verl.workers.engine_workers import TrainingWorker, TrainingWorkerConfig
from verl.workers.engine_workers_tinker import TinkerTrainingWorker
from verl.workers.utils.losses import ppo_loss, sft_loss, value_loss

from bytescale.common.errors import ConfigError
from bytescale.integrations.verl import BytescaleEngineConfig

WORDS, LR, CLIP, UPDATES = 64, 1e-2, 0.5, 10
FIRST, NEAR = 1e-5, 3.0
"""Relative, of fp32 with sums in another order: the first update of ours from others. AdamW makes more of it, as much
for others as for ours: over all updates, ours is at most as many times as far from fp64 as the farther of them."""
MESHES = {2: [(1, 1), (2, 1), (1, 2)], 4: [(2, 2), (1, 2)]}
"""By the number of ranks, how many of them share matrices and how many layers (tp, pp)."""
PROMPTS, RESPONSES = (3, 9, 2, 5), (40, 4, 17, 2)
FSDP_ENGINE: dict[str, Any] = {
    "strategy": "fsdp2", "model_dtype": "fp32", "dtype": "float32", "use_torch_compile": False,
    "mixed_precision": {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
}  # fmt: skip
LENGTHS = [prompt + response for prompt, response in zip(PROMPTS, RESPONSES, strict=True)]


def make_model(folder: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def rollouts(rank: int, step: int) -> TensorDict:
    """Recorded rollouts of one rank: nested sequences of very unequal lengths, and padded numbers of the responses."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    longest, size, ranks = max(RESPONSES), len(PROMPTS), dist.get_world_size()
    ids, mask, prompts, responses = [], [], [], []
    padded = {
        name: torch.zeros(size, longest)
        for name in ("response_mask", "old_log_probs", "advantages", "values", "returns")
    }
    for number, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        tokens = torch.randint(1, WORDS, (prompt + response,), generator=generator)
        ids.append(tokens)
        prompts.append(tokens[:prompt])
        responses.append(tokens[prompt:])
        mask.append(torch.cat([torch.zeros(prompt), torch.ones(response)]).long())
        padded["response_mask"][number, :response] = 1
        padded["old_log_probs"][number, :response] = -4.1 + 0.2 * torch.randn(response, generator=generator)
        padded["advantages"][number, :response] = float(torch.randn((), generator=generator))
        padded["values"][number, :response] = 0.1 * torch.randn(response, generator=generator)
        padded["returns"][number, :response] = torch.randn(response, generator=generator)

    def nested(parts: list[Tensor]) -> Tensor:
        return torch.nested.as_nested_tensor(parts, layout=torch.jagged)

    data = tu.get_tensordict(
        tensor_dict={
            "input_ids": nested(ids),
            "position_ids": nested([torch.arange(len(own)) for own in ids]),
            "loss_mask": nested(mask),
            "prompts": nested(prompts),
            "responses": nested(responses),
            "attention_mask": nested([torch.ones_like(own) for own in ids]),
            **padded,
        },
        non_tensor_dict={
            "temperature": 0.8,
            "calculate_entropy": True,
            "global_batch_size": size * ranks,
            "max_response_len": longest,
        },
    )
    data["response_mask"] = data["response_mask"].bool()
    return data


def our_engine(tp: int = 1, pp: int = 1) -> BytescaleEngineConfig:
    budget = {"max_token_len_per_gpu": 32 * tp * pp, "infer_max_token_len_per_gpu": 64 * tp * pp}
    return BytescaleEngineConfig(dtype="float32", tp=tp, pp=pp, **budget)


def fsdp_engine() -> FSDPEngineConfig:
    """verl's own engine, two micro-batches a rank: its budget has to hold the longest sequence."""
    budget = {"max_token_len_per_gpu": max(LENGTHS), "infer_max_token_len_per_gpu": max(LENGTHS)}
    return FSDPEngineConfig(**FSDP_ENGINE, **budget)


def value_model(local_path: str, torch_dtype: torch.dtype, model_config: Any, trust_remote_code: bool) -> Any:
    """verl's ``load_valuehead_model`` without flash_attention_2, which it insists on and which needs a GPU."""
    return AutoModelForTokenClassification.from_pretrained(
        local_path, dtype=torch_dtype, config=model_config, attn_implementation="sdpa"
    )


verl.utils.model.load_valuehead_model = value_model


def worker(folder: Path, kind: str, engine: EngineConfig, cls: Any = TrainingWorker, **of_model: Any) -> Any:
    model = HFModelConfig(
        path=str(folder), load_tokenizer=False, use_remove_padding=True, enable_gradient_checkpointing=False,
        override_config={"attn_implementation": "sdpa"}, **of_model,
    )  # fmt: skip
    optimizer = FSDPOptimizerConfig(lr=LR, weight_decay=0.01, total_training_steps=100, clip_grad=CLIP)
    made = cls(
        TrainingWorkerConfig(
            model_type="value_model" if kind == "critic" else "language_model",
            model_config=model,
            engine_config=engine,
            optimizer_config=optimizer,
            checkpoint_config=CheckpointConfig(),
            profiler_config=None,
        )
    )
    made.reset()
    return made


def loss_of(kind: str) -> Any:
    if kind == "sft":
        return partial(sft_loss, config=None)
    if kind == "critic":
        return partial(value_loss, config=CriticConfig(strategy="fsdp", ppo_micro_batch_size_per_gpu=1, rollout_n=1))
    policy = PolicyLossConfig(loss_mode="gspo" if kind == "gspo" else "vanilla")
    aggregation = "seq-mean-token-mean" if kind == "gspo" else "token-mean"
    config = ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, policy_loss=policy, entropy_coeff=0.01,
        loss_agg_mode=aggregation, use_kl_loss=False, clip_ratio=0.2,
    )  # fmt: skip
    return partial(ppo_loss, config=config)


class Plain:
    """The same model and loss without any parallelism: this rank's sequences, gradients averaged over ranks."""

    def __init__(self, model: torch.nn.Module, kind: str) -> None:
        self.model, self.kind, self.loss = model.train(), kind, loss_of(kind)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01)

    def outputs(self, data: TensorDict) -> dict[str, Tensor]:
        columns: dict[str, list[Tensor]] = {"log_probs": [], "entropy": [], "values": []}
        for tokens in data["input_ids"].unbind():
            logits = self.model(tokens[None]).logits[0]
            if self.kind == "critic":
                columns["values"].append(logits[:, 0])
                continue
            log_p = (logits / data["temperature"]).log_softmax(1)
            chosen = log_p[:-1].gather(1, tokens[1:, None])[:, 0]
            columns["log_probs"].append(torch.nn.functional.pad(chosen, (0, 1)))
            columns["entropy"].append(-(log_p.exp() * log_p).sum(1))
        offsets = data["input_ids"].offsets()
        return {
            name: torch.nested.nested_tensor_from_jagged(torch.cat(parts), offsets)
            for name, parts in columns.items()
            if parts
        }

    def update(self, data: TensorDict) -> tuple[float, float]:
        self.optimizer.zero_grad()
        return self.backward(data), self.step()

    def backward(self, data: TensorDict) -> float:
        """Add this rank's gradients. Returns the mean loss of all ranks."""
        ranks = dist.get_world_size()
        num_tokens = data["loss_mask"].sum()
        dist.all_reduce(num_tokens)
        tu.assign_non_tensor(data, batch_num_tokens=num_tokens.item(), dp_size=ranks)
        loss, _ = self.loss(model_output=self.outputs(data), data=data, dp_group=dist.group.WORLD)
        loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return float(total) / ranks

    def step(self) -> float:
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        return float(norm)


class Worker:
    """verl's worker, which runs an engine. Updates as ``Plain`` makes them."""

    def __init__(self, folder: Path, kind: str, engine: EngineConfig) -> None:
        self.worker = worker(folder, kind, engine)
        self.worker.set_loss_fn(loss_of(kind))

    def update(self, data: TensorDict) -> tuple[float, float]:
        tu.assign_non_tensor(data, global_token_num=LENGTHS, update_lr_scheduler=True)
        metrics = tu.get(self.worker.train_batch(data), "metrics")
        return metrics["loss"], metrics["grad_norm"]


def compare(kind: str, folder: Path, out: Path, mesh: tuple[int, int]) -> str:
    """Ten updates beside the plain model in fp32 and fp64, and beside verl's FSDP engine, from the same weights."""
    made = Worker(folder, kind, our_engine(*mesh))
    model = made.worker.engine.module
    same, whole = out / kind, dict(made.worker.engine.hdp.weights())
    if dist.get_rank() == 0:
        model.save_pretrained(same, state_dict=whole)
    dist.barrier()
    cls = AutoModelForTokenClassification if kind == "critic" else AutoModelForCausalLM
    models = [
        cls.from_pretrained(same, config=copy.deepcopy(model.config), attn_implementation="sdpa", dtype=dtype)
        for dtype in (torch.float32, torch.float64)
    ]
    plain, exact = (Plain(own, kind) for own in models)
    sides = {"ours": made, "a plain model": plain, "verl's FSDP engine": Worker(same, kind, fsdp_engine())}
    apart: dict[str, list[float]] = {name: [] for name in sides}
    for step in range(UPDATES):
        data = rollouts(dist.get_rank(), step)
        wanted = exact.update(data.clone())
        found = {name: side.update(data.clone()) for name, side in sides.items()}
        for name, numbers in found.items():
            apart[name].append(max(abs(a - b) / max(abs(b), 1e-3) for a, b in zip(numbers, wanted, strict=True)))
        for name, numbers in found.items() if step == 0 else ():
            for own, other in zip(found["ours"], numbers, strict=True):
                differ = f"{kind}: the first loss or norm is {own}, and not {other} as that of {name}"
                assert abs(own - other) <= FIRST * max(abs(other), 1e-3), differ
    worst = {name: max(every) for name, every in apart.items()}
    limit = NEAR * max(value for name, value in worst.items() if name != "ours")
    assert worst["ours"] < limit + 1e-6, f"{kind}: losses or norms of ours are far from fp64: {worst}"
    from_fp64 = ", ".join(f"{value:.1e} ({name})" for name, value in worst.items())
    return (
        f"{kind}, (tp, pp) {mesh}: losses and gradient norms of {UPDATES} updates are those of fp64 within {from_fp64}"
    )


def actor_engine(folder: Path, out: Path, mesh: tuple[int, int]) -> str:
    """verl's test_actor_engine: inference, training, and a checkpoint that goes on exactly; and weights by name."""
    made, name_of_mesh = worker(folder, "ppo", our_engine(*mesh)), f"{mesh[0]}-{mesh[1]}"
    data = rollouts(dist.get_rank(), 0)
    tu.assign_non_tensor(data, global_token_num=LENGTHS, compute_loss=False)
    output = made.infer_batch(data.clone())
    reference = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        wanted = Plain(reference, "ppo").outputs(data)
    for name in ("log_probs", "entropy"):
        for ours, theirs, mask in zip(
            output[name].unbind(), wanted[name].unbind(), data["loss_mask"].unbind(), strict=True
        ):
            rows = mask.roll(-1).bool()
            rows[-1] = False
            torch.testing.assert_close(ours[rows], theirs[rows], rtol=1e-4, atol=1e-4)
    made.set_loss_fn(loss_of("ppo"))

    def train(steps: range) -> list[float]:
        found = []
        for step in steps:
            data = rollouts(dist.get_rank(), step)
            tu.assign_non_tensor(data, global_token_num=LENGTHS, update_lr_scheduler=True)
            found.append(tu.get(made.train_batch(data), "metrics")["loss"])
        return found

    train(range(2))
    made.save_checkpoint(str(out / f"actor-{name_of_mesh}"), None, 2)
    ahead = train(range(2, 4))
    made.load_checkpoint(str(out / f"actor-{name_of_mesh}"))
    assert train(range(2, 4)) == ahead, "an update after a restore differs"
    made.save_checkpoint(str(out / f"last-{name_of_mesh}"), None, 4)
    stream, adapter = made.engine.get_per_tensor_param()
    saved = AutoModelForCausalLM.from_pretrained(out / f"last-{name_of_mesh}/huggingface").state_dict()
    assert adapter is None
    for name, tensor in stream:
        assert torch.equal(saved.pop(name), tensor), f"{name} was saved with other values"
    assert not saved, saved.keys()
    return f"actor, (tp, pp) {mesh}: inference, training, checkpoint, saved model and weights by name"


def tinker_worker(folder: Path) -> str:
    """verl's worker behind servers of Tinker: gradients of several passes, and an optimizer that each step sets."""
    made = worker(folder, "ppo", replace(our_engine(), dtype="float64"), TinkerTrainingWorker)
    made.set_loss_fn(loss_of("ppo"))
    plain = Plain(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64), "ppo")
    apart = dict.fromkeys(("losses", "log-probabilities", "norms", "weights"), 0.0)

    def compare(what: str, own: Any, wanted: Any) -> None:
        own, wanted = (torch.as_tensor(value, dtype=torch.float64).detach() for value in (own, wanted))
        apart[what] = max(apart[what], float((own - wanted).abs().max() / wanted.abs().max().clamp(min=1.0)))

    for update in range(3):
        made.optimizer_zero_grad()
        plain.optimizer.zero_grad()
        for part in range(2):
            data = rollouts(dist.get_rank(), 2 * update + part)
            tu.assign_non_tensor(data, global_token_num=LENGTHS)
            wanted, loss = plain.outputs(data)["log_probs"], plain.backward(data.clone())
            found = made.forward_backward(data)
            compare("losses", tu.get(found, "metrics")["loss"], loss)
            for own, other in zip(found["log_probs"].unbind(), wanted.unbind(), strict=True):
                compare("log-probabilities", own[:-1], other[:-1])
        options = {"lr": 1e-3 * (1 + update), "eps": 1e-6, "weight_decay": 0.1 * update}
        plain.optimizer.param_groups[0].update(options)
        compare("norms", made.optimizer_step(options)["grad_norm"], plain.step())
    weights = dict(made.engine.hdp.weights())
    for name, parameter in plain.model.named_parameters():
        compare("weights", weights[name], parameter)
    told = ", ".join(f"{what} {far:.0e}" for what, far in apart.items())
    assert apart.pop("losses") < 1e-6, told  # verl tells them in fp32
    assert max(apart.values()) < 1e-10, told
    return f"verl's Tinker worker: of six passes and three updates in fp64, {told}"


def changed_weights(folder: Path, mesh: tuple[int, int]) -> str:
    """What verl's checkpoint engine for deltas asks for: a receiver has the weights of the trainer bit for bit."""
    made = worker(folder, "ppo", our_engine(*mesh))
    made.set_loss_fn(loss_of("ppo"))
    engine, is_first, bits = made.engine, dist.get_rank() == 0, torch.int16
    receiver = {name: value.to(torch.bfloat16) for name, value in engine.get_per_tensor_param()[0]}
    engine.prime_delta_snapshots()
    total = sum(value.numel() for value in receiver.values())
    kept = sum(copy.numel() for copy in engine._delta_shard_snap.values())
    assert abs(kept * dist.get_world_size() - total) <= len(receiver) * dist.get_world_size(), (kept, total)
    changed = 0
    for step in range(3):
        data = rollouts(dist.get_rank(), step)
        tu.assign_non_tensor(data, global_token_num=LENGTHS, update_lr_scheduler=True)
        for group in engine.optimizer.param_groups:
            group["lr"] = 1e-5
        made.train_batch(data)
        left_out: Any = None
        for slots, dtype, counts, positions, values, group in engine.get_per_tensor_param_delta_shard()[0]:
            ((name, shape),) = slots
            assert (dtype, tuple(shape)) == ("bfloat16", tuple(receiver[name].shape))
            gathered = gather_slot_entries_to_rank0(positions, values, counts, group=group)
            if is_first:
                ((positions, values),) = gathered
                changed += len(positions)
                if len(positions):
                    place = int(positions[0])
                    left_out = receiver[name].view(-1), place, receiver[name].view(-1)[place].clone()
                receiver[name].view(-1)[positions] = values
        wanted = {name: value.to(torch.bfloat16).view(bits) for name, value in engine.get_per_tensor_param()[0]}
        if is_first:
            assert all(torch.equal(receiver[name].view(bits), value) for name, value in wanted.items())
            flat, place, former = left_out  # the comparison can fail: a value that is left out
            new, flat[place] = flat[place].clone(), former
            assert not all(torch.equal(receiver[name].view(bits), value) for name, value in wanted.items())
            flat[place] = new
    share = f"{changed / 3 / total:.0%} of the values in an update"
    return f"changed weights, (tp, pp) {mesh}: {share}, shares of each rank, bit for bit"


def refused(folder: Path) -> str:
    """What needs all layers on each rank, before a model is loaded."""
    routes = replace(our_engine(pp=2), router_replay=EngineRouterReplayConfig(mode="R3"))
    for engine, of_model, what in (
        (routes, {}, "engine.router_replay.mode = 'R3' with tp = 1, pp = 2"),
        (our_engine(pp=2), {"lora_rank": 4}, "odel.lora_rank = 4 with tp = 1, pp = 2"),
        (our_engine(tp=2), {"lora_rank": 4}, "odel.lora_rank = 4 with tp = 2, pp = 1"),
    ):
        told = ""
        try:
            worker(folder, "ppo", engine, **of_model)
        except ConfigError as error:
            told = str(error)
        assert what in told, f"{what} was not refused: {told}"
    return "routes on stages, and adapters where ranks share the model, are refused"


def main() -> None:
    out = Path(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder = out / "model"
    if dist.get_rank() == 0:
        make_model(folder)
    dist.barrier()
    for kind in sys.argv[2:] or ("sft", "ppo", "gspo", "critic"):
        for mesh in MESHES[dist.get_world_size()]:
            told = compare(kind, folder, out, mesh)
            if dist.get_rank() == 0:
                print(told, flush=True)
    meshes = MESHES[dist.get_world_size()]
    checks = [partial(actor_engine, folder, out, mesh) for mesh in meshes]
    checks += [partial(changed_weights, folder, mesh) for mesh in meshes]
    for check in (*checks, partial(tinker_worker, folder), partial(refused, folder)):
        told = check()
        if dist.get_rank() == 0:
            print(told, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
