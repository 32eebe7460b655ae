"""How long each test file takes, and how much of that a processor works for it.

`make durations` runs every test with `--record-durations`, which writes `tests/durations.json`; `tests/support/order.py` reads it. A run
of some files replaces those files' entries alone.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

RECORDED = Path(__file__).parents[1] / "durations.json"
ROOT = RECORDED.parents[1]
_PROCESSOR_SECONDS = "processor_seconds"
_TICKS = os.sysconf("SC_CLK_TCK")


class Duration(NamedTuple):
    """Of a test file, or of files that run in one process."""

    seconds: float
    processor_seconds: float

    def __add__(self, other: Any) -> Duration:
        return Duration(self.seconds + other.seconds, self.processor_seconds + other.processor_seconds)


def recorded(path: Path = RECORDED) -> dict[str, Duration]:
    """By test file, its path from the root of the repository."""
    return {name: Duration(**each) for name, each in json.loads(path.read_text()).items()}


def file_of(nodeid: str) -> str:
    """The file in which a test was found: its location may be in the base class of a framework, elsewhere."""
    return nodeid.partition("::")[0]


class Recorder:
    """Adds up what the tests of a run take, in the process that starts them and in those that run them."""

    def __init__(self, writes: bool) -> None:
        self._writes = writes
        self._taken: defaultdict[str, Duration] = defaultdict(lambda: Duration(0.0, 0.0))
        self._before = 0.0

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: Any) -> Iterator[None]:
        if call.when == "teardown":
            now = processor_seconds()
            item.user_properties.append((_PROCESSOR_SECONDS, max(now - self._before, 0.0)))
            self._before = now
        return (yield)

    def pytest_collection_finish(self) -> None:
        self._before = processor_seconds()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        worked = sum(value for name, value in report.user_properties if name == _PROCESSOR_SECONDS) if report.when == "teardown" else 0.0
        self._taken[file_of(report.nodeid)] += Duration(report.duration, worked)  # type: ignore[arg-type]

    def pytest_sessionfinish(self) -> None:
        if self._writes:
            write(self._taken)


def write(taken: dict[str, Duration], path: Path = RECORDED) -> None:
    """Replace the entries of these files, and drop those of files that are no more."""
    known = recorded(path) if path.exists() else {}
    merged = {name: each for name, each in {**known, **taken}.items() if (ROOT / name).exists()}
    lines = [
        f'  "{name}": {json.dumps({key: round(value, 1) for key, value in merged[name]._asdict().items()})}' for name in sorted(merged)
    ]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def processor_seconds() -> float:
    """What this process, its descendants, and those of them that have ended and were waited for have used."""
    used: dict[int, float] = {}
    children: defaultdict[int, list[int]] = defaultdict(list)
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            try:
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(") ")[2].split()
            except OSError:
                continue  # it has just ended
            used[int(entry)] = sum(map(int, fields[11:15])) / _TICKS
            children[int(fields[1])].append(int(entry))
    tree = [os.getpid()]
    for process in tree:
        tree += children[process]
    return sum(used.get(process, 0.0) for process in tree)
