"""Tinker's own client trains and samples on ``bytescale serve``, beside a plain loop of transformers, peft and PyTorch.

The texts are Python's manual pages of modules, with a tokenizer that is trained on them. The model is small, with
random weights, in fp64. Every comparison prints its largest difference.
"""

from __future__ import annotations

import os
import pydoc
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peft
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

import tinker
from tinker import types

RANKS = int(sys.argv[1])
ADAM = {"learning_rate": 2e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.01}
CAPACITY, RANK, SEED, TOKEN = 288 // RANKS, 8, 3, "tml-of-this-test"
failures = []


def compare(what: str, own: Any, expected: Any, most: float) -> None:
    own, expected = torch.as_tensor(own, dtype=torch.float64), torch.as_tensor(expected, dtype=torch.float64)
    assert own.shape == expected.shape, (what, own.shape, expected.shape)
    distance = float(((own - expected).abs() / expected.abs().clamp(min=1.0)).max())
    good = distance <= most
    print(
        f"{RANKS} rank(s): {what}: largest difference {distance:.1e} (at most {most:.0e}){'' if good else ' FAILED'}",
        flush=True,
    )
    if not good:
        failures.append(what)


def texts() -> list[str]:
    """Foreign text: the manual pages of 24 modules, of very different lengths."""
    names = (
        "abc argparse array ast base64 bisect calendar cmd code codecs collections csv dis enum glob heapq hmac io "
        "json keyword locale math queue stat"
    )
    pages = [pydoc.plaintext.document(__import__(name)) for name in names.split()]
    return [page[: 60 + 37 * place] for place, page in enumerate(pages)]


def make_model(folder: Path, special: tuple[str, ...] = ()) -> Any:
    """A folder as a user has one, whose tokenizer knows ``special`` words. Returns the tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts(), trainers.BpeTrainer(vocab_size=600, special_tokens=["<end>", *special], initial_alphabet=alphabet)
    )
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    wrapped.save_pretrained(folder)
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=len(wrapped), hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, eos_token_id=0, bos_token_id=None,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(shape).double().save_pretrained(folder)
    return wrapped


@contextmanager
def serving(folder: Path, name: str = "small") -> Iterator[str]:
    """The address of a server on so many ranks, whose model has this name."""
    command = [
        sys.executable,
        "-m",
        "bytescale",
        "serve",
        str(folder),
        "--name",
        name,
        "--out",
        str(folder / "out"),
        "--port",
        "0",
    ]
    command += ["--ranks", str(RANKS), "--capacity_tokens", str(CAPACITY), "--dtype", "fp64", "--device", "cpu"]
    environment = {**os.environ, "BYTESCALE_SERVE_TOKEN": TOKEN}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield next(line for line in process.stdout if line.startswith("serving")).split()[-1]
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


class Plain:
    """The reference: a loop of PyTorch over one sequence at a time."""

    def __init__(self, folder: Path, rank: int = RANK, seed: int = SEED, **parts: bool) -> None:
        assert all(parts.values()), "every linear module has adapters here"
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        torch.manual_seed(seed)
        names = [name for name, module in base.named_modules() if isinstance(module, torch.nn.Linear)]
        config = peft.LoraConfig(r=rank, lora_alpha=32, target_modules=names)
        self.model = peft.get_peft_model(base, config, autocast_adapter_dtype=False)
        self.trained = [own for own in self.model.parameters() if own.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained)

    def logprobs(self, datum: types.Datum) -> torch.Tensor:
        targets = datum.loss_fn_inputs["target_tokens"].to_torch()
        logits = self.model(input_ids=torch.tensor([datum.model_input.to_ints()])).logits[0]
        return logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]

    def run(self, data: list[types.Datum], loss: str) -> float:
        total = 0.0
        for datum in data:
            given = {name: own.to_torch().double() for name, own in datum.loss_fn_inputs.items()}
            own = self.logprobs(datum)
            if loss == "cross_entropy":
                aim = own * given["weights"]
            else:
                ratio = (own - given["logprobs"]).exp()
                clipped = ratio.clamp(0.8, 1.2) if loss == "ppo" else ratio
                aim = torch.minimum(ratio * given["advantages"], clipped * given["advantages"])
            (-aim.sum()).backward()
            total -= float(aim.sum())
        return total

    def run_custom(self, data: list[types.Datum], loss: Any) -> float:
        """A loss of the client's, of the log-probabilities of all data."""
        total, _ = loss(data, [self.logprobs(datum) for datum in data])
        total.backward()
        return float(total)

    def step(self, adam: types.AdamParams | None = None) -> float:
        own = adam or types.AdamParams(**ADAM)
        options = {"lr": own.learning_rate, "betas": (own.beta1, own.beta2), "eps": own.eps}
        self.optimizer.param_groups[0].update(options, weight_decay=own.weight_decay)
        norm = float(torch.nn.utils.clip_grad_norm_(self.trained, 1e30))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm


