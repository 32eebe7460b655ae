"""Handles as a policy sees them, checks of the plan that a policy returns, and the meaning of `only=` and of keeps.

`Budget` says how many device bytes all handles together may hold.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from placement.core.errors import DeviceMemoryError, PhaseError, PolicyError
from placement.core.states import IDLE, HandleView, Plan, State, View, bytes_under
from placement.group.vote import OtherBudgetError

if TYPE_CHECKING:
    from placement.devices.memory import DeviceMemory
    from placement.registration.handle import Handle

_FACTS = tuple(each.name for each in fields(HandleView))


def handle_view(handle: Handle, kept: frozenset[str] = frozenset()) -> HandleView:
    """One handle as a policy sees it. The object is the last one as long as every fact is the same: making one takes as long as asking."""
    storage = handle.storage
    facts: tuple[Any, ...] = (
        handle.name,
        handle.kind,
        handle.role,
        handle.state,
        storage.num_bytes,
        storage.resident_bytes,
        storage.prefetched_bytes,
        storage.can_prefetch,
        tuple([owner.name for owner in handle.owners]),
        handle.readonly,
        handle.external,
        handle.gathers is not None,
        handle.is_built,
        handle.name in kept,
        storage.bytes_by_tag(),
        storage.resident_tags,
        handle.is_streaming,
        0 if handle.streamed is None else handle.streamed.window_bytes,
        None if handle.streamed is None else handle.streamed.refusal,
    )
    if handle.last_view is None or handle.last_view[0] != facts:
        handle.last_view = facts, HandleView(**dict(zip(_FACTS, facts, strict=True)))
    return handle.last_view[1]


def ask(policy: Any, view: View) -> Plan:
    """Ask the policy for a plan, and check it.

    Raises:
        PolicyError: the policy raised an error, or its answer is not a plan, misses a handle, names an unknown handle, or contains
            something impossible (a readonly handle in TRAINING, parts that a handle does not have, ...).
    """
    try:
        plan = policy.plan(view)
    except PolicyError:
        raise
    except Exception as error:
        raise PolicyError(f"policy {policy.name!r} failed on phase {view.phase!r}: {error!r}") from error
    if not isinstance(plan, Plan):
        raise PolicyError(f"policy {policy.name!r} returned {type(plan).__name__} for phase {view.phase!r}, not a Plan")
    problems = list(_problems(view, plan))
    if problems:
        raise PolicyError(f"policy {policy.name!r} gave no usable plan for phase {view.phase!r}: {'; '.join(problems)}")
    return plan


def _problems(view: View, plan: Plan) -> Iterable[str]:
    forgotten = [name for name in view.handles if name not in plan.targets]
    if forgotten:
        yield f"it forgets {', '.join(map(repr, forgotten))}"
    unknown = [
        name
        for name in dict.fromkeys((*plan.targets, *plan.streamed, *plan.dropped, *plan.parts, *plan.prefetch))
        if name not in view.handles
    ]
    if unknown:
        yield f"it names {', '.join(map(repr, unknown))}, which are not registered"
    for name, state in plan.targets.items():
        handle = view.handles.get(name)
        if handle is not None and handle.readonly and state is State.TRAINING:
            yield f"it wants {name!r} in TRAINING, which is readonly"
    yield from _wrongly_streamed(view, plan)
    for name, tags in plan.parts.items():
        if unknown_tags := tags - frozenset(view.handles[name].tags if name in view.handles else ()):
            yield f"it wants {', '.join(sorted(unknown_tags))} of {name!r}, which has no such part"
        elif not tags or name not in plan.targets or not plan.on_device(name):
            yield f"it wants parts of {name!r}, but not the handle on the device: leave {name!r} out of parts"
    for name in plan.dropped & view.handles.keys():
        if view.handles[name].kind == "optimizer":
            yield f"it drops gradients of {name!r}, an optimizer: name the module that has them"
        elif plan.targets.get(name) is State.TRAINING:
            yield f"it drops gradients of {name!r} and wants it in TRAINING"
    yield from _problems_of_prefetch(view, plan)


def _problems_of_prefetch(view: View, plan: Plan) -> Iterable[str]:
    wishes: Mapping[str, Any] = plan.prefetch  # written by a user's policy
    for name, nbytes in wishes.items():
        if name in view.handles and not view.handles[name].can_prefetch:
            yield f"it prefetches {name!r}, of which nothing can arrive early (HandleView.can_prefetch)"
        elif plan.targets.get(name, State.CPU_OFFLOADED) is not State.CPU_OFFLOADED:
            yield f"it prefetches {name!r}, which it wants {plan.targets[name]}: only what is CPU_OFFLOADED can arrive early"
        elif not isinstance(nbytes, int) or nbytes < 0:
            yield f"it prefetches {nbytes!r} bytes of {name!r}"


def _wrongly_streamed(view: View, plan: Plan) -> Iterable[str]:
    """The problems of the handles that a plan streams. A model must be SYNCING, an optimizer TRAINING with a step that can be streamed."""
    wrong = []
    for name in plan.streamed:
        handle, state = view.handles.get(name), plan.targets.get(name)
        if handle is None or handle.kind != "optimizer" or state is not State.TRAINING:
            wrong += [] if state is State.SYNCING else [name]
        elif handle.external:
            yield f"it streams the state of {name!r}, which a framework moves: leave {name!r} out of streamed"
        elif handle.unstreamable is not None:
            yield f"it streams the state of {name!r}, whose step cannot be made in parts: {handle.unstreamable}"
    if wrong:
        yield f"it streams {', '.join(map(repr, wrong))} without SYNCING, and they are no optimizers in TRAINING"


def meant(only: Sequence[str] | None, handles: Mapping[str, Handle]) -> set[str] | None:
    """The handles that `only=` means: the named ones and the optimizers that they own.

    Raises:
        PhaseError: a name is not registered; the message suggests the nearest name that is.
    """
    if only is None:
        return None
    for name in only:
        if name not in handles:
            raise PhaseError(f"only=: {unknown_handle(name, handles)}")
    return still_meant(only, handles)


def still_meant(only: Sequence[str] | None, handles: Mapping[str, Handle]) -> set[str] | None:
    """The handles that `only=` of an open phase means now, like `meant`, but without handles that were unregistered meanwhile."""
    if only is None:
        return None
    chosen = {name for name in only if name in handles}
    return chosen | {handle.name for handle in handles.values() if any(owner.name in chosen for owner in handle.owners)}


def with_kept(plan: Plan, kept: Iterable[str], handles: Mapping[str, Handle]) -> Plan:
    """A plan with kept handles added. A keep loads nothing: of an engine only the tags that are on the device stay there."""
    for name in kept:
        plan = plan.also(name, State.GPU_RESIDENT, handles[name].storage.resident_tags or None)
    return plan


def unknown_handle(name: object, handles: Iterable[str]) -> str:
    known = list(handles)
    near = difflib.get_close_matches(str(name), known, n=1)
    return f"no handle {name!r}" + (f", did you mean {near[0]!r}?" if near else f"; registered: {', '.join(known) or 'none'}")


class Budget:
    """The budget of each phase: a number from the user, or derived from free memory.

    Without a number, the budget is the free memory plus the bytes that the handles hold, minus the additional bytes that others
    (activations, the framework) were seen to need in this phase. Before a phase has run once, a fraction `headroom` is left free instead.

    Args:
        given_bytes: the user's number; None: derive the budget.
        headroom: the fraction left free in a phase that has not run yet.
        leased_from_bytes: if the device is shared under leases, the bytes that all its processes may use together; else None. Memory
            that other processes hold now counts as free then, because a phase waits for it.
    """

    def __init__(self, given_bytes: int | None, headroom: float, leased_from_bytes: int | None = None) -> None:
        self._given_bytes = given_bytes
        self._headroom = headroom
        self._leased_from_bytes = leased_from_bytes
        self._others_bytes: dict[str, int] = {}

    def limit(self, phase: str, memory: DeviceMemory, held_bytes: int) -> int:
        """Device bytes that all handles together may hold in this phase."""
        if self._leased_from_bytes is not None:
            least = self._leased_from_bytes if self._given_bytes is None else self._given_bytes
            return min(least, self._leased_from_bytes - self.working_bytes(phase))
        if self._given_bytes is not None:
            return self._given_bytes
        available = memory.free_bytes + held_bytes
        seen = self._others_bytes.get(phase)
        if seen is None:
            return int(available * (1 - self._headroom))
        return max(0, available - max(0, seen - memory.torch_reserved_bytes))

    def growth_bytes(self, phase: str, memory: DeviceMemory) -> int:
        """Bytes that others may still take in a phase that has begun: up to the most that was seen in it, or the headroom."""
        seen = self._others_bytes.get(phase)
        return int(memory.free_bytes * self._headroom) if seen is None else max(0, seen - memory.torch_reserved_bytes)

    def working_bytes(self, phase: str) -> int:
        """Bytes to lease for a phase in addition to the handles' bytes: the most that torch's allocator reserved in it, or the headroom."""
        available = self._leased_from_bytes or 0
        guess = int(available * self._headroom) if self._given_bytes is None and phase != IDLE else 0
        return min(available, self._others_bytes.get(phase, guess))

    def observe(self, phase: str, memory: DeviceMemory) -> None:
        """Remember how much torch's allocator has reserved. Called when a phase ends."""
        self._others_bytes[phase] = max(memory.torch_reserved_bytes, self._others_bytes.get(phase, 0))


