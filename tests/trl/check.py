"""What ``make check-trl`` runs in an environment of its own: TRL's trainers alone, under DDP, and over HDP.

torchrun --nproc-per-node N check.py KIND OUT [--plain] [--stop] [--resume] [--tp] [--simulated [--planted]]
    [--no-evaluation] [--pp]

Writes the log of every update, and the trained model, to OUT. With ``--tp`` pairs of ranks share the model's matrices,
with ``--pp`` two ranks its layers. Of the kind
"global", ranks share batches of a fixed size: ``--stop`` ends such a run with a checkpoint after two updates, and
``--resume`` goes on from it. ``--simulated`` gives every rank a simulated accelerator: faults, and waits amid
micro-batches, go to OUT, too. ``--planted`` lets the loss make the host wait.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from PIL import Image
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    ProcessorMixin,
    Qwen2VLProcessor,
    TrainerCallback,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

import trl
from bytescale.common.errors import ConfigError
from bytescale.integrations.trl import HDPDPOTrainer, HDPGRPOTrainer, HDPSFTTrainer

STEPS, STOP = 4, 2
WORDS = ["<pad>", "<eos>", *(f"w{n}" for n in range(62))]
IMAGE = 61  # w59, between w60 and w61, stands for a picture


def tokenizer() -> PreTrainedTokenizerFast:
    made = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens([WORDS[IMAGE]])  # a processor writes it many times without a space
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def model(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, bos_token_id=1, eos_token_id=1, pad_token_id=0,
        )
    )  # fmt: skip


class Pictures(Qwen2VLProcessor):
    """Qwen2-VL's processor without its half for videos, which transformers makes with torchvision alone."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None) -> None:
        self.image_token, self.image_token_id = WORDS[IMAGE], IMAGE
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


def seeing() -> tuple[Any, Pictures]:
    """A small Qwen2.5-VL, and its processor."""
    vision = {
        "hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "depth": 2, "patch_size": 4,
        "fullatt_block_indexes": [1], "window_size": 16,
    }  # fmt: skip
    words = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0,
        "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4},
    }  # fmt: skip
    config = AutoConfig.for_model(
        "qwen2_5_vl", text_config=words, vision_config=vision, image_token_id=IMAGE, video_token_id=60,
        vision_start_token_id=62, vision_end_token_id=63, bos_token_id=1, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    images = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, temporal_patch_size=2, min_pixels=64)
    template = (
        "{% for m in messages %}{% for p in m.content %}{% if p.type == 'image' %}w60 w59 w61 {% else %}{{ p.text }} "
        "{% endif %}{% endfor %}<eos> {% endfor %}"
    )
    return AutoModelForImageTextToText.from_config(config), Pictures(images, tokenizer(), chat_template=template)


def pictures() -> Dataset:
    """Chats with one picture, two, or none of unequal sizes, in turns."""
    generator, made = torch.Generator().manual_seed(0), []
    for number in range(16 * STEPS):
        images = [
            Image.new("RGB", (16 + 8 * ((number + other) % 4), 16 + 8 * (number % 3)), (40 * number % 256, 90, 160))
            for other in range((1, 2, 1, 0)[number % 4])
        ]
        seen = [*({"type": "image", "text": None} for _ in images), {"type": "text", "text": text(generator, 4)}]
        said = [{"type": "text", "text": text(generator, 3 + 5 * (number % 5))}]
        messages = [{"role": "user", "content": seen}, {"role": "assistant", "content": said}]
        made.append({"messages": messages, "images": images})
    return Dataset.from_list(made)


def text(generator: torch.Generator, length: int) -> str:
    return " ".join(WORDS[int(n)] for n in torch.randint(2, 60, (length,), generator=generator))


