"""`placement explain --live URL`: the reasons of a running worker's policy."""

from __future__ import annotations

from pathlib import Path

import pytest

from placement.cli import main
from placement.cli.explain import live_table
from placement.observe.discovery import Target
from tests.support.worker import Worker, learn


def test_it_says_why_each_handle_is_where_it_is(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    worker = Worker(policy="cyclic", budget_bytes="16MiB")
    server = worker.manager.serve(discovery=tmp_path)
    try:
        for _ in range(2):
            with worker.manager.phase("log_prob") as step:
                step.switch("train")
                learn(worker.net, worker.adam)
        with worker.manager.phase("log_prob") as step:
            step.keep("critic")
            step.switch("values")
            for place in (server.url, str(tmp_path)):
                assert main(["explain", "--live", place]) == 0
                lines = capsys.readouterr().out.splitlines()
                assert ": policy cyclic, in values, " in lines[0]
                assert lines[0].endswith(" of 16 MiB on the device")
                assert lines[1].split() == ["handle", "state", "on", "device", "why"]
                said = {line.split()[0]: line for line in lines[2:]}
                assert said.keys() == {"actor", "actor.optimizer", "ref", "critic", "critic.optimizer"}
                assert said["critic"].endswith("needed in values")
                assert said["actor"].split()[1] == "GPU_RESIDENT"
                assert "needed" in said["actor"]
    finally:
        server.close()


def test_a_policy_that_gives_no_reasons() -> None:
    handle = {"name": "actor", "state": "GPU_RESIDENT", "resident_bytes": 2048, "kept": True, "broken": "a reason"}
    state = {"policy": "mine", "phases": [], "budget_bytes": 4096, "handles": [handle]}
    head, _, row = live_table("rank0", state).splitlines()
    assert head == "rank0: policy mine, in idle, 2 KiB of 4 KiB on the device"
    assert row.endswith("the policy does not say; kept by phase.keep(); broken: a reason")


@pytest.mark.parametrize("body", [b"<html>", b"{}"])
def test_another_server_is_no_worker(body: bytes, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("placement.cli.explain.find_targets", lambda places: [Target(address="rank0:1", labels={})])
    monkeypatch.setattr("placement.cli.explain.ask", lambda url: body)
    assert main(["explain", "--live", "http://127.0.0.1:9"]) == 1
    assert "/state is not the state of a worker" in capsys.readouterr().err


def test_nobody_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--live", "http://127.0.0.1:9"]) == 1
    assert "does not answer" in capsys.readouterr().err
