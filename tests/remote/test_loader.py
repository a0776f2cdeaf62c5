"""The remote loader against the local one, and against a count of every token."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from bytescale.cli.main import run
from bytescale.common.errors import CheckpointError, ConfigError, DataError
from bytescale.data.loading.corpus import prepare_corpus
from bytescale.data.order.epoch import epoch_order
from tests.data.chats import chat_folder, conversations
from tests.data.support import write_jsonl
from tests.helpers.effort import one_of
from tests.remote.support import (
    assert_same_data,
    count_tokens,
    feeds,
    kill_minus_9,
    numbered_config,
    pid_of,
    servers,
    take_steps,
    write_numbered_corpus,
)

pytestmark = pytest.mark.usefixtures("ray_joined")


@pytest.fixture
def corpus(tmp_path: Path) -> int:
    return write_numbered_corpus(tmp_path / "numbers")


@pytest.mark.parametrize("num_ranks", one_of([1, 3, 8], 3))
def test_both_loaders_give_the_same_bytes(tmp_path: Path, num_ranks: int) -> None:
    """Text of two kinds over several servers, documents split by the context, several epochs."""
    (tmp_path / "a.txt").write_text("a text of its own " * 20)
    write_jsonl(tmp_path / "b.jsonl", [{"text": "word " * (n % 37 + 1)} for n in range(25)])
    config = numbered_config(tmp_path, sources=(str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl")), servers=2)
    with feeds(config, "ray", num_ranks) as remote, feeds(config, "local", num_ranks) as local:
        assert [loader.state_dict() for loader in remote] == [loader.state_dict() for loader in local]
        assert [loader.metadata for loader in remote] == [loader.metadata for loader in local]
        for ours, theirs in zip(take_steps(remote, 14)[0], take_steps(local, 14)[0], strict=True):
            for mine, other in zip(ours, theirs, strict=True):
                assert_same_data(mine, other)
            assert len({data.plan.digest() for data in ours + theirs}) == 1


def test_both_loaders_give_the_same_labels_and_fields(tmp_path: Path) -> None:
    """Records, a pair with labels of its own and a pair without, and a server that is killed in between."""
    generator = np.random.default_rng(0)

    def records(count: int, labels: bool) -> list[dict]:
        made = []
        for length in generator.integers(2, 150, count).tolist():
            tokens = generator.integers(0, 256, length)
            record = {"tokens": tokens.tolist(), "old_logprobs": generator.normal(size=length).tolist()}
            record["advantages"] = [float(generator.normal())] * length
            if labels:
                record["labels"] = np.where(generator.random(length) < 0.2, 255 - tokens, tokens).tolist()
            made.append(record)
        return made

    fields = ["advantages", "old_logprobs"]
    for name, labels in (("a", True), ("b", True), ("c", False)):
        write_jsonl(tmp_path / f"{name}.jsonl", records(25, labels))
        if name != "a":
            options = ["--content", "tokens", "--fields", *fields, "--output", str(tmp_path / "pairs" / name)]
            assert run("data tokenize", [str(tmp_path / f"{name}.jsonl"), *options]) == 0
    sources = (str(tmp_path / "a.jsonl"), str(tmp_path / "pairs"))
    config = numbered_config(tmp_path, sources=sources, content="tokens", fields=tuple(fields), servers=2)
    with feeds(config, "ray", 3) as remote, feeds(config, "local", 3) as local:

        def kill_a_server(step: int) -> None:
            if step == 3:
                kill_minus_9(servers(remote[0])[0])

        taken = take_steps(remote, 8, before_step=kill_a_server)[0]
        for ours, theirs in zip(taken, take_steps(local, 8)[0], strict=True):
            for mine, other in zip(ours, theirs, strict=True):
                assert_same_data(mine, other)
        given = [data for step in taken for rank in step for data in rank.micro_batches]
        assert any((data.labels[:-1] != data.tokens[1:]).any() for data in given)
        assert all(sorted(data.fields) == fields for data in given)


@pytest.mark.exhaustive
def test_both_loaders_give_the_same_weights(tmp_path: Path) -> None:
    """Conversations, a pair with weights, and a pair without: every weight of every label to the last bit."""
    folder, pairs = chat_folder(tmp_path / "model"), tmp_path / "pairs"
    write_jsonl(tmp_path / "a.jsonl", conversations(20))
    write_jsonl(
        tmp_path / "b.jsonl",
        [{"tokens": [7] * n, "weights": [0.5 + n % 3 - k % 2 for k in range(n)]} for n in range(2, 30)],
    )
    write_jsonl(tmp_path / "c.jsonl", [{"text": "word " * n} for n in range(1, 9)])
    tokenizer = ["--tokenizer", str(folder)]
    for name, content in (("b", "tokens"), ("c", "text")):
        source = str(tmp_path / f"{name}.jsonl")
        assert run("data tokenize", [source, *tokenizer, "--content", content, "--output", str(pairs / name)]) == 0
    config = numbered_config(
        tmp_path,
        sources=(str(tmp_path / "a.jsonl"), str(pairs)),
        content="messages",
        tokenizer=str(folder),
        loss_per="sequence",
        servers=2,
    )
    with feeds(config, "ray", 3) as remote, feeds(config, "local", 3) as local:
        for ours, theirs in zip(take_steps(remote, 8)[0], take_steps(local, 8)[0], strict=True):
            for mine, other in zip(ours, theirs, strict=True):
                assert_same_data(mine, other)


def test_a_rank_receives_its_own_slices_and_no_more(tmp_path: Path, corpus: int) -> None:
    with feeds(numbered_config(tmp_path), "ray", 4) as opened:
        for ranks in take_steps(opened, 5)[0]:
            for data in ranks:
                num_tokens = sum(len(micro_batch.tokens) for micro_batch in data.micro_batches)
                num_segments = sum(len(micro_batch.segment_samples) for micro_batch in data.micro_batches)
                # 4 bytes a token; each segment may bring the one token behind it, its last label.
                assert 4 * num_tokens <= data.times.bytes_read <= 4 * (num_tokens + num_segments)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kinds", [("ray", "ray", "ray"), ("ray", "local", "ray")])
def test_an_epoch_over_4_then_2_then_3_ranks_is_the_corpus_once(
    tmp_path: Path, corpus: int, kinds: tuple[str, ...]
) -> None:
    """Also over other numbers of servers. Steps that were fetched ahead when a part ended come again."""
    state, counts, step = None, count_tokens([]), 0
    for number, (kind, num_ranks) in enumerate(zip(kinds, (4, 2, 3), strict=True)):
        with feeds(numbered_config(tmp_path, servers=number + 1), kind, num_ranks) as opened:
            while state is None or state["epoch"] == 0:
                steps, state = take_steps(opened, 3, state=state)
                counts += count_tokens(steps)
                assert [ranks[0].step for ranks in steps] == [step, step + 1, step + 2]
                step += 3
                if step in (3, 6):
                    break
    # The first epoch is every token once. The last batches went on into the second: as far as the state says.
    samples = prepare_corpus(numbered_config(tmp_path)).samples
    begun = epoch_order(len(samples), state["shuffle_seed"], 1)[: state["position"]]
    again = [range(samples.start[sample], samples.start[sample] + samples.length[sample]) for sample in begun]
    assert state["epoch"] == 1
    assert counts == Counter(range(corpus)) + Counter(token for tokens in again for token in tokens)


@pytest.mark.exhaustive
def test_an_epoch_through_kills_is_the_corpus_once(tmp_path: Path, corpus: int) -> None:
    """kill -9 of every server; the data is that of an undisturbed local loader to the last bit."""
    config = numbered_config(tmp_path, servers=2)
    with feeds(config, "ray", 3) as opened, feeds(config, "local", 3) as local:
        first, second = servers(opened[0])
        victims = {2: first, 5: first, 6: second, 8: first}  # the first has all tokens of such a small pair

        def kill_sometimes(step: int) -> None:
            if step in victims:
                kill_minus_9(victims[step])

        steps, state = take_steps(opened, 14, before_step=kill_sometimes)
        expected, expected_state = take_steps(local, 14)
        assert state == expected_state
        for ours, theirs in zip(steps, expected, strict=True):
            for mine, other in zip(ours, theirs, strict=True):
                assert_same_data(mine, other)
        assert max(data.times.restarts for data in steps[-1]) >= 3


@pytest.mark.exhaustive
def test_a_server_that_dies_while_it_tokenises_starts_again(tmp_path: Path) -> None:
    import threading
    import time

    write_jsonl(tmp_path / "b.jsonl", [{"text": f"line {n} " * 300} for n in range(6000)])
    config = numbered_config(tmp_path, sources=(str(tmp_path / "b.jsonl"),), servers=2, batch_tokens=4000)

    with feeds(config, "ray", 1) as (loader,):

        def kill_soon() -> None:
            time.sleep(0.3)
            kill_minus_9(servers(loader)[0])

        killer = threading.Thread(target=kill_soon)
        killer.start()
        loader.state_dict()
        killer.join()
        with feeds(config, "local", 1) as (local,):
            local.state_dict()
            assert loader.metadata == local.metadata
        assert not list((tmp_path / "cache").rglob("*.tmp"))


def test_what_servers_find_wrong_reaches_every_rank(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text('{"text": "fine"}\nbroken\n')
    with feeds(numbered_config(tmp_path, sources=(str(tmp_path / "b.jsonl"),)), "ray", 3) as opened:
        for loader in opened:
            with pytest.raises(DataError, match=r"b.jsonl:2 is not JSON .*To fix: mend or delete the line"):
                loader.state_dict()
    with (
        pytest.raises(ConfigError, match=r"ata source .*nowhere.* does not exist"),
        feeds(numbered_config(tmp_path, sources=(str(tmp_path / "nowhere"),)), "ray", 1),
    ):
        pass


@pytest.mark.exhaustive
def test_the_state_of_other_data_is_refused(tmp_path: Path, corpus: int) -> None:
    with feeds(numbered_config(tmp_path), "ray", 1) as (loader,):
        state = loader.state_dict()
        with pytest.raises(CheckpointError, match="made with data corpus"):
            loader.load_state_dict({**state, "corpus": "another"})
        with pytest.raises(CheckpointError, match="made with data shuffle_seed 77"):
            loader.load_state_dict({**state, "shuffle_seed": 77})
        assert loader.state_dict() == state


@pytest.mark.exhaustive
def test_closing_ends_the_actors(tmp_path: Path, corpus: int) -> None:
    import psutil
    import ray

    with feeds(numbered_config(tmp_path), "ray", 2) as opened:
        pids = ray.get([pid_of(server) for server in servers(opened[0])])
        processes = [psutil.Process(pid) for pid in pids]
    _, alive = psutil.wait_procs(processes, timeout=600)
    assert not alive
    assert np.unique(pids).size == 2
