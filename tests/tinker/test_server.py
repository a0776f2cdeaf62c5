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
from tests.helpers.forks import run_forked
from tokenizers import Tokenizer, models
from torch import nn
from transformers import PreTrainedTokenizerFast

from bytescale.cli.serve import answer_requests
from bytescale.common.errors import ConfigError
from bytescale.config.schema import Config, ParallelConfig, TrainerConfig
from bytescale.integrations.tinker.server import MOST_BYTES, TinkerServer
from bytescale.integrations.tinker.trainers import Trainers, _drawn
from bytescale.parity import small_model
from bytescale.train.ranks import open_ranks

CAPACITY, ADAM = 32, {"learning_rate": 1e-2, "beta1": 0.8, "beta2": 0.9, "eps": 1e-6, "weight_decay": 0.05}
LORA = {"rank": 3, "seed": 5, "train_mlp": False}


class Client:
    """Sends JSON, and waits for futures."""

    def __init__(self, server: TinkerServer) -> None:
        self.server = server

    def raw(self, method: str, route: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.server_port, timeout=60)
        content = body if isinstance(body, bytes | None) else json.dumps(body)
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
            server = TinkerServer(("127.0.0.1", 0), token, out, "small", CAPACITY * num_ranks)
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
            "loss_fn_inputs": {name: {"data": own, "shape": [length]} for name, own in inputs.items()},
        })  # fmt: skip
    return data


STEPS = [
    ("cross_entropy", None, data_of((40, 7, 13), seed=0)),
    ("ppo", {"clip_low_threshold": 0.9}, data_of((9, 30), seed=1)),
    ("importance_sampling", None, data_of((11, 25), seed=2)),
]
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


def trained_by_client(client: Client, rank: int) -> tuple[list[float], list[list[float]], str]:
    """The same by requests, which are all sent before their results are asked for."""
    model = client.model(rank)
    losses, rows, numbers = [], [], {}

    def send(place: int) -> None:
        seq, (name, config, data) = (1, 3, 4)[place], STEPS[place]
        given = {"data": data, "loss_fn": name, "loss_fn_config": config}
        body = {"model_id": model, "seq_id": seq, "forward_backward_input": given}
        numbers[place] = client.post("forward_backward", **body)["request_id"]
        assert client.post("forward_backward", **body)["request_id"] == numbers[place]  # a client tries again

    send(0)
    client.post("optim_step", model_id=model, seq_id=2, adam_params=ADAM)
    send(1)
    send(2)
    client.wait("optim_step", model_id=model, seq_id=5, adam_params=ADAM | {"grad_clip_norm": 0.5})
    for place in range(3):
        result = client.result(numbers[place])
        losses.append(result["metrics"]["loss:sum"])
        rows += [own["logprobs"]["data"] for own in result["loss_fn_outputs"]]
    path = client.wait("save_weights_for_sampler", model_id=model, seq_id=6, path="end")["path"]
    given = {"data": STEPS[0][2], "loss_fn": "cross_entropy"}
    last = client.wait("forward", model_id=model, seq_id=7, forward_input=given)["loss_fn_outputs"][-1]["logprobs"][
        "data"
    ]
    prompt, params = {"chunks": given["data"][-1]["model_input"]["chunks"]}, {"max_tokens": 1}
    sample = {"model_path": path, "prompt": prompt, "sampling_params": params, "prompt_logprobs": True}
    scores = client.wait("asample", **sample)["prompt_logprobs"]
    assert scores[1:] == pytest.approx(last[:-1], abs=1e-12)  # of the weights that were just written
    return losses, rows, path


