"""`placement status` and `placement top`."""

from __future__ import annotations

import concurrent.futures
import contextlib
import io
import json
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import placement
from placement.cli import main
from placement.cli.top import Screen, decode
from placement.cli.workers import look, trouble_of
from placement.observe.discovery import Identity
from placement.testing import SimulatedDevice


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[list[placement.Manager]]:
    managers, servers, models = [], [], []
    for rank in (2, 10):
        manager = placement.Manager(device=SimulatedDevice(1 << 20, chunk_bytes=4096))
        models.append(nn.Linear(32, 32))
        manager.register("actor", models[-1], role="actor")
        servers.append(manager.serve(discovery=tmp_path, identity=Identity(rank=rank)))
        managers.append(manager)
    yield managers
    for server in servers:
        server.close()


def test_status_prints_every_worker_and_handle(
    workers: list[placement.Manager], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with workers[1].phase("log_prob"):
        assert main(["status", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["worker", "phase", "on", "device", "of", "used", "stall", "handles", "on", "the", "device", "trouble"]
    assert [line.split()[0] for line in lines[1:3]] == ["node0/rank2", "node0/rank10"]  # 2 before 10
    assert lines[1].split()[1:3] == ["idle", "0"]
    assert lines[2].split()[1:4] == ["log_prob", "8", "KiB"]
    assert sum(line.startswith("actor ") for line in lines) == 2


def test_status_as_json_and_from_the_environment(
    workers: list[placement.Manager], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLACEMENT_DISCOVERY", str(tmp_path))
    assert main(["status", "--json", "--sort", "held"]) == 0
    views = json.loads(capsys.readouterr().out)
    assert {view["name"] for view in views} == {"node0/rank2", "node0/rank10"}
    assert views[0]["snapshot"]["handles"][0]["name"] == "actor"


def test_what_is_wrong_shows_and_is_the_exit_status(workers: list[placement.Manager], capsys: pytest.CaptureFixture[str]) -> None:
    with workers[0].serve() as server:
        assert main(["status", server.url, "http://127.0.0.1:9"]) == 1
        out = capsys.readouterr().out
        assert "http://127.0.0.1:9/workers does not answer" in out
        assert main(["status"]) == 1
        assert "no workers named" in capsys.readouterr().err
        assert main(["status", "no/such/folder"]) == 1
        assert "or a discovery folder (workers create it when they announce themselves)" in capsys.readouterr().err
        assert main(["top", server.url, "--interval", "0"]) == 1
        assert "must be more than 0" in capsys.readouterr().err


def test_without_a_terminal_top_prints_once(
    workers: list[placement.Manager], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["top", str(tmp_path)]) == 0
    assert "node0/rank10" in capsys.readouterr().out


def view(name: str, held: int = 0, stalled: float = 0.0, **changes: Any) -> dict[str, Any]:
    handle = {"name": "actor", "resident_bytes": held, "broken": None, "drift_bytes": 0}
    snapshot = {
        "handles": [handle], "phase_seconds": {"train": 10.0}, "phase_stall_seconds": {"train": stalled}, "phases": ["train"],
        "device_used_bytes": held, "device_total_bytes": 100, "unpaired_bytes": 0, "wrong_writes": 0, **changes,
    }  # fmt: skip
    return {"name": name, "labels": {}, "snapshot": snapshot}


def test_sorting_and_choosing() -> None:
    screen = Screen("name")
    screen.take([view("rank10", held=5), view("rank9", stalled=1.0), view("rank1", wrong_writes=2), {"name": "rank0", "error": "gone"}])
    names = [each["name"] for each in screen.views]
    assert names == ["rank0", "rank1", "rank9", "rank10"]
    assert screen.press("down")
    assert screen.press("down")
    orders = {}
    for _ in range(4):
        screen.press("s")
        orders[screen.sorting] = [each["name"] for each in screen.views]
        assert screen.views[screen.chosen]["name"] == "rank9"  # the chosen worker stays the chosen one
    assert orders["held"][0] == "rank10"
    assert orders["stall"][0] == "rank9"
    assert orders["trouble"][:2] == ["rank0", "rank1"]
    assert trouble_of(screen.views[1]) == "2 wrong writes"
    for key, detail in (("enter", "rank9"), ("q", None), ("enter", "rank9"), ("escape", None)):
        assert screen.press(key)
        assert screen.detail == detail
    for _ in range(9):
        screen.press("down")
    assert screen.chosen == 3
    screen.take([view("rank1")])
    assert screen.chosen == 0
    assert not screen.press("q")


def test_an_empty_run_can_be_looked_at() -> None:
    screen = Screen("name")
    screen.take([])
    for key in ("up", "down", "enter", "s"):
        assert screen.press(key)
    assert screen.detail is None
    assert screen.render(24) is not None


def test_a_terminal_of_80_columns_shows_names_phases_and_sizes_whole(workers: list[placement.Manager], tmp_path: Path) -> None:
    console = pytest.importorskip("rich.console").Console(width=80, file=io.StringIO())
    screen = Screen("name")
    with workers[1].phase("log_prob"), concurrent.futures.ThreadPoolExecutor(1) as pool:
        screen.take(look([str(tmp_path)], pool))
    screen.views.append({"name": "node0/rank11", "labels": {}, "error": "http://127.0.0.1:9/workers does not answer: Connection refused"})
    console.print(screen.render(24))
    lines = console.file.getvalue().splitlines()
    assert "3 workers, 1 with trouble" in lines[0]
    (row,) = [line for line in lines if "node0/rank10" in line]
    assert row.split()[1:4] == ["log_prob", "8", "KiB"]
    (row,) = [line for line in lines if "node0/rank11" in line]
    assert "…" in row
    (head,) = [line for line in lines if "on device" in line]
    assert not lines[lines.index(head) - 1].strip(), "the header has one line"


@pytest.mark.parametrize(
    ("sent", "key"),
    [
        (b"\x1b[A", "up"),
        (b"\x1bOB", "down"),
        (b"\r", "enter"),
        (b"\x1b", "escape"),
        (b"s", "s"),
        (b"qq", "q"),
        (b"\xc3\xa4", ""),
        (b"\x1b[B\x1b[B", "down"),
        (b"\rq", "enter"),
    ],
)
def test_keys(sent: bytes, key: str) -> None:
    assert decode(sent) == key


def test_in_a_terminal(workers: list[placement.Manager], tmp_path: Path) -> None:
    pytest.importorskip("rich")
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "140", "LINES": "30"}
    command = [sys.executable, "-m", "placement", "top", str(tmp_path), "--interval", "0.2"]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, env=environment)
    os.close(theirs)

    def read_until(text: str) -> None:
        seen, deadline = b"", time.monotonic() + 60
        while text.encode() not in seen:
            assert time.monotonic() < deadline, seen.decode(errors="replace")[-2000:]
            if select.select([ours], [], [], 0.2)[0]:
                seen += os.read(ours, 65536)

    try:
        read_until("node0/rank10")
        with workers[0].phase("log_prob"):
            read_until("log_prob")
        os.write(ours, b"\r")
        read_until("host copy")
        os.write(ours, b"q")
        read_until("2 workers")
        os.write(ours, b"q")
        deadline = time.monotonic() + 30
        while process.poll() is None and time.monotonic() < deadline:  # it cannot end before somebody reads what it still writes
            if select.select([ours], [], [], 0.2)[0]:
                with contextlib.suppress(OSError):  # nobody has the other side open any more
                    os.read(ours, 65536)
        assert process.poll() == 0
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()
        os.close(ours)
