"""Pictures of a corpus: a rank reads those that it encodes ahead of training, and ``hf.loop.encoded`` does the rest.

All ranks know the pictures of a global batch, and how many tokens stand for each, so that they agree on who encodes
which. A rank reads no other pixels.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from bytescale.common.arrays import FloatArray
from bytescale.common.errors import DataError
from bytescale.config.schema import DataConfig
from bytescale.cost.memory.measured import MeasuredRows
from bytescale.data.loading.corpus import Corpus, place_of_document
from bytescale.data.loading.loader import Loader, StepData
from bytescale.data.order.batches import GlobalBatch
from bytescale.data.tokens.pictures import folder_of, pixels_of
from bytescale.hf.batch.documents import ITEM_NAMES, Documents
from bytescale.hf.loop.encoded import EncodedItems, Items, require_use
from bytescale.hf.model.decoder import HFDecoder
from bytescale.hf.model.encoders import even_frame, work_of
from bytescale.plan import RankPlan
from bytescale.plan.plan import Planner
from bytescale.planner.calibrated import CalibratedPlanner
from bytescale.planner.verified import VerifiedPlanner
from bytescale.runtime.group import RankGroup
from bytescale.runtime.plain_data import all_gather_json


@dataclass(frozen=True, kw_only=True)
class PicturesOfRank:
    """What a rank needs for the pictures of a global batch."""

    items: Items  # all of them, with what the processor returns where this rank encodes
    told: dict[int, dict[str, Any]]  # of its own ones, what there is beside pixels, by the item's place
    rank_plan: RankPlan
    documents: Documents  # this rank's, whole: their tokens alone
    error: str = ""  # what is wrong with a picture that this rank has read

    def encoded(self, decoder: HFDecoder, group: RankGroup, *, keeps_graphs: bool) -> EncodedItems:
        """Encode, and exchange rows. Every rank of the ``group`` calls it, and it raises on all of them."""
        require_use(self.items, decoder)
        error, documents, encoders = self.error, self.documents, decoder.encoders
        told = all_gather_json([error, list(self.told.items())], group.group, group.device)
        if wrong := [one for one, _ in told if one]:
            raise DataError(wrong[0])
        for place, given in (one for _, of_rank in told for one in of_rank):  # positions of documents need it
            for name, value in given.items():
                self.items.items[place][1].setdefault(name, torch.tensor(value))
        try:
            documents = self.items.with_fields(documents, encoders)
        except DataError as found:
            error = str(found)
        return EncodedItems(
            decoder,
            group,
            self.items,
            [] if error else [documents.rows(own) for own in self.rank_plan.micro_batches],
            {number: encoders.counts(tokens) for number, tokens in documents.fields["tokens"].items()},
            keeps_graphs=keeps_graphs,
            error=error,
        )


def read_pictures(
    corpus: Corpus,
    config: DataConfig,
    batch: GlobalBatch,
    rank_plan: RankPlan,
    rank: tuple[int, int],
    dtype: torch.dtype,
) -> PicturesOfRank | None:
    """Read those pictures of a batch that a ``rank`` of so many encodes; None: there are none. ``dtype``: of pixels."""
    if (of_batch := _items_of(corpus, batch)) is None:
        return None
    (items, pictures), error, told = of_batch, "", dict[int, dict[str, Any]]()
    for place in (place for place, owner in enumerate(items.ranks(rank[1])) if owner == rank[0]):
        (_, item), picture = items.items[place], pictures[place]
        try:
            for name, value in pixels_of(picture, _tokenizer_of(corpus)).items():
                is_pixels = name.startswith("pixel")
                item[name] = value.to(dtype) if is_pixels and value.is_floating_point() else value  # type: ignore[index]
                if not is_pixels:
                    told.setdefault(place, {})[name] = value.tolist()
        except DataError as found:
            number = next(one for one, own in corpus.pictures_of(batch.samples).items() if picture in own)
            part, document = int(batch.samples.part[number]), int(batch.samples.document[number])
            error = error or f"{place_of_document(config, part, document)}: {found}"
    own = sorted({0}.union(*(one.sequences.tolist() for one in rank_plan.micro_batches)))
    read = corpus.documents(batch.samples[np.array(own)])
    tokens = {number: torch.from_numpy(one["tokens"].astype(np.int64)) for number, one in zip(own, read, strict=True)}
    return PicturesOfRank(
        items=items,
        told=told,
        rank_plan=rank_plan,
        documents=Documents(fields={"tokens": tokens}, lengths=batch.lengths.tolist()),
        error=error,
    )


@functools.lru_cache(maxsize=2)
def _even_rows(tokenizer: str) -> float:
    """``encoders.even_frame`` in tokens of a picture. Infinity where pictures are cut into tiles of one size."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder_of(tokenizer), local_files_only=True, trust_remote_code=False)
    merged = getattr(getattr(config, "vision_config", None), "spatial_merge_size", None)
    return even_frame(config, "image") / merged**2 if merged else math.inf