@pytest.mark.parametrize(
    ("num_ranks", "rank"), [pytest.param(1, 0, id="all weights"), (1, 3), *(
        pytest.param(2, rank, marks=pytest.mark.exhaustive) for rank in (0, 3))],
)  # fmt: skip
def test_losses_and_weights_are_those_of_a_plain_loop(num_ranks: int, rank: int, folder: Path, tmp_path: Path) -> None:
    """On two ranks, the first sequence is shared: it is longer than one holds."""
    lengths = [40] if num_ranks == 1 else []
    steps = [
        (n, c, [d for d in data if len(d["loss_fn_inputs"]["weights"]["data"]) not in lengths]) for n, c, data in STEPS
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{__name__}.STEPS", steps)
        losses, rows, weights = alone(folder, rank)
        own_losses, own_rows, path = served(folder, tmp_path, lambda c: trained_by_client(c, rank), num_ranks)
    assert own_losses == pytest.approx(losses, rel=1e-11)
    for own, row in zip(own_rows, rows, strict=True):
        assert own == pytest.approx(row, abs=1e-10)
    model_id = path.split("/")[2]
    saved = load_file(next((tmp_path / model_id / "sampler_weights" / "end").glob("*model.safetensors")))
    for name, weight in weights.items():
        own_weight = saved[name.replace(".default", "")]
        torch.testing.assert_close(own_weight, weight, rtol=0, atol=1e-10)


def used_by_two_clients(client: Client) -> dict[str, Any]:
    """Two models whose requests alternate, checkpoints, and samples."""
    session = client.post("create_session", tags=[], user_metadata=None, sdk_version="0")["session_id"]
    models = [client.model(rank, place, session) for place, rank in enumerate((3, 0))]
    data, found = {"data": data_of((9, 20), seed=4), "loss_fn": "cross_entropy"}, {}

    def loss(model: str) -> float:
        return client.wait("forward", model_id=model, forward_input=data)["metrics"]["loss:sum"]

    def step(*models: str) -> None:
        for model in models:
            client.wait("forward_backward", model_id=model, forward_backward_input=data)
        for model in models:
            client.wait("optim_step", model_id=model, adam_params=ADAM)

    step(*models)
    step(models[0])
    saved = client.wait("save_weights", model_id=models[0], path="later")["path"]
    unnamed = client.wait("save_weights_for_sampler", model_id=models[0])["sampling_session_id"]
    found["at the save"] = loss(models[0]), loss(models[1])
    twins = [
        client.wait("load_weights", session_id=session, model_seq_id=2 + place, path=saved, optimizer=keeps)["model_id"]
        for place, keeps in enumerate((True, False))
    ]
    found["loaded"] = [loss(twin) for twin in twins]
    found["weights"] = client.post("weights_info", tinker_path=saved)
    found["info"] = client.post("get_info", model_id=twins[1])
    step(*twins, models[0])
    found["behind a further update"] = [loss(model) for model in (models[0], *twins)]
    fresh = client.model(3, 9, session)
    client.wait("load_weights", model_id=fresh, path=saved, optimizer=False, seq_id=1)
    step(fresh)
    found["without states"] = loss(fresh)
    prompt = {"chunks": [{"tokens": [5, 6, 7]}, {"tokens": [8]}]}
    params = {"max_tokens": 8, "seed": 11}
    asked = [(1, {"temperature": 0.0}), (3, {"top_k": 9}), (1, {"stop": [9]})]
    asked += [asked[1], (3, {"top_k": 9, "seed": 12})]
    numbers = []
    for place, (count, more) in enumerate(asked):
        body = {"prompt": prompt, "num_samples": count, "sampling_params": params | more, "prompt_logprobs": True}
        numbers.append(client.post("asample", sampling_session_id=unnamed, seq_id=place, **body)["request_id"])
    found["samples"] = [client.result(number) for number in numbers]
    base = {"base_model": "small", "prompt": {"chunks": [{"tokens": [5]}]}}
    found["of the folder"] = client.wait("asample", **base, sampling_params={"max_tokens": 4, "temperature": 0.0})
    client.wait("unload_model", model_id=models[0])
    found["unloaded"] = client.wait("forward", model_id=models[0], forward_input=data)
    found["again"] = (
        client.wait("save_weights", model_id=twins[0], path="x"),
        client.wait("save_weights", model_id=twins[0], path="x"),
    )
    for word in (10**6, -1):
        for what in ("tokens", "targets"):
            own = data_of((9,), seed=4)[0]
            inputs = own["model_input"]["chunks"][0]["tokens"], own["loss_fn_inputs"]["target_tokens"]["data"]
            inputs[what == "targets"][-1] = word
            wrong = {"data": [own], "loss_fn": "cross_entropy"}
            body = {"model_id": twins[0], "forward_backward_input": wrong}
            found[f"no word: {word} in {what}"] = client.wait("forward_backward", **body)
    base |= {"sampling_params": {"max_tokens": 2}}
    with client.server.changed:  # so that they run together
        prompts = [{"chunks": [{"tokens": [own]}]} for own in (5, 900, 6)]
        numbers = [client.server.answer("POST", "asample", base | {"prompt": own})["request_id"] for own in prompts]
    found["together"] = [client.result(number) for number in numbers]
    found["too long"] = client.wait(
        "forward", model_id=twins[0], forward_input=data | {"data": data_of((900,), seed=0)}
    )
    return found


def test_clients_do_not_see_each_other_and_continue_from_checkpoints(folder: Path, tmp_path: Path) -> None:
    found = served(folder, tmp_path, used_by_two_clients)
    assert found["loaded"] == pytest.approx([found["at the save"][0]] * 2, rel=1e-12)
    assert found["at the save"][0] != pytest.approx(found["at the save"][1], rel=1e-3)
    trained, twin, reset = found["behind a further update"]
    assert twin == pytest.approx(trained, rel=1e-12)
    assert reset == pytest.approx(found["without states"], rel=1e-12)
    assert reset != pytest.approx(trained, rel=1e-6)
    assert found["info"]["lora_rank"] == found["weights"]["lora_rank"] == 3
    assert found["info"]["is_lora"]
    good, bad, best = found["together"]
    assert len(good["sequences"]) == len(best["sequences"]) == 1
    assert "900" in bad["error"]
    wrong = [("unloaded", "is not there"), ("too long", "900")]
    for key, cause in wrong + [(key, key.split()[2]) for key in found if "no word" in key]:
        assert found[key]["category"] == "user"
        assert cause in found[key]["error"]
    assert "path" in found["again"][0]
    assert "exists" in found["again"][1]["error"]
    check_samples(folder, tmp_path, found)


def check_samples(folder: Path, out: Path, found: dict[str, Any]) -> None:
    """Log-probabilities are those of the saved weights, and without a temperature the likeliest tokens are drawn."""
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    row = found["of the folder"]["sequences"][0]["tokens"]
    with torch.no_grad():
        expected = base.generate(torch.tensor([[5]]), max_new_tokens=4, do_sample=False)[0, 1:].tolist()
        assert row == expected[: len(row)]
        adapters = next(out.glob("*/sampler_weights/unnamed-*"))
        model = peft.PeftModel.from_pretrained(copy.deepcopy(base), adapters, autocast_adapter_dtype=False)
        likeliest, many, ended, again, other = found["samples"]
        greedy = model.generate(input_ids=torch.tensor([[5, 6, 7, 8]]), max_new_tokens=8, do_sample=False)[
            0, 4:
        ].tolist()
        own = likeliest["sequences"][0]["tokens"]
        assert own == greedy[: len(own)]
        assert len(many["sequences"]) == 3
        assert again == many
        assert [own["tokens"] for own in other["sequences"]] != [own["tokens"] for own in many["sequences"]]
        assert len({tuple(sequence["tokens"]) for sequence in many["sequences"]}) > 1
        for result in found["samples"]:
            for sequence in result["sequences"]:
                tokens = torch.tensor([5, 6, 7, 8, *sequence["tokens"]])
                scores = model(input_ids=tokens[None]).logits[0, :-1].log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
                assert sequence["logprobs"] == pytest.approx(scores[3:].tolist(), abs=1e-10)
                assert result["prompt_logprobs"][1:] == pytest.approx(scores[:3].tolist(), abs=1e-10)
                assert sequence["stop_reason"] == ("length" if len(sequence["tokens"]) == 8 else "stop")
        ends = [base.generation_config.eos_token_id, 9]
        assert all(end not in sequence["tokens"][:-1] for sequence in ended["sequences"] for end in ends[1:])


def test_a_text_ends_a_sample_at_the_token_that_completes_it() -> None:
    """Each of a batch by itself; a text may lie across tokens, and the model's own end is one, too."""
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(67)}, unk_token="w0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    request = {"num_samples": 3, "max_tokens": 12, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "seed": 4, "stop": []}

    def drawn(stop: list[Any], own_ends: list[int]) -> list[tuple[list[int], str]]:
        given = {"input_ids": torch.tensor([[5, 6]])}
        return _drawn(model, request | {"stop": stop}, given, own_ends, lambda: tokenizer)

    model = small_model("qwen3").eval()
    rows = [row for row, _ in drawn([], [])]
    assert [len(row) for row in rows] == [12] * 3
    text, own_end = tokenizer.decode(rows[0][3:5]), rows[1][6]
    found = drawn([text, "not there"], [own_end])
    assert (found[0][1], found[1][1]) == ("stop", "stop")
    for (row, reason), whole in zip(found, rows, strict=True):
        ended = [text in tokenizer.decode(whole[:size]) or own_end in whole[:size] for size in range(1, 13)]
        assert (row, reason) == ((whole[: ended.index(True) + 1], "stop") if any(ended) else (whole, "length"))


