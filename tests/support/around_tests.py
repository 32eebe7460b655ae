"""What holds for every test: it is seeded, it leaves nothing behind, and torch is set up for it.

`tests/conftest.py` takes this in where tests run: xdist's first process hands tests out, and never
needs torch.

A test against a framework that is not installed is skipped and says so, also where a rank of it has
looked for the framework.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import os
import re
import signal
import sys
from collections.abc import Generator, Iterator
from typing import Any

import pytest
import torch

from placement.registration import streamed_optimizer
from tests.support import nothing_left
from tests.support.durations import file_of
from tests.support.forked import import_before
from tests.support.order import imports_of, ordered
from tests.support.programs import Programs
from tests.support.ranks import RankError, Ranks
from tests.support.seeds import seed
from tests.support.worker import Worker

torch.set_num_threads(1)
# A shell starts what runs in its background with this signal ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Before a test file is read, whose settings begin with these, and before `_freeze`: hypothesis asks
# who refers to what it is given, which nobody can say of what is frozen.
with contextlib.suppress(ImportError):
    importlib.import_module("tests.support.profiles")

_BUCKET_BYTES = streamed_optimizer.BUCKET_BYTES
_WATCHED = pytest.StashKey[nothing_left.Watched]()
_looked_at: dict[str, int] = {}
_PACKAGES = (
    "accelerate|bitsandbytes|datasets|deepspeed|dill|megatron|megatron_fsdp|multiprocess|omegaconf"
    "|pandas|peft|pyarrow|ray|tensordict|torchao|trl|veomni|verl|xxhash"
)
_FRAMEWORK = re.compile(rf"No module named '((?:{_PACKAGES})\b[^']*)'")
"""Packages of tests/frameworks.txt, by the names under which they are imported."""


def has_slow(config: pytest.Config) -> bool:
    """Whether a run has the tests that are slow or of a sweep: those that are named always run."""
    return (
        config.getoption("slow")
        or os.environ.get("SWEEP") == "all"
        or any("::" in each for each in config.args)
    )


def is_slow(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(name) for name in ("slow", "sweep"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    needs_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if needs_gpu and not torch.cuda.is_available():
        config.hook.pytest_deselected(items=needs_gpu)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
    slow = [] if has_slow(config) else [item for item in items if is_slow(item)]
    if slow:
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if not is_slow(item)]
    items[:] = ordered(items)


def pytest_collection_finish() -> None:
    gc.enable()
    _freeze()


def _freeze() -> None:
    """Collections in the tests look at what tests make, and not at what torch and a framework are
    made of: ten times as fast."""
    if len(sys.modules) > _looked_at.get("modules", 0) + 20:
        gc.collect()
        gc.freeze()
        _looked_at["modules"] = len(sys.modules)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    import_before(*imports_of(file_of(item.nodeid), has_slow(item.config)))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    _freeze()  # what the test has imported


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, Any, Any]:
    try:
        return (yield)
    except (ModuleNotFoundError, RankError) as error:
        missing = _FRAMEWORK.search(str(error))
        if missing is None or importlib.util.find_spec(missing[1].partition(".")[0]) is not None:
            raise  # a part that is missing from an installed package is a failure
        pytest.skip(f"{missing[1]} is not installed here")


@pytest.fixture(autouse=True)
def _watched(request: pytest.FixtureRequest) -> Iterator[None]:
    """Knows the managers of a test and of its fixtures. `pytest_pyfunc_call` checks them while
    those fixtures are still there.

    Tests on a GPU end by the fixtures of tests/gpu, which also look at what the driver says.
    """
    if request.node.get_closest_marker("leaves_behind") or request.node.get_closest_marker("gpu"):
        yield
        return
    looks_at_what_is_collected = not {"gc", "weakref"}.isdisjoint(vars(request.module))
    with nothing_left.watched(holds=not looks_at_what_is_collected) as request.node.stash[_WATCHED]:
        yield


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
    """Every test that has passed: its managers are in order, and nothing is left on their
    devices."""
    answer = yield
    if _WATCHED in pyfuncitem.stash:
        for manager in pyfuncitem.stash[_WATCHED].managers():
            nothing_left.check(manager)
    return answer


@pytest.fixture
def worker() -> Worker:
    """See `Worker`. A test that looks at what is collected makes its own."""
    return Worker()


@pytest.fixture(scope="session")
def programs() -> Iterator[Programs]:
    """Interpreters of their own, for programs whose end is looked at."""
    programs = Programs()
    yield programs
    programs.close()


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    """Two processes with a gloo process group; `run(function, ...)` calls a function on both."""
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def one_rank() -> Iterator[Ranks]:
    """One process with a process group of its own: what a framework does differently in a world of
    one."""
    ranks = Ranks(1)
    yield ranks
    ranks.close()


@pytest.fixture(autouse=True)
def _clean_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same random numbers for every test, the ordinary buckets of streamed steps, and none of
    the caller's PLACEMENT_* variables."""
    streamed_optimizer.BUCKET_BYTES = _BUCKET_BYTES
    for name in os.environ:
        if name.startswith("PLACEMENT_"):
            monkeypatch.delenv(name)
    seed(0)
    # a test that interrupts at every bytecode can hit torch's own switch
    torch.set_grad_enabled(True)
