"""What a run that calibrates its costs has learned, from calibration.jsonl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bytescale.common.units import format_bytes, format_seconds
from bytescale.report.html import details, note, table
from bytescale.report.runs import RunRecord

TERMS = {
    "attention_seconds_per_pair": "attention, a million pairs",
    "token_seconds": "everything else, a thousand tokens",
    "micro_batch_seconds": "a micro-batch",
    "ring_message_seconds": "a ring step",
    "inter_node_ring_step_seconds": "latency of a ring step across nodes",
}
SCALES = {"attention_seconds_per_pair": 1e6, "token_seconds": 1e3}
LINKS = {"intra_node_bytes_per_second": "link inside a node", "inter_node_bytes_per_second": "link across nodes"}


def learned(run: RunRecord) -> str:
    """Costs at the start and at the end, and the ranks that were found to be slower or faster."""
    if not run.calibration:
        return ""
    first, last = run.calibration[0], run.calibration[-1]
    if last["cost"] == first["cost"]:
        return note(f"Calibration has changed no cost in {len(run.calibration)} steps: too few were measured.")
    rows = [
        [name, _seconds(first["cost"], term), _seconds(last["cost"], term)]
        for term, name in TERMS.items()
        if last["cost"].get(term)
    ]
    rows += [
        [name, _rate(first["cost"], link), _rate(last["cost"], link)]
        for link, name in LINKS.items()
        if first["cost"].get(link) != last["cost"].get(link)
    ]
    costs = table(["", f"after step {first['step']}", f"after step {last['step']}"], rows)
    return details("Costs that were learned", costs) + note(" ".join(speed_sentences(run.calibration)))


def speed_sentences(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """A sentence for every rank whose speed was ever unlike that of the middle rank."""
    ranks = min(len(line["speeds"]) for line in lines)
    found = []
    for rank in range(ranks):
        unlike = [line for line in lines if line["speeds"][rank] != 1.0]
        if not unlike:
            continue
        lowest = min(line["speeds"][rank] for line in unlike)
        highest = max(line["speeds"][rank] for line in unlike)
        speed = f"{lowest:.2f}" if lowest == highest else f"{lowest:.2f} to {highest:.2f}"
        until = f"to {unlike[-1]['step']}" if len(unlike) > 1 else "only"
        found.append(
            f"Rank {rank} had {speed} of the middle rank's speed after {len(unlike)} of {len(lines)} steps "
            f"({unlike[0]['step']} {until})."
        )
    return found or ["All ranks were found to be equally fast."]


def _seconds(cost: Mapping[str, Any], term: str) -> str:
    return format_seconds(SCALES.get(term, 1.0) * float(cost.get(term) or 0.0))


def _rate(cost: Mapping[str, Any], link: str) -> str:
    value = float(cost.get(link) or 0.0)
    return "no limit" if value == float("inf") else f"{format_bytes(value)}/s"
