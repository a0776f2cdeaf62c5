"""What ``make check-verl`` runs on two ranks: ``multi_modal_inputs`` with images, in fp64.

torchrun --nproc-per-node 2 images.py OUT

Log-probabilities and gradients, the encoder's included, equal those of plain transformers, one sequence after the
other, with the loss that the engine is given. Some sequences have several images, and some none.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from check import our_engine, worker
from tensordict import TensorDict
from torch import Tensor
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from verl.utils import tensordict_utils as tu

from bytescale.common.errors import ConfigError

IMAGE, WORDS, TOLERANCE = 70, 80, 1e-6
"""Norms and rotations compute in fp32, on rows in another order."""
GRIDS = ([(4, 4)], [], [(4, 8), (4, 4)], [(8, 4)])


def make_model(folder: Path) -> None:
    torch.manual_seed(0)
    text = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": WORDS, "max_position_embeddings": 256, "bos_token_id": 1,
        "eos_token_id": 2, "pad_token_id": 0,
        "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4},
    }  # fmt: skip
    vision = {
        "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4,
        "depth": 2, "window_size": 16, "fullatt_block_indexes": [1],
    }  # fmt: skip
    config = Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, image_token_id=IMAGE, video_token_id=71, vision_start_token_id=72,
        vision_end_token_id=73,
    )  # fmt: skip
    Qwen2_5_VLForConditionalGeneration(config).save_pretrained(folder)


def sequences(rank: int) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Tokens, and what a processor makes of the images of one sequence, all in one."""
    generator, found = torch.Generator().manual_seed(rank), []
    for number, grids in enumerate(GRIDS):
        tokens = [3 + (7 * place + rank) % 60 for place in range(4 + 3 * number)]
        for height, width in grids:
            tokens += [72, *[IMAGE] * (height * width // 4), 73, 5 + number, 9]
        given = {}
        if grids:
            patches = sum(height * width for height, width in grids)
            pixels = torch.randn(patches, 3 * 2 * 16, generator=generator, dtype=torch.float64)
            given = {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, *own] for own in grids])}
            given["images_seqlens"] = torch.tensor([height * width for height, width in grids])
        found.append((torch.tensor(tokens), given))
    return found


def batch() -> TensorDict:
    tokens, images = zip(*sequences(dist.get_rank()), strict=True)

    def nested(parts: list[Tensor]) -> Tensor:
        return torch.nested.as_nested_tensor(parts, layout=torch.jagged)

    data = tu.get_tensordict(
        tensor_dict={
            "input_ids": nested([*tokens]),
            "position_ids": nested([torch.arange(len(own)) for own in tokens]),
            "loss_mask": nested([torch.ones_like(own) for own in tokens]),
            "attention_mask": nested([torch.ones_like(own) for own in tokens]),
        },
        non_tensor_dict={"temperature": 1.0, "calculate_entropy": False, "global_batch_size": len(tokens) * 2},
    )
    tu.assign_non_tensor_stack(data, "multi_modal_inputs", [*images])
    return data


def weighed(model_output: dict[str, Tensor], data: TensorDict, dp_group: Any) -> tuple[Tensor, dict[str, Any]]:
    """A sum over sequences, the last value of each of which means nothing."""
    return -torch.stack([own[:-1].sum() for own in model_output["log_probs"].unbind()]).sum(), {}


def alone(folder: Path) -> tuple[list[Tensor], dict[str, Tensor]]:
    """This rank's log-probabilities, and the mean over ranks of the gradients."""
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float64)
    found = []
    for rank in range(dist.get_world_size()):
        for tokens, given in sequences(rank):
            given = {name: value for name, value in given.items() if name != "images_seqlens"}
            if given:
                given["mm_token_type_ids"] = (tokens == IMAGE).int()[None]
            logprobs = model(input_ids=tokens[None], **given).logits[0].log_softmax(-1)
            own = logprobs[:-1].gather(-1, tokens[1:, None])[:, 0]
            (-own.sum() / dist.get_world_size()).backward()
            found += [own.detach()] if rank == dist.get_rank() else []
    return found, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def main() -> None:
    folder = Path(sys.argv[1]) / "sees"
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        make_model(folder)
    dist.barrier()
    wanted, gradients = alone(folder)
    worst = 0.0
    for one_pass, pp in itertools.product((True, False), (1, 2)):
        of_stages = {"pp": pp, "max_token_len_per_gpu": 40 * pp}
        config = dataclasses.replace(our_engine(), dtype="float64", one_pass=one_pass, **of_stages)
        engine = worker(folder, "ppo", config).engine
        with engine.eval_mode():
            output = engine.forward_backward_batch(batch(), None, forward_only=True)["model_output"]
        for ours, theirs in zip(output["log_probs"].unbind(), wanted, strict=True):
            worst = max(worst, float((ours[:-1] - theirs).abs().max()))
        with engine.train_mode():
            engine.forward_backward_batch(batch(), weighed)
            found = engine.hdp.gradients()
        assert any("visual" in name for name in gradients), "nobody has trained the encoder"
        for name, gradient in gradients.items():
            worst = max(worst, float((found[name] - gradient).abs().max() / gradient.abs().max().clamp(min=1e-3)))
    assert worst < TOLERANCE, f"they differ by {worst}"
    wrong = batch()
    tu.assign_non_tensor_stack(wrong, "multi_modal_inputs", [{"pixel_values_videos": torch.ones(1)}] * len(GRIDS))
    said = ""
    try:
        engine.forward_backward_batch(wrong, None, forward_only=True)
    except ConfigError as error:
        said = str(error)
    assert "pixel_values_videos" in said, "videos were not refused"
    if dist.get_rank() == 0:
        print(f"sequences with images: within {worst:.1e} of plain transformers", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
