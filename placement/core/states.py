"""The words of the state machine: states, triggers, phases, and what a policy reads and writes.

Standard library only. Everything here is immutable data; nothing moves a byte.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NoReturn, Protocol, TypeVar, runtime_checkable

_K = TypeVar("_K")
_V = TypeVar("_V")


class State(enum.StrEnum):
    """What may be done with a handle now."""

    CPU_OFFLOADED = "CPU_OFFLOADED"
    """The host copy is the only one; poison lies behind the device addresses."""
    GPU_RESIDENT = "GPU_RESIDENT"
    """The values are on the device and may be read there."""
    SYNCING = "SYNCING"
    """The weights are being published: nothing moves or writes them."""
    TRAINING = "TRAINING"
    """The values are on the device and may change."""


class Trigger(enum.StrEnum):
    """The names of the transitions."""

    LOAD = "load"
    OFFLOAD = "offload"
    BEGIN_SYNC = "begin_sync"
    END_SYNC = "end_sync"
    BEGIN_STREAM = "begin_stream"
    END_STREAM = "end_stream"
    BEGIN_TRAIN = "begin_train"
    END_TRAIN = "end_train"
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
    (Trigger.SYNC_TO_TRAIN, State.SYNCING, State.TRAINING),
    (Trigger.TRAIN_TO_SYNC, State.TRAINING, State.SYNCING),
)
"""The one table: the machine, the README's diagram and the tests read it."""

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
"""The phases every shipped policy knows. `Settings.phases` adds names of the user's own."""

KINDS: tuple[str, ...] = ("module", "optimizer", "engine")
ROLES: tuple[str, ...] = ("actor", "ref", "critic", "reward", "teacher", "rollout")
WORKER_ROLES: tuple[str, ...] = ("trainer", "rollout", "hybrid")
WEIGHTS, KV_CACHE, CUDA_GRAPH = TAGS = ("weights", "kv_cache", "cuda_graph")
"""The parts of a rollout engine that can be on the device by themselves."""


class ReadOnly(dict[_K, _V]):
    """A mapping that stays as it was made. Unlike a `MappingProxyType` it can be copied, pickled and written as JSON."""

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("this mapping is read-only: a policy returns a Plan and changes nothing that it is shown")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[type[ReadOnly[_K, _V]], tuple[dict[_K, _V]]]:
        return type(self), (dict(self),)


