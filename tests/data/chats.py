"""Conversations for tests, and a tokenizer with a chat template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

CHATML = (
    "{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('unknown role ' + "
    "m.role) }}{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THOUGHTS = (  # as Qwen3: thoughts are written in the last turn alone, and roles that are not known are left out
    "{% for m in messages %}{% if m.role in ['user', 'assistant'] %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TEXT = "what is the answer to this question ? it is 42 , of course über 世界 🙂 please tell me more about rings"
_WORDS = tuple(_TEXT.split())


def chat_folder(folder: Path, template: str | None = CHATML) -> Path:
    """A folder with a byte-level tokenizer.json and a tokenizer_config.json, as transformers reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    made = byte_level_bpe([" ".join(_WORDS)] * 3, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    made.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|endoftext|>",
        "bos_token": {"content": "<|endoftext|>", "__type": "AddedToken"},
    }
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def byte_level_bpe(texts: Sequence[str], special: Sequence[str]) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=317 + len(special),
        special_tokens=list(special),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    return made


def conversations(count: int, seed: int = 0, most_words: int = 12) -> list[dict[str, Any]]:
    """Records with one to three exchanges of random words."""
    random = np.random.default_rng(seed)

    def text() -> str:
        return " ".join(random.choice(_WORDS, random.integers(1, most_words)))

    records = []
    for _ in range(count):
        messages = [{"role": "system", "content": text()}] if random.random() < 0.3 else []
        for _ in range(random.integers(1, 4)):
            messages += [{"role": "user", "content": text()}, {"role": "assistant", "content": text()}]
        records.append({"messages": messages})
    return records
