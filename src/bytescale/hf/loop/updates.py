"""The training half of ``HDP``: the optimizer, updates, and what is kept of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bytescale.common.environment import host_bytes_of_a_rank
from bytescale.common.errors import ConfigError, NonFiniteError
from bytescale.hf.loop.session import Session

if TYPE_CHECKING:
    import torch.distributed as dist

    from bytescale.hf.files.weight_parts import Convert, WeightPart
    from bytescale.hf.loop.recovery import Recovery
    from bytescale.runtime.optimizer.optimizers import GroupOptions
    from bytescale.runtime.optimizer.sharded_optimizer import Update


class Updates(Session):
    """Updates of one attached model, whose gradients and optimizer states are sharded over the ranks of a group."""

    recovery: Recovery | None = None

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
        from bytescale.runtime.optimizer.sharded_optimizer import ShardedOptimizer
        from bytescale.runtime.optimizer.take_over import take_over  # scoring has no optimizer
        from bytescale.runtime.tied import TiedHead

        if self._optimizer is not None:
            raise ConfigError(
                "this HDP has an optimizer", so="two of them would update the same weights", fix="make one"
            )
        if offload:
            self._require_host_room(on_host=True)
        if former := ShardedOptimizer.of(self.model):
            former.leave(self.model)
        decoder = self.engine.decoder
        decoder.require_unchanged(with_training=False)
        stage, parts = decoder.stage, decoder.layers
        named = [(name, p) for name, p in self.model.named_parameters() if stage is None or name in stage.names]
        if self.mesh.domain.size > 1:
            _, parts = decoder.head, decoder.parts  # the head is found by a pass
        self._optimizer = take_over(
            named,
            self.mesh,
            cls,
            options,
            group_options,
            cuts=self.cuts,
            experts=decoder.experts if self.experts == "parallel" else (),
            on_host=offload,
            chunk=(decoder.model, parts),
            late=decoder.late_parameters(),
        )
        self._optimizer.join(self.model)
        self.tied = TiedHead.of(self.mesh, None if stage is None else stage.tied, self._optimizer.zeros)
        self._optimizer_of = {"cls": cls, "group_options": group_options, "offload": offload, **options}
        decoder.begin_training()
        decoder.attachment.ran_plain_backward = False
        return self._optimizer.torch_optimizer

    def _require_host_room(self, *, on_host: bool, is_copied: bool = False) -> None:
        from bytescale.cost.memory.device_memory import States, host_bytes_left  # with these alone

        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        states = States(
            num_parameters=sum(parameter.numel() for parameter in trained),
            element_bytes=max((parameter.element_size() for parameter in trained), default=4),
            num_ranks=self.mesh.hdp.size,
            on_host=on_host,
            is_copied=is_copied,
        )
        room = host_bytes_of_a_rank(self.group.size, with_optimizer=on_host) - self.engine.host_bytes
        host_bytes_left(states, self.group.min_of([room])[0])  # of the rank with the least, so that all ranks agree

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
        self.finish_items()
        decoder.require_unchanged(with_training=True)
        for zero in [] if self.is_reducing else sharded.zeros:
            zero.parameters.require_own_gradients()
        self.is_reducing = False
        options = {name: value for name, value in (("lr", lr), ("betas", betas)) if value is not None}
        sharded.set_options(options)
        squares, waiting = self.group.sum_of(
            [sharded.reduce_gradients(), 0 if self.recovery is None else self.recovery.num_waiting()]
        )
        grad_norm, self.ranks_wait = squares**0.5, waiting > 0
        if math.isfinite(grad_norm):
            update = sharded.update(grad_norm, max_grad_norm)
        elif skip_nonfinite:
            update = sharded.skip(grad_norm)
        sharded.zero_grad()
        if not math.isfinite(grad_norm) and not skip_nonfinite:
            raise NonFiniteError(
                f"the norm of the gradients is {grad_norm} at update {sharded.num_updates + 1}",
                so="the update was not made, and the weights are as before",
                fix="look at the loss and its divisor (weights that sum to zero), lower lr, or leave the batch out",
            )
        return update

    @property
    def num_updates(self) -> int:
        """Updates that the weights have behind them."""
        return self.sharded().num_updates

    def keep_copies(self, *, store: dist.Store | None = None, model: Callable[[], nn.Module] | None = None) -> None:
        """Keep copies of the optimizer's states on other ranks, so that ``recover`` can go on where a rank has died.

        Every rank calls it, behind ``adamw`` or ``optimizer``. A rank then has four times its states in host memory,
        and sends them to another one behind each update, while the next batch computes (``runtime.optimizer.copies``).

        Args:
            store: where ranks meet when one of them has died; None: that of ``init_process_group``. A store that a
                rank serves ends with it.
            model: makes the whole model anew, on its device, as ``HDP(...)`` was given it; what is trained may have any
                values. ``recover`` calls it where ranks have parts (``tp``, ``pp``, ``shard="parameters"``).

        Raises ``ConfigError`` where ranks have such parts and ``model`` is None, or are not all of WORLD's, and where
        host memory has no room.
        """
        from bytescale.hf.loop.recovery import recovery_of  # few loops go on where a rank has died

        self.sharded()
        if self.recovery is None:  # all ranks are at their beginning
            self._require_host_room(on_host=self._optimizer_of["offload"], is_copied=True)
            self.recovery = recovery_of(self, store)
        self.recovery.begin(self, model)

    def recover(self) -> list[int]:
        """Go on with the ranks that there are: after ``RanksLost``, or where ``ranks_wait`` behind ``step()``.

        Every rank that is left calls it. Groups are made anew, WORLD too. Weights and optimizer states are those of the
        newest update that all have, the same as without the loss, and gradients are zero. ``num_updates`` is the number
        of the batch to plan next: on a rank whose ``step()`` did not return, the update may be there, and one that
        ``step()`` has made may be lost. The model, and the optimizer that ``adamw`` returned, stay the same objects.

        With ``tp``, ``pp`` or ``shard="parameters"``, whole copies of the model go on, and a rank that is in none waits
        here until it makes one with others.

        Returns the ranks that were lost, in the numbers of before. Raises ``CheckpointError`` if a rank and the one
        that kept its copies are both gone; ``RankFailure`` if the others went on without this rank, or no store is
        left; ``SystemExit`` on a rank that waits while the others end (``detach``).
        """
        if self.recovery is None:
            raise ConfigError(
                "recover() without keep_copies()",
                so="the optimizer states of the rank that died are lost",
                fix="call hdp.keep_copies() behind hdp.adamw(...), and continue now from a checkpoint",
            )
        return self.recovery.recover(self, lambda: self.optimizer(**self._optimizer_of))

    def gradients(self) -> dict[str, Tensor]:
        """The global gradient of every trained parameter, by name, before it is clipped. Every rank calls it.

        Copies, in fp32 or wider; ``step`` may follow.
        """
        self.require_no_reduction("gradients() was called")
        self.finish_items()
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
        from bytescale.hf.loop.checkpoints import save  # writers of files and stores

        return save(self, Path(folder), extra or {}, keep)

    def load(self, path: Path | str) -> dict[str, Any]:
        """Continue exactly from a checkpoint, or from the newest in a folder of checkpoints. Returns its ``extra``.

        Every rank calls it, after ``adamw`` or ``optimizer``. Raises ``CheckpointError`` if there is none, or if it is
        of another model.
        """
        from bytescale.hf.loop.checkpoints import load  # readers of files and stores

        return load(self, Path(path))

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
        if self.units is not None:
            self.units.begin()  # the head is open after a forward without a backward
        for kind in [kind for kind, wanted in asked.items() if wanted]:
            if target.type == home.type:
                self._parking.fetch(kind)
            else:
                self._parking.park(kind, self._memory_of(kind))

    def _memory_of(self, kind: str) -> list[Tensor]:
        zeros = [] if self._optimizer is None else self._optimizer.zeros
        weights = [tensor.data for tensor in (*self.model.parameters(), *self.model.buffers())]
        if kind == "weights":
            return weights if self.units is None else weights + [store.values for store in self.units.stores]
        if kind == "gradients":
            flat = [zero.parameters.gradients for zero in zeros]
            return flat + [p.grad for p in self.model.parameters() if p.grad is not None]
        if any(zero.on_host for zero in zeros):
            return []
        states = [] if self._optimizer is None else self._optimizer.torch_optimizer.state.values()
        held = [value for state in states for value in state.values() if isinstance(value, Tensor)]
        masters = [shard.master.data for zero in zeros for shard in zero.shards if shard.master is not shard.value]
        return [*held, *masters]

    def weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield name and whole tensor of each weight, one at a time, named as in Hugging Face's files.

        For inference engines: adapters are merged into what is yielded, and tied weights come once. ``dtype``: of the
        tensors; None: the model's. Without it a tensor may be the model's own memory. Every rank may call it alone,
        unless ranks share the parameters (``shard``, ``tp``, ``pp``): all of them go through it to its end then. Raises
        ``ConfigError`` for adapters that are not added to a weight.
        """
        from bytescale.hf.files.weight_stream import named_weights  # for inference engines
        from bytescale.runtime.optimizer.zero import whole_of

        self.require_at_home("weights")
        if any(".lora_" in name for name, _ in self.model.named_parameters()):
            self.require("hdp.weights() of adapters")
        names, stage = {id(p): name for name, p in self.model.named_parameters()}, self.engine.decoder.stage

        def whole(parameter: nn.Parameter) -> Tensor:
            value = parameter.detach() if self.units is None else self.units.whole(parameter)
            if self.cuts is None:
                return value
            is_here = stage is None or names[id(parameter)] in stage.names
            return whole_of(value, self.cuts[names[id(parameter)]], self.mesh, is_here=is_here)

        return named_weights(self.model, dtype, whole, self.units)

    def weight_parts(
        self, dtype: torch.dtype | None = None, *, share: bool = True, convert: Convert | None = None
    ) -> Iterator[WeightPart]:
        """Yield this rank's part of each weight: what ``weights`` yields, once over all ranks.

        Nothing is gathered, unless there are adapters, or ``convert``, which is called with name and whole tensor, and
        whose tensors come in the place of it. All ranks yield the same names in the same order; parts may be empty.
        ``share=False``: each rank yields everything, for a receiver of its own. Raises as ``weights``, and
        ``ConfigError`` where no part of the files' form is a rank's. ``SentWeights.changed`` takes the parts.
        """
        from bytescale.hf.files.weight_parts import held_parts, parts_of  # for inference engines

        self.require_at_home("weights")
        is_whole = convert is not None or any(".lora_" in name for name, _ in self.model.named_parameters())
        if share and not is_whole and (self.units is not None or self.cuts) and self.mesh.shape.pp == 1:
            return held_parts(self.model, dtype, self.mesh, self.units, self.cuts or {})
        rank, size = (self.group.rank, self.group.size) if share else (0, 1)
        return parts_of(self.weights(dtype), rank, size, convert)


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
