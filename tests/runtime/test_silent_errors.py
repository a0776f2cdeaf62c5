"""What used to be wrong without a word: zero_grad, moved weights, keywords under checkpointing, frozen heads."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from bytescale.common.errors import ConfigError
from bytescale.parity.thread_ranks import run_ranks
from bytescale.runtime.group import RankGroup
from bytescale.runtime.loss import accumulated_at_once
from bytescale.runtime.mesh import Mesh
from bytescale.runtime.optimizer.flat import FlatParameters
from bytescale.runtime.optimizer.take_over import take_over
from bytescale.runtime.saved.checkpointing import KeptAttention, apply_checkpointing
from tests.helpers.reference_loss import linear_cross_entropy, reference_cross_entropy


class Layer(nn.Module):
    """A layer with dropout and a keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.dropout = nn.Dropout(0.5)

    def forward(self, rows: Tensor, *, scale: float = 1.0) -> Tensor:
        return self.dropout(torch.tanh(self.linear(rows))) * scale


def test_checkpointed_layers_keep_keywords_and_drop_the_same_numbers_again() -> None:
    torch.manual_seed(0)
    plain = Layer()
    checkpointed = copy.deepcopy(plain)
    apply_checkpointing([checkpointed], "full", KeptAttention())
    rows = torch.randn(7, 5)
    for layer in (plain, checkpointed):
        torch.manual_seed(1)
        layer(rows, scale=3.0).sum().backward()
    assert plain.linear.weight.grad is not None
    torch.testing.assert_close(checkpointed.linear.weight.grad, plain.linear.weight.grad, rtol=0, atol=0)


def test_zero_grad_of_a_module_sets_the_flat_gradients_to_zero() -> None:
    """It sets ``grad`` to None, after which autograd makes tensors outside of the buffer."""
    model = nn.Linear(4, 3)
    flat = FlatParameters(model.named_parameters(), num_shards=2)
    rows = torch.randn(6, 4)
    model(rows).square().sum().backward()
    once = flat.gradients.clone()
    model.zero_grad()
    flat.collect_gradients()
    assert not flat.gradients.any()
    model(rows).square().sum().backward()
    torch.testing.assert_close(flat.gradients, once)
    model.zero_grad()
    model(rows).square().sum().backward()  # replaces what the buffer holds
    model(rows).square().sum().backward()  # and adds to it
    torch.testing.assert_close(flat.gradients, 2 * once)
    model.weight.grad = torch.ones_like(model.weight)  # somebody else's gradient counts
    flat.collect_gradients()
    weight = next(entry for entry in flat.entries if entry.name == "weight")
    assert bool((flat.gradient_of(weight) == 1).all())


@pytest.mark.parametrize("move", ["to", "half"])
def test_parameters_that_leave_the_flat_memory_are_told(move: str) -> None:
    """Updates would reach the buffer alone. ``cpu:0`` is for PyTorch another device than ``cpu``."""
    model = nn.Linear(4, 3)
    flat = FlatParameters(model.named_parameters(), num_shards=1)
    flat.require_adopted()
    if move == "to":
        model.to("cpu:0")
    else:
        model.half()
    with pytest.raises(ConfigError, match="Parameter bias has been moved or replaced"):
        flat.require_adopted()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_weights_that_are_loaded_later_become_the_master_weights(num_ranks: int) -> None:
    """In bf16 the master weights are a copy; an update would bring the old weights back."""
    loaded = {"weight": torch.full((3, 40), 2.0), "bias": torch.full((3,), -1.0)}

    def one_rank(group: dist.ProcessGroup) -> dict[str, Tensor]:
        model = nn.Linear(40, 3).bfloat16()
        mesh, options = Mesh.of_hdp(RankGroup(group)), {"lr": 0.25}
        optimizer = take_over(list(model.named_parameters()), mesh, torch.optim.SGD, options, chunk=(model, [model]))
        model.load_state_dict(loaded)
        for parameter in model.parameters():
            parameter.sum().backward()
        optimizer.update(optimizer.reduce_gradients(), 0)
        return {name: value.float() for name, value in model.state_dict().items()}

    for weights in run_ranks(num_ranks, one_rank):
        for name, value in loaded.items():
            torch.testing.assert_close(weights[name], value - 0.25 * num_ranks)


@pytest.mark.parametrize("num_rows", [0, 9])
def test_a_frozen_head_gives_gradients_to_the_hidden_states_alone(num_rows: int) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(num_rows, 4, dtype=torch.float64), torch.randn(11, 4, dtype=torch.float64)
    labels = torch.randint(11, (num_rows,))
    ours, theirs = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    loss = linear_cross_entropy(*accumulated_at_once(ours, weight), labels)
    expected = reference_cross_entropy(theirs, weight, labels)
    (3 * loss).backward()
    (3 * expected).backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(ours.grad, theirs.grad)
    assert weight.grad is None


def test_a_head_alone_can_be_trained() -> None:
    """The hidden states come from frozen layers."""
    torch.manual_seed(0)
    hidden, labels = torch.randn(9, 4, dtype=torch.float64), torch.randint(11, (9,))
    ours = torch.randn(11, 4, dtype=torch.float64, requires_grad=True)
    theirs = ours.detach().clone().requires_grad_()
    linear_cross_entropy(hidden, ours, labels).backward()
    reference_cross_entropy(hidden, theirs, labels).backward()
    torch.testing.assert_close(ours.grad, theirs.grad)
