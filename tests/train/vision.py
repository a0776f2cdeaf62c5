"""Folders of small vision-language models with their processors, and chats about pictures that the tests draw."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoProcessor, LlavaProcessor, PreTrainedTokenizerFast, ProcessorMixin, Qwen2VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from tests.hf.test_images import IMAGE, VIDEO, WORDS, model_of

NAMED = ("user", "assistant", "what", "is", "this", "a", "red", "blue", "green", "thing", "and", ".")
SPECIAL = {"<pad>": 0, "<s>": 1, "</s>": 2, "<image>": IMAGE, "<video>": VIDEO, "<see>": 72, "</see>": 73}
# As Qwen's: contents are texts or lists. LLaVA's own knows lists alone.
EITHER = (
    "{% for m in messages %}<s>{{ m.role + ' ' }}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<see><image></see>{% else %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endif %}</s>{% endfor %}{% if add_generation_prompt %}<s>assistant {% endif %}"
)  # fmt: skip
LISTS = (
    "{% for m in messages %}<s>{{ m.role + ' ' }}{% for p in m.content | selectattr('type', 'equalto', 'image') %}"
    "<image>{% endfor %}{% for p in m.content | selectattr('type', 'equalto', 'text') %}{{ p.text }}{% endfor %}</s>"
    "{% endfor %}{% if add_generation_prompt %}<s>assistant {% endif %}"
)  # fmt: skip


class PicturesOfQwen(Qwen2VLProcessor):
    """Qwen2-VL's own without its half for videos, which transformers makes with torchvision alone."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None) -> None:
        self.image_token, self.image_token_id = "<image>", IMAGE
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


AutoProcessor.register("pictures_of_qwen", PicturesOfQwen)


def tokenizer() -> PreTrainedTokenizerFast:
    words = {**{f"word{number}": number for number in range(3 + len(NAMED), WORDS)}}
    numbers = {**{word: 3 + place for place, word in enumerate(NAMED)}, **SPECIAL}
    free = {number: word for word, number in words.items() if number not in SPECIAL.values()}
    vocabulary = {**numbers, **{word: number for number, word in free.items()}}
    made = Tokenizer(WordLevel(vocabulary, unk_token="word20"))
    made.pre_tokenizer = Whitespace()
    made.add_special_tokens(list(SPECIAL))
    return PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="word20", bos_token="<s>", eos_token="</s>", pad_token="<pad>",
        extra_special_tokens={"image_token": "<image>"},
    )  # fmt: skip


def vision_folder(folder: Path, family: str) -> Path:
    """A small random model in fp64 with its processor, as they lie on the Hub."""
    processor: Any
    if family == "llava":
        images = SiglipImageProcessorPil(size={"height": 16, "width": 16})
        processor = LlavaProcessor(
            images, tokenizer(), patch_size=4, vision_feature_select_strategy="full", chat_template=LISTS
        )
    else:
        images = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, temporal_patch_size=2, min_pixels=64)
        processor = PicturesOfQwen(images, tokenizer(), chat_template=EITHER)
    model_of(family).save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def draw(folder: Path, number: int = 8) -> list[str]:
    """Pictures of several sizes and kinds of file. Returns their paths from ``folder``'s parent."""
    folder.mkdir(parents=True, exist_ok=True)
    names = []
    for place in range(number):
        image = Image.new("RGB", (16 + 8 * (place % 3), 16 + 4 * (place % 4)), (place * 40 % 256, 90, 160))
        ImageDraw.Draw(image).ellipse((1, 1, 12 + place, 9), fill=(250, place * 70 % 256, 0))
        names.append(f"{folder.name}/{place}.{('png', 'jpg', 'webp', 'bmp')[place % 4]}")
        image.save(folder.parent / names[-1])
    return names


def chats(names: list[str]) -> list[dict[str, Any]]:
    """Two pictures, one, none; one in two documents; several turns; an answer as a text, a list or a picture."""

    def seen(*parts: Any) -> dict[str, Any]:
        own = [
            {"type": "image", "path": part[1:]} if part[0] == "@" else {"type": "text", "text": part} for part in parts
        ]
        return {"role": "user", "content": own}

    def said(text: str) -> dict[str, Any]:
        return {"role": "assistant", "content": text}

    a, b, c, d, e, *_ = (f"@{name}" for name in names)
    conversations = [
        [seen(a, "what is this"), said("a red thing .")],
        [seen("what is", b, "and", c), said("a blue thing and a green thing")],
        [{"role": "user", "content": "what is this"}, said("a thing")],
        [seen(a, "this"), said("a thing ."), seen(d, "and this"), said("red")],
        [seen("this", e), {"role": "assistant", "content": [{"type": "text", "text": "green and blue ."}]}],
        [seen(e, d, c), said("a thing and a thing and a thing and a thing")],
    ]
    return [{"messages": own} for own in conversations]


def write_chats(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def plain_document(folder: Path, home: Path, record: dict[str, Any]) -> tuple[dict[str, Any], torch.Tensor]:
    """What the model takes of a chat, by its own processor, and which of its tokens the assistant says, ``[T]``."""
    processor = AutoProcessor.from_pretrained(folder)
    messages = []
    for message in record["messages"]:
        parts = message["content"]
        parts = [{"type": "text", "text": parts}] if isinstance(parts, str) else parts
        parts = [{**part, "path": str(home / part["path"])} if "path" in part else part for part in parts]
        messages.append({**message, "content": parts})
    given = dict(processor.apply_chat_template(messages, tokenize=True, return_dict=True, return_tensors="pt"))
    given = {name: value.double() if value.is_floating_point() else value for name, value in given.items()}
    ids, trained, turn = given["input_ids"][0].tolist(), [], False
    names = ("<s>", "</s>", "assistant")
    start, end, assistant = processor.tokenizer.convert_tokens_to_ids(names)
    for place, token in enumerate(ids):
        if token == start:
            turn = False
        trained.append(turn)
        if token == assistant and ids[place - 1] == start:
            turn = True
        turn = turn and token != end
    return given, torch.tensor(trained)