def supervised(tokenizer: Any) -> list[types.Datum]:
    data = []
    for text in texts():
        tokens = tokenizer.encode(text)
        weights = [float(place >= len(tokens) // 4) for place in range(len(tokens) - 1)]
        inputs = {"target_tokens": tokens[1:], "weights": weights}
        data.append(types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs))
    return data


def rollouts(sampler: Any, tokenizer: Any) -> list[types.Datum]:
    """Four prompts with four samples each, whose reward is how often they have the letter e, less the group's mean."""
    futures = [
        sampler.sample(prompt=types.ModelInput.from_ints(tokenizer.encode(text[:60])), num_samples=4,
                       sampling_params=types.SamplingParams(max_tokens=20, temperature=1.0, seed=place))
        for place, text in enumerate(texts()[:4])
    ]  # fmt: skip
    data = []
    for text, future in zip(texts()[:4], futures, strict=True):
        prompt, sequences = tokenizer.encode(text[:60]), future.result().sequences
        rewards = torch.tensor([float(tokenizer.decode(own.tokens).count("e")) for own in sequences])
        for own, advantage in zip(sequences, (rewards - rewards.mean()).tolist(), strict=True):
            tokens, before = prompt + own.tokens, len(prompt) - 1
            inputs = {
                "target_tokens": tokens[1:],
                "logprobs": [0.0] * before + own.logprobs,
                "advantages": [0.0] * before + [advantage] * len(own.tokens),
            }
            data.append(types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs))
    return data


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer = make_model(folder)
        with serving(folder) as address:
            service = tinker.ServiceClient(base_url=address, api_key=TOKEN)
            client = service.create_lora_training_client(base_model="small", rank=RANK, seed=SEED).result()
            assert client.get_tokenizer().encode(texts()[3]) == tokenizer.encode(texts()[3])
            check(service, client, Plain(folder), tokenizer)
    print("FAILED: " + ", ".join(failures) if failures else f"{RANKS} rank(s): all as they should be", flush=True)
    return bool(failures)