@dataclass(frozen=True, kw_only=True, slots=True)
class HandleView:
    """What a policy may know of one handle."""

    name: str
    kind: str
    role: str | None
    state: State
    num_bytes: int
    """Device bytes the handle needs while it is on the device; 0 for an unbuilt `Lazy` and an external handle. State that an optimizer's
    steps have still to create counts where its size can be told, also while the optimizer is on the device already."""
    resident_bytes: int = 0
    """Device bytes it holds now."""
    owners: tuple[str, ...] = ()
    """For an optimizer: the module handles whose parameters it steps."""
    readonly: bool = False
    external: bool = False
    gathers: bool = False
    """Whether its framework gathers the values on the device for a state dict (FSDP1), so that no host copy can stand in for them."""
    built: bool = True
    kept: bool = False
    """Carried over the end of an earlier phase by `phase.keep`."""
    tags: Mapping[str, int] = field(default_factory=dict, hash=False)
    """Of an engine that can be on the device in part: device bytes by tag. 0: not known yet."""
    resident_tags: frozenset[str] = frozenset()
    """Those of them that are on the device now."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "tags", ReadOnly(self.tags))


@dataclass(frozen=True, slots=True)
class Plan:
    """One target state for every handle. Immutable; the methods return new plans.

    `streamed` names the handles whose SYNCING is published from the host copy, without loading. `dropped` names those whose
    gradients are dead once this plan takes them out of TRAINING: they become None and are not copied. All others keep theirs.
    `parts` names the engines that are on the device in part, with the tags that are; all others are there whole.
    """

    targets: Mapping[str, State]
    streamed: frozenset[str] = frozenset()
    dropped: frozenset[str] = frozenset()
    parts: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        targets = {n: s if type(s) is State else State(s) for n, s in dict(self.targets).items()}
        object.__setattr__(self, "targets", ReadOnly(targets))
        object.__setattr__(self, "streamed", frozenset(self.streamed))
        object.__setattr__(self, "dropped", frozenset(self.dropped))
        object.__setattr__(self, "parts", ReadOnly({n: frozenset(tags) for n, tags in dict(self.parts).items()}))

    def __getitem__(self, name: str) -> State:
        return self.targets[name]

    def also(self, handle: HandleView | str, state: State, tags: frozenset[str] | None = None) -> Plan:
        """This plan with one more target; a handle that the plan already wants on the device keeps its target.

        Args:
            tags: of an engine, where it is not meant whole.
        """
        name = handle if isinstance(handle, str) else handle.name
        if self.targets.get(name, State.CPU_OFFLOADED) is not State.CPU_OFFLOADED:
            return self
        parts = self.parts if tags is None else {**self.parts, name: tags}
        return replace(self, targets={**self.targets, name: state}, parts=parts)

    def on_device(self, name: str) -> bool:
        """Whether the handle's bytes are on the device under this plan."""
        return self.targets[name] is not State.CPU_OFFLOADED and name not in self.streamed

    def limited_to(self, names: Iterable[str], enclosing: Plan) -> Plan:
        """This plan for `names`, `enclosing` for every other handle (what `phase(only=...)` means)."""
        chosen = set(names)
        targets = {n: s if n in chosen else enclosing.targets[n] for n, s in self.targets.items()}
        streamed = (self.streamed & chosen) | (enclosing.streamed - chosen)
        dropped = (self.dropped & chosen) | (enclosing.dropped - chosen)
        parts = {n: tags for n, tags in self.parts.items() if n in chosen}
        parts |= {n: tags for n, tags in enclosing.parts.items() if n not in chosen}
        return Plan(targets, streamed, dropped, parts)

    def without(self, name: str) -> Plan:
        """This plan for a worker that has no such handle."""
        targets = {n: s for n, s in self.targets.items() if n != name}
        parts = {n: tags for n, tags in self.parts.items() if n != name}
        return Plan(targets, self.streamed - {name}, self.dropped - {name}, parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """What a policy decides from. Pure data: reading it has no effect and costs no device call."""

    phase: str
    enclosing: str | None = None
    """The phase around this one; None at the outermost."""
    upcoming: tuple[str, ...] = ()
    """The phases known to come, nearest first; empty until a cycle has been seen."""
    handles: Mapping[str, HandleView] = field(default_factory=dict)
    budget_bytes: int = 0
    """Device bytes that all handles may hold together in this phase."""
    worker_role: str = "hybrid"
    phases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The user's own phases (`Settings.phases`): roles needed, by phase name."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "handles", ReadOnly(self.handles))
        object.__setattr__(self, "phases", ReadOnly(self.phases))

    def with_role(self, *roles: str, kind: str | None = None) -> tuple[HandleView, ...]:
        """The handles of these roles, in registration order; of one kind if given."""
        return tuple(h for h in self.handles.values() if h.role in roles and kind in (None, h.kind))

    @property
    def known_phases(self) -> tuple[str, ...]:
        """The phases that mean something here: the shipped ones and the user's own."""
        return (*PHASES, *(name for name in self.phases if name not in PHASES))

    def total_plan(
        self,
        targets: Mapping[str, State],
        streamed: Iterable[str] = (),
        dropped: Iterable[str] = (),
        parts: Mapping[str, frozenset[str]] = ReadOnly(),
    ) -> Plan:
        """The plan with these targets and CPU_OFFLOADED for every other handle of the view."""
        return Plan({**dict.fromkeys(self.handles, State.CPU_OFFLOADED), **targets}, frozenset(streamed), frozenset(dropped), parts)

    def bytes_of(self, plan: Plan) -> int:
        """Device bytes that the handles hold together under a plan."""
        return sum(bytes_under(plan, h) for h in self.handles.values())

    def fits(self, plan: Plan, *more: HandleView) -> bool:
        """Whether the plan, with `more` on the device too, stays within the budget."""
        extra = sum(h.num_bytes for h in more if not h.external and not plan.on_device(h.name))
        return self.bytes_of(plan) + extra <= self.budget_bytes

    def evicted(self, freed_bytes: Mapping[str, int], deficit_bytes: int) -> set[str]:
        """The handles that leave the device so that a deficit is covered; all that are given where that is not enough.

        First those that need not be copied back (readonly, or a module that no optimizer steps), then the rest; of each, the smallest
        handle that covers the deficit, else the largest.

        Args:
            freed_bytes: the handles that may leave, with the device bytes that each would free.
        """
        stepped = {owner for h in self.handles.values() if h.kind == "optimizer" for owner in h.owners}
        clean = {n for n in freed_bytes if (h := self.handles[n]).readonly or (h.kind == "module" and n not in stepped)}
        evicted: list[str] = []
        for group in (clean, freed_bytes.keys() - clean):
            by_size = sorted((n for n in freed_bytes if n in group), key=freed_bytes.__getitem__)
            while deficit_bytes > 0 and by_size:
                covering = bisect_left(by_size, deficit_bytes, key=freed_bytes.__getitem__)
                evicted.append(by_size.pop(min(covering, len(by_size) - 1)))
                deficit_bytes -= freed_bytes[evicted[-1]]
        names = set(evicted)
        for name in reversed(evicted):  # a large late eviction can make a small early one needless
            if freed_bytes[name] <= -deficit_bytes:
                names.discard(name)
                deficit_bytes += freed_bytes[name]
        return names


def bytes_under(plan: Plan, handle: HandleView) -> int:
    """Device bytes of one handle under a plan, as far as it is placement that places them."""
    if handle.external or not plan.on_device(handle.name):
        return 0
    tags = plan.parts.get(handle.name)
    return handle.num_bytes if tags is None else sum(handle.tags.get(tag, 0) for tag in tags)


@runtime_checkable
class Policy(Protocol):
    """Decides where every handle belongs in a phase.

    `plan` is called with the manager's lock held, before any byte moves. Each phase transition (entry, switch, exit) and each registration
    calls it as often as it has questions: for the phase that begins, again once a `Lazy` was built for it, for the phase around it
    (outside every phase that is `idle`), and with a budget of 0 bytes for what a phase needs in any case.

    The plan it returns names every handle of the view. It is a function of the view alone: the same view gives an equal
    plan, on every rank, and the view cannot be changed. Whether the bytes fit is the manager's check, not the policy's duty;
    what may stay on the device and need not is what a policy wants only where `view.fits` says so.

    Raises:
        PolicyError: the phase is not one of `view.known_phases`.
    """

    name: str
    """For metrics and messages: `[A-Za-z0-9_.:-]{1,64}`."""

    def plan(self, view: View) -> Plan: ...
