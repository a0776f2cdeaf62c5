"""A small vision-language model learns the colors and the shapes of ten drawn pictures.

torchrun --nproc-per-node 2 examples/pictures.py

Each document is one picture or two, and words that say what is there. The model is a Qwen2.5-VL with random weights;
with one of the Hub, take its own processor in place of ``SmallProcessor``. Any rank encodes any picture.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from PIL import Image, ImageDraw
from transformers import AutoModelForImageTextToText, Qwen2_5_VLConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

import bytescale

COLORS, SHAPES = ("red", "green", "blue", "orange", "purple"), ("ellipse", "rectangle")
START, END, IMAGE = 12, 13, 14  # behind the words: <vision_start>, <vision_end>, <image>


def drawn(color: str, shape: str, size: int = 56) -> Image.Image:
    picture = Image.new("RGB", (size, size), "white")
    getattr(ImageDraw.Draw(picture), shape)((8, 8, size - 8, size - 8), fill=color)
    return picture


class SmallProcessor:
    """What this script needs of a processor, with one word for each color and shape."""

    def __init__(self) -> None:
        self.image_processor: Any = Qwen2VLImageProcessorPil(patch_size=14, merge_size=2, min_pixels=56 * 56)

    def tokens(self, pictures: list[Any], words: list[str]) -> list[int]:
        found: list[int] = []
        for picture in pictures:
            found += [START, *[IMAGE] * (int(picture["image_grid_thw"].prod()) // 4), END]
        return found + [2 + (COLORS + SHAPES).index(word) for word in words]


def make_model() -> Any:
    """Every rank makes the same one."""
    torch.manual_seed(0)
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": 16, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0,
            "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0},
        },
        vision_config={
            "depth": 2, "hidden_size": 64, "num_heads": 4, "intermediate_size": 128, "out_hidden_size": 64,
            "patch_size": 14, "window_size": 112, "fullatt_block_indexes": [1],
        },
        image_token_id=IMAGE, vision_start_token_id=START, vision_end_token_id=END,
    )  # fmt: skip
    return AutoModelForImageTextToText.from_config(config, dtype=torch.float32)


def documents(processor: SmallProcessor) -> list[dict[str, Any]]:
    """Ten pictures, each alone, and with the next one beside it. Only the words are learned."""
    named = [(color, shape) for color in COLORS for shape in SHAPES]
    made = [processor.image_processor(images=[drawn(*name)], return_tensors="pt") for name in named]
    found = []
    for first in range(len(named)):
        for places in ([first], [first, (first + 1) % len(named)]):
            words = [word for place in places for word in named[place]]
            tokens = torch.tensor(processor.tokens([made[place] for place in places], words))
            labels = torch.full_like(tokens, -100)
            labels[-len(words) - 1 : -1] = tokens[-len(words) :]
            found.append({"tokens": tokens, "labels": labels, "images": [dict(made[place]) for place in places]})
    return found


def main(steps: int = 60, lr: float = 3e-3) -> list[float]:
    """Returns the mean loss of a word at each step."""
    model, batch = make_model(), documents(SmallProcessor())
    num_words = sum(int((document["labels"] != -100).sum()) for document in batch)
    hdp = bytescale.HDP(model, capacity_tokens=64)
    hdp.adamw(lr=lr)
    losses = []
    for _ in range(steps):
        seen = torch.zeros((), dtype=torch.float64)
        for micro in hdp.plan(batch):
            loss = micro.loss_sum(model) / num_words
            loss.backward()
            seen += loss.detach()
        if dist.is_initialized():
            dist.all_reduce(seen)
        hdp.step()
        losses.append(float(seen))
        if len(losses) % 10 == 1 and (not dist.is_initialized() or dist.get_rank() == 0):
            print(f"step {len(losses)}: loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
