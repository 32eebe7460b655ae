"""The model of a manager: what is registered, which phases are open, where everything must be. The
rules are in the test."""

from __future__ import annotations

import contextlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from hypothesis.stateful import RuleBasedStateMachine

from placement import IntegrityError, Manager, Plan, State
from placement.core.errors import DeviceMemoryError
from placement.core.journal import logger
from placement.devices.simulated.device import SimulatedDevice
from placement.phases.hold import Hold
from placement.phases.phase import PhaseContext
from placement.planning.planner import without_surplus
from placement.testing import Faults
from tests.model.shadow import Recording, Shadow, raw
from tests.support.buckets import set_bucket_bytes


@dataclass
class Level:
    """One open phase as the model sees it."""

    name: str
    only: frozenset[str] | None
    plan: Plan
    phase: PhaseContext | None
    """None: opened by `Manager.enter` or `Manager.hold`."""
    kept: set[str] = field(default_factory=set)
    hold: Hold | None = None

    @property
    def belongs_to_a_thread(self) -> bool:
        return self.phase is not None


REPLACED = "replaced"


def is_told(told: str, handle: str, tensor: str) -> bool:
    """Whether an error names this change. See `World.unreported`."""
    if tensor == REPLACED:
        return f"of {handle!r} were replaced" in told
    names, is_about, _ = told.partition(f" were added to {handle!r}")
    return bool(is_about) and tensor in names.rpartition(". ")[2]


@contextlib.contextmanager
def logged(log: list[str]) -> Iterator[None]:
    """Add what placement logs inside to a list."""
    handler = logging.Handler()
    handler.emit = lambda record: log.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


