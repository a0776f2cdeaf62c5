"""``bytescale serve``: requests as clients of Tinker send them, against plain transformers, on one rank and on two."""

from __future__ import annotations

import copy
import http.client
import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from bytescale.cli.serve import answer_requests
from bytescale.common.errors import ConfigError
from bytescale.config.schema import Config, ParallelConfig, TrainerConfig
from bytescale.integrations.tinker.server import MOST_BYTES, TinkerServer
from bytescale.integrations.tinker.trainers import Trainers
from bytescale.parity import small_model
from bytescale.train.ranks import open_ranks
from tests.helpers.forks import run_forked

CAPACITY, ADAM = 32, {"learning_rate": 1e-2, "beta1": 0.8, "beta2": 0.9, "eps": 1e-8, "weight_decay": 0.05}
LORA = {"rank": 3, "seed": 5, "train_mlp": False}


class Client:
    """Sends JSON, and waits for futures."""

    def __init__(self, server: TinkerServer) -> None:
        self.server = server

    def raw(self, method: str, route: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.server_port, timeout=60)
        content = body if isinstance(body, bytes) else json.dumps(body)
        connection.request(method, f"/api/v1/{route}", content, {"Content-Type": "application/json", **headers})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())

    def post(self, route: str, **body: Any) -> Any:
        status, answer = self.raw("POST", route, body)
        assert status == 200, answer
        return answer

    def wait(self, route: str, **body: Any) -> Any:
        return self.result(self.post(route, **body)["request_id"])

    def result(self, number: str) -> Any:
        status, answer = self.raw("POST", "retrieve_future", {"request_id": number})
        assert status == 200, answer
        return answer

    def model(self, rank: int = LORA["rank"], place: int = 0, session: str = "") -> str:
        session = session or self.post("create_session", tags=[], user_metadata=None, sdk_version="0")["session_id"]
        lora = LORA | {"rank": rank}
        body = {"session_id": session, "model_seq_id": place, "base_model": "small", "lora_config": lora}
        return self.wait("create_model", **body)["model_id"]


