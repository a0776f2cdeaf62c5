"""The share of a model that one device of a mesh has: some layers, and a part of each of their matrices."""

from __future__ import annotations

from dataclasses import dataclass

from bytescale.config import Architecture
from bytescale.cost import flops
from bytescale.cost.split import stage_chunks


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShare:
    """What one device has of a model.

    Tensor parallelism over N devices leaves each of them 1 / N of the heads, of the feed-forward part and of the
    vocabulary (``models.tensor_parallel``). A pipeline stage has its layers. The first stage also has the embedding,
    and the last one the final norm and the head.
    """

    architecture: Architecture
    tensor_parallel: int = 1
    num_stages: int = 1
    stage: int = 0
    virtual_stages: int = 1
    """Chunks of layers on each stage, interleaved (``plan.schedule``)."""

    @property
    def chunks(self) -> list[range]:
        """Numbers of the layers in each chunk of this stage."""
        return stage_chunks(self.architecture, self.num_stages, self.stage, self.virtual_stages)

    @property
    def num_layers(self) -> int:
        """Layers of this stage."""
        return sum(map(len, self.chunks))

    @property
    def is_first(self) -> bool:
        """Whether this is the stage with the embedding."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether this is the stage with the final norm, the head and the loss."""
        return self.stage == self.num_stages - 1

    @property
    def key_parts(self) -> int:
        """Parts that the key heads are cut into. With fewer heads than devices, neighbours hold the same head."""
        return min(self.tensor_parallel, self.architecture.num_kv_heads)

    @property
    def key_heads(self) -> int:
        """Key heads on this device."""
        return self.architecture.num_kv_heads // self.key_parts

    @property
    def num_in_flight(self) -> int:
        """Micro-batches whose activations this stage holds at the same time.

        1F1B keeps as many as there are stages from this one to the last. Interleaved stages keep more chunks, and the
        result is the number of whole micro-batches that these chunks make up.
        """
        behind = self.num_stages - 1 - self.stage
        if self.virtual_stages == 1:
            return behind + 1
        chunks = 2 * behind + (self.virtual_stages - 1) * self.num_stages + 1
        return -(-chunks // self.virtual_stages)

    @property
    def num_parameters(self) -> int:
        """Weights on this device."""
        return flops.device_parameters(
            self.architecture,
            num_layers=self.num_layers,
            is_first=self.is_first,
            is_last=self.is_last,
            tensor_parallel=self.tensor_parallel,
        )
