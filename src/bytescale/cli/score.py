"""``bytescale score``: log-probabilities of every document of a corpus under a model of Hugging Face."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from bytescale.cli.data import CorpusOptions
from bytescale.cli.options import ModelOptions, folder_of_model, parse_with_model
from bytescale.common.environment import ranks_of_torchrun
from bytescale.common.errors import typed_path
from bytescale.common.limits import limits
from bytescale.config.resolve import HF_PREFIX
from bytescale.config.schema import Config, DataConfig, ModelConfig, TrainerConfig
from bytescale.config.sharing import ranks_beside


@dataclass(slots=True, kw_only=True)
class ScoreOptions(CorpusOptions, ModelOptions):
    """bytescale score MODEL SOURCE ... --out FILE.parquet: the log-probability of every token under a model.

    MODEL is a Hugging Face folder, or the name of a model of the Hub. The file has a row for each document, in the
    order of the sources. After a kill, the same command continues, on any number of ranks.
    """

    out: Path
    """The Parquet file to write. Its parts lie beside it, in FILE.parquet.parts, until all are there."""
    tokenizer: str = ""
    """`bytes`, or the path of a tokenizer.json or its folder; empty: the model's."""
    tp: int = field(default=1, metadata=limits(least=1))
    """Ranks that share each layer's matrices, as `parallel.tp`."""
    pp: int = field(default=1, metadata=limits(least=1))
    """Pipeline stages, as `parallel.pp`."""
    batch_tokens: int = field(default=2**18, metadata=limits(least=1))
    """Tokens that are planned together and written as one part."""
    invariant: bool = False
    """Scores are the same to the last bit for any number of ranks and capacity, on CPUs, for more time and memory."""
    timeout_seconds: float | None = field(default=None, metadata=limits(above=0))
    """If a message takes longer than this, a rank counts as lost, and all ranks stop. Unset: 120, or 1800 on GPUs."""

    def corpus_config(self) -> DataConfig:
        """The ``[data]`` section: documents of any length, each as one sequence, with a tokenizer as in training."""
        from bytescale.train.origin import with_its_tokenizer

        model = f"{HF_PREFIX}{self.model}"
        data = replace(self.data_config(), tokenizer=self.tokenizer or "auto", context_length=2**62)
        config = Config(data=data, model=ModelConfig(preset=model), trainer=TrainerConfig(init=model))
        return with_its_tokenizer(config).data


def run(arguments: Sequence[str]) -> int:
    options = parse_with_model(ScoreOptions, arguments, prog="bytescale score")
    options = replace(options, model=folder_of_model(options.model))
    from bytescale.hf.scoring.score_file import ScoreFile
    from bytescale.train.ranks import end_with_launcher

    ScoreFile(options.out).check_is_new()
    if ranks_of_torchrun() is not None:
        end_with_launcher()
        score_on_ranks(options)
        return 0
    if options.ranks > 1:
        from bytescale.train.launch.forked import prepare_for_copies

        prepare_for_copies()
    prepare(options)
    if options.ranks == 1:
        score_on_ranks(options)
        return 0
    from bytescale.cli.main import run_on_ranks

    print(f"starting {options.ranks} ranks ...", flush=True)
    modules = ["bytescale.hf.loop.hdp", "bytescale.hf.scoring.score_file"]
    return run_on_ranks("score", arguments, options.ranks, modules=modules, go_on="continue")


def prepare(options: ScoreOptions) -> None:
    """Tokenise the corpus and check its documents, before any rank is started."""
    from bytescale.config.hugging_face import read_hf_config
    from bytescale.data.loading.corpus import prepare_corpus
    from bytescale.data.tokens.progress import progress_bar
    from bytescale.hf.files.folder import require_positions
    from bytescale.hf.scoring.score_file import check_documents

    num_hdp, data = ranks_beside(options.ranks, options.tp, options.pp), options.corpus_config()
    with progress_bar() as progress:
        corpus = prepare_corpus(data, progress)
    check_documents(corpus, num_hdp, options.capacity_tokens, data)
    longest, content = int(corpus.samples.length.max()), read_hf_config(typed_path(options.model))
    require_positions(content, longest, what="a document has", fix="split or truncate documents to {} tokens")


def score_on_ranks(options: ScoreOptions) -> None:
    from bytescale.config.hugging_face import read_hf_config
    from bytescale.data.loading.corpus import check_vocabulary, prepare_corpus
    from bytescale.hf.files.folder import read_model
    from bytescale.hf.loop.hdp import HDP
    from bytescale.hf.scoring.score_file import ScoreFile, score_corpus
    from bytescale.train.ranks import open_ranks

    folder, data = typed_path(options.model), options.corpus_config()
    with open_ranks(options.run_config(options.timeout_seconds)) as ranks:
        corpus = prepare_corpus(data)
        model = read_model(folder, read_hf_config(folder), ranks.dtype).eval().to(ranks.device)
        check_vocabulary(corpus.metadata, len(model.get_input_embeddings().weight))
        hdp = HDP(
            model,
            capacity_tokens=options.capacity_tokens,
            tp=options.tp,
            pp=options.pp,
            forward_only=True,
            invariant=options.invariant,
        )
        score_corpus(
            hdp,
            corpus,
            ScoreFile(options.out),
            data=data,
            batch_tokens=options.batch_tokens,
            model_name=model_identity(folder),
            log=print if ranks.is_first else lambda line: None,
        )
        if ranks.is_first:
            counts = corpus.metadata.counts
            print(f"{counts.num_samples} documents, {counts.num_tokens} tokens -> {options.out}")


def model_identity(folder: Path) -> str:
    """The folder's path and a hash that changes when a file in it does."""
    content = hashlib.blake2b(digest_size=8)
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        content.update(f"{path.name}\0{path.stat().st_size}\0{path.stat().st_mtime_ns}\n".encode())
    return f"{folder.resolve()} {content.hexdigest()}"