@pytest.mark.exhaustive
def test_two_ranks_draw_and_score_as_one_does(folder: Path, tmp_path: Path) -> None:
    one = served(folder, tmp_path / "one", used_by_two_clients)
    two = served(folder, tmp_path / "two", used_by_two_clients, 2)
    for key in ("at the save", "loaded", "behind a further update"):
        assert two[key] == pytest.approx(one[key], rel=1e-12)
    for own, result in zip(two["samples"], one["samples"], strict=True):
        for sequence, other in zip(own["sequences"], result["sequences"], strict=True):
            assert sequence["tokens"] == other["tokens"]
            assert sequence["logprobs"] == pytest.approx(other["logprobs"], abs=1e-10)


GOOD = {"data": data_of((4,), seed=0), "loss_fn": "cross_entropy"}
INPUTS = GOOD["data"][0]["loss_fn_inputs"]


def bad_passes() -> list[tuple[Any, str]]:
    def with_inputs(**inputs: Any) -> dict[str, Any]:
        return GOOD | {"data": [GOOD["data"][0] | {"loss_fn_inputs": INPUTS | inputs}]}

    def with_chunks(*chunks: Any) -> dict[str, Any]:
        return GOOD | {"data": [GOOD["data"][0] | {"model_input": {"chunks": list(chunks)}}]}

    return [
        (GOOD | {"loss_fn": "dro"}, "'dro'"),
        (GOOD | {"loss_fn": []}, "[]"),
        (GOOD | {"loss_fn_config": {"beta": 0.1}}, "beta"),
        (GOOD | {"loss_fn": "ppo", "loss_fn_config": {"clip_low_threshold": "x"}}, "clip_low_threshold"),
        (with_inputs(logprobs=None) | {"loss_fn": "ppo"}, "logprobs"),
        (GOOD | {"data": []}, "data"),
        (GOOD | {"data": 3}, "form"),
        (GOOD | {"data": [5]}, "loss_fn_inputs"),
        (with_inputs(weights={"data": [1.0]}), "1 numbers for 4 tokens"),
        (with_inputs(weights={"data": [float("nan")] * 4}), "weights"),
        (with_inputs(weights={"data": ["1"] * 4}), "weights"),
        (with_inputs(target_tokens={"data": [1.5] * 4}), "target_tokens"),
        (with_inputs(target_tokens={"data": [[1, 2]] * 4, "shape": [4, 2]}), "target_tokens"),
        (with_inputs(target_tokens={"data": [1] * 8, "shape": [4, 2]}), "target_tokens"),
        (with_inputs(target_tokens={"data": [1], "sparse_crow_indices": [0, 1]}), "target_tokens"),
        (with_chunks({"type": "image", "data": "", "format": "png"}), "image"),
        (with_chunks({"tokens": []}), "tokens"),
        (with_chunks(7), "form"),
        ("x", "forward_backward_input"),
    ]  # fmt: skip


