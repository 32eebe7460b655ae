"""How workers are found."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

import placement
from placement.cli import main
from placement.core.errors import PlacementError
from placement.observe.discovery import (
    Announcement,
    Identity,
    Target,
    as_json,
    find_targets,
    from_json,
    targets_in,
    views_of,
)
from placement.testing import SimulatedDevice
from tests.observe.managed import managed
from tests.support.forked import processes

WORKER = """
import sys, placement
from placement.testing import SimulatedDevice
manager = placement.Manager(device=SimulatedDevice(1 << 20), discovery=sys.argv[1])
server = manager.serve()
print(server.port, flush=True)
sys.stdin.read()
"""


def worker_process(folder: Path, rank: int) -> subprocess.Popen[str]:
    """A worker that writes a line when it is announced, and ends when its input does."""
    return subprocess.Popen(
        [sys.executable, "-c", WORKER, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "RANK": str(rank)},
    )


def until_it_is_killed(folder: str, rank: int, announced: Connection) -> None:
    """A worker that never ends by itself."""
    os.environ["RANK"] = str(rank)
    manager = placement.Manager(device=SimulatedDevice(1 << 20), discovery=folder)
    manager.serve()
    announced.send(None)
    signal.pause()


def test_who_a_worker_is() -> None:
    torchrun = {"RANK": "11", "LOCAL_RANK": "3", "GROUP_RANK": "1", "TORCHELASTIC_RUN_ID": "job7"}
    assert Identity.from_launcher(torchrun, gpu_uuid="GPU-1").instance == "node1/rank11"
    assert Identity.from_launcher(torchrun).run == "job7"
    slurm = {"SLURM_PROCID": "2", "SLURM_NODEID": "0", "SLURM_JOB_ID": "99"}
    assert Identity.from_launcher(slurm) == Identity(run="99", node="node0", rank=2)
    assert Identity.from_launcher({}) == Identity()
    with pytest.raises(PlacementError, match="RANK is 'two'"):
        Identity.from_launcher({"RANK": "two"})


def test_targets_survive_their_form() -> None:
    targets = [
        Target.of("127.0.0.1:80", Identity(rank=rank, gpu_uuid="GPU-1")) for rank in range(2)
    ]
    assert from_json(as_json(targets), "here") == targets
    assert json.loads(as_json([])) == []  # Prometheus wants a list, also of nothing
    for text in ("{", "{}1", '[{"targets": ["a"]}]', "[3]"):
        with pytest.raises(PlacementError, match="here is not a list"):
            from_json(text, "here")


def test_a_worker_announces_itself_and_takes_its_file_away(tmp_path: Path) -> None:
    manager = placement.Manager(device=SimulatedDevice(1 << 20))
    server = manager.serve(discovery=tmp_path, identity=Identity(run="a run/7", rank=3))
    (path,) = tmp_path.glob("*.json")
    assert path.name == "a-run-7.node0-rank3.json"
    (target,) = targets_in(tmp_path)
    assert target.address == f"127.0.0.1:{server.port}"
    assert target.labels == {
        "instance": "node0/rank3", "run": "a run/7", "node": "node0", "rank": "3",
    }  # fmt: skip
    assert [*tmp_path.iterdir()] == [path]
    server.close()
    server.close()
    assert targets_in(tmp_path) == []


def test_a_restarted_worker_replaces_its_file_and_the_old_one_leaves_it(tmp_path: Path) -> None:
    first = Announcement(tmp_path, Target.of("127.0.0.1:1", Identity()))
    second = Announcement(tmp_path, Target.of("127.0.0.1:2", Identity()))
    first.close()
    assert [target.address for target in targets_in(tmp_path)] == ["127.0.0.1:2"]
    second.close()
    assert targets_in(tmp_path) == []


@pytest.mark.sweep
def test_two_processes_are_found_and_a_killed_one_does_not_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One ends in order, and takes its file away; the other one is killed."""
    ours, theirs = processes.Pipe()
    doomed = processes.Process(target=until_it_is_killed, args=(str(tmp_path), 1, theirs))
    doomed.start()
    theirs.close()
    process = worker_process(tmp_path, 0)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        ours.recv()
        assert [target.name for target in targets_in(tmp_path)] == ["node0/rank0", "node0/rank1"]
        assert all("error" not in view for view in views_of([str(tmp_path)]))
        doomed.kill()
        doomed.join()
        assert main(["status", str(tmp_path)]) == 1
        said = capsys.readouterr().out
        assert re.search(r"node0/rank1.*does not answer", said)
        assert not re.search(r"node0/rank0.*does not answer", said)
        process.communicate("")
        assert process.returncode == 0
        assert [target.name for target in targets_in(tmp_path)] == ["node0/rank1"]
    finally:
        doomed.kill()
        doomed.join()
        process.kill()
        process.communicate()


def test_a_forked_child_leaves_the_file(tmp_path: Path) -> None:
    announcement = Announcement(tmp_path, Target.of("127.0.0.1:1", Identity()))
    if not (child := os.fork()):
        announcement.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert targets_in(tmp_path)
    announcement.close()
    assert not targets_in(tmp_path)


def test_a_folder_that_cannot_be_written_is_an_error_and_the_port_is_free_again(
    tmp_path: Path,
) -> None:
    (tmp_path / "taken").write_text("a file where a folder has to be")
    manager = placement.Manager(device=SimulatedDevice(1 << 20))
    with pytest.raises(PlacementError, match="cannot announce this worker in"):
        manager.serve(discovery=tmp_path / "taken")


def test_all_workers_are_asked_and_one_that_is_gone_says_so(tmp_path: Path) -> None:
    """The list that one process has written for all, where there is no shared folder."""
    managers, _models = zip(*(managed() for _ in range(2)), strict=True)
    servers = [manager.serve(identity=Identity(rank=rank)) for rank, manager in enumerate(managers)]
    gathered = []
    for server in servers:
        assert server.target is not None
        labels = {**server.target.labels, "cluster": "a label of the list alone"}
        gathered.append(Target(address=server.target.address, labels=labels))
    gathered.append(Target.of("127.0.0.1:9", Identity(rank=2)))
    (tmp_path / "grpo-7.json").write_text(as_json(gathered))
    with managers[0].phase("log_prob"):
        views = views_of([str(tmp_path)])
    assert [view["name"] for view in views] == ["node0/rank0", "node0/rank1", "node0/rank2"]
    assert [view["snapshot"]["handles"][0]["state"] for view in views[:2]] == [
        "GPU_RESIDENT",
        "CPU_OFFLOADED",
    ]
    assert "does not answer" in views[2]["error"]
    assert [state for state, _, _ in views[0]["timeline"]["actor"]] == [
        "CPU_OFFLOADED",
        "GPU_RESIDENT",
    ]
    assert views[0]["phases"][-1][0] == "log_prob"
    assert views[0]["transitions"][0]["trigger"] == "load"
    for server in servers:
        server.close()


def test_what_names_no_worker_is_an_error(tmp_path: Path) -> None:
    for place in (str(tmp_path / "nowhere"), "https://host:9400"):  # workers serve no TLS
        with pytest.raises(PlacementError, match="is no worker's URL"):
            find_targets([place])
