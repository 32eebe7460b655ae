"""`placement status`."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import placement
from placement.cli import main
from placement.cli.workers import trouble_of
from placement.core.snapshot import readable
from placement.forecasting.device import SizedEngine, SizesDevice
from placement.observe.discovery import Identity
from tests.observe.managed import managed


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[list[placement.Manager]]:
    made = [managed() for _ in range(2)]
    servers = [
        manager.serve(discovery=tmp_path, identity=Identity(rank=rank))
        for rank, (manager, _) in zip((2, 10), made, strict=True)
    ]
    yield [manager for manager, _ in made]
    for server in servers:
        server.close()


def test_status_prints_every_worker_and_handle(
    workers: list[placement.Manager], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with workers[1].phase("log_prob"):
        assert main(["status", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == [
        "worker",
        "phase",
        "on",
        "device",
        "of",
        "used",
        "stall",
        "handles",
        "on",
        "the",
        "device",
        "trouble",
    ]
    # 2 before 10
    assert [line.split()[0] for line in lines[1:3]] == ["node0/rank2", "node0/rank10"]
    assert lines[1].split()[1:3] == ["idle", "0"]
    assert lines[2].split()[1:4] == ["log_prob", "8", "KiB"]
    assert sum(line.startswith("actor ") for line in lines) == 2


def test_what_each_node_takes_of_host_memory_by_kind(
    workers: list[placement.Manager], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    host_bytes = workers[0].handles["actor"].host_bytes
    for worker in workers:
        worker.register(
            "rollout",
            SizedEngine(
                SizesDevice(), {"weights": 1 << 20, "kv_cache": 1 << 20}, keeps_weights=True
            ),
            role="rollout",
        )
    for words in (
        ["status", str(tmp_path)],
        ["doctor", "--device", "simulated:8MiB", "--bytes", "1MiB", "--workers", str(tmp_path)],
    ):
        main(words)
        lines = capsys.readouterr().out.splitlines()
        (head,) = [
            index for index, line in enumerate(lines) if line.split()[:2] == ["node", "page-locked"]
        ]
        cells = lines[head + 1].split()
        assert cells == ["node0", *readable(2 * host_bytes).split(), "0", "2", "MiB", "0"]


def test_status_as_json_and_from_the_environment(
    workers: list[placement.Manager],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PLACEMENT_DISCOVERY", str(tmp_path))
    assert main(["status", "--json"]) == 0
    views = json.loads(capsys.readouterr().out)
    assert {view["name"] for view in views} == {"node0/rank2", "node0/rank10"}
    assert views[0]["snapshot"]["handles"][0]["name"] == "actor"


def test_what_is_wrong_shows_and_is_the_exit_status(
    workers: list[placement.Manager],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with workers[0].serve() as server:
        assert main(["status", server.url, "http://127.0.0.1:9"]) == 1
        out = capsys.readouterr().out
        assert "http://127.0.0.1:9/workers does not answer" in out
        assert main(["status"]) == 1
        assert "no workers named" in capsys.readouterr().err
        monkeypatch.setenv("PLACEMENT_POLCY", "x")
        assert main(["status"]) == 1
        assert "did you mean 'PLACEMENT_POLICY'" in capsys.readouterr().err
        assert main(["status", server.url, "--watch", "--json"]) == 1
        assert "leave --json out" in capsys.readouterr().err
        workers[0].suspend()
        assert main(["status", server.url]) == 0
        assert "suspended" in capsys.readouterr().out
        workers[0].resume()
        assert main(["status", "no/such/folder"]) == 1
        assert (
            "and no discovery folder (workers create it when they announce themselves)"
        ) in capsys.readouterr().err
        with pytest.raises(SystemExit, match="2"):
            main(["status", server.url, "--watch", "0"])
        assert "'0' is not a number of seconds above 0" in capsys.readouterr().err


def test_what_a_worker_takes_that_does_not_answer_is_unknown(
    workers: list[placement.Manager], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In its own row, in its node's, which has another worker, and on a node of its own."""
    target = next(tmp_path.glob("*.json"))
    lost = json.loads(target.read_text(encoding="utf-8"))
    lost[0]["targets"] = ["127.0.0.1:9"]
    lost[0]["labels"]["rank"] = "3"
    (tmp_path / "lost.json").write_text(json.dumps(lost), encoding="utf-8")
    alone = "http://127.0.0.1:9"
    assert main(["status", str(tmp_path), alone]) == 1
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert sum(cells[1:7] == ["?"] * 6 for cells in lines) == 2
    host_bytes = readable(2 * workers[0].handles["actor"].host_bytes)
    assert f"node0 {host_bytes} + ? 0 + ? 0 + ? 0 + ?".split() in lines
    assert [alone.removeprefix("http://"), *["?"] * 4] in lines
    main(["status", "--json", alone])
    (view,) = json.loads(capsys.readouterr().out)
    assert set(view) == {"name", "labels", "error"}


def test_the_trouble_of_a_worker() -> None:
    handle = {"name": "actor", "broken": "a reason", "drift_bytes": 3}
    snapshot = {"handles": [handle], "unpaired_bytes": 2048, "wrong_writes": 2}
    assert trouble_of({"name": "rank1", "snapshot": snapshot}) == (
        "actor broken, 2 KiB left on the device, 2 wrong writes, actor drifted"
    )
    assert trouble_of({"name": "rank0", "error": "gone"}) == "gone"


def test_watching_in_a_terminal_until_ctrl_c(
    workers: list[placement.Manager], tmp_path: Path
) -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "140", "LINES": "30"}
    # A test that runs in the background ignores SIGINT, and so would its child.
    program = (
        "import signal, sys, placement.cli; signal.signal(signal.SIGINT, "
        "signal.default_int_handler); sys.exit(placement.cli.main())"
    )
    command = [sys.executable, "-c", program, "status", str(tmp_path), "--watch", "0.2"]
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
    )
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
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    finally:
        process.kill()
        process.wait()
        os.close(ours)
