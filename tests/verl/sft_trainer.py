"""What ``make check-verl`` runs on two gloo ranks: verl's own ``SFTTrainer``, its config and parquet files.

torchrun --nproc-per-node 2 sft_trainer.py OUT

Three runs: over verl's FSDP engine, over ours, and over ours stopped after three of six updates and begun again. What
the trainer logs of each update, and the loss of validation, is the same.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from check import FSDP_ENGINE, make_model
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from verl.trainer.sft_trainer import SFTTrainer

UPDATES, BATCH, CAPACITY, LONGEST = 6, 4, 48, 80
WORDS = ["<pad>", "<eos>", "<user>", "<assistant>", *(f"w{n}" for n in range(60))]
TEMPLATE = (
    "{% for message in messages %}{{ '<' + message['role'] + '> ' + message['content'] + ' <eos> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant> ' }}{% endif %}"
)
OUR_ENGINE = {
    "_target_": "bytescale.integrations.verl.BytescaleEngineConfig", "strategy": "bytescale", "dtype": "float32",
    "max_token_len_per_gpu": CAPACITY, "infer_max_token_len_per_gpu": 2 * CAPACITY,
}  # fmt: skip


def write_files(out: Path) -> None:
    """A model with its tokenizer, and conversations of very unequal lengths."""
    make_model(out / "model")
    made = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(out / "model")
    generator = torch.Generator().manual_seed(0)

    def text(length: int) -> str:
        return " ".join(WORDS[int(n)] for n in torch.randint(4, 64, (length,), generator=generator))

    for name, count in (("train", UPDATES * BATCH), ("val", BATCH)):
        lengths = [(60, 3, 9, 25, 2, 14, 40, 5)[number % 8] for number in range(count)]
        rows = [
            [{"role": "user", "content": text(3)}, {"role": "assistant", "content": text(length)}]
            + [{"role": "user", "content": text(2)}, {"role": "assistant", "content": text(4)}] * (number % 2)
            for number, length in enumerate(lengths)
        ]
        pq.write_table(pa.table({"messages": rows}), out / f"{name}.parquet")


def run(out: Path, name: str, engine: dict[str, Any], updates: int, resume: str = "disable") -> list[dict[str, Any]]:
    """What the trainer has logged of every update, and of the validation at the end."""
    os.environ["VERL_FILE_LOGGER_PATH"] = str(out / f"{name}.jsonl")
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose(
            "sft_trainer_engine",
            [
                f"model.path={out / 'model'}", "model.enable_gradient_checkpointing=false",
                "+model.override_config.attn_implementation=sdpa",
                f"data.train_files={out / 'train.parquet'}", f"data.val_files={out / 'val.parquet'}",
                f"data.train_batch_size={BATCH}", "data.num_workers=0", f"data.max_length={LONGEST}",
                f"data.max_token_len_per_gpu={LONGEST}", "optim.lr=1e-2", "optim.clip_grad=0.5",
                "optim.lr_scheduler_type=cosine", "trainer.device=cpu", "trainer.logger=[file]",
                "trainer.total_epochs=1", f"trainer.save_freq={UPDATES // 2}", "trainer.n_gpus_per_node=2",
                f"trainer.default_local_dir={out / name.split('-')[0]}", f"trainer.resume_mode={resume}",
            ],
        )  # fmt: skip
    config.engine = OmegaConf.create(engine)
    trainer = SFTTrainer(config)
    trainer.total_training_steps = updates  # as if it was stopped there; the schedule is that of all updates
    trainer.fit()
    dist.barrier()
    return [json.loads(line) for line in (out / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def compared(found: list[dict[str, Any]], wanted: list[dict[str, Any]], tolerance: float) -> float:
    """The largest relative difference of the metrics, but for times and verl's count of tokens since it started."""
    assert [line["step"] for line in found] == [line["step"] for line in wanted], (found, wanted)
    worst = 0.0
    for own, other in zip(found, wanted, strict=True):
        assert own["data"].keys() == other["data"].keys(), own["data"].keys() ^ other["data"].keys()
        for name in own["data"]:
            if not name.startswith("perf/") and name not in ("train/mfu", "train/total_tokens(B)"):
                a, b = float(own["data"][name]), float(other["data"][name])
                worst = max(worst, abs(a - b) / max(abs(b), 1e-9))
                assert abs(a - b) <= tolerance * abs(b), f"{name} of update {own['step']} is {a} and not {b}"
    return worst


def main() -> None:
    out = Path(sys.argv[1]) / "trainer"
    torch.set_num_threads(1)
    dist.init_process_group("gloo")  # verl would ask for the backend cpu:gloo,cpu:gloo
    if dist.get_rank() == 0:
        out.mkdir(parents=True)
        write_files(out)
    dist.barrier()
    theirs = run(out, "theirs", FSDP_ENGINE | {"_target_": "verl.workers.config.FSDPEngineConfig"}, UPDATES)
    ours = run(out, "ours", OUR_ENGINE, UPDATES)
    half = run(out, "half", OUR_ENGINE, UPDATES // 2)
    rest = run(out, "half-resumed", OUR_ENGINE, UPDATES, resume="auto")
    assert len(ours) == UPDATES + 1, "six updates and a validation"
    apart = compared(ours, theirs, 1e-4)
    compared([line for line in half if "train/loss" in line["data"]] + rest, ours, 0.0)
    if dist.get_rank() == 0:
        losses = [line["data"]["train/loss"] for line in ours if "train/loss" in line["data"]]
        print(
            f"SFTTrainer: {UPDATES} updates, losses {losses[0]:.3f} to {losses[-1]:.3f}; metrics within {apart:.1e} of "
            "those over verl's FSDP engine, and the same after a stop",
            flush=True,
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
