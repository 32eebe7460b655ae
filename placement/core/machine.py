"""The state machine of one handle: `transitions` over the table of `placement.core.states`, with types.

The work of a transition happens in `before`, so that an exception leaves the source state; `after` only records. No
conditions (a false one would refuse in silence), no `on_exception` and no `finalize_event` (they swallow), no automatic
`to_STATE()` triggers, no queue. The lock is the manager's.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Any, Protocol

from transitions import EventData, Machine, MachineError

from placement.core.errors import PhaseError
from placement.core.states import TRANSITIONS, State, Trigger

logging.getLogger("transitions").setLevel(logging.WARNING)  # it writes one INFO line per callback


class TransitionCallbacks(Protocol):
    """What a machine calls around each transition."""

    def before(self, trigger: Trigger, source: State, target: State) -> None:
        """Do the work. Whatever this raises leaves the source state and reaches the caller."""

    def after(self, trigger: Trigger, source: State, target: State) -> None:
        """Record. The state has changed."""


class _Token:
    """The model that `transitions` drives: private, slotted, never registered with the shared machine (no cycle, no added methods)."""

    __slots__ = ("_callbacks", "_state")

    def __init__(self, callbacks: TransitionCallbacks, initial: State) -> None:
        self._callbacks = callbacks
        self._state = initial

    def _before(self, event: EventData) -> None:
        self._callbacks.before(*_edge(event))

    def _after(self, event: EventData) -> None:
        self._callbacks.after(*_edge(event))


def _edge(event: EventData) -> tuple[Trigger, State, State]:
    transition: Any = event.transition
    return Trigger(event.event.name), State(transition.source), State(transition.dest)


_MACHINE = Machine(
    model=None,
    states=[state.value for state in State],
    transitions=[
        {"trigger": trigger.value, "source": source.value, "dest": target.value, "before": "_before", "after": "_after"}
        for trigger, source, target in TRANSITIONS
    ],
    initial=State.CPU_OFFLOADED.value,
    auto_transitions=False,
    send_event=True,
    queued=False,
    model_attribute="_state",
)

Node = tuple[State, bool]
"""A state, and whether the bytes are on the device: SYNCING comes in both ways."""

_ON_DEVICE_AFTER: dict[Trigger, bool] = {
    Trigger.OFFLOAD: False,
    Trigger.BEGIN_STREAM: False,
    Trigger.END_STREAM: False,
}


def _edges(node: Node) -> list[tuple[Trigger, Node]]:
    state, on_device = node
    found = []
    for trigger, source, target in TRANSITIONS:
        streams = trigger in (Trigger.BEGIN_STREAM, Trigger.END_STREAM, Trigger.LOAD)
        if source is state and streams is not on_device:
            found.append((trigger, (target, _ON_DEVICE_AFTER.get(trigger, True))))
    return found


def _all_paths() -> dict[tuple[Node, Node], tuple[Trigger, ...]]:
    nodes: list[Node] = [(s, True) for s in State if s is not State.CPU_OFFLOADED]
    nodes += [(State.CPU_OFFLOADED, False), (State.SYNCING, False)]
    paths: dict[tuple[Node, Node], tuple[Trigger, ...]] = {}
    for start in nodes:
        paths[start, start] = ()
        frontier = deque([start])
        while frontier:
            here = frontier.popleft()
            for trigger, there in _edges(here):
                if (start, there) not in paths:
                    paths[start, there] = (*paths[start, here], trigger)
                    frontier.append(there)
    return paths


_PATHS = _all_paths()


def path(source: Node, target: Node) -> tuple[Trigger, ...]:
    """The shortest sequence of triggers between two nodes; every node reaches every other.

    Raises:
        ValueError: not a node (CPU_OFFLOADED on the device, TRAINING off it).
    """
    try:
        return _PATHS[source, target]
    except KeyError:
        raise ValueError(f"no handle can be {target[0]} with its bytes {'on' if target[1] else 'off'} the device") from None


_STATES = {state.value: state for state in State}  # looked up at every phase transition for every handle; the enum's own call is slower


class HandleMachine:
    """The machine of one handle. `fire` is the only way to change its state."""

    __slots__ = ("_name", "_token")

    def __init__(self, name: str, callbacks: TransitionCallbacks) -> None:
        self._name = name
        self._token = _Token(callbacks, State.CPU_OFFLOADED)

    @property
    def state(self) -> State:
        return _STATES[self._token._state]

    def fire(self, trigger: Trigger) -> None:
        """Make one transition.

        Raises:
            PhaseError: the table has no such transition from the present state.
            Exception: whatever the move raised; the state is the source state then.
        """
        try:
            _MACHINE.events[trigger.value].trigger(self._token)
        except MachineError as error:
            raise PhaseError(f"{self._name!r} cannot {trigger} while it is {self.state}") from error


def diagram() -> str:
    """The mermaid state diagram of the README, from the table."""
    lines = ["stateDiagram-v2", f"    [*] --> {State.CPU_OFFLOADED}"]
    lines += [f"    {source} --> {target}: {trigger}" for trigger, source, target in TRANSITIONS]
    return "\n".join(lines)