def refused(client: Client) -> list[tuple[str, int, str, int, str]]:
    """Of each request that has to be refused: case, status and message, and what was expected. The server goes on."""
    model = client.model()
    session = model.split(":")[0]
    work = {"model_id": model}
    cases: list[tuple[int, str, tuple[Any, ...], dict[str, str]]] = [
        (400, cause, ("POST", "forward_backward", work | {"seq_id": 1 + place, "forward_backward_input": given}), {})
        for place, (given, cause) in enumerate(bad_passes())
    ]
    lora = {"session_id": session, "base_model": "small", "lora_config": {"rank": 2}}
    sample = {"base_model": "small", "prompt": {"chunks": [{"tokens": [5]}]}, "sampling_params": {"max_tokens": 2}}
    cases += [
        (404, "forward_backward_x", ("POST", "forward_backward_x", {}), {}),
        (404, "../", ("GET", "../../etc/passwd"), {}),
        (404, "DELETE", ("DELETE", f"training_runs/{model}", {}), {}),
        (404, "nobody", ("POST", "optim_step", {"model_id": "nobody", "adam_params": ADAM}), {}),
        (404, "nobody", ("POST", "create_model", lora | {"session_id": "nobody"}), {}),
        (404, "nobody", ("GET", "samplers/nobody"), {}),
        (410, "nothing", ("POST", "retrieve_future", {"request_id": "nothing"}), {}),
        (400, "other", ("POST", "create_model", lora | {"base_model": "other"}), {}),
        (400, "rank", ("POST", "create_model", lora | {"lora_config": {"rank": -1}}), {}),
        (400, "dimuon", ("POST", "create_model", lora | {"optimizer_config": {"type": "dimuon"}}), {}),
        (400, "adam_params", ("POST", "optim_step", work), {}),
        (400, "beta1", ("POST", "optim_step", work | {"adam_params": ADAM | {"beta1": 1.0}}), {}),
        (400, "eps", ("POST", "optim_step", work | {"adam_params": ADAM | {"eps": True}}), {}),
        (400, "../x", ("POST", "save_weights", work | {"path": "../x"}), {}),
        (400, ".hidden", ("POST", "save_weights", work | {"path": ".hidden"}), {}),
        (400, "a/b", ("POST", "save_weights_for_sampler", work | {"path": "a/b"}), {}),
        (400, "inflight", ("POST", "save_weights_for_sampler", work | {"kind": "inflight"}), {}),
        (400, "overwrite", ("POST", "save_weights", work | {"path": "x", "overwrite": True}), {}),
        (400, "model_role", ("POST", "create_model", {"model_role": "critic"}), {}),
        (404, "nothing", ("POST", "weights_info", {"tinker_path": "tinker://nothing/weights/x"}), {}),
        (400, "the name '..'", ("POST", "load_weights", work | {"path": "tinker://../weights/x"}), {}),
        (400, "the name '..'", ("POST", "load_weights", work | {"path": "tinker://a/weights/.."}), {}),
        (400, "/etc/passwd", ("POST", "load_weights", work | {"path": "/etc/passwd"}), {}),
        (400, "stop", ("POST", "asample", sample | {"sampling_params": {"stop": ["x"]}}), {}),
        (400, "max_tokens", ("POST", "asample", sample | {"sampling_params": {"max_tokens": 10**6}}), {}),
        (400, "num_samples", ("POST", "asample", sample | {"num_samples": 10**9}), {}),
        (400, "0 tokens", ("POST", "asample", sample | {"prompt": {"chunks": []}}), {}),
        (400, "topk_prompt_logprobs", ("POST", "asample", sample | {"topk_prompt_logprobs": 5}), {}),
        (400, "form", ("POST", "optim_step", b"{"), {}),
        (400, "request", ("POST", "optim_step", b"[]"), {}),
        (400, "form", ("POST", "optim_step", b"[" * 10**5), {}),
        (415, "text/plain", ("POST", "optim_step", b"{}"), {"Content-Type": "text/plain"}),
        (400, "tinker", ("POST", "forward_backward", b"\xff"), {"Content-Type": "application/x-protobuf"}),
        (411, "encoded", ("POST", "optim_step", b"{}"), {"Content-Encoding": "zstd"}),
        (411, "length", ("POST", "optim_step", b"{}"), {"Content-Length": "-5"}),
        (413, "bytes", ("POST", "optim_step", b"{}"), {"Content-Length": str(MOST_BYTES + 1)}),
        (403, "evil.example", ("POST", "healthz", {}), {"Host": "evil.example:80"}),
    ]  # fmt: skip
    found = []
    for status, cause, request, headers in cases:
        own_status, answer = client.raw(*request, **headers)
        found.append((cause, own_status, answer["detail"], status, cause))
    client.wait("forward_backward", **work, seq_id=100, forward_backward_input=GOOD)
    return found


def test_bad_requests_are_answered_with_their_cause(folder: Path, tmp_path: Path) -> None:
    for case, status, detail, own_status, cause in served(folder, tmp_path, refused):
        assert status == own_status, (case, detail)
        assert cause.lower() in detail.lower()
    assert not list(tmp_path.iterdir())


def test_others_need_a_token(folder: Path, tmp_path: Path) -> None:
    def ask(client: Client) -> list[int]:
        given = [
            {},
            {"X-API-Key": "tml-secre"},
            {"X-API-Key": "tml-secret"},
            {"X-API-Key": "tml-secret", "Host": "far:1"},
        ]
        return [client.raw("GET", "healthz", None, **headers)[0] for headers in given]

    assert served(folder, tmp_path, ask, token="tml-secret") == [401, 401, 200, 200]
    for address in ("0.0.0.0", "::", "192.168.0.1", ""):
        with pytest.raises(ConfigError, match="BYTESCALE_SERVE_TOKEN"):
            TinkerServer((address, 0), "", tmp_path, "small", 1)
