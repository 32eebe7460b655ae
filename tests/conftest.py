"""What holds for every test: seeded, no settings from the caller's environment, GPU tests only where there is a GPU.

A test against a framework that is not installed is skipped and says so, also where a rank of it has looked for the framework.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import itertools
import os
import re
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest
import torch

from tests.ranks import RankError, Ranks

# Several processes share few cores here, and torch's threads spin where they wait. Set before a test, also for what it starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)

COUNTED = "counted"
_MOSTLY_WAITING = (
    "tests/ray/test_fleet.py",
    "tests/observe/test_prometheus.py",
    "tests/faults/test_interrupts.py",
    "tests/ray/test_faults.py",
    "tests/group/test_lease_swaps.py",
    "tests/ray/test_examples.py",
    "tests/group/test_faults.py",
)
"""Each takes a minute or more in the one process that runs a file (xdist's `loadfile`), most of them waiting. Those with many processes of
their own are far from each other."""
_FRAMEWORK = re.compile(r"No module named '((?:accelerate|bitsandbytes|deepspeed|megatron|megatron_fsdp|peft|ray|torchao|veomni)\b[^']*)'")
"""Packages of tests/frameworks.txt, by the names under which they are imported."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    needs_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if needs_gpu and not torch.cuda.is_available():
        config.hook.pytest_deselected(items=needs_gpu)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
    items[:] = _mixed(items)


def pytest_collection_finish() -> None:
    """Collections in the tests look at what tests make, and not at what torch is made of: ten times as fast."""
    with contextlib.suppress(ImportError):  # it asks who refers to what it is given, which nobody can say of what is frozen
        importlib.import_module("hypothesis")
    gc.collect()
    gc.freeze()


def _mixed(items: list[pytest.Item]) -> list[pytest.Item]:
    """In an order in which the cores have work beside what waits: a file of those, then some of the others, and so on."""
    places: dict[str, list[pytest.Item]] = {}
    for item in items:
        places.setdefault(item.location[0], []).append(item)
    waiting = [places.pop(place) for place in _MOSTLY_WAITING if place in places]
    # The longest come last in the alphabet, and nothing long may begin at the end.
    others = [places[place] for place in sorted(places, key=lambda place: (not place.startswith("tests/sharded/"), place))]
    mixed = [[each, *others[4 * index : 4 * index + 4]] for index, each in enumerate(waiting)]
    rest = others[4 * len(waiting) :]
    return [item for group in itertools.chain(*mixed, rest) for item in group]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, Any, Any]:
    try:
        return (yield)
    except (ModuleNotFoundError, RankError) as error:
        if (missing := _FRAMEWORK.search(str(error))) is None:
            raise
        pytest.skip(f"{missing[1]} is not installed here")


@pytest.fixture
def counted(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Say how many cases a test went through; the end of the run shows it, passed or not."""

    def note(text: str) -> None:
        request.node.user_properties.append((COUNTED, text))

    return note


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    """Two processes with a gloo process group; `run(function, ...)` calls a function on both."""
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def one_rank() -> Iterator[Ranks]:
    """One process with a process group of its own: what a framework does differently in a world of one."""
    ranks = Ranks(1)
    yield ranks
    ranks.close()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.getreports(kind) if report.when == "call"]
    lines = sorted({text for report in reports for name, text in report.user_properties if name == COUNTED})
    if lines:
        terminalreporter.section("cases in each sweep")
        for line in lines:
            terminalreporter.line(line)


@pytest.fixture(autouse=True)
def _clean_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same random numbers for every test, and none of the caller's PLACEMENT_* variables."""
    for name in os.environ:
        if name.startswith("PLACEMENT_"):
            monkeypatch.delenv(name)
    torch.manual_seed(0)
    torch.set_grad_enabled(True)  # a test that interrupts at every bytecode can hit torch's own switch
