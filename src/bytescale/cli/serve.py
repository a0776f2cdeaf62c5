"""``bytescale serve``: models for clients of Thinking Machines' Tinker, on all ranks of this machine."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bytescale.cli.options import ModelOptions, folder_of_model, parse_with_model
from bytescale.common.environment import ranks_of_torchrun
from bytescale.common.errors import BytescaleError, RankFailure, typed_path
from bytescale.common.limits import limits

if TYPE_CHECKING:
    from bytescale.integrations.tinker.server import TinkerServer
    from bytescale.integrations.tinker.trainers import Trainers

SILENT_SECONDS = 1800.0
"""So long a rank may write weights, or draw its samples, while others wait."""
IDLE_SECONDS = 30.0
"""Without requests, ranks hear from the first one so often, and do not take it for lost."""


@dataclass(slots=True, kw_only=True)
class ServeOptions(ModelOptions):
    """bytescale serve MODEL --out FOLDER: train and sample for clients of Tinker (TINKER_BASE_URL).

    MODEL is a Hugging Face folder, or the name of a model of the Hub. Where BYTESCALE_SERVE_TOKEN is set, clients have
    to send it as their API key (TINKER_API_KEY); those of Thinking Machines want one that begins with tml-.
    """

    out: Path
    """The folder of checkpoints and of weights for sampling. All ranks have to see it."""
    name: str = ""
    """What clients call the model (base_model); empty: as it was given."""
    host: str = "127.0.0.1"
    """The address to listen at. Any but this machine's own needs a token."""
    port: int = field(default=8000, metadata=limits(least=0, most=65535))
    """0: one that is free."""
    checkpointing: Literal["none", "attention", "full"] = "none"
    """Which parts of layers are computed again in backward."""


def run(arguments: Sequence[str]) -> int:
    options = parse_with_model(ServeOptions, arguments, prog="bytescale serve")
    options = replace(options, name=options.name or options.model, model=folder_of_model(options.model))
    is_rank = ranks_of_torchrun() is not None
    if options.ranks > 1 and not is_rank:
        from bytescale.cli.main import run_on_ranks

        modules = ["bytescale.integrations.tinker.trainers", "bytescale.integrations.tinker.server"]
        return run_on_ranks("serve", arguments, options.ranks, modules=modules, go_on="begin again")
    if is_rank:
        from bytescale.train.ranks import end_with_launcher

        end_with_launcher()
    from bytescale.integrations.tinker.server import TinkerServer
    from bytescale.integrations.tinker.trainers import Trainers
    from bytescale.train.ranks import open_ranks

    folder, token = typed_path(options.model), os.environ.pop("BYTESCALE_SERVE_TOKEN", "")
    out = typed_path(options.out)
    with open_ranks(options.run_config(SILENT_SECONDS)) as ranks:
        hdp = {"capacity_tokens": options.capacity_tokens, "checkpointing": options.checkpointing}
        trainers = Trainers(folder, out, ranks.world, ranks.dtype, **hdp)
        server = None
        if ranks.is_first:
            tokenizer = str(folder.resolve()) if (folder / "tokenizer.json").exists() else None
            longest = options.capacity_tokens * ranks.world.size
            server = TinkerServer((options.host, options.port), token, out, options.name, longest, tokenizer)
            threading.Thread(target=server.serve_forever, daemon=True).start()
            print(f"serving {options.name} at http://{options.host}:{server.server_port}", flush=True)
        answer_requests(trainers, server)
    return 0


def answer_requests(trainers: Trainers, server: TinkerServer | None) -> None:
    """Do what ``server``, on the first rank, has in line, until work says to stop."""
    from bytescale.runtime.plain_data import broadcast_json

    while True:
        numbers, work = server.take(IDLE_SECONDS) if server is not None else ([], {})
        work = broadcast_json(work, trainers.group.group, device=trainers.group.device)
        do = work.pop("do")
        if do == "stop":
            return
        if do:
            results = results_of(trainers, do, work)
            if server is not None:
                server.finish(numbers, results)


def results_of(trainers: Trainers, do: str, work: dict[str, Any]) -> list[dict[str, Any]]:
    """Of one request, or of each that runs together with others. What is wrong with it, on all ranks alike, is one."""
    try:
        made = getattr(trainers, do)(**work)
        return made if isinstance(made, list) else [made]
    except RankFailure:
        raise
    except BytescaleError as error:
        if len(requests := work.get("requests", ())) > 1:  # each by itself, as one of them is wrong
            return [result for own in requests for result in results_of(trainers, do, work | {"requests": [own]})]
        return [{"error": str(error), "category": "user"}]
