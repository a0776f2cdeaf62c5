"""The cookbook's own loops (tinker-cookbook) against ``bytescale serve``, beside a plain loop of transformers and peft.

``cookbook.py RANKS``. Its supervised loop trains on the conversations that it ships, its loop of reinforcement learning
on an environment of its class ``ProblemEnv``, and its DPO on pairs of these conversations. All that they ask the server
to train is recorded on the way, and done again by the plain loop, which begins with the same adapters.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import chz
import datasets
import tinker_cookbook
import torch
from tests.tinker import check
from tests.tinker.check import RANK, Plain, compare, make_model, serving
from tinker_cookbook import renderers
from tinker_cookbook.preference import train_dpo
from tinker_cookbook.preference.dpo_datasets import DPODatasetBuilderFromComparisons
from tinker_cookbook.preference.preference_datasets import ComparisonDatasetBuilder
from tinker_cookbook.preference.types import Comparison, LabeledComparison
from tinker_cookbook.rl import train as rl
from tinker_cookbook.rl.problem_env import ProblemEnv, ProblemGroupBuilder
from tinker_cookbook.rl.types import RLDataset, RLDatasetBuilder
from tinker_cookbook.supervised import train as supervised
from tinker_cookbook.supervised.data import FromConversationFileBuilder
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig
from tinker_cookbook.tokenizer_utils import get_tokenizer, register_tokenizer

import tinker

MODEL = "Qwen/Qwen3-8B"  # a name that the cookbook knows; the model is a small one
CONVERSATIONS = Path(tinker_cookbook.__file__).parent / "example_data" / "conversations.jsonl"
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>")


class Recorder:
    """What clients send to be trained, and what they are answered: the client's methods, called as they are."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any]] = []
        for name in ("forward_backward", "forward_backward_custom", "optim_step"):
            setattr(tinker.TrainingClient, name, self._recorded(getattr(tinker.TrainingClient, name)))

    def _recorded(self, method: Any) -> Any:
        def call(client: Any, given: Any, *args: Any, **options: Any) -> Any:
            future = method(client, given, *args, **options)
            loss = args[0] if args else options.get("loss_fn")
            self.calls.append(((given, loss), future))
            return future

        return call


class OfLetters(ProblemEnv):
    """Rewards a sample by its share of the letters that the question asks for."""

    def __init__(self, letters: str, **options: Any) -> None:
        super().__init__(**options)
        self.letters = letters

    def get_question(self) -> str:
        return f"Name words with the letters {self.letters}."

    def check_answer(self, sample_str: str) -> float:
        return sum(own in self.letters for own in sample_str) / max(1, len(sample_str))

    def check_format(self, sample_str: str) -> bool:
        return True

    def get_reference_answer(self) -> str:
        return self.letters


class Letters(RLDataset):
    """Two batches of two questions, four samples each."""

    def __init__(self, renderer: Any) -> None:
        self.renderer = renderer

    def get_batch(self, index: int) -> Sequence[Any]:
        letters = (("aeiou", "nrst"), ("lmn", "abcdef"))[index]
        return [
            ProblemGroupBuilder(env_thunk=partial(OfLetters, own, renderer=self.renderer), num_envs=4)
            for own in letters
        ]

    def __len__(self) -> int:
        return 2


@chz.chz
class LettersBuilder(RLDatasetBuilder):
    renderer_name: str

    async def __call__(self) -> tuple[Letters, None]:
        return Letters(renderers.get_renderer(self.renderer_name, tokenizer=get_tokenizer(MODEL))), None


@chz.chz
class Pairs(ComparisonDatasetBuilder):
    """The answer to a question is better than the one to the next question."""

    def get_train_and_test_datasets(self) -> tuple[datasets.Dataset, None]:
        rows = [json.loads(line)["messages"] for line in CONVERSATIONS.read_text(encoding="utf-8").splitlines()]
        rows = [own for own in rows if len(own) == 2][:12]
        both = [{"asked": a[0], "good": a[1], "bad": b[1]} for a, b in itertools.pairwise(rows)]
        return datasets.Dataset.from_list(both), None

    def example_to_labeled_comparison(self, example: dict[str, Any]) -> LabeledComparison:
        pair = Comparison(
            prompt_conversation=[example["asked"]], completion_A=[example["good"]], completion_B=[example["bad"]]
        )
        return LabeledComparison(comparison=pair, label="A")