def rows(kind: str) -> Dataset:
    """Prompts and answers of very unequal lengths."""
    generator = torch.Generator().manual_seed(0)
    lengths = [60, 3, 9, 25, 2, 14, 40, 5] * 2 * STEPS
    made = []
    for number, length in enumerate(lengths):
        prompt = text(generator, 2 + number % 4)
        if kind == "sft":
            made.append({"prompt": prompt, "completion": " " + text(generator, length)})
        elif kind == "dpo":
            answers = {"chosen": " " + text(generator, length), "rejected": " " + text(generator, 1 + length // 2)}
            made.append({"prompt": prompt, **answers})
        else:
            made.append({"prompt": prompt})
    return Dataset.from_list(made)


def reward(completion_ids: list[list[int]], **more: Any) -> list[float]:
    """Even words are good."""
    return [sum(1.0 - token % 2 for token in ids) / max(1, len(ids)) for ids in completion_ids]


class Stop(TrainerCallback):
    """Ends a run early, whose schedule goes on."""

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        control.should_save = control.should_training_stop = state.global_step == STOP


def trainer(kind: str, out: Path, plain: bool, is_simulated: bool = False) -> Any:
    common: dict[str, Any] = {
        "output_dir": str(out / "trainer"), "max_steps": STEPS, "per_device_train_batch_size": 4,
        "learning_rate": 1e-2, "logging_steps": 1, "save_strategy": "no", "report_to": [], "disable_tqdm": True,
        "use_cpu": not is_simulated, "bf16": False, "gradient_checkpointing": False, "max_grad_norm": 0.5, "seed": 1,
        "lr_scheduler_type": "linear", "dataloader_num_workers": 0,
    }  # fmt: skip
    options: dict[str, Any] = {"processing_class": tokenizer(), "train_dataset": rows(kind)}
    if not plain:
        degrees = {name: 2 for name in ("tp", "pp") if f"--{name}" in sys.argv}
        options |= {"capacity_tokens": 70 * 2 ** len(degrees), **degrees}
    if kind == "sft":
        made = trl.SFTTrainer if plain else HDPSFTTrainer
        if "--no-evaluation" not in sys.argv:  # TRL's kernel for losses of plain models looks for a driver
            common |= {"eval_strategy": "steps", "eval_steps": 2}
            options["eval_dataset"] = rows(kind).select(range(6))
        return made(model(), args=trl.SFTConfig(**common, max_length=128, gradient_accumulation_steps=2), **options)
    if kind == "images":
        made = trl.SFTTrainer if plain else HDPSFTTrainer
        whole, processor = seeing()
        options |= {"processing_class": processor, "train_dataset": pictures()}
        return made(whole, args=trl.SFTConfig(**common, max_length=None), **options)
    if kind == "global":
        common["per_device_train_batch_size"] = 8 // dist.get_world_size()
        options["train_dataset"] = rows("sft")
        args = trl.SFTConfig(**common, max_length=128, gradient_accumulation_steps=2)
        return HDPSFTTrainer(model(), args=args, **options)
    if kind == "dft":
        made = trl.SFTTrainer if plain else HDPSFTTrainer
        options["train_dataset"] = rows("sft")
        return made(model(), args=trl.SFTConfig(**common, max_length=128, loss_type="dft"), **options)
    if kind == "dpo":
        made = trl.DPOTrainer if plain else HDPDPOTrainer
        config = trl.DPOConfig(**common, max_length=128, beta=0.5)
        return made(model(), args=config, ref_model=model(seed=5), **options)
    made = trl.GRPOTrainer if plain else HDPGRPOTrainer
    config = trl.GRPOConfig(
        **common, num_generations=4, max_completion_length=24, temperature=0.9, beta=0.1, num_iterations=2,
        importance_sampling_level="sequence", epsilon=0.05,
    )  # fmt: skip
    model().save_pretrained(out / "start")  # TRL loads the reference from there; the first rank writes it
    dist.barrier()
    return made(str(out / "start"), reward_funcs=reward, args=config, **options)


def refused(out: Path) -> None:
    """What would sample from a part of the model, or save one."""
    options: dict[str, Any] = {"output_dir": str(out), "use_cpu": True, "bf16": False, "gradient_checkpointing": False}
    sampling, adapters = {"args": trl.GRPOConfig(**options)}, {"args": trl.SFTConfig(**options), "peft_config": 1}
    for degree in ("tp", "pp"):
        for made, given in ((HDPGRPOTrainer, sampling), (HDPSFTTrainer, adapters)):
            told = ""
            try:
                made("which is not loaded", capacity_tokens=70, **{degree: 2}, **given)
            except ConfigError as error:
                told = str(error)
            assert re.search(f"{degree} = 2.* with adapters or with a trainer that samples", told, re.IGNORECASE), told
    (out / "log.json").write_text("[]")


def that_looks(loss_of: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A loss of documents whose value somebody asks for."""

    def looking(num_items: Any) -> Any:
        loss = loss_of(num_items)

        def looked(*given: Any) -> torch.Tensor:
            total: torch.Tensor = loss(*given)
            assert float(total.detach()) == float(total.detach())
            return total

        return looked

    return looking


def train(kind: str, out: Path) -> None:
    made = trainer(kind, out, "--plain" in sys.argv, "--simulated" in sys.argv)
    if "--planted" in sys.argv:
        made._loss_of_documents = that_looks(made._loss_of_documents)
    if "--stop" in sys.argv:
        made.add_callback(Stop())
    made.train(resume_from_checkpoint="--resume" in sys.argv)
    made.save_model(str(out / "saved"))
    if dist.get_rank() == 0:
        (out / "log.json").write_text(json.dumps(made.state.log_history))
        weights = load_file(out / "saved" / "model.safetensors")
        (out / "weights.json").write_text(json.dumps({name: own.flatten().tolist() for name, own in weights.items()}))


def simulated(kind: str, out: Path) -> None:
    """``train`` on a simulated accelerator, whose faults and waits it tells."""
    from tests.accelerator.processes import BACKEND, simulated_process, told

    rank = int(os.environ["RANK"])
    with simulated_process(rank) as own:
        dist.init_process_group(BACKEND)
        train(kind, out)
        (out / f"told-{rank}.json").write_text(json.dumps(told(own)))


def main() -> None:
    kind, out = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    out.mkdir(parents=True, exist_ok=True)
    if "--simulated" in sys.argv:
        simulated(kind, out)
        return
    if kind == "refused":
        refused(out)
        return
    dist.init_process_group("gloo")
    train(kind, out)


if __name__ == "__main__":
    main()
