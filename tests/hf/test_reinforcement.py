"""What loops of reinforcement learning and distillation need: entropies, temperatures, value heads, second models."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn

import bytescale
from bytescale.common.errors import ConfigError, DataError, RankFailure
from bytescale.runtime.parking import Parking

from .support import documents, on_ranks, parameters_of, printed_loop, small_model

LENGTHS = [37, 1, 8, 3, 60]


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    return small_model("llama")


def whole_logits(model: nn.Module, document: dict[str, Any]) -> Tensor:
    return model(input_ids=document["tokens"][None]).logits[0]


def close(ours: Tensor, wanted: Tensor, atol: float = 1e-10) -> None:
    torch.testing.assert_close(ours, wanted, rtol=0, atol=atol)


@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.exhaustive), 3])
@pytest.mark.parametrize("name", ["llama", "granite"])
def test_entropy_temperature_and_best_words(name: str, num_ranks: int) -> None:
    """Values and gradients are those of all logits at once, in chunks of seven rows."""
    start = small_model(name)
    batch = documents(LENGTHS)
    reference = copy.deepcopy(start)
    wanted, loss = [], torch.zeros((), dtype=torch.float64)
    for document in batch:
        log_p = (whole_logits(reference, document) / 0.7).log_softmax(1)
        labels = document["tokens"].roll(-1)
        chosen = F.pad(log_p.gather(1, labels[:, None])[:-1, 0], (0, 1))
        entropy = -(log_p.exp() * log_p).sum(1)
        top = log_p.topk(3, dim=1).values
        words = log_p[:, [2, 5]]
        loss = loss + (document["weights"] * (chosen - 0.3 * entropy + top[:, 0] * words[:, 1])).sum()
        wanted.append(torch.cat([chosen[:, None], entropy[:, None], top, words], dim=1).detach())
    loss.backward()

    def work(group: Any, model: nn.Module) -> Any:
        hdp = bytescale.HDP(model, group, capacity_tokens=120 // num_ranks)
        hdp.adamw(lr=0.0)
        for micro in hdp.plan(batch):
            temperature = torch.full((micro.num_rows,), 0.7, dtype=torch.float64) if micro.index else 0.7
            asked = torch.tensor([[2, 5]]).expand(micro.num_rows, 2)
            s = micro.logprobs(model, temperature=temperature, entropy=True, top=3, words=asked, rows_at_a_time=7)
            each = s.logprobs - 0.3 * s.entropy + s.top_logprobs[:, 0] * s.word_logprobs[:, 1]
            (micro.weights * each).sum().backward()
            hdp.collect(micro, torch.cat([s.logprobs[:, None], s.entropy[:, None], s.top_logprobs, s.word_logprobs], 1))
        return hdp.collected(), hdp.gradients()

    for scores, gradients in on_ranks(num_ranks, start, work):
        for ours, theirs in zip(scores, wanted, strict=True):
            close(ours, theirs)
        for key, parameter in reference.named_parameters():
            close(gradients[key], parameter.grad)


class ActorCritic(nn.Module):
    """A wrapper without get_decoder, with a head of its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.pretrained_model = model
        self.v_head = nn.Linear(model.config.hidden_size, 1, dtype=torch.float64)

    def forward(self, **inputs: Any) -> Any:
        return self.pretrained_model(**inputs)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_value_head_beside_the_words(llama: nn.Module, num_ranks: int) -> None:
    torch.manual_seed(1)
    start = ActorCritic(copy.deepcopy(llama))
    batch = documents(LENGTHS)
    reference = copy.deepcopy(start)
    loss = torch.zeros((), dtype=torch.float64)
    for document in batch:
        out = reference(input_ids=document["tokens"][None], output_hidden_states=True)
        values = reference.v_head(out.hidden_states[-1][0])[:, 0]
        chosen = -F.cross_entropy(out.logits[0, :-1], document["tokens"][1:], reduction="none")
        loss = loss + (values - document["weights"]).square().sum() - chosen.sum()
    loss.backward()

    def work(group: Any, model: nn.Module) -> dict[str, Tensor]:
        hdp = bytescale.HDP(model, group, capacity_tokens=120 // num_ranks)
        hdp.adamw(lr=0.0)
        for micro in hdp.plan(batch):
            scores = micro.logprobs(model, hidden=True)
            values = model.v_head(scores.hidden)[:, 0]
            ((values - micro.weights).square().sum() - scores.logprobs.sum()).backward()
        return hdp.gradients()

    for gradients in on_ranks(num_ranks, start, work):
        for key, parameter in reference.named_parameters():
            close(gradients[key], parameter.grad, 1e-9)


def test_a_reference_and_switched_off_adapters_on_the_same_plan(llama: nn.Module) -> None:
    """Log-probabilities of a model of another family, and of the model without its adapters, in the same loop."""
    start = get_peft_model(copy.deepcopy(llama), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    teacher = small_model("qwen3", seed=3)
    batch = documents(LENGTHS)
    wanted = []
    with torch.no_grad():
        for document in batch:
            rows = []
            for model in (start, teacher, llama):
                log_p = whole_logits(model, document).log_softmax(1)
                rows.append(F.pad(log_p.gather(1, document["tokens"].roll(-1)[:, None])[:-1, 0], (0, 1)))
            wanted.append(torch.stack(rows, 1))

    def work(group: Any, model: nn.Module) -> list[Tensor]:
        hdp = bytescale.HDP(model, group, capacity_tokens=40)
        other = copy.deepcopy(teacher)
        hdp.attach(other)
        hdp.adamw(lr=0.0)
        for micro in hdp.plan(batch):
            theirs = micro.logprobs(other)
            with torch.no_grad(), model.disable_adapter():
                without = micro.logprobs(model)
            ours = micro.logprobs(model)
            assert not theirs.requires_grad
            (ours - theirs - without).sum().backward()
            with torch.no_grad():
                close(
                    other(**micro.inputs_for(other)).logits[0, : micro.num_rows].amax(1),
                    micro.logprobs(other, top=1).top_logprobs[:, 0]
                    + other(**micro.inputs_for(other)).logits[0, : micro.num_rows].logsumexp(1),
                )
            hdp.collect(micro, torch.stack([ours, theirs, without], 1))
        hdp.step()
        return hdp.collected()

    for scores in on_ranks(3, start, work):
        for ours, theirs in zip(scores, wanted, strict=True):
            close(ours, theirs)


def test_second_models_that_would_mean_something_else_are_refused(llama: nn.Module) -> None:
    hdp = bytescale.HDP(copy.deepcopy(llama), capacity_tokens=200)
    larger = small_model("llama", vocab_size=96)
    with pytest.raises(ConfigError, match="has 96 words, and the first one 67"):
        hdp.attach(larger)
    with pytest.raises(ConfigError, match="modules of the first one"):
        hdp.attach(hdp.model)
    hdp.attach(larger, same_tokenizer=True)
    (micro,) = hdp.plan(documents([5, 9]))
    assert micro.logprobs(larger).shape == (14,)
    with pytest.raises(ConfigError, match="attached for passes without"):
        larger(**micro.inputs_for(larger))
    with pytest.raises(ConfigError, match="not attached to it"):
        micro.logprobs(llama)
    with pytest.raises(DataError, match="The temperature is 0"):
        micro.logprobs(hdp.model, temperature=0)
    hdp.detach()
    assert larger.config._attn_implementation == "sdpa"

    others = [small_model("llama", seed=seed) for seed in range(2)]

    def different(group: Any, model: nn.Module) -> None:
        hdp = bytescale.HDP(model, group, capacity_tokens=40)
        with pytest.raises(RankFailure, match="the weights of a second model"):
            hdp.attach(others[group.rank()])

    on_ranks(2, llama, different)


def test_accumulation_options_of_a_step_and_skipped_steps(llama: nn.Module) -> None:
    """Three plans before one update; rates and betas of this step; what is not a number is skipped and told."""
    batches = [documents(LENGTHS[n:], n) for n in range(3)]
    total = sum(float(d["weights"].sum()) for batch in batches for d in batch)
    reference = copy.deepcopy(llama)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1.0)
    for step in range(2):
        optimizer.zero_grad()
        for document in (d for batch in batches for d in batch):
            losses = F.cross_entropy(whole_logits(reference, document)[:-1], document["tokens"][1:], reduction="none")
            ((document["weights"][:-1] * losses).sum() / total).backward()
        for group in optimizer.param_groups:
            group.update(lr=1e-3 * (step + 1), betas=(0.5 + step / 10, 0.9))
        optimizer.step()

    def work(group: Any, model: nn.Module) -> dict[str, Tensor]:
        hdp = bytescale.HDP(model, group, capacity_tokens=60)
        hdp.adamw(lr=1.0)
        for step in range(2):
            for batch in batches:
                for micro in hdp.plan(batch):
                    (micro.loss_sum(model) / total).backward()
            hdp.step(max_grad_norm=0, lr=1e-3 * (step + 1), betas=(0.5 + step / 10, 0.9))
        before = parameters_of(model)
        for micro in hdp.plan(batches[0]):
            (micro.loss_sum(model) * (float("nan") if group.rank() else 1.0)).backward()
        update = hdp.step(skip_nonfinite=True)
        assert (update.skipped, update.num_updates) == (True, 2)
        assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
        printed_loop(hdp, model, batches[0])
        assert not hdp.step(skip_nonfinite=True, lr=0.0).skipped
        return before

    for parameters in on_ranks(2, llama, work):
        for name, parameter in reference.named_parameters():
            close(parameters[name], parameter.detach(), 1e-8)


def test_sgd_has_no_betas(llama: nn.Module) -> None:
    hdp = bytescale.HDP(copy.deepcopy(llama), capacity_tokens=200)
    hdp.optimizer(torch.optim.SGD, lr=0.1)
    printed_loop(hdp, hdp.model, documents([5]))
    with pytest.raises(ConfigError, match="SGD has no option betas"):
        hdp.step(betas=(0.9, 0.9))


def test_scoring_may_hold_more_than_training(llama: nn.Module) -> None:
    def work(group: Any, model: nn.Module) -> tuple[int, int]:
        hdp = bytescale.HDP(model, group, capacity_tokens=20)
        with torch.no_grad():
            usual, large = hdp.plan(documents([60, 20, 9])), hdp.plan(documents([60, 20, 9]), capacity_tokens=100)
            for micro in large:
                hdp.collect(micro, micro.logprobs(model))
            assert [len(scores) for scores in hdp.collected()] == [60, 20, 9]
        return len(usual), len(large)

    (usual, large), *_ = on_ranks(3, llama, work)
    assert large < usual


@pytest.mark.parametrize("name", ["llama", "mixtral", "lora"])
def test_weights_are_streamed_as_files_have_them(name: str, tmp_path: Path) -> None:
    """The names and numbers of save_pretrained, of merged adapters, and of the experts that lie in one tensor here."""
    model = small_model("llama" if name == "lora" else name)
    if name == "lora":
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    hdp = bytescale.HDP(model, capacity_tokens=200)
    streamed = {key: value.clone() for key, value in hdp.weights(torch.float32)}
    merged = copy.deepcopy(model).merge_and_unload() if name == "lora" else model
    merged.to(torch.float32).save_pretrained(tmp_path)
    files = load_file(tmp_path / "model.safetensors")
    assert streamed.keys() == files.keys()
    for key, value in files.items():
        close(streamed[key], value, 1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_memory_is_given_back_and_taken_again(llama: nn.Module, dtype: torch.dtype) -> None:
    """Parked between two updates, weights, gradients and states go on as if nothing had happened."""
    ours, wanted = copy.deepcopy(llama).to(dtype), copy.deepcopy(llama).to(dtype)
    for model in (ours, wanted):
        hdp = bytescale.HDP(model, capacity_tokens=200)
        hdp.adamw(lr=1e-2)
        hdp.to("cpu")  # the model is there
        printed_loop(hdp, model, documents(LENGTHS))
        hdp.step()
        printed_loop(hdp, model, documents(LENGTHS))
        if model is ours:
            hdp.group.device = torch.device("cuda")  # what is on a CPU here is taken for a device's
            hdp.to("cpu")
            assert sum(p.untyped_storage().nbytes() for p in model.parameters()) == 0
            for refused in (hdp.step, lambda hdp=hdp: list(hdp.plan(documents([5]))), lambda hdp=hdp: hdp.weights()):
                with pytest.raises(ConfigError, match="of the model are in host memory"):
                    refused()
            hdp.to("cuda")
            hdp.group.device = torch.device("cpu")
        hdp.step()
    for a, b in zip(ours.parameters(), wanted.parameters(), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(ConfigError, match="cannot go to mps"):
        hdp.to("mps")


def test_parking_counts_shared_memory_once() -> None:
    whole = torch.arange(6.0)
    parking = Parking()
    parking.park("weights", [whole[:3], whole[3:], torch.zeros(0)])
    assert whole.untyped_storage().nbytes() == 0
    parking.fetch("weights")
    assert whole.tolist() == [0, 1, 2, 3, 4, 5]
