"""Every setting, its default, and what it means: the schema of the TOML files and of the command line.

Plain data: nothing here imports torch. ``config.load`` reads these from TOML and checks single values; rules that tie
two settings together are in ``config.validate``. Counts may be written as ``"8K"`` or ``"2M"`` in TOML.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from bytescale.common.limits import limits

AUTO_CAPACITY = 0
AUTO_DOMAIN = 0
LossPer = Literal["token", "sequence", "weight"]
Shard = Literal["optimizer", "parameters"]
Experts = Literal["gathered", "parallel"]
Checkpointing = Literal["none", "full", "attention"]
Bos = Literal["auto", "always", "never"]
PlannerName = Literal["adaptive", "paper", "greedy", "naive", "static"]


@dataclass(slots=True, kw_only=True)
class ModelConfig:
    """What is trained: a decoder of transformers."""

    preset: str = "tiny"
    """tiny, 160m, 1b, 7b, 13b, 30b, 70b (Llama shapes; 7b to 70b are the paper's), tiny-moe, mixtral-8x7b,
    mixtral-8x22b (top-2 of 8 experts), hf:FOLDER or checkpoint:FOLDER, the shape of the model in that folder.
    hf:OWNER/NAME: a model of the Hub."""
    config: dict[str, Any] = field(default_factory=dict)
    """Fields of the model's config.json that get other values, by their names there: num_hidden_layers = 16,
    rope_theta = 1e6. Of the model in a folder, those with which its weights still fit. A preset has the vocabulary of
    the tokenizer, rounded up to a multiple of 64, unless vocab_size is here."""
    router_aux_loss_weight: float | None = None
    """Weight of the loss that keeps experts evenly used, counted over the global batch; 0: off. Unset: 0.02 for
    presets, 0 for models of folders."""
    indexer_loss: Literal["off", "dense", "sparse"] = "off"
    """How indexers that choose keys are trained, as DeepSeek-V3.2's: dense, the warm-up, with attention to all keys and
    the rest of the model frozen; sparse, beside it. off: they are not, and have to be frozen."""
    indexer_loss_coefficient: float = field(default=1.0, metadata=limits(least=0))
    """What the loss of indexers, a mean over all tokens of the global batch, is multiplied by."""
    lora_rank: int = field(default=0, metadata=limits(least=0))
    """Train low-rank adapters (LoRA) of this rank beside the weights of hf:FOLDER, which stay as they are; 0: train the
    weights."""
    lora_alpha: float | None = field(default=None, metadata=limits(least=0))
    """What adapters give is multiplied by lora_alpha / lora_rank; unset: by 2."""
    lora_targets: tuple[str, ...] = ()
    """Names of the linear modules that get adapters, such as q_proj; empty: all but the head."""
    freeze: tuple[str, ...] = ()
    """Parameters that are not trained: patterns of their names, such as *.embed_tokens.* or model.layers.[0-3].*, or
    with a ! before it the pattern of all that are trained: !*.indexer.*"""


@dataclass(slots=True, kw_only=True)
class CorpusConfig:
    """Where the text comes from, and how it becomes tokens."""

    sources: tuple[str, ...] = ()
    """Folders, files, globs, URLs of them (s3://, hdfs://, http://), `python:stdlib`, Python's own
    library, or `python:functions`, its functions, of which most are short, and a few of its modules."""
    format: Literal["auto", "text", "jsonl", "parquet", "bin"] = "auto"
    """Format of the sources; auto goes by each file's ending (.bin: Megatron .bin/.idx pair, already tokens)."""
    content: Literal["text", "messages", "prompt", "tokens"] = "text"
    """What a JSONL or Parquet record is. text: text_key. messages: a conversation under `messages` (or ShareGPT's
    `conversations`), of which what the assistant says is trained on. prompt: `prompt` and `completion`, of which the
    completion is. tokens: `tokens` or `input_ids`, with `labels` and `weights` if there are any (docs/data.md)."""
    chat_template: str = ""
    """messages only. A file with the chat template; empty: the tokenizer's own."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """messages only. What chat templates are told: {enable_thinking = false}. A record may have its own."""
    chat_template_date: str = "2024-07-26"
    """messages only. The day that chat templates are told if they ask for today (strftime_now), as YYYY-MM-DD."""
    train_empty_thoughts: bool = True
    """messages only. Whether `<think></think>` without a thought, with which a turn begins, is trained on."""
    fields: tuple[str, ...] = ()
    """tokens only. Further keys with a number per token (advantages, old log-probabilities), for loops of your own."""
    text_key: str = "text"
    """JSONL key or Parquet column that holds the text."""
    tokenizer: str = "auto"
    """`bytes`, the path of a tokenizer.json, or `bpe` to train one on the sources (cached). auto: the tokenizer of the
    model that `--init` names, else `bytes`."""
    bpe_vocab_size: int = field(default=4096, metadata=limits(least=257, most=2**24))
    """Vocabulary of the tokenizer that `bpe` trains: the 256 bytes, the end of a document, and what is merged."""
    bos: Bos = "auto"
    """Whether documents of text, and prompts, begin with the tokenizer's bos_token. auto: where the tokenizer's own
    call puts it. A chat template writes it by itself."""
    cache_dir: str = ".cache/bytescale"
    """Where tokenizers and tokenised corpora are kept between runs."""
    num_workers: int = field(default=2, metadata=limits(least=1))
    """Processes that tokenise."""


@dataclass(slots=True, kw_only=True)
class DataConfig(CorpusConfig):
    """Where the text comes from, how it becomes tokens, and how many make a global batch."""

    loss_per: LossPer = "token"
    """What the sum of weighted losses is divided by. token: the tokens of the GLOBAL batch whose weight is not 0.
    weight: the sum of their absolute weights. sequence: each sequence's by its own sum of absolute weights, and then by
    the number of sequences in the GLOBAL batch that are trained on."""
    weights: tuple[float, ...] = ()
    """The share of tokens that each source gives: one number per source, 1 in all. Empty: all are one corpus."""
    max_corrupt_records: int = field(default=0, metadata=limits(least=0))
    """How many damaged records may be left out. One more stops the run."""
    context_length: int = field(default=8192, metadata=limits(least=1))
    """Longest sequence in tokens; see over_length."""
    over_length: Literal["split", "truncate", "drop"] = "split"
    """What happens to documents longer than context_length."""
    batch_tokens: int = field(default=32768, metadata=limits(least=2))
    """Size of a global batch: whole sequences are drawn until the next one would exceed it."""
    shuffle_seed: int = field(default=1234, metadata=limits(least=0))
    """Seed of the order of documents. The order depends on this seed and the epoch, never on the number of ranks."""
    shuffle_window_mib: int = field(default=256, metadata=limits(least=1))
    """MiB of text that are shuffled together. A larger corpus is shuffled in random parts of this size, one after the
    other, so training can start when the first part is tokenised."""
    share_prefixes: bool = False
    """Compute what several sequences of a batch begin with once, where that saves time, with the same gradients. Every
    rank reads whole batches; cost.calibrate has no effect."""
    record: bool = False
    """Write down what every rank is given in every step (data/ in the run folder), for `bytescale data audit`."""
    loader: Literal["local", "ray"] = "local"
    """local: every rank reads its slices for itself; ray: servers tokenise, and ranks fetch their slices from them."""
    servers: int = field(default=2, metadata=limits(least=1))
    """ray only. Server actors per node."""


@dataclass(slots=True, kw_only=True)
class ParallelConfig:
    """The ranks and what each of them can hold."""

    ranks: int = field(default=1, metadata=limits(least=1, most=2**18))
    """Training processes on this node. For more than one, bytescale starts torchrun's agent; under torchrun, it joins
    the processes that are there and starts none."""
    tp: int = field(default=1, metadata=limits(least=1))
    """Tensor parallelism: ranks, next to each other, that share every layer's matrices and a micro-batch's tokens."""
    pp: int = field(default=1, metadata=limits(least=1))
    """Pipeline parallelism: stages, each with some of the layers. HDP has what remains, ranks / (tp * pp)."""
    capacity_tokens: int = field(default=8192, metadata=limits(least=0, auto=AUTO_CAPACITY))
    """Tokens that one micro-batch of one HDP rank may hold (the paper's C); `auto` (or 0): what the rank's memory
    allows. All capacities together must hold the context, unless activations are offloaded."""
    timeout_seconds: float | None = field(default=None, metadata=limits(above=0))
    """If a message takes longer than this, a rank counts as lost, and all ranks stop with a message. Unset: 120, or on
    GPUs 1800, since it counts from posting there, and a rank may post long before its peers come."""
    stop_seconds: float = field(default=30.0, metadata=limits(above=0))
    """How long ranks may take to finish their step and save after SIGTERM, or to end after another rank has died."""
    elastic: bool = False
    """Go on without ranks that die, from copies of their optimizer states, and take in new ones between two steps. With
    shard = parameters, domain has to be a number. A run that cannot go on is started again from its last checkpoint, as
    --max-restarts says."""
    shard: Shard = "optimizer"
    """What is divided among ranks. optimizer: its states, among all HDP ranks. parameters: the weights and gradients of
    the layers, too, among the ranks of a domain, which gather a layer when it computes and run in lockstep; not with
    pp."""
    domain: int = field(default=AUTO_DOMAIN, metadata=limits(least=0, auto=AUTO_DOMAIN))
    """Consecutive HDP ranks that share parameters; `auto` (or 0): those of a node."""
    experts: Experts = "gathered"
    """How a domain that shares parameters computes mixtures of experts. gathered: as all else of a layer. parallel:
    every rank keeps whole experts, as many as the others, and tokens travel to the experts that the router has chosen
    and back; not with tp."""


@dataclass(slots=True, kw_only=True)
class MemoryConfig:
    """The memory of a rank, and what happens to activations that do not fit."""

    offload: Literal["auto", "on", "off"] = "auto"
    """Send activations of long sequences to host memory if compute hides the copies (Eq. 3). auto: only on a GPU."""
    device_gib: float | None = field(default=None, metadata=limits(above=0, most=2**20))
    """GiB of one rank's device that may be used; unset: 92 % of a GPU's, or of the machine's RAM over its ranks."""
    host_gib: float | None = field(default=None, metadata=limits(above=0, most=2**20))
    """GiB of host memory for one rank's offloaded activations and optimizer; unset: half of the machine's RAM over its
    ranks, or 80 % of it with `optimizer.offload`."""
    checkpointing: Checkpointing = "none"
    """Which activations backward computes again. full: all. attention: all except the result of attention, which is
    cheap to keep, O(s), and expensive to compute, O(s^2). none: it keeps all activations. With full and attention,
    feed-forward parts of plain linear layers are computed a chunk of rows at a time, except with `parallel.tp`."""


@dataclass(slots=True, kw_only=True)
class KernelsConfig:
    """What computes attention and the operations between matrix products."""

    attention: Literal["auto", "flash", "fa3", "fa4", "math"] = "auto"
    """auto: the fastest flash implementation that works here; flash: PyTorch's own; fa3, fa4: FlashAttention 3 (Hopper)
    or 4 (Hopper, Blackwell), packages of their own; math: the slow reference written out in matrix products."""
    deterministic: bool = False
    """Two runs of one plan are equal to the last bit on GPUs, too: slower, and an error where an operation cannot."""


@dataclass(slots=True, kw_only=True)
class PlannerConfig:
    """How a global batch is laid out over the ranks."""

    name: PlannerName = "adaptive"
    """adaptive: ours; how many ranks share a sequence follows the cluster and the batch. paper: the paper's Algorithm 2
    as published. greedy: Algorithm 2, but each group goes to the ranks that are free first. naive: its Algorithm 1.
    static: a mesh of data and context parallelism, the baseline."""


@dataclass(slots=True, kw_only=True)
class CostConfig:
    """The speeds that the planner assumes."""

    profile: str | None = None
    """A TOML file written by `bytescale profile`. Unset: times follow from counted operations of the model."""
    calibrate: bool = True
    """Refine the times while training, from what ranks measure in every step. Later plans depend on measured times, so
    two runs differ in the order of sums; false: they are equal to the last bit. Needs tp = pp = 1."""


@dataclass(slots=True, kw_only=True)
class OptimizerConfig:
    """An optimizer with linear warm-up and a schedule. States are sharded over all HDP ranks (ZeRO-1)."""

    name: Literal["adamw", "muon", "sgd"] = "adamw"
    """muon: orthogonalised momentum for layers' matrices, AdamW for the rest, at AdamW's rates. sgd: with momentum."""
    options: dict[str, Any] = field(default_factory=dict)
    """Numbers of the optimizer by its own names for them. adamw: betas = [0.9, 0.95] and eps = 1e-8. sgd: momentum =
    0.95. muon: all three."""
    offload: bool = False
    """Master weights and states are in host memory and updated there: 12 bytes of it for each parameter with AdamW,
    over the number of ranks. Gradients go down and weights come up bucket by bucket. Not for muon."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Options of parameters by patterns of their names: {"*.embed_tokens.*" = {lr_ratio = 0.1, weight_decay = 0}}.
    lr_ratio multiplies the learning rate. Later ones win."""
    lr: float = field(default=3e-4, metadata=limits(above=0))
    """Peak learning rate."""
    schedule: Literal["cosine", "linear", "constant", "wsd", "inverse-sqrt"] = "cosine"
    """How the learning rate falls after warm-up. wsd: it stays, and falls linearly over the last fifth of the
    steps. inverse-sqrt: as sqrt(warmup_steps / step), which does not depend on the number of steps."""
    min_lr_ratio: float = 0.1
    """Lowest learning rate over the peak. A constant schedule stays above it."""
    warmup_steps: int = field(default=10, metadata=limits(least=0))
    """Steps of linear warm-up."""
    weight_decay: float = 0.1
    """Applied to matrices only, not to norms."""
    z_loss: float = field(default=0.0, metadata=limits(least=0))
    """Weight of log(sum of exp(logits))^2, which keeps logits from drifting (PaLM: 1e-4); part of the loss printed."""
    clip_grad_norm: float = field(default=1.0, metadata=limits(least=0))
    """Largest global gradient norm; 0 switches clipping off."""


@dataclass(slots=True, kw_only=True)
class TrainerConfig:
    """The loop: how long, in which precision, on what."""

    steps: int = field(default=100, metadata=limits(least=1))
    """Optimizer steps in all (a resumed run continues up to this number)."""
    epochs: int = field(default=0, metadata=limits(least=0, most=10_000))
    """Passes over the data in place of `steps`, which becomes their number of batches. All text is tokenised before the
    first step then. With data.weights, passes of the source that is passed last. 0: `steps` counts."""
    seed: int = 0
    """Seed of the initial weights."""
    init: str = ""
    """Where the initial weights come from. hf:FOLDER: a Hugging Face folder. hf:OWNER/NAME or hf:OWNER/NAME@REVISION: a
    model of the Hub, downloaded once. checkpoint:FOLDER: a checkpoint from any number of ranks. Empty: random numbers
    from `seed`."""
    dtype: Literal["auto", "bf16", "fp32", "fp64"] = "auto"
    """Parameters and activations; auto: bf16 on GPU, fp32 on CPU. Master weights are at least fp32."""
    invariant: bool = False
    """Every token's log-probability is the same to the last bit under any plan and number of ranks, on CPUs, for more
    time and memory; gradients are still summed in the plan's order. Not with tp or experts in parallel."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """auto: cuda where there is a GPU for every rank of this node."""
    run_dir: str = ""
    """Folder of this run; empty: runs/<config name>-<date>-<time>."""
    resume: bool = False
    """Continue the run in run_dir from its last checkpoint, on any number of ranks."""


@dataclass(slots=True, kw_only=True)
class LogConfig:
    """What a run tells of itself: traces, trackers."""

    trace_steps: tuple[int, ...] = ()
    """Steps of which a trace is written to the run folder's traces/: what every rank did and when, beside what was
    predicted. Open it in https://ui.perfetto.dev."""
    static_mesh: bool = False
    """Whether rows of metrics.jsonl have `static_seconds`: what the batch would have taken on a static mesh that holds
    data.context_length, simulated by calibrated costs, as `predicted_seconds` is."""
    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    """Who else gets the numbers of metrics.jsonl. tensorboard: events in the run folder (extra `tensorboard`). wandb:
    Weights & Biases (extra `wandb`), whose own variables say where: WANDB_MODE=offline writes into the run folder, for
    `wandb sync`; without WANDB_PROJECT and WANDB_NAME, the project is bytescale and the name that of the run folder.
    trackio (extra `trackio`): a database of this machine, in TRACKIO_DIR, for `trackio show`, unless TRACKIO_SPACE_ID
    or TRACKIO_SERVER_URL names a place; if you are logged in at the Hub, it asks there for your name."""


@dataclass(slots=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints: whole at any moment, with a checksum of every block."""

    every: int = field(default=50, metadata=limits(least=0))
    """Steps between checkpoints; 0: only at the end."""
    keep: int = field(default=2, metadata=limits(least=1))
    """Newest checkpoints that are kept."""
    keep_every: int = field(default=0, metadata=limits(least=0))
    """Checkpoints whose step is a multiple of this are kept for ever; 0: none are."""
    folder: str = ""
    """Where checkpoints are: a folder, or a URL (s3://BUCKET/NAME, or any that fsspec knows); empty: the run folder.
    Behind a URL they arrive while training goes on, and the run folder has copies."""


@dataclass(slots=True, kw_only=True)
class EvalConfig:
    """Loss and perplexity on other data, by the length of sequences. It changes nothing of the training."""

    sources: tuple[str, ...] = ()
    """Files, folders or URLs, read with all other settings of [data]. Each document counts once. Empty: no
    evaluation."""
    every: int = field(default=100, metadata=limits(least=0))
    """Steps between evaluations; 0: only after the last step, which is always evaluated."""
    keep_best: bool = False
    """Also save after each evaluation with a lower loss than all before it, and keep the last checkpoint of these."""
    patience: int = field(default=0, metadata=limits(least=0))
    """The run ends early after this many evaluations in a row without a lower loss; 0: never."""


@dataclass(slots=True, kw_only=True)
class Config:
    """A whole training run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    kernels: KernelsConfig = field(default_factory=KernelsConfig)
    planner: PlannerConfig = field(default_factory=PlannerConfig)
    cost: CostConfig = field(default_factory=CostConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    log: LogConfig = field(default_factory=LogConfig)
