"""Pictures of files in loops of one's own, and in ``bytescale score``: the numbers of plain transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForImageTextToText

from bytescale import HDP
from bytescale.cli.main import main
from bytescale.cli.score import score_on_ranks
from bytescale.config.schema import Config
from bytescale.hf.loop import pictures
from bytescale.hf.loop.encoded import EncodedItems
from tests.cli.test_score import options, rows_of
from tests.helpers.effort import one_of
from tests.helpers.forks import run_forked
from tests.hf.support import on_ranks
from tests.train.test_pictures import LR, STEPS, picture_run, plainly
from tests.train.vision import chats, draw, plain_document, vision_folder, write_chats

RANKS = [(1, 1, 1), (2, 1, 1), (3, 1, 1), (2, 2, 1), (4, 2, 1), (2, 1, 2), (6, 1, 2), (4, 2, 2)]
"""Ranks, tensor-parallel ranks and stages among them."""


def model_of(folder: str | Path) -> Any:
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float64)


def trained(config: Config, num_ranks: int, tp: int, pp: int) -> list[Any]:
    """Of each rank the losses and the weights at the end; and behind them, how many pictures all have read."""
    plain = pictures.pixels_of

    def work(group: dist.ProcessGroup, own: nn.Module) -> Any:
        hdp = HDP(own.train(), group, capacity_tokens=48 if num_ranks > tp * pp else 256, tp=tp, pp=pp)
        hdp.optimizer(torch.optim.SGD, lr=LR)
        losses = []
        with hdp.batches(config.data, stop_step=STEPS) as batches:
            for batch in batches:
                divisor, total = batch.loss_divisor, torch.zeros((), dtype=torch.float64)
                for micro in batch if pp == 1 else ():
                    loss = micro.loss_sum(own) / divisor
                    loss.backward()
                    total += loss.detach()
                if pp > 1:
                    losses.append(batch.forward_backward(lambda micro, divisor=divisor: micro.loss_sum(own) / divisor))
                else:
                    losses.append(float(hdp.group.all_reduce(total)))
                hdp.step(max_grad_norm=0.0)
        return losses, {name: value.detach() for name, value in own.named_parameters()}

    seen: list[Any] = []
    pictures.pixels_of = lambda picture, tokenizer: seen.append(picture.path) or plain(picture, tokenizer)
    try:
        return [*on_ranks(num_ranks, model_of(config.data.tokenizer), work), len(seen)]
    finally:
        pictures.pixels_of = plain


@pytest.mark.parametrize(("num_ranks", "tp", "pp"), one_of(RANKS, (6, 1, 2)))
def test_batches_that_are_read_ahead(tmp_path: Path, num_ranks: int, tp: int, pp: int) -> None:
    """Losses of two steps and the weights at the end; a picture of a batch is read by one rank."""
    config = picture_run(tmp_path, "qwen2_vl", 1)
    losses, model = plainly(config, chats(draw(tmp_path / "pictures")))
    *ranks, num_read = trained(config, num_ranks, tp, pp)
    wanted, compared = dict(model.named_parameters()), set[str]()
    for found, weights in ranks:
        assert found == pytest.approx(losses, rel=1e-10)
        here = {name: own for name, own in weights.items() if own.numel()}  # a stage has some of them
        for name, own in here.items() if tp == 1 else ():
            torch.testing.assert_close(own, wanted[name].detach(), rtol=0, atol=1e-10)
            compared.add(name)
    assert tp > 1 or compared == wanted.keys()
    assert num_read <= STEPS * 8  # three ranks would read all of them three times


def _wrong_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = EncodedItems._of_micro_batch
    monkeypatch.setattr(
        EncodedItems, "_of_micro_batch", lambda *args: [own._replace(pairs=own.pairs[::-1]) for own in plain(*args)]
    )


def scores_apart(tmp_path: Path, family: str, num_ranks: int, tp: int = 1, pp: int = 1) -> float:
    """The largest difference of a log-probability in the file that the command writes."""
    records = chats(draw(tmp_path / "pictures"))
    folder, source = tmp_path / family, write_chats(tmp_path / "chats.jsonl", records)
    if not folder.exists():
        vision_folder(folder, family)
    wanted = options(
        folder, source, tmp_path / "out.parquet", content="messages", ranks=num_ranks, capacity_tokens=80,
        batch_tokens=120, tp=tp, pp=pp,
    )  # fmt: skip
    wanted.out.unlink(missing_ok=True)
    run_forked(num_ranks, lambda _: score_on_ranks(wanted))
    model, rows, worst = model_of(folder).eval(), rows_of(wanted.out), 0.0
    assert len(rows) == len(records)
    for record, row in zip(records, rows, strict=True):
        given, said = plain_document(folder, tmp_path, record)
        with torch.no_grad():
            logits = model(**given).logits[0, :-1].log_softmax(-1)
        logprobs = logits.gather(1, given["input_ids"][0, 1:, None])[:, 0]
        worst = max(worst, float((torch.tensor(row["logprobs"], dtype=torch.float64) - logprobs).abs().max()))
        worst = max(worst, abs(row["logprob"] - float(logprobs[said[1:]].sum())))
    return worst


SCORED = [(family, *mesh) for family in ("qwen2_vl", "llava") for mesh in RANKS]


@pytest.mark.parametrize(("family", "num_ranks", "tp", "pp"), one_of(SCORED, ("qwen2_vl", 6, 1, 2)))
def test_the_scores_of_chats_with_pictures(
    tmp_path: Path, family: str, num_ranks: int, tp: int, pp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert scores_apart(tmp_path, family, num_ranks, tp, pp) < 1e-10
    _wrong_rows(monkeypatch)  # a planted fault
    assert scores_apart(tmp_path, family, num_ranks, tp, pp) > 1e-6


def test_the_command_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And of a picture that is damaged behind its header, its file and line."""
    source = write_chats(tmp_path / "chats.jsonl", chats(draw(tmp_path / "pictures")))
    arguments = ["score", str(vision_folder(tmp_path / "llava", "llava")), str(source), "--content", "messages"]
    arguments += ["--cache-dir", str(tmp_path / "cache"), "--dtype", "fp64"]
    assert main([*arguments, "--out", str(tmp_path / "out.parquet")]) == 0
    assert "6 documents" in capsys.readouterr().out
    content = (tmp_path / "pictures" / "4.png").read_bytes()
    (tmp_path / "pictures" / "4.png").write_bytes(content[:60])
    assert main([*arguments, "--out", str(tmp_path / "other.parquet")]) != 0
    assert "cannot be read" in capsys.readouterr().err
