"""Options of a run, and its order. No settings come from the caller's environment; what holds for
each test is in `tests/support/around_tests.py`.
"""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.durations import Recorder
from tests.support.order import make_scheduler

# Several processes share few cores here, and torch's threads spin where they wait. Set before a
# test, also for what it starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# torch's stores look up the name of each peer, a loopback one too, and serve nobody in the
# meantime: 5 s where a name server does not answer.
os.environ.setdefault("RES_OPTIONS", "attempts:0")
# Checkpoints are synced to the disk, and the cores wait for it: temporary files lie in memory where
# that has room.
_MEMORY, _ROOM_BYTES = "/dev/shm", 1 << 30
if (
    "PYTEST_DEBUG_TEMPROOT" not in os.environ
    and os.path.isdir(_MEMORY)
    and shutil.disk_usage(_MEMORY).free > _ROOM_BYTES
):
    os.environ["PYTEST_DEBUG_TEMPROOT"] = _MEMORY

COUNTED = "counted"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record-durations",
        action="store_true",
        help="write how long each test file takes into tests/durations.json",
    )
    parser.addoption("--slow", action="store_true", help="also run tests marked slow or sweep")


def pytest_configure(config: pytest.Config) -> None:
    is_worker = hasattr(config, "workerinput")
    if is_worker or not config.getoption("numprocesses", None):
        # Most of what is imported stays: garbage is looked for once the tests are known.
        gc.disable()
        config.pluginmanager.import_plugin("tests.support.around_tests")
    if config.getoption("record_durations") and not is_worker:
        config.pluginmanager.register(Recorder())


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return make_scheduler(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.fixture
def counted(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Say how many cases a test went through; the end of the run shows it, passed or not."""

    def note(text: str) -> None:
        request.node.user_properties.append((COUNTED, text))

    return note


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reports = [
        report
        for kind in ("passed", "failed")
        for report in terminalreporter.getreports(kind)
        if report.when == "call"
    ]
    lines = sorted(
        {text for report in reports for name, text in report.user_properties if name == COUNTED}
    )
    if lines:
        terminalreporter.section("cases in each sweep")
        for line in lines:
            terminalreporter.line(line)
