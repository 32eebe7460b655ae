"""`placement doctor`, and the inspection of a device behind it."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest
import torch

from placement import PlacementError
from placement.cli import doctor, main
from placement.cli.doctor import examine, table
from placement.devices import inspection
from placement.devices.host.slab import Slab
from placement.devices.inspection import Inspection, inspect, settled
from placement.registration import streamed_optimizer
from placement.testing import Faults, InjectedFault, SimulatedDevice
from tests.devices.test_host import GPU, machine

CHUNK = 64 << 10


def device(capacity_bytes: int = 64 * CHUNK, **keywords: object) -> SimulatedDevice:
    return SimulatedDevice(capacity_bytes=capacity_bytes, chunk_bytes=CHUNK, **keywords)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    # whoever looks at figures waits until they have settled
    monkeypatch.setattr(inspection, "_MOST_SECONDS", 0.0)
    monkeypatch.setattr(doctor, "_PAUSE_SECONDS", 0.0)


def test_a_healthy_device() -> None:
    # buffers are for the room that there is
    looked_at = device(5 * CHUNK, bandwidth_bytes_per_second=64 << 20)
    before = looked_at.memory()
    found = inspect(looked_at)
    assert looked_at.memory() == before
    assert found.findings == ()
    assert (found.device, found.total_bytes, found.free_bytes) == (
        "simulated",
        before.total_bytes,
        before.free_bytes,
    )
    assert found.pageable_reason is None
    rates = found.link
    assert 0 < rates.to_device_bytes_per_second <= 64 << 20
    assert 0 < rates.to_host_bytes_per_second <= 64 << 20
    assert rates.both_bytes_per_second > 0
    assert found.versions.keys() >= {"placement", "python", "torch"}
    assert table(found).endswith("nothing found")


@pytest.mark.parametrize(
    ("operation", "at"),
    [
        *((each, 2) for each in ("host", "reserve", "create", "copy", "sync")),
        ("map", 1),
        ("create", 14),
        ("copy", 28),
    ],
)
def test_a_failure_leaves_nothing_on_the_device(operation: str, at: int) -> None:
    looked_at = device()
    before = looked_at.memory()
    faulty = Faults(looked_at)
    faulty.fail(operation, at=at)
    with pytest.raises((InjectedFault, PlacementError)):
        examine(faulty, 2 * CHUNK)
    gc.collect()
    assert looked_at.memory() == before


@pytest.mark.parametrize(
    ("seconds", "median"),
    [
        pytest.param([90, 1, 1, 1, 1, 1], 1, id="the first one warms up"),
        pytest.param([1, 1, 1, 1, 3, 1, 1, 1.01, 1.01, 1.01], 1.01, id="a slow moment"),
        pytest.param([*range(1, 27), 100, 101, 104, 103, 102], 102, id="never settled"),
    ],
)
def test_figures_are_taken_once_they_have_settled(
    seconds: list[float], median: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspection, "_MOST_SECONDS", 60.0)
    left = [[each, 0.0] for each in seconds]
    assert settled(lambda: left.pop(0)) == [median, 0.0]
    assert left == []


def test_phase_transitions_are_timed_and_leave_nothing() -> None:
    streamed_optimizer.BUCKET_BYTES = CHUNK
    looked_at = device()
    before = looked_at.memory()
    report = examine(looked_at, 8 * CHUNK)
    found = report.transitions
    gc.collect()
    assert looked_at.memory() == before
    assert found is not None
    assert 0 < found.alone <= found.moving
    assert min(found.loaded_byte, found.offloaded_byte, found.skipped_byte) >= 0
    assert found.streamed_byte >= 0
    assert "if anything moves" in table(report)
    assert "if anything moves" not in table(inspect(looked_at, CHUNK))


def test_a_model_of_few_buckets_is_too_small_to_time_a_streamed_step_by() -> None:
    transitions = examine(device(), 8 * CHUNK).transitions
    assert transitions is not None
    assert transitions.streamed_byte == 0


def test_what_is_not_as_it_should_be(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnTheBus(SimulatedDevice):
        pci_address = "0000:3b:00.0"

        def host(self, nbytes: int) -> Slab:
            return Slab(nbytes, pin=lambda *_: "over the limit of locked memory")

    looked_at = OnTheBus(capacity_bytes=1 << 50, chunk_bytes=CHUNK)
    monkeypatch.setattr(inspection, "num_nodes", lambda: 2)
    found = inspect(looked_at, CHUNK)
    assert found.pageable_reason == "over the limit of locked memory"
    assert len(found.findings) == 3
    for finding, word in zip(
        found.findings,
        ("not page-locked", "2 NUMA nodes", ("do not fit into host memory")),
        strict=True,
    ):
        assert word in finding
    assert table(found).count("\n! ") == 3


@pytest.mark.parametrize(
    ("node", "shown"),
    [("1", "from node 1 of 2"), ("-1", ("2 nodes, the device's is not known")), (None, "one node")],
)
def test_the_numa_node_of_the_device(
    node: str | None, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(tmp_path, 1 if node is None else 2, node)
    nodes, node_of = inspection.num_nodes(tmp_path), inspection.node_of(GPU, tmp_path)
    assert (nodes, node_of) == ((2, 1) if node == "1" else (2, None) if node else (1, None))
    monkeypatch.setattr(inspection, "num_nodes", lambda: nodes)
    monkeypatch.setattr(inspection, "node_of", lambda _: node_of)
    assert shown in table(inspect(device(), CHUNK))


def test_the_command_and_the_disk_of_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PLACEMENT_HOST_LIMIT_BYTES", "1GiB")
    monkeypatch.setenv("PLACEMENT_DISK_DIRECTORY", str(tmp_path))
    command = ["doctor", "--device", "simulated:8MiB", "--bytes", "1MiB"]
    assert main(command) == 0
    text = capsys.readouterr().out
    assert all(
        words in text
        for words in ("both directions at once", "free for host copies", "available, page-locked")
    )
    monkeypatch.setenv("PLACEMENT_DISK_DIRECTORY", str(tmp_path / "none"))
    assert main([*command, "--json"]) == 1  # there is a finding
    found = Inspection(**json.loads(capsys.readouterr().out))
    assert (found.device, found.disk_free_bytes) == ("simulated", None)
    assert any("is no folder; set disk_directory" in each for each in found.findings)
    assert "available, pageable" in table(found.model_copy(update={"pageable_reason": "no"}))


def test_mistakes_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["doctor", "--bytes", "3x"])
    assert "'3x'" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["doctor", "--device", "simulated:64MiB", "--bytes", "0"])
    assert "no rate can be measured with 0 bytes" in capsys.readouterr().err
    assert main(["doctor", "--device", "bogus"]) == 2
    assert "'bogus' is not known" in capsys.readouterr().err
    assert main(["doctor", "--device", "simulated:256KiB"]) == 1
    assert "DeviceMemoryError" in capsys.readouterr().err


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="the error is that of a machine without a CUDA device"
)
def test_without_a_gpu_the_command_says_which_option_goes_without(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["doctor"]) == 1
    assert "placement doctor --device simulated:1GiB" in capsys.readouterr().err
