"""Incidents: the folder that an error names, and who held what when it is read."""

from __future__ import annotations

import json
from collections.abc import Callable, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from placement import (
    DeviceMemoryError,
    EngineLost,
    GroupError,
    HostMemoryError,
    IntegrityError,
    Manager,
    PhaseError,
)
from placement.cli import main
from placement.engines import TaggedEngine
from placement.testing import Faults, SimulatedDevice
from tests.group.manager_ranks import ranks_of
from tests.support.threads import on_all
from tests.support.worker import CAPACITY, OFF, Worker, learn, net

FILES = {
    "incident.json",
    "snapshot.json",
    "journal.json",
    "audit.json",
}


class LostEngine(TaggedEngine):
    """It has ended before it is to be loaded for the first time."""

    def __init__(self) -> None:
        super().__init__(tags=("weights",), weights="keep", verify="answer")

    def drain(self) -> None: ...
    def admit(self) -> None: ...
    def offload(self, tags: object) -> None: ...
    def receive(self, bucket: object) -> None: ...

    def load(self, tags: object) -> None:
        raise EngineLost("it has ended")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "new" / "incidents"


def folder_of(error: BaseException, place: Path, files: Set[str] = FILES) -> Path:
    """The folder that the last line of an error names; the only one."""
    last = error.__notes__[-1]
    (folder,) = place.iterdir()
    assert last == f"placement: incident: {folder} (placement status --incident {folder})"
    assert {file.name for file in folder.iterdir()} == files
    return folder


def read(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["status", "--incident", str(folder)]) == 0
    return capsys.readouterr().out


def row(text: str, handle: str) -> list[str]:
    return next(line.split() for line in text.splitlines() if line.startswith(f"{handle} "))


