"""How long each test file takes.

`make durations` runs the tests with `--record-durations`, which writes `tests/durations.json`;
`tests/support/order.py` reads it. A run of some files replaces those files' entries alone.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest

RECORDED = Path(__file__).parents[1] / "durations.json"
ROOT = RECORDED.parents[1]


def recorded() -> dict[str, float]:
    """Seconds by test file, its path from the root of the repository."""
    found: dict[str, float] = json.loads(RECORDED.read_text())
    return found


def file_of(nodeid: str) -> str:
    """The file in which a test was found: its location may be in the base class of a framework,
    elsewhere."""
    return nodeid.partition("::")[0]


class Recorder:
    """Adds up what the tests of a run take, and writes it at the end."""

    def __init__(self) -> None:
        self._taken: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._taken[file_of(report.nodeid)] += report.duration

    def pytest_sessionfinish(self) -> None:
        known = {
            name: seconds
            for name, seconds in (recorded() | self._taken).items()
            if (ROOT / name).exists()
        }
        RECORDED.write_text(
            json.dumps({name: round(known[name], 1) for name in sorted(known)}, indent=2) + "\n"
        )