def check(service: Any, client: Any, plain: Plain, tokenizer: Any) -> None:
    adam, data = types.AdamParams(**ADAM), supervised(tokenizer)
    lengths = [datum.model_input.length for datum in data]
    print(
        f"{RANKS} rank(s): {len(data)} texts of {min(lengths)} to {max(lengths)} tokens, {CAPACITY} tokens a rank",
        flush=True,
    )
    losses, norms = [], []
    for _ in range(4):
        passed, updated = client.forward_backward(data, "cross_entropy"), client.optim_step(adam)
        losses.append((passed.result().metrics["loss:sum"], plain.run(data, "cross_entropy")))
        norms.append((updated.result().metrics["grad_norm"], plain.step()))
    print("   losses:", " ".join(f"{own:.4f}" for own, _ in losses))
    compare("losses of four updates by cross_entropy", *zip(*losses, strict=True), 1e-10)
    compare("norms of gradients", *zip(*norms, strict=True), 1e-10)
    own = [row["logprobs"].to_torch() for row in client.forward(data, "cross_entropy").result().loss_fn_outputs]
    with torch.no_grad():
        compare("log-probabilities (fp32)", torch.cat(own), torch.cat([plain.logprobs(datum) for datum in data]), 1e-6)
    for loss in ("importance_sampling", "ppo"):
        sampler = client.save_weights_and_get_sampling_client()
        sampler = sampler.result() if hasattr(sampler, "result") else sampler
        drawn = rollouts(sampler, tokenizer)
        sampled = torch.cat([datum.loss_fn_inputs["logprobs"].to_torch() for datum in drawn])
        with torch.no_grad():
            exact = torch.cat([plain.logprobs(datum) for datum in drawn])
        compare("log-probabilities of samples (fp32)", sampled, torch.where(sampled == 0, sampled, exact.float()), 1e-6)
        losses = []
        for _ in range(3):  # the second and third are off-policy
            passed, updated = client.forward_backward(drawn, loss), client.optim_step(adam)
            losses.append((passed.result().metrics["loss:sum"], plain.run(drawn, loss)))
            updated.result()
            plain.step()
        print("   losses:", " ".join(f"{own:.4f}" for own, _ in losses))
        compare(f"losses of three updates by {loss}", *zip(*losses, strict=True), 1e-9)
    check_the_rest(service, client, plain, data)


def check_the_rest(service: Any, client: Any, plain: Plain, data: list[types.Datum]) -> None:
    """A loss of the client's, a batch in two parts that arrive in the wrong order, checkpoints, refusals."""
    adam = types.AdamParams(**ADAM)

    def squares(_: Any, rows: Any) -> Any:
        return sum((row**2).sum() for row in rows), {}

    result = client.forward_backward_custom(data, squares)
    client.optim_step(adam).result()
    loss = plain.run_custom(data, squares)
    plain.step()
    compare("a loss of the client's (forward_backward_custom, fp32)", result.result().metrics["loss:sum"], loss, 1e-6)
    many = [
        types.Datum(
            model_input=types.ModelInput.from_ints([place % 500, 7]),
            loss_fn_inputs={"target_tokens": [5, place % 300], "weights": [1.0, 0.5]},
        )
        for place in range(1030)
    ]
    passed, updated = client.forward_backward(many, "cross_entropy"), client.optim_step(adam)
    compare(
        "1030 sequences in two requests", passed.result().metrics["loss:sum"], plain.run(many, "cross_entropy"), 1e-6
    )
    compare("the norm of their gradients", updated.result().metrics["grad_norm"], plain.step(), 1e-5)
    path = client.save_state("kept").result().path
    twin = service.create_training_client_from_state_with_optimizer(path).result()
    assert twin.get_info().lora_rank == RANK
    losses = []
    for own in (client, twin):
        own.forward_backward(data, "cross_entropy").result()
        own.optim_step(adam).result()
        losses.append(own.forward(data, "cross_entropy").result().metrics["loss:sum"])
    compare("a client from a checkpoint, behind a further update", losses[1], losses[0], 1e-12)
    prompt = types.ModelInput.from_ints(data[5].model_input.to_ints())
    scores = service.create_sampling_client(base_model="small")
    scores = (scores.result() if hasattr(scores, "result") else scores).compute_logprobs(prompt).result()
    assert scores[0] is None
    assert len(scores) == prompt.length
    wrong = {
        "'dro'": lambda: client.forward_backward(data, "dro"),
        "../x": lambda: client.save_state("../x"),
        "exists": lambda: client.save_state("kept"),
        "'other'": lambda: service.create_lora_training_client(base_model="other"),
    }
    for cause, asked in wrong.items():
        answer = "nothing was refused"
        try:
            asked().result()
        except tinker.TinkerError as error:
            answer = str(error)
        print("   refused:", answer[:140].replace("\n", " "))
        if cause not in answer:
            failures.append(f"{cause}: {answer}")
    compare("the server goes on", client.forward(data, "cross_entropy").result().metrics["loss:sum"], losses[0], 1e-12)


if __name__ == "__main__":
    sys.exit(main())
