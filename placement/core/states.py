"""The vocabulary of the state machine: states, triggers, phases, and the data that a policy reads
and returns.

Imports the standard library only. Everything here is immutable data; nothing here moves a byte.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, Protocol, TypeVar, runtime_checkable

OwnPhases = Mapping[str, "tuple[str, ...] | Mapping[str, State]"]
"""The user's own phases: for each name the roles that it needs on the device, or a state for each
of these roles."""

_K = TypeVar("_K")
_V = TypeVar("_V")


class State(enum.StrEnum):
    """The states of a handle. Each says what may be done with the handle."""

    CPU_OFFLOADED = "CPU_OFFLOADED"
    """The values are in the host copy; the last bytes may still be on their way there. Poison is
    mapped behind the device addresses."""
    GPU_RESIDENT = "GPU_RESIDENT"
    """The values are on the device and may be read there."""
    SYNCING = "SYNCING"
    """The weights are being published: nothing may move or write them."""
    TRAINING = "TRAINING"
    """The values may change. They are on the device, or each step of an optimizer streams its state
    there and back."""


class Trigger(enum.StrEnum):
    """The names of the state transitions."""

    LOAD = "load"
    OFFLOAD = "offload"
    BEGIN_SYNC = "begin_sync"
    END_SYNC = "end_sync"
    BEGIN_STREAM = "begin_stream"
    END_STREAM = "end_stream"
    BEGIN_TRAIN = "begin_train"
    END_TRAIN = "end_train"
    BEGIN_STREAMED_TRAIN = "begin_streamed_train"
    END_STREAMED_TRAIN = "end_streamed_train"
    SYNC_TO_TRAIN = "sync_to_train"
    TRAIN_TO_SYNC = "train_to_sync"


TRANSITIONS: tuple[tuple[Trigger, State, State], ...] = (
    (Trigger.LOAD, State.CPU_OFFLOADED, State.GPU_RESIDENT),
    (Trigger.OFFLOAD, State.GPU_RESIDENT, State.CPU_OFFLOADED),
    (Trigger.BEGIN_SYNC, State.GPU_RESIDENT, State.SYNCING),
    (Trigger.END_SYNC, State.SYNCING, State.GPU_RESIDENT),
    (Trigger.BEGIN_STREAM, State.CPU_OFFLOADED, State.SYNCING),
    (Trigger.END_STREAM, State.SYNCING, State.CPU_OFFLOADED),
    (Trigger.BEGIN_TRAIN, State.GPU_RESIDENT, State.TRAINING),
    (Trigger.END_TRAIN, State.TRAINING, State.GPU_RESIDENT),
    (Trigger.BEGIN_STREAMED_TRAIN, State.CPU_OFFLOADED, State.TRAINING),
    (Trigger.END_STREAMED_TRAIN, State.TRAINING, State.CPU_OFFLOADED),
    (Trigger.SYNC_TO_TRAIN, State.SYNCING, State.TRAINING),
    (Trigger.TRAIN_TO_SYNC, State.TRAINING, State.SYNCING),
)
"""The only table of state transitions. The machine, the diagram in docs/concepts.md and the tests
read it."""


IDLE = "idle"
PHASES: tuple[str, ...] = (
    "rollout",
    "weight_sync",
    "log_prob",
    "ref_log_prob",
    "values",
    "reward",
    "train",
    "optimizer_step",
    "checkpoint",
    "restore",
    "eval",
    IDLE,
)
"""The phases that every shipped policy knows. `Settings.phases` adds the user's own."""

KINDS: tuple[str, ...] = ("module", "optimizer", "engine")
ROLES: tuple[str, ...] = ("actor", "ref", "critic", "reward", "teacher", "rollout")
WORKER_ROLES: tuple[str, ...] = ("trainer", "rollout", "hybrid")
WEIGHTS, KV_CACHE, CUDA_GRAPH = TAGS = ("weights", "kv_cache", "cuda_graph")
"""The tags of a rollout engine's parts, each of which can be on the device by itself."""


class ReadOnly(dict[_K, _V]):
    """A read-only dictionary. Unlike a `MappingProxyType` it can be copied, pickled and written as
    JSON."""

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError(
            "this mapping is read-only: a policy must return a new Plan instead of changing its "
            "View"
        )

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(self),)


NO_TAGS: Mapping[str, int] = ReadOnly()