class World(RuleBasedStateMachine):
    """A real manager on a simulated device that can be told to fail, beside what it should be
    doing."""

    def start(self, policy: Any, budget_bytes: int | None) -> None:
        self.device = Faults(SimulatedDevice(capacity_bytes=16 << 20, chunk_bytes=8192))
        self.policy = Recording(policy)
        set_bucket_bytes(8192)
        self.manager = Manager(
            device=self.device,
            policy=self.policy,
            budget_bytes=budget_bytes,
        )
        self.may_refuse = budget_bytes is not None
        self.shadows: dict[str, Shadow] = {}
        self.levels: list[Level] = []
        self.carried: set[str] = set()
        self.base = Plan({})
        """Where every handle must be now."""
        self.is_settled = True
        """False after a fault at an exit, until the next phase transition has made it good."""
        self.was_written = False
        """Something wrote into offloaded memory since the last phase transition."""
        # handle and tensor of what was added while it was offloaded, or `REPLACED`, until an error
        # names it
        self.unreported: set[tuple[str, str]] = set()
        """Handles to which tensors were added, or of which tensors were replaced, while they were
        offloaded."""
        self.armed: tuple[str, int] | None = None
        self.orphans: list[tuple[Any, bytes]] = []
        """Tensors of state dicts whose handle is gone, and the last values that they had."""
        self.count = 0
        self.num_checks = 0
        self.before: Any = None

    # --- choosing

    def shadows_that(self, *wanted: Callable[[Shadow], bool]) -> list[Shadow]:
        return [each for each in self.shadows.values() if all(is_so(each) for is_so in wanted)]

    def new_name(self) -> str:
        self.count += 1
        return f"h{self.count}"

    # --- what must be so

    def enclosing(self, carried: Iterable[str] | None = None) -> Plan:
        """Where everything belongs outside a new phase, with what is carried."""
        plan = self.levels[-1].plan if self.levels else self.policy.last["idle"]
        for name in self.carried if carried is None else carried:
            plan = plan.also(name, State.GPU_RESIDENT)
        return plan

    def meant(self, only: Iterable[str] | None) -> set[str] | None:
        if only is None:
            return None
        optimizers = {
            name
            for name, s in self.shadows.items()
            if s.optimizer_of is not None and s.optimizer_of.handle.name in only
        }
        return set(only) | optimizers

    def limited(self, name: str, only: frozenset[str] | None) -> Plan:
        """The plan of a phase that has just begun, inside those that are open."""
        plan, view, chosen = self.policy.last[name], self.policy.views[name], self.meant(only)
        if chosen is None:
            return plan
        plan = plan.limited_to(
            chosen, self.enclosing([each for each in self.carried if plan.on_device(each)])
        )
        if view.fits(plan):
            return plan
        needed = self.policy.needed["idle"]
        for level, meant in [
            *((level.name, self.meant(level.only)) for level in self.levels),
            (name, chosen),
        ]:
            asked = self.policy.needed[level]
            needed = asked if meant is None else asked.limited_to(meant, needed)
        return without_surplus(view, plan, needed)

    def on_device(self, name: str) -> bool:
        shadow = self.shadows.get(name)
        return shadow is not None and shadow.handle.is_on_device

    # --- phase transitions

    def reported_in(self, told: str) -> set[tuple[str, str]]:
        """The unreported changes that a text names."""
        return {change for change in self.unreported if is_told(told, *change)}

    def transition(
        self,
        call: Callable[[], object],
        *,
        exits: bool = False,
        checks_writes: bool = True,
        moves: bool = True,
    ) -> bool:
        """Cross a phase transition, with the armed fault. Whether it was crossed; anything but a
        fault or a refusal fails the test."""
        fired = self.device.fired
        if self.armed is not None:
            self.device.fail(self.armed[0], at=self.armed[1])
            self.armed = None
        expected = self.was_written and checks_writes
        if checks_writes:
            self.was_written = False
        log: list[str] = []
        try:
            with logged(log):
                call()
        except Exception as error:
            # where a load at an exit finds the write, it is a note on its error
            told = " ".join([str(error), *getattr(error, "__notes__", [])])
            reported = self.reported_in(told)
            if self.device.fired > fired:
                self.unreported -= reported
                self.is_settled = self.is_settled and not exits
                return exits
            is_written = "The written values are lost" in told
            if isinstance(error, IntegrityError) and (reported or expected):
                assert is_written is expected, told
                self.unreported -= reported
                return exits
            if (
                "is readonly, but" in str(error)
                and isinstance(error, IntegrityError)
                and any(s.is_tainted for s in self.shadows.values())
            ):
                return exits
            if self.may_refuse and not exits and isinstance(error, DeviceMemoryError):
                return False
            raise
        else:
            assert not expected, (
                "a write into offloaded memory was not found at the phase transition"
            )
            self.unreported -= self.reported_in(" ".join(log))  # by a phase that was dropped
            for handle, _ in self.unreported:
                assert not self.on_device(handle), f"what was added to {handle!r} was not reported"
            if self.device.fired == fired and moves:
                self.is_settled = True
            return True
        finally:
            self.device.clear()

    def open(
        self,
        name: str,
        only: frozenset[str] | None,
        phase: PhaseContext | None,
        call: Callable[[], object],
    ) -> None:
        opened: list[object] = []
        if self.transition(lambda: opened.append(call())):
            hold = opened[0] if isinstance(opened[0], Hold) else None
            self.levels.append(Level(name, only, self.limited(name, only), phase, hold=hold))
            self.carried = set()
            self.base = self.levels[-1].plan
        else:
            self.base = self.enclosing()

    def leave(self, level: Level, call: Callable[[], object], *, carries: bool = True) -> None:
        """Leave a phase: the innermost one, a hold, or one with only holds inside it."""
        kept = {name for name in level.kept if self.on_device(name)} if carries else set()
        if self.transition(call, exits=True):
            index = next(index for index, each in enumerate(self.levels) if each is level)
            del self.levels[index]
            around = self.levels[index - 1].plan if index else self.policy.last["idle"]
            for inner in self.levels[index:]:
                chosen = self.meant(inner.only)
                # all other handles are where the phase around wants them, but nothing is loaded
                if chosen is not None:
                    away = {
                        n for n, state in inner.plan.targets.items() if state is State.CPU_OFFLOADED
                    }
                    inner.plan = inner.plan.limited_to(chosen | away, around)
                around = inner.plan
            self.carried = kept
            self.base = self.enclosing()

    def is_blocked(self, level: Level) -> bool:
        """Whether a phase cannot be left yet, because one that is no hold is open inside it."""
        index = next(index for index, each in enumerate(self.levels) if each is level)
        return level.hold is None and any(inner.hold is None for inner in self.levels[index + 1 :])

    def forget(self, shadow: Shadow) -> None:
        """The handle is gone; what others hold of it keeps today's values."""
        name = shadow.handle.name
        del self.shadows[name]
        if shadow.optimizer_of is not None:
            shadow.optimizer_of.optimizers.remove(shadow)
        for optimizer in shadow.optimizers:
            optimizer.optimizer_of = None
        self.orphans += [(tensor, raw(tensor)) for held in shadow.dicts for tensor in held.values()]
        self.carried.discard(name)
        self.base = _without(self.base, name)
        for level in self.levels:
            level.kept.discard(name)
            level.plan = _without(level.plan, name)

    def join(self, shadow: Shadow) -> None:
        """A handle was registered: every open phase has a target for it."""
        name = shadow.handle.name
        self.shadows[name] = shadow
        if shadow.optimizer_of is not None:
            shadow.optimizer_of.optimizers.append(shadow)
        # An optimizer makes its owner a trained module.
        joining = {name} if shadow.optimizer_of is None else {name, shadow.optimizer_of.handle.name}
        below = self.policy.last["idle"]
        for level in self.levels:
            chosen = self.meant(level.only)
            streamed = level.plan.streamed | (below.streamed & {name})
            around = Plan({**level.plan.targets, name: below.targets[name]}, streamed)
            level.plan = self.policy.last[level.name].limited_to(
                joining if chosen is None else joining & chosen, around
            )
            below = level.plan
        self.base = self.enclosing()

    # --- after every rule

    def check_everything(self) -> None:
        self.manager.check_integrity()
        handles = self.manager.handles
        assert handles.keys() == self.shadows.keys()
        held = sum(h.holding.chunk_bytes for h in handles.values() if h.holding is not None)
        assert self.device.memory().chunk_bytes == held
        self._check_targets()
        for shadow in self.shadows.values():
            assert shadow.handle.broken is None
            shadow.check()
            shadow.check_place(poisoned=not self.was_written)
            # not always: while the host copy is shown to somebody who may write, nothing arrives
            # early
            if self.num_checks % 4 == 0:
                shadow.check_state_dict()
        self.num_checks += 1
        self.check_orphans()
        self._check_snapshot()

    def check_orphans(self) -> None:
        for tensor, data in self.orphans:
            assert raw(tensor) == data, "a state dict of a handle that is gone reads something else"

    def _check_targets(self) -> None:
        for name, handle in self.manager.handles.items():
            on = handle.is_on_device
            if handle.holding is not None:
                assert handle.holding.on_device is on, f"{handle!r}: state and decision differ"
            if not on:
                assert handle.resident_bytes == handle.prefetched_bytes
                # a streamed step has its first bytes ahead
                if not self.levels and self.is_settled and name not in self.base.streamed:
                    assert handle.prefetched_bytes == 0
            if self.is_settled:
                # What an exit wants of a Lazy waits for the next entry, which builds it.
                wanted = (
                    (self.base.targets[name], self.base.on_device(name))
                    if handle.is_built
                    else (State.CPU_OFFLOADED, False)
                )
                assert (handle.state, on) == wanted, (
                    f"{handle!r} should be {wanted} in {[level.name for level in self.levels]}"
                )

    def _check_snapshot(self) -> None:
        snapshot = self.manager.snapshot()
        told = json.loads(snapshot.model_dump_json())
        assert [h["name"] for h in told["handles"]] == list(self.manager.handles)
        assert told["phases"] == [level.name for level in self.levels]
        records = list(self.manager.journal)
        last = {record.handle: record.target for record in records}
        counted: Counter[tuple[str, str]] = Counter(
            (record.handle, record.trigger) for record in records
        )
        for each in snapshot.handles:
            handle = self.manager.handles[each.name]
            assert each.kept == (each.name in self.carried)
            assert each.state is handle.state is last.get(each.name, State.CPU_OFFLOADED)
            assert {t: n for t, n in each.transitions.items() if n} == {
                t: n for (h, t), n in counted.items() if h == each.name
            }
        for source, target in _chains(records):
            assert source is target, "a record does not begin where the one before ended"
        self._check_monotone(snapshot)

    def _check_monotone(self, snapshot: Any) -> None:
        before, self.before = self.before, snapshot
        if before is None:
            return
        for counter in ("phase_seconds", "phase_stall_seconds", "policy_decisions"):
            now = getattr(snapshot, counter)
            assert all(now[key] >= value for key, value in getattr(before, counter).items()), (
                counter
            )
        for counter in ("pairing_violations", "wrong_writes", "expired_keeps", "peak_bytes"):
            assert getattr(snapshot, counter) >= getattr(before, counter), counter
        earlier = {each.name: each for each in before.handles}
        for each in snapshot.handles:
            if each.name in earlier:
                was = earlier[each.name]
                assert all(
                    each.state_seconds[state] >= seconds
                    for state, seconds in was.state_seconds.items()
                )
                assert (each.loaded_bytes, each.offloaded_bytes, each.skipped_bytes) >= (
                    was.loaded_bytes, was.offloaded_bytes, was.skipped_bytes,
                )  # fmt: skip


def _without(plan: Plan, name: str) -> Plan:
    return Plan({n: s for n, s in plan.targets.items() if n != name}, plan.streamed - {name})


def _chains(records: Iterable[Any]) -> Iterator[tuple[State, State]]:
    """(source of a record, target of the one before it) for each handle."""
    last: dict[str, State] = {}
    for record in records:
        yield record.source, last.get(record.handle, State.CPU_OFFLOADED)
        last[record.handle] = record.target
