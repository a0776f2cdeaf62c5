"""What people switch on in training: LoRA, activation checkpointing, frozen parts, several dtypes."""

from __future__ import annotations

import copy
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import bytescale
from bytescale import HDP
from bytescale.attention.flash import Heads
from bytescale.common.errors import ConfigError
from bytescale.hf.loop import micro_batch
from bytescale.parity import Setup, compare
from bytescale.parity.__main__ import TOLERANCE
from tests.helpers.effort import one_of

from .support import documents, on_ranks, plain_update, printed_loop, small_model

WITH_RULES = ["mistral", "gemma2", "gpt_oss", "deepseek_v3"]
"""A window, windows and soft caps, windows and sinks, values of another width than keys."""


@pytest.mark.parametrize(
    ("name", "reentrant"),
    one_of([("qwen3", False), ("qwen3", True), *((n, False) for n in WITH_RULES)], ("qwen3", False)),
)
def test_hugging_faces_checkpointing(name: str, reentrant: bool) -> None:
    model = small_model(name)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    assert compare(model, Setup(num_ranks=3)).worst <= TOLERANCE["fp64"]
    assert all(layer.gradient_checkpointing for layer in model.model.layers)


@pytest.mark.parametrize(
    ("name", "checkpointing"),
    [
        ("llama", False),
        ("gpt_oss", True),
        *(
            pytest.param(name, flag, marks=pytest.mark.exhaustive)
            for name in WITH_RULES
            if name != "gemma2"
            for flag in (False, True)
        ),
    ],
)
def test_lora(name: str, checkpointing: bool) -> None:
    """The adapters' gradients are those of one process; the base has none and stays as it is."""
    model = small_model(name)
    torch.manual_seed(0)
    parts = ["q_proj", "q_a_proj", "kv_b_proj", "v_proj", "o_proj"]
    adapted = get_peft_model(model, LoraConfig(r=3, lora_dropout=0.0, target_modules=parts))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:  # starts at zero, which would make the gradients of A zero
            nn.init.normal_(parameter, std=0.1)
    if checkpointing:
        adapted.gradient_checkpointing_enable({"use_reentrant": False})
    result = compare(adapted.to(torch.float64).train(), Setup(num_ranks=3, seed=1))
    assert result.worst <= TOLERANCE["fp64"]
    assert result.gradients
    assert all("lora" in name for name in result.gradients)


def test_frozen_embedding_and_head() -> None:
    model = small_model("qwen3")
    model.model.embed_tokens.weight.requires_grad = False  # tied to the head
    model.model.layers[0].requires_grad_(False)
    assert compare(model, Setup(num_ranks=3)).worst <= 1e-10


def test_parameters_of_several_dtypes() -> None:
    """Norms in fp64 beside matrices in fp32: each dtype has flat buffers of its own, and all train in one update."""
    llama = small_model("llama", dtype=torch.float32)
    llama.lm_head.double()
    llama.lm_head.register_forward_pre_hook(lambda module, args: (args[0].double(),))
    batch = documents([20, 9, 4])
    reference = copy.deepcopy(llama)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    plain_update(reference, batch, optimizer, clip=1.0)

    def work(group: Any, model: nn.Module) -> dict[str, torch.Tensor]:
        hdp = bytescale.HDP(model, group, capacity_tokens=20)
        hdp.optimizer(torch.optim.SGD, lr=0.1)
        printed_loop(hdp, model, batch)
        hdp.step()
        return {name: p.detach().clone() for name, p in model.named_parameters()}

    for parameters in on_ranks(2, llama, work):
        for name, parameter in reference.named_parameters():
            assert parameters[name].dtype == parameter.dtype
            torch.testing.assert_close(parameters[name], parameter.detach(), rtol=0, atol=1e-6)


def test_bf16_gradients_are_summed_in_fp32() -> None:
    """``zero_grad`` of the model empties the wide sums too, which its parameters do not show."""
    model = small_model("llama", dtype=torch.bfloat16)
    hdp = bytescale.HDP(model, capacity_tokens=50)
    hdp.adamw(lr=1e-3)
    batch = documents([9, 5])
    printed_loop(hdp, model, batch)
    wanted = hdp.gradients()
    assert all(gradient.dtype == torch.float32 for gradient in wanted.values())
    model.zero_grad()
    assert not any(gradient.any() for gradient in hdp.gradients().values())
    printed_loop(hdp, model, batch)
    for name, gradient in hdp.gradients().items():
        torch.testing.assert_close(gradient, wanted[name], rtol=0, atol=0)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("family", "num_layers"), one_of([("llama", 1), ("mistral", 2), ("gemma2", 2)], ("llama", 1)))
def test_layers_compiled_around_attention(family: str, num_layers: int) -> None:
    """Every layer is compiled; the graph breaks at attention, which runs as it is. The backend counts what it gets."""
    source = small_model(family, num_hidden_layers=num_layers)
    batch = documents([20, 9, 4])
    reference = copy.deepcopy(source)
    plain_update(reference, batch, torch.optim.SGD(reference.parameters(), lr=0.1), clip=1.0)
    compiled: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        compiled.append(sum(node.op.startswith("call") for node in graph.graph.nodes))
        return graph.forward

    def work(group: Any, model: nn.Module) -> dict[str, torch.Tensor]:
        hdp = bytescale.HDP(model, group, capacity_tokens=20)
        hdp.optimizer(torch.optim.SGD, lr=0.1)
        for layer in model.model.layers:
            layer.compile(backend=backend, dynamic=True)
        printed_loop(hdp, model, batch)
        hdp.step()
        return {name: p.detach().clone() for name, p in model.named_parameters()}

    try:
        results = on_ranks(2, source, work)
    finally:
        torch._dynamo.reset()
    assert sum(compiled) > 10 * num_layers, "norms, products and rotations of the layers were compiled"
    tolerance = 1e-8 if family == "gemma2" else 1e-10  # its norms compute in fp32, whatever the model's dtype
    for parameters in results:
        for name, parameter in reference.named_parameters():
            torch.testing.assert_close(parameters[name], parameter.detach(), rtol=0, atol=tolerance)


def test_own_loops_take_the_fastest_attention_until_they_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the trainer does, for the heads that the probe has seen; all ranks are asked."""
    opened: list[Any] = []

    @contextmanager
    def open_attention(name: str, device: torch.device, dtype: torch.dtype, heads: Heads, everywhere: Any) -> Any:
        opened.append((name, heads, everywhere([1.0, -2.0])))
        yield
        opened.append("left")

    monkeypatch.setattr(micro_batch, "open_attention", open_attention)
    model = small_model("gemma2")
    layers = HDP(model, capacity_tokens=64, kernel="fa3").structure.layers
    heads = Heads(layers[0].num_heads, layers[0].num_kv_heads, layers[0].head_dim, windowed=True)
    assert opened == [("fa3", heads, [1.0, -2.0])]
    opened.clear()
    hdp = HDP(small_model("mamba2"), capacity_tokens=64)  # it has no attention
    hdp.detach()
    assert not opened
    hdp = HDP(small_model("llama"), capacity_tokens=64)
    hdp.detach()
    assert [opened[0][0], opened[-1]] == ["auto", "left"]


def test_an_implementation_that_is_not_there_is_refused_by_own_loops() -> None:
    with pytest.raises(ConfigError, match=r'"fa3", but it needs a GPU'):
        HDP(small_model("llama"), capacity_tokens=64, kernel="fa3")