@dataclass(frozen=True, kw_only=True, slots=True)
class HandleView:
    """The facts about one handle that a policy may use."""

    name: str
    kind: str
    role: str | None
    state: State
    num_bytes: int
    """Device bytes that the handle needs while it is on the device; 0 for an unbuilt `Lazy` and for
    an external handle. State that an optimizer's steps have still to create is included where its
    size is known, even while the optimizer is on the device."""
    resident_bytes: int = 0
    """Device bytes that the handle holds now, with those that arrived early (see
    `Plan.prefetch`)."""
    prefetched_bytes: int = 0
    """The part of `resident_bytes` that arrived early, or is arriving. 0 while the handle is on the
    device."""
    can_prefetch: bool = True
    """Whether `Plan.prefetch` may name the handle: placement moves its bytes, from a host copy of
    this process alone."""
    owners: tuple[str, ...] = ()
    """For an optimizer: the module handles whose parameters it steps."""
    readonly: bool = False
    external: bool = False
    gathers: bool = False
    """Whether the framework gathers values on the device for a state dict (FSDP1), so that the host
    copy cannot stand in for them."""
    built: bool = True
    kept: bool = False
    """Whether `phase.keep` carried the handle's residency over the end of an earlier phase."""
    tags: Mapping[str, int] = field(default_factory=lambda: NO_TAGS, hash=False)
    """Device bytes by tag, for an engine that can be on the device in part. 0: not known yet."""
    resident_tags: frozenset[str] = frozenset()
    """The tags that are on the device now."""
    streaming: bool = False
    """Whether the handle is published or stepped from its host copy now."""
    window_bytes: int = 0
    """For an optimizer: the most device bytes that its steps hold of its state while they stream
    it."""
    unstreamable: str | None = None
    """For an optimizer: why its steps cannot stream its state; None where they can."""

    def __post_init__(self) -> None:
        if type(self.tags) is not ReadOnly:
            object.__setattr__(self, "tags", ReadOnly(self.tags))

    def at_rest(self) -> HandleView:
        """The handle as it would be off the device, and not streamed from there either."""
        nowhere = frozenset[str]()
        return replace(
            self,
            state=State.CPU_OFFLOADED,
            resident_bytes=0,
            prefetched_bytes=0,
            resident_tags=nowhere,
            streaming=False,
        )


def _without(name: str, of: Mapping[str, _V]) -> dict[str, _V]:
    remaining = dict(of)
    remaining.pop(name, None)
    return remaining


def _mixed(
    names: set[str],
    inside: Mapping[str, _V],
    outside: Mapping[str, _V],
) -> dict[str, _V]:
    """The values of `inside` for these names, and those of `outside` for all others."""
    mixed = {name: value for name, value in inside.items() if name in names}
    mixed.update({name: value for name, value in outside.items() if name not in names})
    return mixed


