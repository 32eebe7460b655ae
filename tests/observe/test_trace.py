"""The journal as a Chrome trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

import placement
from placement.cli import main
from placement.core.errors import PlacementError
from placement.observe.trace import encoded_trace
from tests.observe.managed import managed


@pytest.fixture
def manager() -> Any:
    manager, model = managed()
    manager.model = model  # type: ignore[attr-defined]
    return manager


def events_of(path: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == kind]


def test_a_track_for_each_handle_and_one_for_phases(
    manager: placement.Manager, tmp_path: Path
) -> None:
    with manager.phase("log_prob", only=["actor"]), manager.phase("checkpoint"):
        pass
    path = tmp_path / "trace.json"
    placement.trace(manager.journal, path)
    assert {
        event["args"]["name"] for event in events_of(path, "M") if event["name"] == "thread_name"
    } == {"phases", "actor"}
    spans = events_of(path, "X")
    assert [event["name"] for event in spans if event["cat"] == "phase"] == [
        "idle",
        "log_prob",
        "checkpoint",
        "log_prob",
        "idle",
    ]
    assert [event["args"] for event in spans if event["name"] == "log_prob"] == [
        {"only": ["actor"]}
    ] * 2
    assert [event["name"] for event in spans if event["cat"] == "state"] == [
        "CPU_OFFLOADED",
        "GPU_RESIDENT",
        "CPU_OFFLOADED",
    ]
    load, offload = (event for event in spans if event["cat"] == "move")
    assert (load["name"], offload["name"]) == ("load", "offload")
    handle = manager.handles["actor"]
    assert load["args"]["bytes"] == handle.counters.loaded_bytes > 0
    assert offload["args"]["skipped_bytes"] == handle.counters.skipped_bytes > 0
    assert load["args"]["phase"] == "log_prob"
    assert "GB/s" in load["args"]  # rounded: 0 for a few bytes on a busy machine
    assert [event["args"]["device"] for event in events_of(path, "C")] == [handle.num_bytes, 0]


def test_on_one_time_with_a_torch_profiler_trace(manager: Any, tmp_path: Path) -> None:
    with (
        profile(activities=[ProfilerActivity.CPU]) as profiler,
        record_function("around"),
        manager.phase("log_prob"),
        record_function("inside"),
    ):
        manager.model(torch.randn(2, 32))
    theirs, both = tmp_path / "torch.json", tmp_path / "both.json"
    profiler.export_chrome_trace(str(theirs))
    placement.trace(manager.journal, both, beside=theirs)
    spans = {
        event["name"]: event
        for event in events_of(both, "X")
        if event.get("cat") in ("user_annotation", "phase")
    }
    around, phase, inside = spans["around"], spans["log_prob"], spans["inside"]
    slack = 2000.0  # microseconds between the two clocks, read one after the other
    for outer, inner in ((around, phase), (phase, inside)):
        assert outer["ts"] - slack <= inner["ts"]
        assert inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + slack
    assert len(events_of(both, "X")) > len(events_of(theirs, "X"))


def test_only_the_last_seconds(manager: placement.Manager) -> None:
    with manager.phase("log_prob"):
        pass
    everything = b"".join(encoded_trace(manager.journal))
    nothing = b"".join(encoded_trace(manager.journal, last_seconds=0))
    assert b"GPU_RESIDENT" in everything
    assert b"GPU_RESIDENT" not in nothing
    assert json.loads(nothing)["traceEvents"]


def test_what_is_no_trace_is_named_and_nothing_is_written(
    manager: placement.Manager, tmp_path: Path
) -> None:
    for content in ("[1", '"text"', '{"events": []}'):
        other = tmp_path / "other.json"
        other.write_text(content)
        with pytest.raises(PlacementError, match=r"other\.json is no Chrome trace"):
            placement.trace(manager.journal, tmp_path / "trace.json", beside=other)
    assert [path.name for path in tmp_path.iterdir()] == ["other.json"]


def test_the_command_puts_workers_side_by_side(
    manager: placement.Manager, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with manager.phase("log_prob"):
        pass
    path = tmp_path / "trace.json"
    with manager.serve() as one, manager.serve() as two:
        assert main(["trace", one.url, two.url, "-o", str(path)]) == 0
    assert "of 2 workers" in capsys.readouterr().out
    assert {event["pid"] for event in events_of(path, "X")} == {1, 2}
    assert main(["trace", one.url, "-o", str(tmp_path / "gone.json")]) == 1
    assert "does not answer: Connection refused\n" in capsys.readouterr().err
    with manager.serve() as server:  # a worker that was killed does not hide the others
        assert main(["trace", one.url, server.url, "-o", str(path)]) == 1
        captured = capsys.readouterr()
        assert "does not answer: Connection refused" in captured.err
        assert "of 1 worker;" in captured.out
        assert {event["pid"] for event in events_of(path, "X")} == {2}
    path.unlink()
    with manager.serve() as server:
        assert main(["trace", server.url, "-o", str(tmp_path / "absent/trace.json")]) == 1
        assert (
            f"cannot write {tmp_path / 'absent/trace.json'}: No such file"
        ) in capsys.readouterr().err
        assert main(["trace", f"{server.url}/metrics", "-o", str(tmp_path / "trace.json")]) == 1
        assert (
            "answers 404 Not Found: is this the address of a placement worker?"
        ) in capsys.readouterr().err
    for seconds in ("-3", "0", "nan", "long"):
        with pytest.raises(SystemExit, match="2"):
            main(["trace", "http://127.0.0.1:9", "--seconds", seconds])
        assert "--seconds" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
