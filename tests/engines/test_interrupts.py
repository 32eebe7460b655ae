"""Ctrl-C at every bytecode of the book of an engine's tags: it is as the engine is, or says that it is in doubt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from placement.engines import residency as book
from tests.engines.test_tagged import Own
from tests.faults.tracing import Interrupter, Recorder, describe

WHOLE = frozenset({"weights", "kv_cache"})


class Discarding(Own):
    """Its weights mean nothing once they have been off the device."""

    def __init__(self, shared: Path) -> None:
        super().__init__(shared, weights="discard", verify="answer")
        self.are_valid = True
        self.is_open = True

    def drain(self) -> None:
        self.is_open = False

    def offload(self, tags: Any) -> None:
        super().offload(tags)
        self.are_valid = False

    def admit(self) -> None:
        assert self.are_valid
        self.is_open = True


def moved(engine: Discarding) -> None:
    engine.residency.offload(WHOLE)
    engine.residency.load(WHOLE)
    engine.are_valid = True
    engine.residency.fill()


@pytest.mark.timeout(120)
def test_an_interrupt_at_every_bytecode(tmp_path: Path) -> None:
    engine = Discarding(tmp_path / "0")
    recorder = Recorder()
    recorder.on()
    moved(engine)
    recorder.off()
    visits = {point: count for point, count in recorder.visits.items() if point[0].co_filename == book.__file__}
    points = [(point, visit) for point, count in visits.items() for visit in range(1, count + 1)]
    assert len(points) > 300
    wrong = []
    for number, (point, visit) in enumerate(points, start=1):
        engine = Discarding(tmp_path / str(number))
        interrupter = Interrupter(point, visit, KeyboardInterrupt)
        interrupter.on()
        try:
            moved(engine)
        except KeyboardInterrupt:
            pass
        finally:
            interrupter.off()
        assert interrupter.fired
        residency = engine.residency
        if residency.doubt is None and (residency.resident != engine.memory.tags or (residency.stale is None and not engine.are_valid)):
            wrong.append(f"{describe(point, visit)}: {sorted(residency.resident)} of {sorted(engine.memory.tags)}, stale {residency.stale}")
        elif residency.doubt is None and residency._is_drained and engine.is_open:
            wrong.append(f"{describe(point, visit)}: taken for drained, and open")
        elif residency.doubt is None and residency.resident == WHOLE and residency.stale is None:
            residency.load(WHOLE)  # what the next phase transition does
            assert engine.is_open, describe(point, visit)
    assert not wrong, "\n".join(wrong)
