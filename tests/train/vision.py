"""Folders of small vision-language models with their processors, and chats about pictures that the tests draw."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image, ImageDraw
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoProcessor, LlavaProcessor, PreTrainedTokenizerFast, ProcessorMixin, Qwen2_5_VLProcessor
from transformers.image_utils import load_image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.video_utils import load_video, make_batched_metadata, make_batched_videos

from tests.hf.test_images import IMAGE, VIDEO, WORDS, model_of

NAMED = ("user", "assistant", "what", "is", "this", "a", "red", "blue", "green", "thing", "and", ".")
SPECIAL = {"<pad>": 0, "<s>": 1, "</s>": 2, "<image>": IMAGE, "<video>": VIDEO, "<see>": 72, "</see>": 73}
# As Qwen's: contents are texts or lists. LLaVA's own knows lists alone.
EITHER = (
    "{% for m in messages %}<s>{{ m.role + ' ' }}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type != 'text' %}<see><{{ p.type }}></see>{% else %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endif %}</s>{% endfor %}{% if add_generation_prompt %}<s>assistant {% endif %}"
)  # fmt: skip
LISTS = (
    "{% for m in messages %}<s>{{ m.role + ' ' }}{% for p in m.content | selectattr('type', 'equalto', 'image') %}"
    "<image>{% endfor %}{% for p in m.content | selectattr('type', 'equalto', 'text') %}{{ p.text }}{% endfor %}</s>"
    "{% endfor %}{% if add_generation_prompt %}<s>assistant {% endif %}"
)  # fmt: skip


class VideosOfQwen:
    """What Qwen2-VL's processor of videos does, which transformers has with torchvision alone; no frame is resized."""

    do_sample_frames = False
    temporal_patch_size, merge_size, patch = 2, 2, 4

    def __call__(self, videos: Any, **options: Any) -> dict[str, Any]:
        values, grids, videos = [], [], make_batched_videos(videos)
        for video in videos:
            frames = torch.as_tensor(video)
            frames = frames.permute(0, 3, 1, 2) if frames.shape[-1] == 3 else frames
            frames = torch.cat([frames, frames[-1:]] if len(frames) % 2 else [frames]) / 255 - 0.5
            time, high, wide = len(frames) // 2, frames.shape[2] // self.patch, frames.shape[3] // self.patch
            parts = frames.view(time, 2, 3, high // 2, 2, self.patch, wide // 2, 2, self.patch)
            values.append(parts.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(time * high * wide, -1))
            grids.append([time, high, wide])
        metadata = make_batched_metadata(videos, options.get("video_metadata"))
        return {
            "pixel_values_videos": torch.cat(values),
            "video_grid_thw": torch.tensor(grids),
            "video_metadata": metadata,
        }


class PicturesOfQwen(Qwen2_5_VLProcessor):
    """Qwen2.5-VL's own with ``VideosOfQwen``."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None) -> None:
        self.image_token, self.image_token_id, self.video_token, self.video_token_id = (
            "<image>",
            IMAGE,
            "<video>",
            VIDEO,
        )
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)

    @property
    def video_processor(self) -> VideosOfQwen:
        return VideosOfQwen()


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
        extra_special_tokens={
            "image_token": "<image>", "video_token": "<video>", "vision_start_token": "<see>",
            "vision_end_token": "</see>",
        },
    )  # fmt: skip


def vision_folder(folder: Path, family: str, *, real: bool = False) -> Path:
    """A small random model in fp64 with its processor, as they lie on the Hub. ``real``: one of transformers alone."""
    processor: Any
    if family == "llava":
        images = SiglipImageProcessorPil(size={"height": 16, "width": 16})
        processor = LlavaProcessor(
            images, tokenizer(), patch_size=4, vision_feature_select_strategy="full", chat_template=LISTS
        )
    elif real:
        of_video = transformers.Qwen3VLVideoProcessor if family == "qwen3_vl" else transformers.Qwen2VLVideoProcessor
        of_both = transformers.Qwen3VLProcessor if family == "qwen3_vl" else Qwen2_5_VLProcessor
        parts: dict[str, Any] = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
        videos = of_video(**parts, size={"shortest_edge": 128, "longest_edge": 1024}, do_sample_frames=True, fps=2)
        images = Qwen2VLImageProcessorPil(**parts, min_pixels=64)
        processor = of_both(images, tokenizer(), videos, chat_template=EITHER)
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


def video_chats(folder: Path, *, files: bool) -> list[dict[str, Any]]:
    """Chats about videos of frames, of video ``files``, and beside a picture; one video in two documents."""
    names = draw(folder / "pictures")
    frames = []
    for place in range(7):
        image = Image.new("RGB", (16, 8 + 8 * (place // 5)), (place * 30, 90, 160))
        ImageDraw.Draw(image).line((0, place, 15, 7), fill=(250, 0, place * 20))
        frames.append(f"pictures/frame-{place}.png")
        image.save(folder / frames[-1])
    sources: list[Any] = [frames[:5], frames[5:], frames[:2]]
    if files:
        sources = [
            write_video(folder / f"pictures/{place}.{end}", place) for place, end in enumerate(("mp4", "mov", "avi"))
        ]

    def about(*parts: Any) -> dict[str, Any]:
        own = [{"type": "text", "text": one} if one in ("what is", "this") else one for one in parts]
        said = {"role": "assistant", "content": "a red thing and a blue thing"}
        return {"messages": [{"role": "user", "content": own}, said]}

    a, b, c = ({"type": "video", "video": one} for one in sources)
    picture = {"type": "image", "path": names[0]}
    return [
        about(a, "what is"),
        about("this", b, "what is", c),
        about("this"),
        about(c, picture, "this"),
        about("this", picture),
    ]


def write_video(file: Path, place: int, codec: str = "mpeg4") -> str:
    """Nine frames or more at 6 a second. Returns the path from the parent of the file's folder."""
    import av

    with av.open(str(file), "w") as container:
        stream = container.add_stream(codec, rate=6)
        stream.width, stream.height, stream.pix_fmt = 16, 16, "yuv420p"
        for number in range(9 + place):
            pixels = np.full((16, 16, 3), (number * 20, place * 80, 100), np.uint8)
            pixels[: number % 16, :8] = 255
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return f"{file.parent.name}/{file.name}"


def write_chats(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def plain_document(folder: Path, home: Path, record: dict[str, Any]) -> tuple[dict[str, Any], torch.Tensor]:
    """What the model takes of a chat, by its own processor, and which of its tokens the assistant says, ``[T]``."""
    processor, options = AutoProcessor.from_pretrained(folder), dict[str, Any]()

    def in_full(part: dict[str, Any]) -> dict[str, Any]:
        if part["type"] != "video":
            return {"type": "image", "image": load_image(str(home / part["path"]))} if "path" in part else part
        if isinstance(part["video"], list):
            return {**part, "video": np.stack([np.asarray(load_image(str(home / path))) for path in part["video"]])}
        sample = processor.video_processor.sample_frames if processor.video_processor.do_sample_frames else None
        frames, metadata = load_video(str(home / part["video"]), backend="pyav", sample_indices_fn=sample)
        options.setdefault("video_metadata", []).append(metadata)
        return {**part, "video": frames}

    messages = []
    for message in record["messages"]:
        parts = message["content"]
        parts = [{"type": "text", "text": parts}] if isinstance(parts, str) else parts
        messages.append({**message, "content": [in_full(part) for part in parts]})
    options |= (
        {"do_sample_frames": False} if any("video" in part for one in messages for part in one["content"]) else {}
    )
    given = processor.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_tensors="pt", processor_kwargs=options
    )
    given = dict(given)
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
