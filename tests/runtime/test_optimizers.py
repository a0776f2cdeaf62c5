"""Optimizers by name, and options of single parameters: against plain code on whole parameters, and in whole runs."""

from __future__ import annotations

import math
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch

from bytescale.common.errors import ConfigError
from bytescale.config.schema import OptimizerConfig
from bytescale.config.validate import validate
from bytescale.cost.memory.device_memory import States
from bytescale.runtime.group import RankGroup
from bytescale.runtime.mesh import Mesh
from bytescale.runtime.optimizer.flat import FlatParameters
from bytescale.runtime.optimizer.sharded_optimizer import ShardedOptimizer
from bytescale.runtime.optimizer.take_over import require_elementwise
from bytescale.train.parts.describe import check_host_room
from tests.helpers.decoder import Sizes
from tests.helpers.effort import pairs
from tests.helpers.lazy_lanes import use_lazy_lanes
from tests.helpers.ranks import run_ranks
from tests.helpers.steps import make_model
from tests.train.runs import interrupt, on_ranks, run, small_run, with_trainer, write_corpus

from .test_zero import STEPS, gradients_of

OVERRIDES = {
    "*": {"lr_ratio": 0.5},
    "*.mlp.*": {"lr_ratio": 2, "weight_decay": 0.3},
    "*norm*": {"weight_decay": 0.1},
}
RATES = (1e-2, 3e-3, 1e-3)


def config_of(name: str) -> OptimizerConfig:
    options = {"momentum": 0.9} if name == "sgd" else {}
    return OptimizerConfig(name=name, lr=RATES[0], weight_decay=0.2, options=options, overrides=OVERRIDES)  # type: ignore[arg-type]


def options_of(name: str, parameter: torch.Tensor) -> tuple[float, float]:
    """Ratio of the learning rate, and decay, as the overrides above say it."""
    if fnmatchcase(name, "*.mlp.*"):
        return 2.0, 0.3
    return 0.5, 0.1 if "norm" in name else (0.2 if parameter.dim() >= 2 else 0.0)


def reference_parameters(num_ranks: int) -> dict[str, torch.Tensor]:
    """The update rule written out, on whole parameters."""
    model = make_model(Sizes(), torch.float64)
    moments = {key: torch.zeros_like(p) for key, p in model.named_parameters()}
    with torch.no_grad():
        for step in range(STEPS):
            shares = list(zip(*(gradients_of(model, step, rank) for rank in range(num_ranks)), strict=True))
            for (key, weight), share in zip(model.named_parameters(), shares, strict=True):
                gradient, (ratio, decay), moment = sum(share), options_of(key, weight), moments[key]
                rate = RATES[step % len(RATES)] * ratio
                moment.mul_(0.9).add_(gradient + decay * weight)
                weight.sub_(rate * moment)
    return {key: p.detach().clone() for key, p in model.named_parameters()}


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_sharded_updates_follow_the_rule(num_ranks: int) -> None:
    def one_rank(hdp: RankGroup) -> dict[str, torch.Tensor]:
        model = make_model(Sizes(), torch.float64)
        flat = FlatParameters(model.named_parameters(), hdp.size)
        optimizer = ShardedOptimizer.of_config(flat, config_of("sgd"), Mesh.of_hdp(hdp))
        for step in range(STEPS):
            flat.zero_gradients()
            for parameter, gradient in zip(model.parameters(), gradients_of(model, step, hdp.rank), strict=True):
                parameter.grad.add_(gradient)
            optimizer.reduce_gradients()
            optimizer.update(1.0, 0.0, lr=RATES[step % len(RATES)])
        return {key: p.detach().clone() for key, p in model.named_parameters()}

    for parameters in run_ranks(num_ranks, one_rank):
        for key, expected in reference_parameters(num_ranks).items():
            torch.testing.assert_close(parameters[key], expected, rtol=1e-10, atol=1e-12, msg=key)


