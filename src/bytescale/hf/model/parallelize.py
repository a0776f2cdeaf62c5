"""One rank's part of a decoder: the order in which it is made, each step with its reason.

1. **Tensor parallelism** compares the cut model with the whole one, and so needs all layers.
2. **The pipeline stage** keeps some of them. It compares itself with the model that tensor parallelism has left.
3. **Flat buffers**, shared layers and experts in parallel (``runtime.optimizer``) take over what is here by then.
4. **Recomputation and offloading** (``runtime.Activations``) are put around layers last: what is computed again gathers
   rows again, and waits for parameters again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn

from bytescale.common.cut import Cut
from bytescale.common.errors import ConfigError
from bytescale.config.sharing import require_beside
from bytescale.hf.model.decoder import HFDecoder
from bytescale.hf.model.stages import cut_to_stage
from bytescale.hf.model.tensor_parallel import apply_tensor_parallelism, planned_cuts
from bytescale.runtime.mesh import Mesh
from bytescale.runtime.token_shards import TokenShards


@dataclass(frozen=True, kw_only=True)
class RankPart:
    """What a rank has of a model.

    Attributes:
        named: its parameters, by their names in the whole model.
        cuts: of each, which part of the whole one it is.
        share: of its numbers, those that one of the ``planned_parts`` would have.
    """

    named: list[tuple[str, nn.Parameter]]
    cuts: dict[str, Cut]
    share: float


def parallelize(
    decoder: HFDecoder,
    mesh: Mesh | None,
    *,
    stage: tuple[int, int] | None = None,
    planned_parts: int = 1,
    cuts_words: bool = True,
) -> RankPart:
    """Reduce a whole decoder to this rank's part, in place (steps 1 and 2). All ranks of ``mesh`` call it together.

    ``stage``: its number, and the number of stages; None: those of the mesh. ``planned_parts``: without a mesh,
    tensor-parallel parts that are planned alone: nothing but a stage is made. ``cuts_words``: whether embedding and
    head may be cut; otherwise every rank has the logits of its own rows.

    Raises ``ConfigError`` for a model that cannot be cut so, by name, and for a stage of a trained one that has nothing
    to train.
    """
    if mesh is not None and decoder.indexer_loss is not None:
        require_beside("indexer_loss", mesh.tp.size)
    number, count = stage or ((0, 1) if mesh is None else (mesh.stage, mesh.shape.pp))
    named = list(decoder.model.named_parameters())
    is_trained = any(parameter.requires_grad for _, parameter in named)
    cuts = {name: Cut(shape=tuple(parameter.shape)) for name, parameter in named}
    planned = planned_cuts(decoder, planned_parts) if planned_parts > 1 else cuts
    if mesh is not None and mesh.tp.size > 1:
        cuts = apply_tensor_parallelism(decoder, TokenShards(mesh.tp), cuts_words=cuts_words)
    if count > 1:
        cut_to_stage(decoder, number, count)
    here = None if decoder.stage is None else decoder.stage.names
    named = [(name, own) for name, own in decoder.model.named_parameters() if here is None or name in here]
    if count > 1 and is_trained and not any(parameter.requires_grad for _, parameter in named):
        raise ConfigError(
            f"pipeline stage {number} of {count} has no parameter that is trained",
            so="its ranks would have nothing to update",
            fix="use fewer stages (pp), or train more of the model",
        )
    whole, parts = (
        sum(math.prod(size) for size in sizes)
        for sizes in zip(*((planned[name].shape, planned[name].part_shape) for name, _ in named), strict=True)
    )
    return RankPart(named=named, cuts=cuts, share=parts / whole)
