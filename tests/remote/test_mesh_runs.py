"""The remote loader under tensor and pipeline parallelism: several ranks are given the same slices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bytescale.data.loading.corpus import prepare_corpus
from bytescale.data.loading.record import check_record
from tests.remote.test_runs import ray_config, started
from tests.train.runs import losses, on_ranks, run, small_run, write_corpus


@pytest.mark.exhaustive
def test_a_mesh_fed_by_ray_has_the_losses_of_one_fed_locally(tmp_path: Path, ray_address: str) -> None:
    write_corpus(tmp_path / "corpus")
    mesh = {"tp": 2, "pp": 2}
    local = on_ranks(small_run(tmp_path / "corpus", tmp_path / "local", steps=4), 4)
    local = replace(local, parallel=replace(local.parallel, **mesh))
    remote = ray_config(tmp_path, tmp_path / "remote")
    remote = replace(remote, parallel=local.parallel, trainer=replace(remote.trainer, steps=4))
    expected = run(local)
    with started(remote, ray_address) as launcher:
        output, _ = launcher.communicate(timeout=600)
    assert launcher.returncode == 0, output
    assert "2 stages x 1 HDP x 2 TP" in output
    assert losses(tmp_path / "remote") == expected
    checked = check_record(tmp_path / "remote" / "data", 4, prepare_corpus(remote.data), remote.data)
    assert checked.num_tokens > 0, "every token is in the record once, though four ranks were given it"