@pytest.mark.parametrize(("name", "dtype"), pairs(["sgd", "adamw"], [torch.float32, torch.bfloat16]))
def test_updates_in_host_memory_are_those_of_the_device(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit, with copies that are as late as CUDA allows, also from a state of the other kind.

    Host memory holds as many bytes as the memory model says.
    """
    use_lazy_lanes(monkeypatch)

    def train(hdp: RankGroup, on_host: bool, steps: range, state: Any = None) -> ShardedOptimizer:
        model = make_model(Sizes(), dtype)
        flat = FlatParameters(model.named_parameters(), hdp.size, bucket_bytes=4096)
        optimizer = ShardedOptimizer.of_config(flat, replace(config_of(name), offload=on_host), Mesh.of_hdp(hdp))
        if state is not None:
            optimizer.load_state(state)
        for step in steps:
            flat.zero_gradients()
            gradients = dict(zip(dict(model.named_parameters()), gradients_of(model, step, hdp.rank), strict=True))
            for entry in flat.entries:
                flat.gradient_of(entry).copy_(gradients[entry.name])
            norm = sum(hdp.sum_of([optimizer.reduce_gradients()])) ** 0.5
            optimizer.update(norm, 0.5, lr=RATES[step])
        return optimizer

    def one_rank(hdp: RankGroup) -> None:
        device, host = train(hdp, False, range(3)), train(hdp, True, range(3))
        resumed = [train(hdp, on, range(1, 3), train(hdp, not on, range(1)).state()) for on in (False, True)]
        wanted = device.state()
        for other in (host, *resumed):
            assert torch.equal(other.zeros[0].parameters.values, device.zeros[0].parameters.values)
            for key, states in other.state()["tensors"].items():
                assert states.keys() == wanted["tensors"][key].keys()
                assert all(torch.equal(value, wanted["tensors"][key][kind]) for kind, value in states.items())
        number, transfers = len(host.zeros[0].parameters.values), host._host
        assert transfers is not None
        counted = States(num_parameters=number, element_bytes=dtype.itemsize, num_ranks=hdp.size, on_host=True)
        held = [value for states in host.torch_optimizer.state.values() for value in states.values()]
        held = [value for value in held if value is not None and value.dim()]
        held += [shard.master for zero in host.zeros for shard in zero.shards] + transfers._buffers
        assert name != "adamw" or sum(value.nbytes for value in held) == pytest.approx(counted.host_bytes, rel=0.05)

    run_ranks(2, one_rank)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_run_is_the_same_on_any_ranks(tmp_path: Path, name: str) -> None:
    """Killed on 2 ranks with the optimizer in host memory, and resumed on 3 without, in FP64, with options of its own.

    ``bytescale train`` refuses a host memory that is too small before it starts ranks.
    """
    config = small_run(write_corpus(tmp_path / "corpus"), tmp_path / "one", steps=6, dtype="fp64")
    optimizer = replace(config_of(name), lr=0.1 if name == "sgd" else 2e-3, warmup_steps=2)
    config = replace(config, optimizer=optimizer)
    whole = run(on_ranks(config, 1, 256))
    parts = on_ranks(with_trainer(config, run_dir=str(tmp_path / "parts")), 2, 128)
    on_host = replace(parts, optimizer=replace(optimizer, offload=True))
    with pytest.raises(ConfigError, match=r"ost memory is too small: .* of 1 MiB that a rank may use"):
        check_host_room(replace(on_host, memory=replace(parts.memory, host_gib=2**-10)))
    copied = replace(parts, parallel=replace(parts.parallel, elastic=True))
    with pytest.raises(ConfigError, match=r"ost memory is too small: .* copied for others"):
        check_host_room(replace(copied, memory=replace(parts.memory, host_gib=2**-10)))
    interrupt(on_host, after_step=4)
    assert run(with_trainer(on_ranks(parts, 3, 128), resume=True)) == pytest.approx(whole, rel=1e-9)
    assert whole[-1] < whole[0] - 0.1


def test_overrides_that_fit_nothing() -> None:
    model = make_model(Sizes(), torch.float64)
    flat, overrides = FlatParameters(model.named_parameters(), 1), {"*.nothing.*": {"lr_ratio": 2}}
    with pytest.raises(ConfigError, match="which no trained parameter matches"):
        ShardedOptimizer.of_config(flat, replace(config_of("sgd"), overrides=overrides), Mesh.of_hdp(RankGroup()))


@pytest.mark.parametrize(
    "override", [2, {}, {"lr_ratio": "2"}, {"rate": 2}, {"lr_ratio": -1}, {"lr_ratio": math.nan}, {"lr_ratio": True}]
)
def test_overrides_that_cannot_be_read(tmp_path: Path, override: object) -> None:
    config = small_run(write_corpus(tmp_path / "corpus"), tmp_path / "run")
    with pytest.raises(ConfigError, match=r"optimizer\.overrides has"):
        validate(replace(config, optimizer=replace(config.optimizer, overrides={"*": override})))


class CountingSGD(torch.optim.SGD):
    """Its rate falls with the number of calls, whatever it updates."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["lr"] /= 2
        super().step()


def test_optimizers_that_host_memory_cannot_have(tmp_path: Path) -> None:
    require_elementwise(CountingSGD, {"lr": 1.0})
    with pytest.raises(ConfigError, match="CountingSGD computes something else if it updates"):
        require_elementwise(CountingSGD, {"lr": 1.0}, one_by_one=True)
    config = small_run(write_corpus(tmp_path / "corpus"), tmp_path / "run")
    with pytest.raises(ConfigError, match=r"optimizer\.name is muon, and optimizer\.offload is true"):
        validate(replace(config, optimizer=OptimizerConfig(name="muon", offload=True)))
