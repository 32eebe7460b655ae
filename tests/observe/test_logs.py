"""Logs, the summary at the end, and marks for profilers."""

from __future__ import annotations

import logging
from unittest.mock import Mock

import pytest
from torch.profiler import ProfilerActivity, profile

import placement
from placement.core.snapshot import readable
from placement.testing import Faults, SimulatedDevice
from tests.observe.managed import managed
from tests.support.programs import Programs


def test_a_summary_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    manager, _model = managed()
    with manager.phase("log_prob"):
        pass
    with caplog.at_level(logging.INFO, logger="placement"):
        manager.close()
        manager.close()
    (last,) = caplog.records
    text = last.getMessage()
    assert "closed" in text
    assert "at most 8 KiB on simulated" in text
    (line,) = [line for line in text.splitlines() if line.startswith("actor")]
    assert line.split()[5:] == ["2", "0", "4.12", "KiB", "0", "4.12", "KiB"]
    assert last.placement.handles[0].name == "actor"


def test_only_warnings_show_where_logging_is_not_set_up(programs: Programs) -> None:
    code = (
        "import placement, torch; from placement.testing import SimulatedDevice\n"
        "m = placement.Manager(device=SimulatedDevice(1 << 20)); x = torch.nn.Linear(2, 2); "
        "m.register('actor', x, role='actor')\n"
        "with m.phase('train'): pass\n"
        "m.close()"
    )
    assert programs.run(code) == (0, "", "")
    warned = code.replace(
        "x = torch.nn.Linear(2, 2); m.register('actor', x, ",
        "m.register('actor', torch.nn.Linear(2, 2), ",
    )
    assert "'actor' is no longer registered" in programs.run(warned).errors


def test_a_failure_is_logged_as_a_warning_and_kept(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = Faults(SimulatedDevice(1 << 20, chunk_bytes=4096))
    manager, _model = managed(device=faults)
    faults.fail("create", at=1)
    with pytest.raises(placement.DeviceMemoryError), manager.phase("log_prob"):
        pass
    (failure,) = manager.journal.failures
    assert (failure.handle, failure.trigger, failure.reason) == ("actor", "load", "device_memory")
    assert any(
        record.levelno == logging.WARNING and "load failed" in record.getMessage()
        for record in caplog.records
    )
    monkeypatch.setattr(faults, "create", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt), manager.phase("log_prob"):
        pass
    assert caplog.messages[-1] == "actor: load failed: KeyboardInterrupt"


def test_moves_are_marked_for_torchs_profiler() -> None:
    manager, _ = managed()
    with profile(activities=[ProfilerActivity.CPU]) as profiler, manager.phase("log_prob"):
        pass
    marks = [event.name for event in profiler.events() if event.name.startswith("placement: ")]
    assert marks == ["placement: load actor", "placement: offload actor"]


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0"),
        (1023, "1023"),
        (1024, "1 KiB"),
        (-4096, "-4 KiB"),
        (3 << 29, "1.5 GiB"),
        (15 << 30, "15 GiB"),
        (5 << 40, "5 TiB"),
    ],
)
def test_sizes_are_readable(nbytes: int, text: str) -> None:
    assert readable(nbytes) == text
