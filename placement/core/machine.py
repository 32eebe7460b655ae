"""The state machine of one handle: the package `transitions`, driven by the table in `placement.core.states`.

A trigger is the commit of a state transition: whoever fires it has done the work before, so that an error of the work leaves the source
state. Features of the package that run code of others are not used: callbacks, conditions (a false one refuses silently),
`on_exception` and `finalize_event` (they swallow exceptions), automatic `to_STATE()` triggers, and the queue. The manager's lock protects
the machine.
"""

from __future__ import annotations

import logging
from collections import deque

from transitions import Machine, MachineError

from placement.core.errors import PhaseError
from placement.core.states import TRANSITIONS, State, Trigger

logging.getLogger("transitions").setLevel(logging.WARNING)  # the package logs one INFO line for each callback

_MACHINE = Machine(
    model=None,
    states=[state.value for state in State],
    transitions=[{"trigger": trigger.value, "source": source.value, "dest": target.value} for trigger, source, target in TRANSITIONS],
    initial=State.CPU_OFFLOADED.value,
    auto_transitions=False,
    queued=False,
    model_attribute="_state",
)

Node = tuple[State, bool]
"""A state, and whether the bytes are on the device. SYNCING and TRAINING exist both ways, each other state only one way."""

_FROM_HOST = (Trigger.LOAD, Trigger.BEGIN_STREAM, Trigger.END_STREAM, Trigger.BEGIN_STREAMED_TRAIN, Trigger.END_STREAMED_TRAIN)
"""The triggers of a handle whose bytes are not on the device."""


def _edges(state: State, on_device: bool) -> list[tuple[Trigger, Node]]:
    found = []
    for trigger, source, target in TRANSITIONS:
        if source is state and (trigger in _FROM_HOST) is not on_device:
            goes_on_device = trigger is Trigger.LOAD or (on_device and trigger is not Trigger.OFFLOAD)
            found.append((trigger, (target, goes_on_device)))
    return found


def _all_paths() -> dict[tuple[Node, Node], tuple[Trigger, ...]]:
    nodes: list[Node] = [(s, True) for s in State if s is not State.CPU_OFFLOADED]
    nodes += [(State.CPU_OFFLOADED, False), (State.SYNCING, False), (State.TRAINING, False)]
    paths: dict[tuple[Node, Node], tuple[Trigger, ...]] = {}
    for start in nodes:
        paths[start, start] = ()
        frontier = deque([start])
        while frontier:
            here = frontier.popleft()
            for trigger, there in _edges(*here):
                if (start, there) not in paths:
                    paths[start, there] = (*paths[start, here], trigger)
                    frontier.append(there)
    return paths


_PATHS = _all_paths()


def path(source: Node, target: Node) -> tuple[Trigger, ...]:
    """The shortest sequence of triggers from one node to another. Every node can reach every other.

    Raises:
        ValueError: an argument is not a node (CPU_OFFLOADED on the device, GPU_RESIDENT off the device).
    """
    try:
        return _PATHS[source, target]
    except KeyError:
        raise ValueError(f"no handle can be {target[0]} with its bytes {'on' if target[1] else 'off'} the device") from None


_STATES = {state.value: state for state in State}  # faster than the enum's own lookup, which counts in a phase transition of many handles


class HandleMachine:
    """The state machine of one handle. Only `fire` changes its state.

    The object is the model that the package drives. It is never registered with the shared machine, which would add methods and a cycle.
    """

    __slots__ = ("_name", "_state")

    def __init__(self, name: str) -> None:
        self._name = name
        self._state = State.CPU_OFFLOADED.value

    @property
    def state(self) -> State:
        return _STATES[self._state]

    def require(self, trigger: Trigger) -> None:
        """Refuse a trigger before its work begins.

        Raises:
            PhaseError: the table has no such transition from the present state.
        """
        if self._state not in _MACHINE.events[trigger.value].transitions:
            raise PhaseError(f"{self._name!r} cannot {trigger} while it is {self.state}")

    def fire(self, trigger: Trigger) -> None:
        """Commit one state transition, whose work is done.

        Raises:
            PhaseError: see `require`.
        """
        try:
            _MACHINE.events[trigger.value].trigger(self)
        except MachineError as error:
            raise PhaseError(f"{self._name!r} cannot {trigger} while it is {self.state}") from error


def diagram() -> str:
    """The Mermaid state diagram of docs/concepts.md, generated from the table."""
    lines = ["stateDiagram-v2", f"    [*] --> {State.CPU_OFFLOADED}"]
    lines += [f"    {source} --> {target}: {trigger}" for trigger, source, target in TRANSITIONS]
    return "\n".join(lines)
