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


USED = (State.SYNCING, State.TRAINING)
NODES = [(State.CPU_OFFLOADED, False), (State.GPU_RESIDENT, True), *itertools.product(USED, (True, False))]
FROM_HOST = (Trigger.BEGIN_STREAM, Trigger.END_STREAM, Trigger.BEGIN_STREAMED_TRAIN, Trigger.END_STREAMED_TRAIN)


def test_every_node_reaches_every_other_through_rows_of_the_table() -> None:
    for source, target in itertools.product(NODES, NODES):
        state, on_device = source
        for trigger in path(source, target):
            streams = trigger in FROM_HOST
            assert not (streams and on_device), "what is used from the host copy starts and ends off the device"
            assert not (state is not State.CPU_OFFLOADED and not on_device and not streams), "it ends before anything else"
            state = next(t for name, s, t in TRANSITIONS if name is trigger and s is state)
            if trigger in (Trigger.LOAD, Trigger.OFFLOAD):
                on_device = trigger is Trigger.LOAD
        assert (state, on_device) == target


@pytest.mark.parametrize(
    ("source", "target", "wanted"),
    [
        ((State.SYNCING, True), (State.TRAINING, True), [Trigger.SYNC_TO_TRAIN]),
        ((State.SYNCING, False), (State.TRAINING, True), [Trigger.END_STREAM, Trigger.LOAD, Trigger.BEGIN_TRAIN]),
        ((State.TRAINING, True), (State.TRAINING, True), []),
        ((State.TRAINING, True), (State.TRAINING, False), [Trigger.END_TRAIN, Trigger.OFFLOAD, Trigger.BEGIN_STREAMED_TRAIN]),
    ],
)
def test_paths_take_no_detour(source: tuple[State, bool], target: tuple[State, bool], wanted: list[Trigger]) -> None:
    assert list(path(source, target)) == wanted


@pytest.mark.parametrize("node", [(State.CPU_OFFLOADED, True), (State.GPU_RESIDENT, False)])
def test_what_is_no_node_has_no_path(node: tuple[State, bool]) -> None:
    with pytest.raises(ValueError, match=r"no handle can be"):
        path((State.CPU_OFFLOADED, False), node)