def test_a_plan_that_does_not_fit(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    worker = Worker(budget_bytes=80 << 10, incidents=place)
    with worker.manager.phase("log_prob", only=["actor"]) as phase:
        with pytest.raises(DeviceMemoryError) as caught:
            phase.switch("train")
        assert worker.actor.resident_bytes > 0
    folder = folder_of(caught.value, place)
    incident = json.loads((folder / "incident.json").read_text())
    assert (incident["phase"], incident["plan"]["targets"]["actor"]) == ("train", "TRAINING")
    records = json.loads((folder / "journal.json").read_text())["records"]
    assert [records[-1][key] for key in ("handle", "trigger")] == ["actor", "load"]
    text = read(folder, capsys)
    assert "DeviceMemoryError" in text
    assert "phase 'train'" in text
    assert row(text, "actor")[1] == "GPU_RESIDENT"
    assert "actor TRAINING" in text  # planned
    assert row(text, "ref")[1] == "CPU_OFFLOADED"
    names = [line.split()[0] for line in text.splitlines() if " CPU_" in line or " GPU_" in line]
    assert names[-5:][0] == "actor"  # who holds most


@pytest.mark.parametrize(
    ("operation", "kind"), [("create", DeviceMemoryError), ("host", HostMemoryError)]
)
def test_memory_that_the_driver_or_the_host_refuses(
    operation: str, kind: type[Exception], place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    device = Faults(SimulatedDevice(CAPACITY))
    worker = Worker(device=device, incidents=place)
    with worker.manager.phase("log_prob", only=["actor"]):
        device.fail(operation)
        teacher = net()
        fails: Callable[[], Any] = (
            (lambda: worker.manager.register("teacher", teacher, role="teacher"))
            if operation == "host"
            else worker.manager.phase("values").__enter__
        )
        with pytest.raises(kind) as caught:
            fails()
        text = read(folder_of(caught.value, place), capsys)
    assert row(text, "actor")[1] == "GPU_RESIDENT"
    assert "injected fault" in text
    with worker.manager.phase("values"):  # and nothing is lost
        pass


def test_memory_that_the_users_own_computing_lacks(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is written before the phase ends, so that it shows what the phase had on the device."""
    worker = Worker(incidents=place)
    with pytest.raises(torch.OutOfMemoryError) as caught, worker.manager.phase("train"):
        # a file name that is no Unicode may be in a message
        raise torch.OutOfMemoryError("\udcff: CUDA out of memory. Tried to allocate 20.00 GiB")
    text = read(folder_of(caught.value, place), capsys)
    assert "Tried to allocate 20.00 GiB" in text
    assert row(text, "actor")[1] == "TRAINING"


def test_what_was_written_shows_as_a_phase_is_left_by_another_error(place: Path) -> None:
    worker = Worker(incidents=place)

    def write() -> None:
        with worker.manager.phase("values"):
            worker.net[0].weight.data.fill_(1)
            raise ValueError("the user's")

    with pytest.raises(ValueError, match="the user's") as caught:
        write()
    folder = folder_of(caught.value, place)
    assert json.loads((folder / "incident.json").read_text())["error"].startswith("IntegrityError")


def test_a_handle_that_stays_broken_makes_no_further_incident(place: Path) -> None:
    worker = Worker(incidents=place)
    engine = LostEngine()
    worker.manager.register("engine", engine, role="rollout")
    with pytest.raises(EngineLost) as caught:
        worker.manager.phase("rollout").__enter__()
    with pytest.raises(ValueError, match="the user's"), worker.manager.phase("log_prob"):
        raise ValueError("the user's")
    with pytest.raises(PhaseError):
        worker.manager.unregister("nobody")
    folder_of(caught.value, place)  # the only one


@dataclass(frozen=True)
class FrozenError(torch.OutOfMemoryError):
    needed_bytes: int


def test_an_error_that_refuses_notes(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    worker = Worker(incidents=place)
    with pytest.raises(FrozenError), worker.manager.phase("train"):
        raise FrozenError(8)
    (folder,) = place.iterdir()
    assert {file.name for file in folder.iterdir()} == FILES
    assert "cannot assign" in caplog.text


def test_an_error_with_notes_of_another_form_is_the_users(place: Path) -> None:
    worker = Worker(incidents=place)
    error = ValueError("the user's")
    error.__notes__ = ("a tuple",)  # type: ignore[assignment]
    with pytest.raises(ValueError, match="the user's"), worker.manager.phase("train"):
        raise error
    assert worker.actor.state is OFF


def test_an_incident_whose_error_has_no_list_of_notes(place: Path) -> None:
    worker = Worker(incidents=place)
    error = DeviceMemoryError("too much")
    error.__notes__ = None  # type: ignore[assignment]
    with pytest.raises(DeviceMemoryError), worker.manager.phase("train"):
        raise error
    assert len([*place.iterdir()]) == 1


def test_a_write_into_offloaded_memory(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    worker = Worker(incidents=place)
    with worker.manager.phase("train"):
        learn(worker.net, worker.adam)
    with torch.no_grad():
        worker.net[0].weight.fill_(1.0)
    with pytest.raises(IntegrityError) as caught:
        worker.manager.phase("train").__enter__()
    text = read(folder_of(caught.value, place), capsys)
    assert "IntegrityError" in text
    assert "0.weight" in text


def test_a_broken_handle(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The error is the device's own."""
    device = Faults(SimulatedDevice(CAPACITY))
    worker = Worker(device=device, incidents=place)
    device.fail("copy", at=2, forever=True)
    device.fail("sync", forever=True)
    with pytest.raises(RuntimeError, match="injected fault") as caught:
        worker.manager.phase("train").__enter__()
    broken = [each.name for each in worker.manager.handles.values() if each.broken]
    assert broken
    text = read(folder_of(caught.value, place), capsys)
    assert f"broken: {broken[0]}: " in text
    device._faults.clear()
    worker.manager.close()


def test_the_error_of_a_group_names_it(place: Path) -> None:
    """On the rank that has failed."""
    failing, other = ranks_of(2, incidents=place)
    failing.faults.fail("create")
    errors = on_all([failing, other], lambda rank: rank.manager.phase("train").__enter__())
    assert [type(error) for error in errors] == [GroupError, GroupError]
    folder_of(errors[0], place)
    assert not getattr(errors[1], "__notes__", ())


def test_what_fails_while_a_phase_is_left_is_told_before_it(place: Path) -> None:
    device = Faults(SimulatedDevice(CAPACITY))
    worker = Worker(device=device, incidents=place)
    phase = worker.manager.phase("train")
    phase.__enter__()
    learn(worker.net, worker.adam)
    device.fail("copy", forever=True)
    error = torch.OutOfMemoryError("CUDA out of memory")
    error.__notes__ = [7]  # type: ignore[list-item] # somebody else's, and no text
    phase.__exit__(type(error), error, None)
    assert any("injected fault" in str(note) for note in error.__notes__)
    folder_of(error, place)
    device.clear()
    worker.manager.close()


def test_no_file_has_the_token(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLACEMENT_CONTROL_TOKEN", "a-token-of-the-tests")
    worker = Worker(budget_bytes=80 << 10, incidents=place)
    worker.manager.serve()
    with pytest.raises(DeviceMemoryError) as caught:
        worker.manager.phase("train").__enter__()
    for file in folder_of(caught.value, place).iterdir():
        assert b"a-token-of-the-tests" not in file.read_bytes()
    worker.manager.close()


def test_other_errors_are_none(place: Path) -> None:
    worker = Worker(incidents=place)
    with pytest.raises(ZeroDivisionError), worker.manager.phase("train"):
        _ = 1 / 0
    assert not place.exists()


def test_one_error_is_one_incident_and_only_the_last_are_kept(place: Path) -> None:
    worker = Worker(budget_bytes=80 << 10, incidents=place, incidents_kept=2)
    named = []
    for _ in range(3):
        # it passes through two phases
        with pytest.raises(DeviceMemoryError) as caught, worker.manager.phase("idle"):
            worker.manager.phase("train").__enter__()
        notes = [note for note in caught.value.__notes__ if "incident" in note]
        assert len(notes) == 1
        named.append(notes[0].split()[2])
    assert {str(folder) for folder in place.iterdir()} == set(named[1:])


@pytest.mark.parametrize("at", ["folder", "file", "audit"])
def test_what_cannot_be_written_hides_no_error(
    at: str, place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    worker = Worker(budget_bytes=80 << 10, incidents=place)
    if at == "folder":
        place.parent.mkdir()
        place.write_text("a file")
    elif at == "file":
        monkeypatch.setattr(Path, "write_bytes", full)
    else:
        monkeypatch.setattr(worker.manager._stack.incidents, "_take_audit", full)
    with pytest.raises(DeviceMemoryError, match="train"):
        worker.manager.phase("train").__enter__()
    monkeypatch.undo()
    assert "incident" in caplog.text
    with worker.manager.phase("log_prob", only=["actor"]):
        assert worker.actor.resident_bytes > 0


@pytest.mark.parametrize("last", ["journal.json", "audit.json"])
def test_a_disk_that_is_full_in_the_middle_costs_the_rest(
    last: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write = Path.write_bytes

    def until_full(path: Path, data: bytes) -> int:
        if path.name != last:
            return write(path, data)
        write(path, data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", until_full)
    worker = Worker(budget_bytes=80 << 10, incidents=place)
    with pytest.raises(DeviceMemoryError) as caught:
        worker.manager.phase("train").__enter__()
    monkeypatch.undo()
    (folder,) = place.iterdir()
    assert str(folder) in caught.value.__notes__[-1]
    assert {file.name for file in folder.iterdir()} == FILES - ({"audit.json"} - {last})
    assert "DeviceMemoryError" in read(folder, capsys)


def test_off_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    worker = Worker(budget_bytes=80 << 10)
    with pytest.raises(DeviceMemoryError) as caught:
        worker.manager.phase("train").__enter__()
    assert not any("incident" in note for note in getattr(caught.value, "__notes__", ()))
    assert [*tmp_path.iterdir()] == []


def test_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="absolute path"):
        Manager(device=SimulatedDevice(CAPACITY), incidents="incidents")
    assert main(["status", "--incident", str(tmp_path)]) == 1
    assert "is not the folder of an incident" in capsys.readouterr().err


def test_the_processes_of_a_gpu(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = SimulatedDevice(CAPACITY)
    worker = Worker(device=device, budget_bytes=80 << 10, incidents=place)
    incidents = worker.manager._stack.incidents
    monkeypatch.setattr(incidents, "_device", torch.device("cuda", 3))
    told = {torch.device("cuda", 3): "GPU:5\nprocess 8 uses 124.000 MB GPU memory"}
    monkeypatch.setattr(torch.cuda, "list_gpu_processes", told.get)
    with pytest.raises(DeviceMemoryError) as caught:
        worker.manager.phase("train").__enter__()
    folder = folder_of(caught.value, place, FILES | {"processes.txt"})
    assert "process 8 uses 124.000 MB GPU memory" in read(folder, capsys).splitlines()
    (folder / "audit.json").unlink()  # as where the device failed
    assert "process 8 uses 124.000 MB GPU memory" in read(folder, capsys).splitlines()