def check_fits(view: View, plan: Plan, other_rank: int | None = None) -> int:
    """Refuse a plan that does not fit, before a byte moves.

    Args:
        other_rank: the rank of the group whose budget applies; None: this process's own budget.

    Returns:
        Bytes that the budget leaves in addition to those that the handles hold now.

    Raises:
        DeviceMemoryError: the plan does not fit; the message has a table of the bytes that each handle holds and wants.
    """
    wanted = view.bytes_of(plan)
    if wanted <= view.budget_bytes:
        return max(0, view.budget_bytes - sum(h.resident_bytes for h in view.handles.values() if not h.external))
    if other_rank is not None:
        reason = (
            f"has a budget of {mib(view.budget_bytes)}, and phase {view.phase!r} needs {mib(wanted)} on the device of each rank: raise "
            "budget_bytes there, or name the handles that the phase needs together (only=[...])"
        )
        raise OtherBudgetError(f"rank {other_rank} {reason}", other_rank, reason)
    error = DeviceMemoryError(
        f"phase {view.phase!r} needs {mib(wanted)} on the device, the budget is {mib(view.budget_bytes)}.\n{table(view.handles, plan)}\n"
        'Name the handles that it needs together: manager.phase("' + view.phase + '", only=[...]), or raise budget_bytes.'
    )
    error.wanted_bytes = wanted
    raise error