def loops(out: Path, address: str) -> dict[str, Any]:
    """The cookbook's loops by name, with its defaults but for sizes."""
    given = {
        "model_name": MODEL, "recipe_name": "check", "renderer_name": "qwen3", "lora_rank": RANK, "base_url": address,
        "learning_rate": 2e-3,
    }  # fmt: skip
    common = ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=MODEL, renderer_name="qwen3", max_length=250, batch_size=4
    )
    chats = FromConversationFileBuilder(common_config=common, file_path=str(CONVERSATIONS), test_size=8)
    pairs = DPODatasetBuilderFromComparisons(common_config=common, comparison_builder=Pairs())
    return {
        "supervised": lambda: asyncio.run(
            supervised.main(
                supervised.Config(
                    log_path=str(out / "supervised"), dataset_builder=chats, max_steps=5, save_every=2, eval_every=2,
                    **given,
                )
            )
        ),
        "reinforcement": lambda: asyncio.run(
            rl.main(
                rl.Config(
                    log_path=str(out / "reinforcement"), dataset_builder=LettersBuilder(renderer_name="qwen3"),
                    max_tokens=12, save_every=1, eval_every=0, **given,
                )
            )
        ),
        "reinforcement from texts": lambda: asyncio.run(
            rl.main(
                rl.Config(
                    log_path=str(out / "texts"), dataset_builder=LettersBuilder(renderer_name="role_colon"),
                    max_tokens=12, eval_every=0, num_substeps=2, **given | {"renderer_name": "role_colon"},
                )
            )
        ),
        "preferences": lambda: train_dpo.main(
            train_dpo.Config(
                log_path=str(out / "preferences"), dataset_builder=pairs, max_steps=2, eval_every=0, **given
            )
        ),
    }  # fmt: skip


def check_loop(name: str, run: Any, folder: Path, recorder: Recorder) -> None:
    """Run one of the cookbook's loops, and then all that it asked for on a plain model."""
    recorder.calls.clear()
    before = set((folder / "out").glob("*/weights/*/tinker.json"))
    run()
    saved = sorted(set((folder / "out").glob("*/weights/*/tinker.json")) - before)
    plain = Plain(folder, **json.loads(saved[0].read_text(encoding="utf-8")))
    losses, norms = [], []
    for (given, loss), future in recorder.calls:
        result = future.result()
        if loss is None:
            norms.append((result.metrics["grad_norm"], plain.step(given)))
        else:
            replay = plain.run_custom if callable(loss) else plain.run
            losses.append((result.metrics["loss:sum"], replay(given, loss)))
    print(f"   {name}: {len(losses)} passes, {len(norms)} updates; losses:", *(f"{own:.4f}" for own, _ in losses))
    print("      norms:", *(f"{own:.4f}" for own, _ in norms))
    assert losses, "the loop trained nothing"
    assert max(own for own, _ in norms) > 0, "the loop had nothing to learn"
    most = 1e-5 if any(callable(loss) for (_, loss), _ in recorder.calls) else 1e-9  # such losses see fp32
    compare(f"{name}: losses", *zip(*losses, strict=True), most)
    compare(f"{name}: norms of gradients", *zip(*norms, strict=True), most)


def main() -> int:
    recorder = Recorder()
    with tempfile.TemporaryDirectory() as kept:
        folder = Path(kept)
        tokenizer = make_model(folder, SPECIAL)
        register_tokenizer(MODEL, lambda: tokenizer)
        with serving(folder, MODEL) as address:
            for name, run in loops(folder / "logs", address).items():
                check_loop(name, run, folder, recorder)
    ranks = f"{check.RANKS} rank(s)"
    print("FAILED: " + ", ".join(check.failures) if check.failures else f"{ranks}: all as they should be", flush=True)
    return bool(check.failures)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
