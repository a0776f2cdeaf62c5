"""Every epoch gives each token once, with both loaders, on 1 to 8 ranks, while processes of all kinds are killed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from bytescale.data.loading.corpus import prepare_corpus
from bytescale.data.order.epoch import epoch_order
from tests.helpers.effort import one_of
from tests.remote.support import (
    count_tokens,
    feeds,
    kill_minus_9,
    numbered_config,
    servers,
    take_steps,
    write_numbered_corpus,
)

pytestmark = pytest.mark.usefixtures("ray_joined")


@pytest.mark.parametrize("num_ranks", one_of(range(1, 9), 3))
@pytest.mark.parametrize("kind", one_of(["local", "ray"], "local"))
def test_an_epoch_through_the_death_of_servers_and_ranks(tmp_path: Path, kind: str, num_ranks: int) -> None:
    """A rank's death ends the attempt in the middle of what it had fetched ahead; the next one has other ranks.

    (Here ranks share a process, so that all these cases take seconds; processes of their own are killed in
    ``test_runs`` and ``test_soak``.)
    """
    num_tokens = write_numbered_corpus(tmp_path / "numbers")
    config = numbered_config(tmp_path)
    counts, state, step = Counter[int](), None, 0
    for attempt, ranks in enumerate((num_ranks, max(1, num_ranks - 1))):
        with feeds(config, kind, ranks) as opened:
            victims = {}
            if kind == "ray":
                first, second = servers(opened[0])
                victims = {2: first, 3: second} if attempt == 0 else {8: first}

            def kill_who_is_due(number: int, victims: dict = victims, begun: int = step) -> None:
                if begun + number in victims:
                    kill_minus_9(victims[begun + number])

            steps, state = take_steps(opened, 6, state=state, before_step=kill_who_is_due)
            assert [data.step for data in steps[-1]] == [step + 5] * ranks
            counts += count_tokens(steps)
            step += 6
    with feeds(config, "local", 1) as opened:
        while state["epoch"] == 0:
            steps, state = take_steps(opened, 1, state=state)
            counts += count_tokens(steps)
    samples = prepare_corpus(config).samples
    begun = epoch_order(len(samples), state["shuffle_seed"], 1)[: state["position"]]
    again = [range(samples.start[sample], samples.start[sample] + samples.length[sample]) for sample in begun]
    assert counts == Counter(range(num_tokens)) + Counter(token for tokens in again for token in tokens)