def served(folder: Path, out: Path, work: Callable[[Client], Any], num_ranks: int = 1, token: str = "") -> Any:
    """What ``work`` returns for a client of a server on so many ranks."""

    def rank_of(rank: int) -> Any:
        torch.set_num_threads(1)
        parallel = ParallelConfig(ranks=num_ranks, capacity_tokens=CAPACITY)
        with open_ranks(Config(parallel=parallel, trainer=TrainerConfig(dtype="fp64", device="cpu"))) as ranks:
            trainers = Trainers(folder, out, ranks.world, ranks.dtype, capacity_tokens=CAPACITY)
            if rank:
                return answer_requests(trainers, None)
            server = TinkerServer(("127.0.0.1", 0), token, "small", CAPACITY * num_ranks, None)
            threading.Thread(target=server.serve_forever, daemon=True).start()

            def ask() -> Any:
                try:
                    return work(Client(server))
                finally:
                    with server.changed:
                        server.queue.append(("", {"do": "stop"}))
                        server.changed.notify_all()

            with ThreadPoolExecutor() as pool:
                answer = pool.submit(ask)
                answer_requests(trainers, server)
                return answer.result()

    return run_forked(num_ranks, rank_of, timeout_seconds=240)[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    small_model("qwen3").save_pretrained(path)
    return path


def data_of(lengths: tuple[int, ...], *, seed: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)
    data = []
    for length in lengths:
        tokens = torch.randint(2, 67, (length + 1,), generator=generator).tolist()
        numbers = torch.randn(3, length, generator=generator, dtype=torch.float64)
        numbers[0, : length // 3] = 0.0  # a prompt
        inputs = dict(zip(("weights", "advantages", "logprobs"), numbers.tolist(), strict=True))
        inputs["logprobs"] = [-4.0 + 0.3 * value for value in inputs["logprobs"]]
        inputs["target_tokens"] = tokens[1:]
        data.append({
            "model_input": {"chunks": [{"type": "encoded_text", "tokens": tokens[:-1]}]},
            "loss_fn_inputs": {name: {"data": own, "dtype": "float32", "shape": [length]} for name, own in inputs.items()},
        })  # fmt: skip
    return data


STEPS = [("cross_entropy", None, data_of((40, 7, 13), seed=0)), ("ppo", {"clip_low_threshold": 0.9}, data_of((9, 30), seed=1)),
         ("importance_sampling", None, data_of((11, 25), seed=2))]  # fmt: skip
"""A pass of each loss, and an update behind the first, and behind the other two together."""


def alone(folder: Path, lora: int) -> tuple[list[float], list[list[float]], dict[str, torch.Tensor]]:
    """Losses, log-probabilities of targets and trained weights of a plain loop of PyTorch."""
    from transformers import AutoModelForCausalLM

    model: nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    if lora:
        torch.manual_seed(LORA["seed"])
        names = ["q_proj", "k_proj", "v_proj", "o_proj", "lm_head"]
        config = peft.LoraConfig(r=lora, lora_alpha=32, target_modules=names)
        model = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    trained = {name: own for name, own in model.named_parameters() if own.requires_grad}
    optimizer = torch.optim.AdamW(
        trained.values(), lr=ADAM["learning_rate"], betas=(ADAM["beta1"], ADAM["beta2"]), eps=ADAM["eps"],
        weight_decay=ADAM["weight_decay"],
    )  # fmt: skip
    losses, rows = [], []
    for number, (name, config, data) in enumerate(STEPS):
        total = 0.0
        for datum in data:
            given = {key: own["data"] for key, own in datum["loss_fn_inputs"].items()}
            targets = torch.tensor(given.pop("target_tokens"))
            inputs = {key: torch.tensor(own, dtype=torch.float64) for key, own in given.items()}
            tokens = torch.tensor([datum["model_input"]["chunks"][0]["tokens"]])
            logprobs = model(input_ids=tokens).logits[0].log_softmax(-1)
            logprobs = logprobs.gather(-1, targets[:, None])[:, 0]
            ratio, gain = (logprobs - inputs["logprobs"]).exp(), inputs["advantages"]
            clipped = ratio.clamp(0.9, 1.2) if config else ratio
            aim = logprobs if name == "cross_entropy" else torch.minimum(ratio * gain, clipped * gain)
            loss = -(inputs["weights"] * aim).sum()
            loss.backward()
            total += loss.item()
            rows.append(logprobs.tolist())
        losses.append(total)
        if number != 1:
            if number:
                nn.utils.clip_grad_norm_(trained.values(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return losses, rows, {name: own.detach() for name, own in trained.items()}


def trained_by_client(client: Client, rank: int) -> tuple[list[float], list[list[float]], str, float]:
    """The same by requests, of which two arrive before one that is to run first."""
    model = client.model(rank)
    losses, rows, numbers = [], [], {}

    def send(place: int) -> None:
        seq, (name, config, data) = (1, 3, 4)[place], STEPS[place]
        given = {"data": data, "loss_fn": name, "loss_fn_config": config}
        body = {"model_id": model, "seq_id": seq, "forward_backward_input": given}
        numbers[place] = client.post("forward_backward", **body)["request_id"]
        assert client.post("forward_backward", **body)["request_id"] == numbers[place]  # a client tries again

    send(2)
    send(0)
    client.post("optim_step", model_id=model, seq_id=2, adam_params=ADAM)
    send(1)
    client.wait("optim_step", model_id=model, seq_id=5, adam_params=ADAM | {"grad_clip_norm": 0.5})
    for place in range(3):
        result = client.result(numbers[place])
        losses.append(result["metrics"]["loss:sum"])
        rows += [own["logprobs"]["data"] for own in result["loss_fn_outputs"]]
    path = client.wait("save_weights_for_sampler", model_id=model, seq_id=6, path="end")["path"]
    given = {"data": STEPS[0][2], "loss_fn": "cross_entropy"}
    last = client.wait("forward", model_id=model, seq_id=7, forward_input=given)["metrics"]["loss:sum"]
    return losses, rows, path, last


@pytest.mark.parametrize(
    ("num_ranks", "rank"), [pytest.param(1, 0, id="all weights"), (1, 3), *(
        pytest.param(2, rank, marks=pytest.mark.exhaustive) for rank in (0, 3))],
)  # fmt: skip
def test_losses_and_weights_are_those_of_a_plain_loop(num_ranks: int, rank: int, folder: Path, tmp_path: Path) -> None:
    """On two ranks, the first sequence is shared: it is longer than one holds."""
    lengths = [40] if num_ranks == 1 else []
    steps = [(n, c, [d for d in data if len(d["loss_fn_inputs"]["weights"]["data"]) not in lengths]) for n, c, data in STEPS]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{__name__}.STEPS", steps)
        losses, rows, weights = alone(folder, rank)
        own_losses, own_rows, path, _ = served(folder, tmp_path, lambda c: trained_by_client(c, rank), num_ranks)
    assert own_losses == pytest.approx(losses, rel=1e-11)
    for own, row in zip(own_rows, rows, strict=True):
        assert own == pytest.approx(row, abs=1e-10)
    model_id = path.split("/")[2]
    saved = load_file(next((tmp_path / model_id / "sampler_weights" / "end").glob("*model.safetensors")))
    for name, weight in weights.items():
        own_weight = saved[name.replace(".default", "")]
        torch.testing.assert_close(own_weight, weight, rtol=0, atol=1e-10)
