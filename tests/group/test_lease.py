"""Leases between real processes: order, priorities, deadlines, and what is left of a process that
dies, forks, stops or writes nonsense."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from placement.core.errors import DeviceMemoryError, PlacementError
from placement.devices import ledger
from placement.devices.ledger import MAX_BYTES, Claim, Ledger
from placement.group import Lease
from tests.group.lease_processes import Doomed, Holder
from tests.group.processes import Process, Processes
from tests.support.forked import exit_code


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path / "leases")


def claims(folder: str) -> list[Claim]:
    return Ledger.of(folder, "GPU-1").claims()


def held(folder: str) -> dict[int, int]:
    return {claim.pid: claim.held_bytes for claim in claims(folder)}


def wait_for(folder: str, process: Process, nbytes: int) -> None:
    """Let it wait, and return when it does."""
    process.begin("wait", nbytes)
    while not any(
        claim.pid == process.pid and claim.note and claim.note.wanted_bytes
        for claim in claims(folder)
    ):
        assert process.is_busy(0.002)


def test_the_first_comes_first_also_when_a_later_one_would_fit(
    processes: Processes, folder: str
) -> None:
    holder, first, second, third = (processes.start(Holder, folder) for _ in range(4))
    holder.call("grow", 80)
    for process, nbytes in ((first, 90), (second, 15), (third, 5)):
        wait_for(folder, process, nbytes)
    assert second.is_busy()  # 15 would fit, but the first one must not starve
    assert not holder.call("grow", 81)
    holder.call("settle", 0)
    assert first.answer() == 90
    assert third.is_busy()
    first.call("settle", 80)
    assert (second.answer(), third.answer()) == (15, 5)


def test_a_higher_priority_comes_before_who_came_first(processes: Processes, folder: str) -> None:
    holder, low, high = (
        processes.start(Holder, folder, {"priority": priority}) for priority in (0, 0, 5)
    )
    holder.call("grow", 100)
    wait_for(folder, low, 60)
    wait_for(folder, high, 60)
    holder.call("settle", 0)
    assert high.answer() == 60
    assert low.is_busy()
    high.call("settle", 0)
    assert low.answer() == 60


def test_a_deadline_names_who_holds_how_much_and_ends_the_wait(
    processes: Processes, folder: str
) -> None:
    holder, behind = processes.start(Holder, folder), processes.start(Holder, folder)
    late = processes.start(Holder, folder, {"name": "late", "deadline_seconds": 0.2})
    holder.call("grow", 70)
    wait_for(folder, late, 40)
    behind.begin("wait", 30)
    with pytest.raises(
        DeviceMemoryError,
        match=r"waited 0.2 s for 40 bytes of GPU-1; its processes share 100",
    ) as caught:
        late.answer()
    lines = str(caught.value).splitlines()
    assert any(f"{holder.pid:>8}" in line and line.split()[-2:] == ["70", "0"] for line in lines)
    assert any("late (this one)" in line and line.split()[-2:] == ["0", "40"] for line in lines)
    assert behind.answer() == 30  # nobody is before it any more
    with pytest.raises(
        DeviceMemoryError, match="needs 101 bytes of GPU-1, but all its processes share 100"
    ):
        Lease("GPU-1", 100, folder=folder).wait(101)


def test_killed_at_every_line(
    processes: Processes, folder: str, counted: Callable[[str], None]
) -> None:
    other = Lease("GPU-1", 100, folder=folder)
    lines = processes.start(Doomed, folder).call("die_at", -1)
    points = range(1, lines + 1, 1 if os.environ.get("SWEEP") == "all" else 4)
    for line in points:
        doomed = processes.start(Doomed, folder)
        doomed.begin("die_at", line)
        with pytest.raises(EOFError):
            doomed.answer()
        doomed.kill()  # collect it
        assert other.grow(100), f"line {line}: {other.snapshot()}"
        assert [holder.is_mine for holder in other.snapshot().holders] == [True]
        other.settle(0)
    assert lines > 100
    counted(
        f"leases: killed at {len(points)} of {lines} lines of taking and giving back, the bytes "
        "free at once"
    )


def test_who_is_stopped_while_it_waits_loses_its_turn_until_it_goes_on(
    processes: Processes, folder: str
) -> None:
    holder, first, second = (processes.start(Holder, folder) for _ in range(3))
    holder.call("grow", 60)
    wait_for(folder, first, 90)
    second.begin("wait", 40)
    assert second.is_busy()
    # so that it is between two looks, not in the middle of one
    with Ledger.of(folder, "GPU-1").turn():
        first.stop()
    assert second.answer() == 40
    first.go_on()
    holder.call("settle", 0)
    second.call("settle", 0)
    assert first.answer() == 90


def test_a_process_stopped_in_its_turn_is_named_and_keeps_nobody_from_giving_back(
    processes: Processes, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "TURN_SECONDS", 0.3)
    mine = Lease("GPU-1", 100, folder=folder)
    assert mine.grow(50)
    stopped = processes.start(Holder, folder)
    stopped.begin("stop_in_turn")
    assert stopped.is_stopped()
    with pytest.raises(
        PlacementError,
        match=rf"process {stopped.pid} has kept .* "
        r"locked "
        r"for "
        r".* "
        r"and may be stopped",
    ):
        mine.grow(60)
    mine.settle(20)
    assert held(folder)[os.getpid()] == 20
    stopped.go_on()
    stopped.answer()
    assert mine.grow(60)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_gives_nothing_of_its_parents_lease_back(folder: str) -> None:
    parents = [Lease("GPU-1", 100, folder=folder)]
    parents[0].grow(70)

    def child() -> int:
        parents[0].close()
        parents.clear()
        own = Lease("GPU-1", 100, folder=folder)
        return 0 if own.grow(30) and not own.grow(31) else 2

    assert exit_code(child) == 0
    assert held(folder) == {os.getpid(): 70}


def test_a_full_file_system_costs_names_only(processes: Processes, folder: str) -> None:
    """/dev/shm of a container is often full."""
    full, other = processes.start(_on_a_full_file_system, folder), processes.start(Holder, folder)
    assert full.call("grow", 60)
    assert not other.call("grow", 41)
    wait_for(folder, other, 80)
    full.call("settle", 20)
    assert other.answer() == 80
    assert full.call("wait", 15) == 15


def _on_a_full_file_system(folder: str) -> Holder:
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    return Holder(folder)


def test_a_file_that_was_removed_is_made_anew_with_what_is_held(
    processes: Processes, folder: str
) -> None:
    first, second = processes.start(Holder, folder), processes.start(Holder, folder)
    first.call("grow", 70)
    second.call("grow", 30)
    Ledger.of(folder, "GPU-1").path.unlink()
    Path(folder).rmdir()
    first.call("settle", 60)
    second.call("settle", 30)
    assert not second.call("grow", 41)
    assert second.call("grow", 40)
    late = processes.start(Holder, folder)
    assert not late.call("grow", 1)
    assert held(folder) == {first.pid: 60, second.pid: 40, late.pid: 0}


def test_a_lock_that_this_process_lost_is_taken_again(folder: str) -> None:
    lease, other = Lease("GPU-1", 100, folder=folder), Lease("GPU-1", 100, folder=folder)
    assert lease.grow(60)
    # closes a descriptor of the file: POSIX drops every lock of the process on it
    Ledger.of(folder, "GPU-1").path.read_bytes()
    assert held(folder) == {}
    assert lease.grow(70)
    assert other.grow(30)
    assert not other.grow(31)


def test_leases_of_one_process_are_told_apart_and_end_with_their_object(folder: str) -> None:
    first, second = (
        Lease("GPU-1", 100, folder=folder, name="a"),
        Lease("GPU-1", 100, folder=folder, name="b"),
    )
    assert first.grow(60)
    assert not second.grow(41)
    seen = second.snapshot()
    assert [(each.name, each.held_bytes, each.is_mine) for each in seen.holders] == [
        ("a", 60, False),
        ("b", 0, True),
    ]
    assert seen.others_bytes == 60
    del first
    assert second.grow(100)
    second.close()
    second.close()
    for use in (second.grow, second.settle):
        with pytest.raises(PlacementError, match="closed"):
            use(101)
    assert claims(folder) == []


def test_holding_waits_and_gives_back_also_on_an_error(folder: str) -> None:
    lease = Lease("GPU-1", 100, folder=folder)

    def nested() -> None:
        with lease.holding(80):
            assert lease.held_bytes == 80
            with lease.holding(1):
                pass

    with pytest.raises(ValueError, match="holds 80 bytes already"):
        nested()
    assert lease.held_bytes == 0
    lease.settle(120)  # what is used is used
    assert not Lease("GPU-1", 100, folder=folder).grow(1)
    lease.settle(0)
    with pytest.raises(ZeroDivisionError), lease.holding(60):  # noqa: PT012
        lease.close()
        raise ZeroDivisionError
    assert claims(folder) == []


@pytest.mark.parametrize(
    ("keywords", "match"),
    [
        ({"gpu": ""}, "UUID"),
        ({"capacity_bytes": 0}, "capacity_bytes"),
        ({"capacity_bytes": 1 << 44}, "capacity_bytes"),
        ({"deadline_seconds": 0.0}, "deadline"),
        ({"priority": 10**300}, "priority"),
    ],
)
def test_plain_mistakes(folder: str, keywords: dict[str, Any], match: str) -> None:
    given: dict[str, Any] = {"gpu": "GPU-1", "capacity_bytes": 100, "folder": folder, **keywords}
    with pytest.raises(ValueError, match=match):
        Lease(**given)


def test_a_folder_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PlacementError, match="cannot open"):
        Lease("GPU-1", 100, folder=tmp_path / "file" / "leases")
    (tmp_path / "links").mkdir()
    Ledger(tmp_path / "links", "GPU-1").path.symlink_to(tmp_path / "file")
    with pytest.raises(PlacementError, match="cannot open"):
        Lease("GPU-1", 100, folder=tmp_path / "links")
    monkeypatch.setattr(ledger, "LEASES_FOLDER", str(tmp_path))
    monkeypatch.setattr(ledger.os, "getuid", lambda: 12345)
    with pytest.raises(PlacementError, match="belongs to another user"):
        Lease("GPU-1", 100, folder=tmp_path)


def test_a_gpus_name_is_no_path_and_never_that_of_another(tmp_path: Path) -> None:
    names = ["../../GPU/1", "..-..-GPU-1", "/tmp/" + "x" * 500 + "/a", "/tmp/" + "x" * 500 + "-a"]
    held = [Lease(name, 100, folder=tmp_path / "leases") for name in names]
    assert all(lease.grow(100) for lease in held)
    files = [path.relative_to(tmp_path) for path in tmp_path.rglob("*.leases")]
    assert len(files) == 4
    assert all(len(path.parts) == 2 and len(path.name) < 80 for path in files)


def test_the_largest_claim_and_the_longest_note_leave_their_neighbours_alone(folder: str) -> None:
    names = ["neighbour", "\x01" * 200, "from the environment \udcff"]
    held = [
        Lease("GPU-1", MAX_BYTES - 1, folder=folder, name=name, priority=-(1 << 31))
        for name in names
    ]
    for lease, nbytes in zip(held, (7, MAX_BYTES - 1, 9), strict=True):
        lease.settle(nbytes)
    held[0].settle(8)
    assert [claim.held_bytes for claim in claims(folder)] == [8, MAX_BYTES - 1, 9]
    held[1].settle(0)
    held[1].deadline_seconds = 0.001
    with pytest.raises(DeviceMemoryError):
        held[1].wait(MAX_BYTES - 1)  # what it writes now is as long as it comes
    assert [claim.held_bytes for claim in claims(folder)] == [8, 0, 9]
    seen = [claim.note and claim.note.name for claim in claims(folder)]
    assert seen == ["neighbour", "\ufffd" * 79 + "\u2026", "from the environment \ufffd"]
