"""The order of the tests, and the durations that it goes by."""

from __future__ import annotations

import json
import time
from pathlib import Path

from tests.support.durations import Duration, processor_seconds, recorded, write
from tests.support.order import _SCOPES, durations_of, ranked

COMPUTES, WAITS = 1.0, 0.1


def taking(seconds: float, share: float = COMPUTES) -> Duration:
    return Duration(seconds, seconds * share)


def test_what_takes_long_begins_first() -> None:
    assert ranked({"short": taking(2), "long": taking(50), "middle": taking(5)}) == ["long", "middle", "short"]


def test_of_what_takes_long_one_that_waits_and_one_that_computes_take_turns() -> None:
    scopes = {f"computes {n}": taking(100 - n) for n in range(3)} | {f"waits {n}": taking(80 - n, WAITS) for n in range(2)}
    scopes |= {f"short {n}": taking(3 - n, WAITS) for n in range(3)}
    turns = ["waits 0", "computes 0", "waits 1", "computes 1", "computes 2"]
    assert ranked(scopes) == [*turns, "short 0", "short 1", "short 2"]


def test_a_file_that_was_not_recorded_counts_as_average() -> None:
    known = {"tests/a.py": Duration(10.0, 4.0), "tests/b.py": Duration(20.0, 8.0)}
    assert durations_of(["tests/a.py", "tests/new.py"], known) == {"tests/a.py": (10.0, 4.0), "tests/new.py": (15.0, 6.0)}
    assert ranked(durations_of(["tests/a.py", "tests/new.py", "tests/b.py"], known)) == ["tests/b.py", "tests/new.py", "tests/a.py"]


def test_files_that_run_in_one_process_count_together() -> None:
    known = {"tests/ray/test_fleet.py": Duration(10.0, 4.0), "tests/ray/test_examples.py": Duration(20.0, 8.0)}
    assert durations_of(known, known) == {"ray": (30.0, 12.0)}


def test_nothing_recorded_is_no_order() -> None:
    assert ranked(durations_of(["tests/b.py", "tests/a.py"], {})) == ["tests/a.py", "tests/b.py"]


def test_a_run_of_some_files_replaces_their_entries_alone(tmp_path: Path) -> None:
    path = tmp_path / "durations.json"
    here = "tests/unit/test_order.py"
    path.write_text(json.dumps({name: taking(1)._asdict() for name in ("tests/conftest.py", here, "tests/unit/test_that_is_no_more.py")}))
    write({here: Duration(2.04, 0.5)}, path)
    assert recorded(path) == {"tests/conftest.py": (1.0, 1.0), here: (2.0, 0.5)}


def test_every_file_that_is_named_is_there() -> None:
    root = Path(__file__).parents[2]
    assert [name for name in (*recorded(), *_SCOPES) if not (root / name).exists()] == []


def test_the_work_of_this_process_is_counted() -> None:
    before, began = processor_seconds(), time.process_time()
    while time.process_time() - began < 0.1:
        pass
    assert processor_seconds() - before > 0.05
