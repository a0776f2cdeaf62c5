"""What ranks send of the weights: each its share, and of it what has changed. A receiver then has the model's bits."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

import bytescale
from bytescale.common.errors import ConfigError
from bytescale.hf.files.weight_parts import parts_of
from bytescale.parity.compare import WideCasts

from .support import documents, on_ranks, printed_loop, small_model

LENGTHS = [9, 1, 14, 3, 6]
DTYPE = torch.bfloat16
SHARED: dict[str, Any] = {"shard": "parameters", "domain": 2}
MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}), "two": (2, {}), "four": (4, {}), "shared": (4, SHARED), "all shared": (2, SHARED),
    "tp": (4, {"tp": 2}), "all tp": (4, {"tp": 4}), "tp shared": (4, {**SHARED, "tp": 2}),
    "experts": (4, {**SHARED, "experts": "parallel"}),
}  # fmt: skip
Sent = list[bytescale.WeightPart]


def kept(part: bytescale.WeightPart) -> bytescale.WeightPart:
    """A copy, as a message is: the part's values may be the model's memory."""
    return part._replace(values=part.values.clone())


def exports(group: Any, model: nn.Module, updates: int, **options: Any) -> tuple[list[Sent], list[Any], int, list[str]]:
    """Of every export, what this rank sent and the masters of all parameters then; the bytes it keeps; all names."""
    sent, messages, masters = bytescale.SentWeights(), [], []
    hdp = bytescale.HDP(model, group, capacity_tokens=40, **options)
    hdp.adamw(lr=4e-6, weight_decay=0.0)
    names = [part.name for part in hdp.weight_parts(DTYPE)]
    for seed in range(updates + 1):
        messages.append([kept(part) for part in sent.changed(hdp.weight_parts(DTYPE))])
        masters.append({name: own["master"].to(DTYPE) for name, own in hdp.state()["tensors"].items()})
        with WideCasts():
            printed_loop(hdp, model, documents(LENGTHS, seed))
            hdp.step()
    if not group.rank():  # this rank alone: nothing is gathered
        assert [part.name for part in hdp.weight_parts(DTYPE)] == names
    return messages, masters, sent.num_bytes, names


def received(tensors: dict[str, Tensor], parts: Sent) -> None:
    for part in parts:
        part.put(tensors.setdefault(part.name, torch.full(part.shape, math.nan, dtype=part.values.dtype)))


def require_equal(tensors: dict[str, Tensor], model: nn.Module, masters: dict[str, Tensor], folder: Path) -> None:
    """Plain transformers read the receiver's tensors as a model's files, and have the trained weights bit for bit."""
    model.config.save_pretrained(folder)  # type: ignore[union-attr, operator]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    loaded, told = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPE, output_loading_info=True)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter.view(torch.int16), masters[name].view(torch.int16)), name


CASES = [("llama", "two"), ("qwen3_moe", "shared"), ("qwen3_moe", "tp"), ("qwen3_moe", "experts")]
REST = [("llama", "one"), ("qwen3_moe", "four"), *((name, mesh) for name in ("gemma2", "llama", "mixtral") for mesh in
        ("four", "shared", "all shared", "tp", "all tp", "tp shared"))]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "mesh"), [*CASES, *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in REST)]
)
def test_a_receiver_has_the_weights_after_every_update(name: str, mesh: str, tmp_path: Path) -> None:
    """Shares of all ranks have every value once; later exports only what has changed, in the shorter form."""
    model = small_model(name)
    num_ranks, options = MESHES[mesh]
    results = on_ranks(num_ranks, model, lambda group, own: exports(group, own, 2, **options))
    tensors: dict[str, Tensor] = {}
    sizes = []
    for number, masters in enumerate(results[0][1]):
        parts = [part for messages, *_ in results for part in messages[number]]
        before = {key: value.clone() for key, value in tensors.items()}
        received(tensors, parts)
        require_equal(tensors, model, masters, tmp_path)
        sizes.append(sum(part.num_bytes for part in parts))
        if number == 0:
            times = {key: torch.zeros(value.shape, dtype=torch.int16) for key, value in tensors.items()}
            for part in parts:
                part._replace(values=torch.ones_like(part.values, dtype=torch.int16)).put(
                    own := torch.zeros(part.shape, dtype=torch.int16)
                )
                times[part.name] += own
            assert all(bool((value == 1).all()) for value in times.values())
            values = [sum(part.values.numel() for part in messages[0]) for messages, *_ in results]
            assert max(values) < 1.2 * sum(values) / num_ranks  # tensors of three values cannot be halved
        else:
            changed = sum(int((before[key] != tensors[key]).sum()) for key in tensors)
            assert 0 < changed <= sum(part.values.numel() for part in parts)
            assert any(part.positions is not None for part in parts)
            assert sizes[number] < 0.7 * sizes[0]
    weights = sum(value.nbytes for value in tensors.values())
    assert sum(num_bytes for _, _, num_bytes, _ in results) == weights
    assert all(names == results[0][3] for *_, names in results)  # the same on all ranks, in one order


def test_a_value_that_is_left_out_is_seen(tmp_path: Path) -> None:
    """The comparison above can fail."""
    model = small_model("llama")
    messages, masters, *_ = on_ranks(1, model, lambda group, own: exports(group, own, 1))[0]
    tensors: dict[str, Tensor] = {}
    received(tensors, messages[0])
    number = next(number for number, part in enumerate(messages[1]) if part.positions is not None)
    whole = messages[1][number]
    messages[1][number] = whole._replace(positions=whole.positions[:-1], values=whole.values[:-1])  # type: ignore[index]
    received(tensors, messages[1])
    with pytest.raises(AssertionError, match=whole.name):
        require_equal(tensors, model, masters[1], tmp_path)
    received(tensors, [whole])
    require_equal(tensors, model, masters[1], tmp_path)


def test_what_an_error_kept_from_the_receiver_comes_again() -> None:
    weights = {"a": torch.arange(6.0), "b": torch.zeros(3), "c": torch.full((2,), math.nan)}
    sent = bytescale.SentWeights()

    def export() -> Any:
        return sent.changed(
            bytescale.WeightPart(name, tuple(value.shape), 0, None, value) for name, value in weights.items()
        )

    assert [part.name for part in export()] == ["a", "b", "c"]
    assert [*export()] == []  # NaN, too, has not changed
    weights["a"][2], weights["b"][0] = 7.0, -0.0  # equal, and another bit
    for part in export():
        assert (part.name, part.start, part.positions, part.values.tolist()) == ("a", 2, None, [7.0])
        break  # the receiver died before it had it
    assert [part.name for part in export()] == ["a", "b"]
    weights["a"] += 1.0
    (part,) = export()
    assert part.positions is None
    assert part.values.tolist() == weights["a"].tolist()  # whole is smaller
    with pytest.raises(ConfigError, match=r"is torch.float32 .* and here torch.float64"):
        part.put(torch.zeros(6, dtype=torch.float64))
    assert sent.num_bytes == 11 * 4
    for num_ranks, names in ((2, ["a", "b", "c"]), (3, ["a"])):  # other ranks: what others had sent is this one's now
        assert [part.name for part in sent.changed(parts_of(weights.items(), 0, num_ranks))] == names


def test_adapters_are_merged_into_what_ranks_send() -> None:
    model = get_peft_model(
        small_model("llama"), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, lora_dropout=0.0)
    )
    merged = dict(bytescale.HDP(copy.deepcopy(model), capacity_tokens=200).weights(DTYPE))

    def work(group: Any, own: nn.Module) -> Sent:
        hdp = bytescale.HDP(own, group, capacity_tokens=40, **SHARED)
        hdp.adamw(lr=1e-3)
        return [kept(part) for part in hdp.weight_parts(DTYPE)]

    tensors: dict[str, Tensor] = {}
    for parts in on_ranks(2, model, work):
        received(tensors, parts)
    assert tensors.keys() == merged.keys()
    assert all(torch.equal(tensors[name], value) for name, value in merged.items())


def test_receivers_in_fp8_get_what_deepseek_has_in_files() -> None:
    """transformers' own code reads the blocks back, at the edges, too; zeros stay zeros. Changes are of FP8."""
    torch.manual_seed(0)
    matrix = torch.randn(200, 300) * torch.logspace(-6, 4, 300)
    matrix[:128, :128] = 0
    parts = dict(bytescale.fp8_blocks("x.weight", matrix))
    small, scale = parts["x.weight"], parts["x.weight_scale_inv"]
    assert (small.dtype, scale.shape, scale.dtype) == (torch.float8_e4m3fn, (2, 3), torch.float32)
    for row, column in ((0, 0), (0, 1), (1, 0), (1, 2)):
        block = slice(row * 128, row * 128 + 128), slice(column * 128, column * 128 + 128)
        own = matrix[block]
        back = Fp8Dequantize(SimpleNamespace(quantization_config=None)).convert(
            {"weight": small[block], "weight_scale_inv": scale[row : row + 1, column : column + 1]}
        )["weight"]
        largest = float(own.abs().max())
        assert float((back - own).abs().max()) <= largest / 448 * 16.01  # half of the last place at 448 is 16
        near = own.abs() > largest / 448 * 2**-6  # normal numbers have three bits
        assert bool(((back - own).abs()[near] <= own.abs()[near] * 2**-4 * 1.001).all())

    def convert(name: str, tensor: Tensor) -> Any:
        return bytescale.fp8_blocks(name, tensor) if name.endswith("_proj.weight") else [(name, tensor)]

    def work(group: Any, own: nn.Module, **options: Any) -> tuple[list[Sent], dict[str, Tensor]]:
        hdp = bytescale.HDP(own, group, capacity_tokens=40, **options)
        hdp.adamw(lr=1e-3)
        sent, messages = bytescale.SentWeights(), []
        for seed in range(2):
            messages.append([kept(part) for part in sent.changed(hdp.weight_parts(convert=convert))])
            printed_loop(hdp, own, documents(LENGTHS, seed))
            hdp.step()
        messages.append([kept(part) for part in sent.changed(hdp.weight_parts(convert=convert))])
        whole = [item for name, tensor in hdp.weights() for item in convert(name, tensor.clone())]
        return messages, {name: tensor.clone() for name, tensor in whole}

    tensors: dict[str, Tensor] = {}
    results = on_ranks(2, small_model("llama"), lambda group, own: work(group, own, **SHARED))
    for number in range(3):
        for messages, _ in results:
            received(tensors, messages[number])
    assert tensors.keys() == results[0][1].keys()
    for name, value in results[0][1].items():
        assert torch.equal(tensors[name].view(torch.uint8), value.view(torch.uint8)), name
