"""Floor 4: readers, tokenising, global batches and the local loader.

Nothing here imports torch, and only ``data.remote`` imports Ray.
"""

from bytescale.data.loading.corpus import IGNORE_INDEX, Corpus, check_vocabulary, prepare_corpus
from bytescale.data.loading.loader import Feed, LocalFeed, LocalLoader, MicroBatchData, StepData, read_micro_batch
from bytescale.data.order.batches import BatchSampler, GlobalBatch
from bytescale.data.order.index import CorpusFacts

__all__ = [
    "IGNORE_INDEX",
    "BatchSampler",
    "Corpus",
    "CorpusFacts",
    "Feed",
    "GlobalBatch",
    "LocalFeed",
    "LocalLoader",
    "MicroBatchData",
    "StepData",
    "check_vocabulary",
    "prepare_corpus",
    "read_micro_batch",
]
