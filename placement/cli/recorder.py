"""Record every phase transition of a manager from outside, with measurements, for the demo."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import placement
from placement.cli.timeline import PhaseRow, Span
from placement.core.snapshot import Snapshot
from placement.core.states import IDLE, State
from placement.devices.base import Device
from placement.devices.memory import Chunk


class PeakMeter(Device):
    """A mixin for devices that records the largest number of bytes that its chunks have held together."""

    peak_bytes = 0

    def create(self, nbytes: int) -> Chunk:
        chunk = super().create(nbytes)  # type: ignore[safe-super]  # mixed in before a whole device
        self.peak_bytes = max(self.peak_bytes, self.memory().chunk_bytes)
        return chunk


class Recorder:
    """Wraps a manager and records its phase transitions: snapshots and device measurements before and after each."""

    def __init__(self, manager: placement.Manager, device: Device) -> None:
        self._manager = manager
        self._device = device
        self._step = 0
        self._begins: list[tuple[int, str, float]] = []
        self.initial: dict[str, State] = {}
        """The initial state of each handle."""
        self.rows: list[PhaseRow] = []

    def register(self, name: str, obj: Any, /, *, role: str | None = None, readonly: bool = False) -> placement.Handle:
        handle = self._manager.register(name, obj, role=role, readonly=readonly)
        self.initial[name] = handle.state
        return handle

    @contextlib.contextmanager
    def phase(self, name: str, /, *, only: Sequence[str] | None = None) -> Iterator[_RecordedPhase]:
        self._step += 1
        with contextlib.ExitStack() as stack:
            with self.transition(name):
                opened = stack.enter_context(self._manager.phase(name, only=only))
            yield _RecordedPhase(self, opened)
            with self.transition(IDLE):
                stack.close()

    @contextlib.contextmanager
    def transition(self, phase: str) -> Iterator[None]:
        """Measure before and after the move into `phase`."""
        before, before_bytes = self._manager.snapshot(), self._device.memory().chunk_bytes
        if isinstance(self._device, PeakMeter):
            self._device.peak_bytes = before_bytes
        self._begins.append((self._step, phase, time.monotonic()))
        yield
        after, after_bytes = self._manager.snapshot(), self._device.memory().chunk_bytes
        peak_bytes = max(before_bytes, after_bytes, getattr(self._device, "peak_bytes", 0))
        self.rows.append(row_between(phase, before, after, (before_bytes, peak_bytes, after_bytes)))

    @property
    def spans(self) -> list[Span]:
        """The phases so far. The last one ends at the present moment."""
        ends = [begin for _, _, begin in self._begins[1:]] + [time.monotonic()]
        return [
            Span(step=step, phase=phase, begin_seconds=begin, end_seconds=end)
            for (step, phase, begin), end in zip(self._begins, ends, strict=True)
        ]

    def rows_of(self, step: int) -> list[PhaseRow]:
        return [row for (of_step, _, _), row in zip(self._begins, self.rows, strict=True) if of_step == step]


class _RecordedPhase:
    def __init__(self, recorder: Recorder, opened: placement.Phase) -> None:
        self._recorder = recorder
        self._opened = opened

    def switch(self, name: str, /, *, only: Sequence[str] | None = None) -> None:
        with self._recorder.transition(name):
            self._opened.switch(name, only=only)


def row_between(phase: str, before: Snapshot, after: Snapshot, measured: tuple[int, int, int]) -> PhaseRow:
    """The differences between two snapshots. `measured` has the device's bytes before, at the peak, and after."""

    def grown(field: str) -> int:
        now, then = (sum(int(getattr(handle, field)) for handle in snapshot.handles) for snapshot in (after, before))
        return now - then

    return PhaseRow(
        phase=phase,
        states={handle.name: handle.state for handle in after.handles},
        before_bytes=measured[0],
        peak_bytes=measured[1],
        after_bytes=measured[2],
        loaded_bytes=grown("loaded_bytes"),
        offloaded_bytes=grown("offloaded_bytes"),
        skipped_bytes=grown("skipped_bytes"),
        stall_seconds=sum(after.phase_stall_seconds.values()) - sum(before.phase_stall_seconds.values()),
    )