def without_surplus(view: View, plan: Plan, needed: Plan) -> Plan:
    """Make a plan fit: offload the cheapest handles that `needed` does not have on the device, just enough for the missing bytes."""
    freed = {
        h.name: bytes_under(plan, h) - bytes_under(needed, h)
        for h in view.handles.values()
        if plan[h.name] is State.GPU_RESIDENT and needed[h.name] in (State.CPU_OFFLOADED, State.GPU_RESIDENT)
    }
    leaving = view.evicted({name: nbytes for name, nbytes in freed.items() if nbytes > 0}, view.bytes_of(plan) - view.budget_bytes)
    return needed.limited_to(leaving, plan)


def mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f} MiB ({nbytes:,} bytes)"


def table(handles: Mapping[str, HandleView], plan: Plan) -> str:
    """A table of the bytes that each handle holds now and wants under the plan, largest first."""
    rows: Iterable[tuple[str, int, int]] = ((h.name, h.resident_bytes, bytes_under(plan, h)) for h in handles.values() if not h.external)
    lines = [f"  {'handle':<24} {'holds':>16} {'wants':>16}"]
    lines += [f"  {name:<24} {holds:>16,} {wants:>16,}" for name, holds, wants in sorted(rows, key=lambda row: -max(row[1], row[2]))]
    return "\n".join(lines)
