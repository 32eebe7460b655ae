"""The state machine of one handle, against the table."""

from __future__ import annotations

import itertools

import pytest

from placement import PhaseError, State, Trigger
from placement.core.states import TRANSITIONS
from placement.registration.handle import Handle, path


def machine_in(state: State) -> Handle:
    """A machine that was brought to a state by triggers alone."""
    machine = Handle("actor", kind="module", role=None, readonly=False)
    on_device = state is not State.CPU_OFFLOADED
    for trigger in path((State.CPU_OFFLOADED, False), (state, on_device)):
        machine.require(trigger)
        machine.fire(trigger)
    return machine


def test_every_row_of_the_table_fires_and_nothing_else_does() -> None:
    rows = {(trigger, source): target for trigger, source, target in TRANSITIONS}
    assert len(rows) == len(TRANSITIONS)
    for trigger, source in itertools.product(Trigger, State):
        machine = machine_in(source)
        target = rows.get((trigger, source))
        if target is None:
            for refused in (machine.require, machine.fire):
                with pytest.raises(PhaseError, match=f"'actor' cannot {trigger} while it is {source}"):
                    refused(trigger)
                assert machine.state is source
        else:
            machine.require(trigger)
            assert machine.state is source
            machine.fire(trigger)
            assert machine.state is target
