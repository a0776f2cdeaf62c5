"""Settings that every test needs before torch is imported: loopback only, one thread per rank."""

import gc
import importlib.util
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("OMP_NUM_THREADS", "1")


NEEDED_BY = {
    "tyro": ("cli", "data/test_commands.py", "test_docs.py"),
    "pyarrow": ("data",),
    "ray": ("remote",),
    "peft": ("hf",),
}
MISSING = [name for name in NEEDED_BY if importlib.util.find_spec(name) is None]
# A bare GPU machine has none of them, and `pytest -m gpu` imports every test file that it collects.
collect_ignore = [path for name in MISSING for path in NEEDED_BY[name]]
LAST_BEGIN = "BYTESCALE_TESTS_BEGIN_BEFORE"
"""The environment variable that holds the moment, in seconds, after which no test begins; absent where none is set."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rest", action="store_true", help="run what `make test` leaves out (tests/helpers/effort.py)")
    parser.addoption(
        "--minutes", type=float, help="begin no test after so many minutes, and say how many were left out"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--rest"):
        os.environ["BYTESCALE_TESTS"] = "rest"  # read when tests are imported, in the workers of xdist too
    minutes = config.getoption("--minutes")
    if minutes is not None and not hasattr(config, "workerinput"):
        os.environ[LAST_BEGIN] = str(int(time.time() + 60 * minutes))  # one moment for the workers of xdist
    if hasattr(config, "workerinput") or config.getoption("dist", "no") == "no":
        _prepare_process()  # which takes seconds: not where xdist hands out tests and runs none


def pytest_report_header() -> list[str]:
    return [f"not collected: tests/{path}, {name} is not installed" for name in MISSING for path in NEEDED_BY[name]]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--rest"):
        kept = [item for item in items if {"exhaustive", "more_examples"} & set(item.keywords)]
    elif config.getoption("markexpr") or any("::" in argument for argument in config.args):
        kept = list(items)  # whoever names a test or a mark wants to see it run
    else:
        kept = [item for item in items if "exhaustive" not in item.keywords]
    import torch

    if LAST_BEGIN in os.environ and kept:  # another first test in every run, so that none is left out in each
        first = int(os.environ[LAST_BEGIN]) * 997 % len(kept)
        kept = kept[first:] + kept[:first]
    held = set(kept)
    config.hook.pytest_deselected(items=[item for item in items if item not in held])
    items[:] = kept
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_runtest_setup() -> None:
    if time.time() > float(os.environ.get(LAST_BEGIN, "inf")):
        pytest.skip("the minutes of --minutes were over")


def pytest_collection_finish() -> None:
    """No collection looks at the objects of all modules and tests, which would take 0.4 s before each fork."""
    gc.enable()  # without a collection, which takes half a second and frees no memory
    gc.freeze()


def _prepare_process() -> None:
    """One thread for each rank, and the same examples in every run."""
    gc.disable()  # until all tests are collected: half of that time went into looking at modules that stay
    import torch
    from hypothesis import HealthCheck, settings

    from bytescale.parity import thread_ranks

    torch.set_num_threads(1)
    settings.register_profile(
        "default", deadline=None, derandomize=True, max_examples=12, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("default")
    if hasattr(os, "sched_setaffinity"):
        worker, cores = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]), sorted(os.sched_getaffinity(0))
        make_group, core = thread_ranks.gloo_group, cores[worker % len(cores)]

        def group_on_one_core(*arguments: Any) -> Any:
            """Ranks that are threads take turns in one interpreter: on two cores a third of their time is waking up."""
            os.sched_setaffinity(0, {core})  # of this thread, and of those that its group starts
            return make_group(*arguments)

        thread_ranks.gloo_group = group_on_one_core


@pytest.fixture(autouse=True, scope="module")
def _what_stays_is_frozen() -> Iterator[None]:
    """Models' code that a module has imported would be looked at by the collection behind every run of ranks."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _default_dtype_stays() -> Iterator[None]:
    """Models that threads make at the same time can leave another default dtype behind, for all tests after."""
    import torch

    yield
    assert torch.get_default_dtype() == torch.float32