def _tokenizer_of(corpus: Corpus) -> str:
    return "" if corpus.tokenizer is None else corpus.tokenizer.name


def _items_of(corpus: Corpus, batch: GlobalBatch) -> tuple[Items, list[Any]] | None:
    """The pictures of a batch as items without pixels, and in the same order; None: there are none."""
    if not (of_documents := corpus.pictures_of(batch.samples)):
        return None
    known, even = dict[str, Any](), _even_rows(_tokenizer_of(corpus))
    documents: list[dict[str, list[Any]]] = [{name: [] for name in ITEM_NAMES} for _ in batch.lengths]
    for number, own in of_documents.items():
        for picture in own:  # one that comes again is the same item
            documents[number][f"{picture.kind}s"].append(known.setdefault(str(picture[1:]), picture))
    found = Items.of(documents, lambda kind, own: [work_of([own.rows / own.frames] * own.frames, even)])
    assert found is not None, "there are pictures"
    pictures: list[Any] = [picture for _, picture in found.items]
    items = [(kind, dict[str, Any]()) for kind, _ in found.items]
    return replace(found, items=items, contents=[one.name for one in pictures]), pictures


def memory_of_pictures(
    corpus: Corpus, batch: GlobalBatch, rows: MeasuredRows, size: int, *, keeps_graphs: bool
) -> tuple[float, float]:
    """``Items.memory`` of a batch on ``size`` ranks; zeros where it has no pictures, or their encoder is not known."""
    if not rows.encoder_row or (found := _items_of(corpus, batch)) is None:
        return 0.0, 0.0
    sizes, num_tokens = [[float(own.rows)] for own in found[1]], int(batch.lengths.sum())
    return found[0].memory(sizes, size, num_tokens, rows, keeps_graphs=keeps_graphs)


def work_of_pictures(corpus: Corpus, batch: GlobalBatch, size: int) -> FloatArray:
    """``[size]`` work of each rank that encodes, in rows of small pictures (``encoders.work_of``)."""
    found = _items_of(corpus, batch)
    assert found is not None, "there are pictures"
    return found[0].loads(size)


class PictureLoader(Loader):
    """A loader that also reads pictures, where there are any, and plans with the memory that they leave.

    Attributes:
        dtype: of pixels.
        ranks: this rank and the number of all that encode.
        memory: what the model needs, and whether graphs of encoders are kept; None: plans do not keep to a memory.
    """

    dtype = torch.float32
    ranks = (0, 1)
    memory: tuple[MeasuredRows, bool] | None = None

    def _planner_of(self, planner: Planner, batch: GlobalBatch) -> Planner:
        if self.memory is None or not isinstance(planner, VerifiedPlanner | CalibratedPlanner):
            return planner
        rows, keeps_graphs = self.memory
        needed = memory_of_pictures(self.corpus, batch, rows, self.ranks[1], keeps_graphs=keeps_graphs)
        return planner.beside(*needed, int(batch.lengths.max()))

    def _with_tokens(self, batch: GlobalBatch, data: StepData) -> StepData:
        data = super()._with_tokens(batch, data)
        items = read_pictures(self.corpus, self._config, batch, data.rank_plan, self.ranks, self.dtype)
        return replace(data, items=items)