@dataclass(frozen=True, slots=True)
class Plan:
    """One target state for every handle. Immutable; the methods return new plans.

    Attributes:
        streamed: handles that are used from the host copy, without loading: a model's SYNCING is
            published from there, and each step of an optimizer that is TRAINING streams the
            optimizer's state from there and back.
        dropped: handles whose gradients are set to None, not copied, when this plan takes them out
            of TRAINING.
        parts: engines that are on the device in part, with the tags that are; every other engine is
            there whole.
        prefetch: device bytes to bring while the phase computes, by handle, in this order. The
            handles are CPU_OFFLOADED under this plan, and stay so: bytes that have arrived early
            need no copy in the phase transition that loads them. It is a wish, not a need: the
            manager brings as much as the budget leaves, and gives the memory back when something
            else needs it. A handle that leaves the device with this plan keeps its bytes there
            until they are saved. Then the first in this order get their room.

    Example:
        ::

            plan = view.total_plan({"actor": State.TRAINING}, prefetch={"ref": 2 << 30})
    """

    targets: Mapping[str, State]
    streamed: frozenset[str] = frozenset()
    dropped: frozenset[str] = frozenset()
    parts: Mapping[str, frozenset[str]] = field(default_factory=dict)
    prefetch: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        targets = dict(self.targets)
        for name, state in targets.items():
            if type(state) is not State:
                targets[name] = State(state)
        parts = dict(self.parts or {})
        for name, tags in parts.items():
            parts[name] = frozenset(tags)
        object.__setattr__(self, "targets", ReadOnly(targets))
        object.__setattr__(self, "streamed", frozenset(self.streamed))
        object.__setattr__(self, "dropped", frozenset(self.dropped))
        object.__setattr__(self, "parts", ReadOnly(parts))
        object.__setattr__(self, "prefetch", ReadOnly(self.prefetch))

    def __getitem__(self, name: str) -> State:
        return self.targets[name]

    def also(
        self, handle: HandleView | str, state: State, tags: frozenset[str] | None = None
    ) -> Plan:
        """This plan with one more target. A handle that the plan already wants on the device keeps
        its target.

        Args:
            tags: the engine's tags to have on the device; None for the whole engine.
        """
        name = handle if isinstance(handle, str) else handle.name
        if self.targets.get(name, State.CPU_OFFLOADED) is not State.CPU_OFFLOADED:
            return self
        parts = self.parts if tags is None else {**self.parts, name: tags}
        return replace(
            self,
            targets={**self.targets, name: state},
            parts=parts,
            prefetch=_without(name, self.prefetch),
        )

    def on_device(self, name: str) -> bool:
        """Whether the handle's bytes are on the device under this plan."""
        return self.targets[name] is not State.CPU_OFFLOADED and name not in self.streamed

    def limited_to(self, names: Iterable[str], enclosing: Plan) -> Plan:
        """This plan for the handles in `names`, and `enclosing` for every other handle: the meaning
        of `phase(only=...)`."""
        limited = set(names)
        targets = dict(self.targets)
        for name in targets.keys() - limited:
            targets[name] = enclosing.targets[name]
        return Plan(
            targets,
            (self.streamed & limited) | (enclosing.streamed - limited),
            (self.dropped & limited) | (enclosing.dropped - limited),
            _mixed(limited, self.parts, enclosing.parts),
            _mixed(limited, self.prefetch, enclosing.prefetch),
        )

    def giving_up(self, name: str) -> Plan:
        """This plan with a handle off the device. If the plan drops its gradients, it still
        does."""
        return replace(
            self,
            targets={**self.targets, name: State.CPU_OFFLOADED},
            streamed=self.streamed - {name},
            parts=_without(name, self.parts),
        )

    def without(self, name: str) -> Plan:
        """This plan without the handle `name`, for a worker that does not have it."""
        return Plan(
            _without(name, self.targets),
            self.streamed - {name},
            self.dropped - {name},
            _without(name, self.parts),
            _without(name, self.prefetch),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """The input of a policy's decision. Pure data: reading it has no effect and makes no device
    call.

    Example:
        ::

            def plan(self, view):
                actors = view.with_role("actor", kind="module")
                targets = {actor.name: State.GPU_RESIDENT for actor in actors}
                return view.total_plan(targets)
    """

    phase: str
    enclosing: str | None = None
    """The phase around this one; None at the outermost."""
    upcoming: tuple[str, ...] = ()
    """The phases expected next, nearest first; empty until a cycle of phases has been seen."""
    handles: Mapping[str, HandleView] = field(default_factory=dict)
    budget_bytes: int = 0
    """Device bytes that all handles may hold together in this phase."""
    worker_role: str = "hybrid"
    phases: OwnPhases = field(default_factory=dict)
    """The user's own phases, see `Settings.phases`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "handles", ReadOnly(self.handles))
        object.__setattr__(self, "phases", ReadOnly(self.phases))

    def wanted_states(self, phase: str) -> Mapping[str, State]:
        """The state that one of the user's own phases wants for each of its roles: GPU_RESIDENT
        where it names the roles alone."""
        wanted = self.phases[phase]
        if isinstance(wanted, Mapping):
            return wanted
        return dict.fromkeys(wanted, State.GPU_RESIDENT)

    def with_role(
        self,
        *roles: str,
        kind: str | None = None,
    ) -> tuple[HandleView, ...]:
        """The handles with one of these roles, in registration order; only of one kind if `kind` is
        given."""
        handles = []
        for handle in self.handles.values():
            if handle.role in roles and kind in (None, handle.kind):
                handles.append(handle)
        return tuple(handles)

    @property
    def known_phases(self) -> tuple[str, ...]:
        """The phases with a meaning: the shipped ones and the user's own."""
        return (*PHASES, *(name for name in self.phases if name not in PHASES))

    def total_plan(
        self,
        targets: Mapping[str, State],
        streamed: Iterable[str] = (),
        dropped: Iterable[str] = (),
        parts: Mapping[str, frozenset[str]] = ReadOnly(),
        prefetch: Mapping[str, int] = ReadOnly(),
    ) -> Plan:
        """A plan with these targets, and CPU_OFFLOADED for every other handle of the view."""
        targets = {**dict.fromkeys(self.handles, State.CPU_OFFLOADED), **targets}
        return Plan(targets, frozenset(streamed), frozenset(dropped), parts, prefetch)

    def bytes_of(self, plan: Plan) -> int:
        """Device bytes that the handles hold together under `plan`."""
        nbytes = 0
        for handle in self.handles.values():
            if plan.targets.get(handle.name) is not State.CPU_OFFLOADED:
                nbytes += bytes_under(plan, handle)
        return nbytes

    def fits(self, plan: Plan, *more: HandleView) -> bool:
        """Whether `plan`, with the handles `more` on the device too, stays within the budget."""
        nbytes = self.bytes_of(plan)
        for handle in more:
            if not handle.external and not plan.on_device(handle.name):
                nbytes += handle.num_bytes
        return nbytes <= self.budget_bytes

    def evicted(self, freed_bytes: Mapping[str, int], deficit_bytes: int) -> set[str]:
        """Choose handles to leave the device so that a deficit is covered; all candidates where
        even they are not enough.

        Handles that need not be copied back (readonly, or a module that no optimizer steps) are
        chosen before the others. In each group the smallest handle that covers the deficit is
        chosen, else the largest.

        Args:
            freed_bytes: the candidates, with the device bytes that each would free.
        """
        if deficit_bytes <= 0:
            return set()
        clean, changing = self._by_copy_back(freed_bytes)
        evicted = []
        for names in (clean, changing):
            by_size = sorted(names, key=freed_bytes.__getitem__)
            while deficit_bytes > 0 and by_size:
                covering = bisect_left(by_size, deficit_bytes, key=freed_bytes.__getitem__)
                evicted.append(by_size.pop(min(covering, len(by_size) - 1)))
                deficit_bytes -= freed_bytes[evicted[-1]]
        needed = set(evicted)
        for name in reversed(evicted):  # a large late eviction can make a small early one needless
            if freed_bytes[name] <= -deficit_bytes:
                needed.discard(name)
                deficit_bytes += freed_bytes[name]
        return needed

    def _by_copy_back(
        self,
        names: Iterable[str],
    ) -> tuple[list[str], list[str]]:
        """These handles in two groups: those that need not be copied back, and the others."""
        stepped: set[str] = set()
        for handle in self.handles.values():
            if handle.kind == "optimizer":
                stepped.update(handle.owners)
        clean: list[str] = []
        changing: list[str] = []
        for name in names:
            handle = self.handles[name]
            is_frozen = handle.kind == "module" and name not in stepped
            (clean if handle.readonly or is_frozen else changing).append(name)
        return clean, changing


def bytes_under(plan: Plan, handle: HandleView) -> int:
    """Device bytes that one handle has under a plan. External handles count 0, a streamed step the
    most that it holds."""
    if handle.external:
        return 0
    state = plan.targets[handle.name]
    if state is State.CPU_OFFLOADED:
        return 0
    if handle.name in plan.streamed:
        return handle.window_bytes if state is State.TRAINING else 0
    tags = plan.parts.get(handle.name)
    if tags is None:
        return handle.num_bytes
    return sum(handle.tags.get(tag, 0) for tag in tags)


@runtime_checkable
class Policy(Protocol):
    """Decides where every handle belongs in a phase.

    The manager calls `plan` with its lock held, before any byte moves. A phase transition (entry,
    switch, exit) or a registration may call it several times: for the phase that begins, again once
    a `Lazy` was built for it, and for the enclosing phase (outside every phase that is `idle`).
    With a budget of 0 bytes it learns which handles the phase needs in any case.

    The returned plan names every handle of the view. It depends on the view alone: equal views give
    equal plans, on every rank. The manager checks whether the bytes fit. A policy keeps optional
    handles on the device only where `view.fits` allows it.

    Raises:
        PolicyError: the phase is not one of `view.known_phases`.

    Example:
        ::

            class Everything:
                name = "everything"

                def plan(self, view):
                    return view.total_plan(dict.fromkeys(view.handles, State.GPU_RESIDENT))
    """

    name: str
    """The policy's name in metrics and messages: `[A-Za-z0-9_.:-]{1,64}`."""

    def plan(self, view: View) -> Plan: ...
