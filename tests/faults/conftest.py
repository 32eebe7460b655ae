"""What holds for every file of fault tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from placement.storage.managed import ManagedStorage
from placement.storage.move import Stage
from tests.faults.harness import many_cases

NEXT = {
    Stage.SETTLED: {Stage.BEGUN, Stage.STEPPING, Stage.HANDING_BACK},
    Stage.BEGUN: {Stage.BEGUN, Stage.HIDING, Stage.VACATING, Stage.SETTLED, Stage.HANDING_BACK},
    Stage.STEPPING: {Stage.BEGUN},
    Stage.HIDING: {Stage.HIDING, Stage.VACATING, Stage.BEGUN},
    Stage.VACATING: {Stage.VACATING, Stage.BEGUN, Stage.SETTLED},
    Stage.HANDING_BACK: {Stage.HANDING_BACK, Stage.BEGUN},
}
"""The stages that may follow each one, whatever fails."""
# the stages that begin with that decision alone
ONLY_ON_DEVICE, ONLY_ON_HOST = {Stage.HIDING}, {Stage.STEPPING}


@pytest.fixture(scope="module", autouse=True)
def _many_cases() -> Iterator[None]:
    with many_cases():
        yield


@pytest.fixture(autouse=True)
def legal_stages(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every storage goes from stage to stage as `Stage` says, through all faults."""
    wrong = []

    def note(storage: ManagedStorage, name: str, value: Any) -> None:
        before = vars(storage).get("stage")
        if name == "stage" and before is not None:
            is_legal = value in NEXT[before] and value not in (
                ONLY_ON_HOST if storage.on_device else ONLY_ON_DEVICE
            )
            wrong.extend([] if is_legal else [(storage.name, before, value, storage.on_device)])
        object.__setattr__(storage, name, value)

    monkeypatch.setattr(ManagedStorage, "__setattr__", note, raising=False)
    yield
    assert not wrong
