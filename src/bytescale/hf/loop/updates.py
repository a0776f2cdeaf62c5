"""The training half of ``HDP``: the optimizer, updates, and what is kept of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bytescale.checkpoint.agree import together
from bytescale.checkpoint.checkpointer import Checkpointer
from bytescale.checkpoint.folder_of_run import complete_checkpoints
from bytescale.checkpoint.manifest import RunState, read_manifest, step_name, step_of
from bytescale.common.environment import HOST_SHARE_WITH_OPTIMIZER, bytes_of_a_rank
from bytescale.common.errors import CheckpointError, ConfigError, NonFiniteError
from bytescale.config.schema import CheckpointConfig, Experts
from bytescale.cost.memory.device_memory import States, host_bytes_left
from bytescale.hf.files.weight_stream import named_weights
from bytescale.hf.loop.micro_batch import Engine
from bytescale.hf.loop.planned_batch import PendingPasses
from bytescale.runtime.group import RankGroup
from bytescale.runtime.optimizer.lockstep import Units
from bytescale.runtime.optimizer.optimizers import GroupOptions
from bytescale.runtime.optimizer.parking import Parking
from bytescale.runtime.optimizer.sharded_optimizer import ShardedOptimizer, Update
from bytescale.runtime.optimizer.take_over import take_over


class Updates:
    """Updates of one attached model, whose gradients and optimizer states are sharded over the ranks of a group."""

    engine: Engine
    sharing: int
    experts: Experts
    is_reducing = False
    """Whether ranks reduce gradients already: the loop over a batch that was planned with last=True has ended."""

    def __init__(self, model: nn.Module, group: RankGroup) -> None:
        self.model, self.group = model, group
        self.pending = PendingPasses()
        self._optimizer: ShardedOptimizer | None = None
        self._ranks: dist.ProcessGroup | None = None
        self._parking = Parking()

    def adamw(
        self,
        lr: float,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        group_options: GroupOptions | None = None,
        offload: bool = False,
    ) -> torch.optim.Optimizer:
        """``optimizer`` with ``torch.optim.AdamW`` and its defaults."""
        return self.optimizer(
            torch.optim.AdamW, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True,
            group_options=group_options, offload=offload,
        )  # fmt: skip

    def optimizer(
        self,
        cls: type[torch.optim.Optimizer],
        *,
        group_options: GroupOptions | None = None,
        offload: bool = False,
        **options: Any,
    ) -> torch.optim.Optimizer:
        """Train all parameters that require a gradient with any elementwise optimizer of PyTorch.

        The parameters move into flat memory. Master weights (at least fp32) and states are sharded over all ranks.
        A model of another ``HDP`` is taken over; ``step``, ``state`` and ``save`` of the other are refused then.

        Args:
            cls: such as ``torch.optim.SGD``; called with ``options``.
            group_options: ``(name, parameter) -> options`` of single parameters, such as
                ``lambda name, p: {} if p.dim() > 1 else {"weight_decay": 0.0}``.
            offload: whether master weights and states are in host memory and updated there: 12 bytes of it a parameter
                with AdamW, over the number of ranks. ``step()`` of ``cls`` is called for one part of the parameters
                after the other.

        Returns the optimizer of this rank's shards, for learning-rate schedulers. ``step()`` of this object calls it.
        Raises ``ConfigError`` if nothing is trainable, ``cls`` is not elementwise or has no room, or there is one.
        """
        if self._optimizer is not None:
            raise ConfigError(
                "this HDP has an optimizer", so="two of them would update the same weights", fix="make one"
            )
        if offload:
            self._require_host_room()
        if former := ShardedOptimizer.of(self.model):
            former.leave(self.model)
        decoder = self.engine.decoder
        decoder.require_unchanged(with_training=False)
        named = list(self.model.named_parameters())
        if self.sharing > 1:
            _ = decoder.head  # found by a pass
        self._optimizer = take_over(
            named,
            self.group,
            cls,
            options,
            group_options,
            domain=self.sharing,
            experts=decoder.experts if self.experts == "parallel" else (),
            on_host=offload,
            chunk=(decoder.model, decoder.parts if self.sharing > 1 else decoder.layers),
            late=decoder.late_parameters(),
        )
        self._optimizer.join(self.model)
        decoder.begin_training()
        decoder.attachment.ran_plain_backward = False
        return self._optimizer.torch_optimizer

    def _require_host_room(self) -> None:
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        states = States(
            num_parameters=sum(parameter.numel() for parameter in trained),
            element_bytes=max((parameter.element_size() for parameter in trained), default=4),
            num_ranks=self.group.size,
            on_host=True,
        )
        room = bytes_of_a_rank(HOST_SHARE_WITH_OPTIMIZER, self.group.size) - self.engine.host_bytes
        host_bytes_left(states, self.group.min_of([room])[0])  # of the rank with the least, so that all ranks agree

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients since the last step. ``model.zero_grad()`` does the same once there is an optimizer."""
        self.sharded().zero_grad()
        self.engine.decoder.attachment.ran_plain_backward = False

    def step(
        self,
        *,
        max_grad_norm: float = 1.0,
        lr: float | None = None,
        betas: tuple[float, float] | None = None,
        skip_nonfinite: bool = False,
    ) -> Update:
        """Sum gradients over ranks, clip them, update the weights, give them to all ranks, and zero the gradients.

        Args:
            max_grad_norm: gradients are scaled so that their global norm is at most this; 0: they are not.
            lr: sets the learning rate of all parameters; None: it stays.
            betas: sets those of all parameters; None: they stay.
            skip_nonfinite: whether an update whose gradients are not numbers is left out, and the result says so
                (``Update.skipped``), on all ranks alike.

        Raises:
            RankFailure: if a micro-batch has not been run forward and backward.
            ConfigError: if parameters were moved, replaced, added or unfrozen since ``adamw`` or ``optimizer``, or if
                this object was detached, or another one has taken the parameters over; or the optimizer has no betas.
            NonFiniteError: if the gradients' norm is not a number. The weights are as before.
        """
        sharded = self.sharded()
        self.require_at_home("weights", "gradients", "states")
        sharded.require_attached()
        decoder = self.engine.decoder
        decoder.attachment.require_no_plain_backward()
        self.pending.finish()
        decoder.require_unchanged(with_training=True)
        for zero in [] if self.is_reducing else sharded.zeros:
            zero.parameters.require_own_gradients()
        self.is_reducing = False
        options = {name: value for name, value in (("lr", lr), ("betas", betas)) if value is not None}
        sharded.set_options(options)
        grad_norm = sum(self.group.sum_of([sharded.reduce_gradients()])) ** 0.5
        if math.isfinite(grad_norm):
            update = sharded.update(grad_norm, max_grad_norm)
        elif skip_nonfinite:
            update = Update(num_updates=sharded.num_updates, grad_norm=grad_norm, skipped=True)
        sharded.zero_grad()
        if not math.isfinite(grad_norm) and not skip_nonfinite:
            raise NonFiniteError(
                f"the norm of the gradients is {grad_norm} at update {sharded.num_updates + 1}",
                so="the update was not made, and the weights are as before",
                fix="look at the loss and its divisor (weights that sum to zero), lower lr, or leave the batch out",
            )
        return update

    def gradients(self) -> dict[str, Tensor]:
        """The global gradient of every trained parameter, by name, before it is clipped. Every rank calls it.

        Copies, in fp32 or wider; ``step`` may follow.
        """
        self.require_no_reduction("gradients() was called")
        return self.sharded().whole_gradients()

    def state(self) -> dict[str, Any]:
        """The optimizer's state as whole tensors: ``{"num_updates": n, "tensors": {name: {state: tensor}}}``.

        The states are ``master`` (the weights, in fp32 or wider) and those of the optimizer, such as ``exp_avg``. They
        are in CPU memory, the same on every rank, and fit any number of ranks. Every rank calls it.
        """
        return self.sharded().state()

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from ``state()``, exactly. Every rank calls it, after ``adamw`` or ``optimizer``.

        Raises ``CheckpointError`` if it is of other parameters or another optimizer; ``ConfigError`` as ``step``.
        """
        self.sharded().load_state(state)

    def save(self, folder: Path | str, extra: dict[str, Any] | None = None, *, keep: int = 2) -> Path:
        """Write a checkpoint ``folder/step-<updates>`` in the trainer's format. Every rank calls it.

        It appears when it is complete, and fits any number of ranks. Frozen parameters are not in it.

        Args:
            extra: what the caller wants back from ``load``, as JSON: the place in the data, for example.
            keep: newest checkpoints in ``folder`` that are kept.

        Raises ``CheckpointError`` if it cannot be written.
        """
        optimizer, folder = self.sharded(), Path(folder)
        checkpoints, ranks = self._checkpoints(folder, keep)
        with together(ranks):
            found = complete_checkpoints(folder) if self.group.rank == 0 else []
            if found and step_of(found[-1].name) > optimizer.num_updates:
                raise CheckpointError(
                    f"{folder} has {found[-1].name}, and this model has made {optimizer.num_updates} updates",
                    so="the checkpoint of another run, or of a later time, would be kept in place of the new one",
                    fix="save to another folder, or move the later checkpoints away",
                )
        state = RunState(
            step=optimizer.num_updates,
            sampler={"extra": extra or {}},
            architecture=self._architecture(),
            mesh={"hdp": self.group.size},
        )
        checkpoints.save(state, optimizer)
        checkpoints.finish()
        return folder / step_name(state.step)

    def load(self, path: Path | str) -> dict[str, Any]:
        """Continue exactly from a checkpoint, or from the newest in a folder of checkpoints. Returns its ``extra``.

        Every rank calls it, after ``adamw`` or ``optimizer``. Raises ``CheckpointError`` if there is none, or if it is
        of another model.
        """
        optimizer, path = self.sharded(), Path(path)
        optimizer.require_adopted()
        complete = complete_checkpoints(path)
        path = complete[-1] if complete else path
        checkpoints, _ = self._checkpoints(path.parent, keep=2**31)
        state = read_manifest(path).state
        if "extra" not in state.sampler:
            raise CheckpointError(
                f"{path} was written by bytescale train, not by HDP.save()",
                so="its names are not those of this model",
                fix="convert it with bytescale convert, and load the folder with transformers",
            )
        checkpoints.restore(path, optimizer, self._architecture())
        extra: dict[str, Any] = state.sampler["extra"]
        return extra

    def _architecture(self) -> dict[str, Any]:
        shapes = {
            entry.name: list(entry.cut.shape) for zero in self.sharded().zeros for entry in zero.parameters.entries
        }
        return {"model": type(self.model).__name__, "parameters": shapes}

    def _checkpoints(self, folder: Path, keep: int) -> tuple[Checkpointer, dist.ProcessGroup]:
        """What writes and reads. Raises ``ConfigError`` without torch.distributed."""
        if not dist.is_initialized():
            raise ConfigError(
                "checkpoints are written by torch.distributed, which is not initialised",
                fix="call init_process_group() before HDP(), also for a single rank, or keep hdp.state()",
            )
        if self._ranks is None:
            group = self.group.group
            ranks = [dist.get_rank()] if group is None else dist.get_process_group_ranks(group)
            self._ranks = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        return Checkpointer(folder, self._ranks, CheckpointConfig(background=False, keep=keep)), self._ranks

    def to(
        self, device: torch.device | str, *, weights: bool = True, gradients: bool = True, states: bool = True
    ) -> None:
        """Send weights, gradients and optimizer states to host memory ("cpu"), or bring them back to their device.

        Between the two, the memory of the device is free for others, such as an inference engine, and nothing can be
        computed with what was sent away. Where the model is in host memory, nothing happens.

        Args:
            weights: also those that are not trained.
            states: with the master weights, where they are not the weights themselves.

        Raises ``ConfigError`` for a device that the model has never been on.
        """
        target, home = torch.device(device), self.group.device
        if target.type not in ("cpu", home.type):
            raise ConfigError(
                f"the model is on {home}, and cannot go to {target}",
                so="its gradients and states are bound to their device",
                fix=f'call hdp.to("cpu") or hdp.to("{home.type}")',
            )
        asked = {"weights": weights, "gradients": gradients, "states": states}
        if self._units is not None:
            self._units.begin()  # the head is open after a forward without a backward
        for kind in [kind for kind, wanted in asked.items() if wanted]:
            if target.type == home.type:
                self._parking.fetch(kind)
            else:
                self._parking.park(kind, self._memory_of(kind))

    def _memory_of(self, kind: str) -> list[Tensor]:
        zeros = [] if self._optimizer is None else self._optimizer.zeros
        weights = [tensor.data for tensor in (*self.model.parameters(), *self.model.buffers())]
        if kind == "weights":
            return weights if self._units is None else weights + [store.values for store in self._units.stores]
        if kind == "gradients":
            flat = [zero.parameters.gradients for zero in zeros]
            return flat + [p.grad for p in self.model.parameters() if p.grad is not None]
        if any(zero.on_host for zero in zeros):
            return []
        states = [] if self._optimizer is None else self._optimizer.torch_optimizer.state.values()
        held = [value for state in states for value in state.values() if isinstance(value, Tensor)]
        masters = [shard.master.data for zero in zeros for shard in zero.shards if shard.master is not shard.value]
        return [*held, *masters]

    def require_at_home(self, *kinds: str) -> None:
        """Raise ``ConfigError`` if one of ``weights``, ``gradients`` and ``states`` was sent away by ``to``."""
        for kind in filter(self._parking.holds, kinds):
            raise ConfigError(
                f"the {kind} of the model are in host memory",
                so="nothing can be computed with them",
                fix=f'call hdp.to("{self.group.device.type}") first',
            )

    def weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield name and whole tensor of each weight, one at a time, named as in Hugging Face's files.

        For inference engines: adapters are merged into what is yielded, and tied weights come once. ``dtype``: of the
        tensors; None: the model's. Without it a tensor may be the model's own memory. Every rank may call it alone,
        unless ranks share the parameters. Raises ``ConfigError`` for adapters that are not added to a weight.
        """
        self.require_at_home("weights")
        return named_weights(self.model, dtype, self._units)

    def require_no_reduction(self, what: str) -> None:
        """Raise ``ConfigError`` if ``what`` would come between the last batch's loop and ``step()``."""
        if self.is_reducing:
            raise ConfigError(
                f"{what} after the loop over a batch that was planned with last=True",
                so="ranks have begun to reduce gradients, and would wait for each other",
                fix="call hdp.step() first, or plan this batch without last=True",
            )

    @property
    def has_optimizer(self) -> bool:
        return self._optimizer is not None

    @property
    def _units(self) -> Units | None:
        """What opens and closes the layers that ranks share; None: every rank has all of its own."""
        return None if self._optimizer is None else self._optimizer.units

    def sharded(self) -> ShardedOptimizer:
        """The optimizer. Raises ``ConfigError`` if there is none, or if another ``HDP`` has taken the model over."""
        if self._optimizer is None:
            raise ConfigError("this HDP has no optimizer", fix="call hdp.adamw(lr=...) or hdp.optimizer(...) first")
        self._optimizer.require_not_replaced(self.model)
        return self._optimizer


class HDPOptimizer(torch.optim.Optimizer):
    """For trainers that call an optimizer: that of this rank's shards, whose ``step`` is ``hdp.step``."""

    def __init__(self, hdp: Updates, shards: torch.optim.Optimizer, max_grad_norm: float) -> None:
        self.hdp, self.shards, self.max_grad_norm = hdp, shards, max_grad_norm
        self.grad_norm = 0.0

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.shards.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.grad_norm = self.hdp.step(max_grad_norm=self.max_grad_norm).grad_norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.hdp.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        return self.shards.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.shards.load_state_dict(state_dict)
