"""The planner asks the policy for plans, and checks them. It provides the view: handles, expected
phases and the budget.

Beside it: the meaning of `only=` and of keeps, and the check that a plan fits the budget.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from placement.core.errors import DeviceMemoryError, PolicyError, listed
from placement.core.settings import Settings, nearest
from placement.core.snapshot import mib
from placement.core.states import IDLE, NO_TAGS, HandleView, Plan, State, View, bytes_under
from placement.devices.memory import DeviceMemory
from placement.group.protocol import Basis
from placement.group.vote import OtherBudgetError
from placement.registration.handle import OFFLOADED, Handle, Node
from placement.storage.managed import ManagedStorage

MOST_PHASES = 64  # how far back a history goes
HEADROOM = 0.2  # the fraction of free memory left to others in a phase that has not run yet
_COMPUTING: dict[str, tuple[str, ...]] = {
    "rollout": ("rollout",),
    "eval": ("rollout",),
    "log_prob": ("actor", "ref"),
    "ref_log_prob": ("ref",),
    "values": ("critic",),
    "reward": ("reward",),
}


class PhaseHistory:
    """The phases that have begun, oldest first. A cycle is searched for in the last `MOST_PHASES`;
    as many before them tell its places apart."""

    def __init__(self) -> None:
        self._phases: deque[str] = deque(maxlen=2 * MOST_PHASES)

    def began(self, phase: str) -> None:
        self._phases.append(phase)

    def upcoming(self, phase: str) -> tuple[str, ...]:
        """The phases that are expected after this one, nearest first, for one whole cycle; empty if
        none has been seen.

        The same phases are expected as the last time. Where a phase has several places in the
        cycle, the place counts that has the most phases before it in common with the present; of
        equal ones the last. A phase that is not in the history (`idle`, or one that begins for the
        first time) is taken as inserted after the last phase.
        """
        phases = [*self._phases]
        has_been = phase in phases[-MOST_PHASES:]
        longest = -1 if has_been else 0
        best_place = len(phases)
        for place in reversed(range(len(phases))[-MOST_PHASES:]):
            if longest >= place:
                break  # fewer phases are before all places that are left
            if has_been and phases[place] != phase:
                continue
            least = longest + 1  # a better place has at least so many in common
            if phases[place - least : place] == phases[len(phases) - least :]:
                longest = _common_end(phases[:place], phases)
                best_place = place
        if has_been:
            return tuple(phases[best_place + 1 :])
        return tuple(phases[best_place:])


def _common_end(short: list[str], long: list[str]) -> int:
    """How many phases at the ends of two histories are the same. `short` is not longer."""
    if short == long[len(long) - len(short) :]:  # as in every steady cycle
        return len(short)
    length = 0
    while short[-1 - length] == long[-1 - length]:
        length += 1
    return length


class Planner:
    """Makes plans for one manager. Moves nothing.

    The budget of a phase is the user's number. Without one it is the free memory plus the bytes
    that the handles hold, minus the bytes that others need. Others are activations and the
    framework; their need is that seen in this phase so far. Before a phase has run once, the
    fraction `HEADROOM` is left free instead. That is a guess: it decides what stays, but a plan
    that fits without it is carried out (`limit_bytes`).
    """

    def __init__(
        self,
        policy: Any,
        settings: Settings,
        handles: Mapping[str, Handle],
        memory: DeviceMemory,
    ) -> None:
        self._policy = policy
        self._settings = settings
        self._handles = handles
        self.history = PhaseHistory()
        self.memory = memory  # the device's memory as measured last
        # the most bytes that others were seen to need in each phase
        self._others_bytes: dict[str, int] = {}
        self._born_bytes = 0
        """Bytes of optimizer state that was created since the optimizers were last looked through.
        The handles hold them already."""
        self._state_bytes = 0
        """Bytes of all optimizer state in torch's own memory. They belong to handles, and move into
        a range at the next offload."""
        self.least: Basis | None = None
        """The least budget of all ranks of the group, from the last phase transition. All ranks use
        it, so that they make the same plan."""
        self.least_bytes: dict[str, int] = {}  # the same in bytes, by phase

    # --- plans

    def ask(
        self,
        phase: str,
        enclosing: str | None = None,
        kept: frozenset[str] = frozenset(),
    ) -> tuple[View, Plan]:
        """The view that the policy was shown, and its plan for a phase. Raises PolicyError: the
        policy gave no valid plan."""
        view = self.view(phase, enclosing, kept)
        plan = ask_policy(self._policy, view)
        if phase == IDLE and self._settings.turns is not None:
            self._refuse_to_stay(view, plan)
        used = [
            handle
            for name, handle in self._handles.items()
            if plan.targets[name] is not State.CPU_OFFLOADED
        ]
        if _follow_param_groups(used):  # their sizes are others now
            return self.ask(phase, enclosing, kept)
        return view, plan

    def _refuse_to_stay(self, view: View, plan: Plan) -> None:
        """Raise PolicyError for a plan with which a turn would never end."""
        own = [handle.name for handle in view.handles.values() if not handle.external]
        staying = [name for name in own if plan.on_device(name) or name in plan.prefetch]
        if staying:
            raise PolicyError(
                f"policy {self._policy.name!r} has {listed(staying)} on the device outside every "
                "phase, so this process's turn would never end. Choose a policy that leaves "
                "nothing there ('colocated', 'cyclic(idle=\"empty\")'), or turns='off'"
            )

    def needed(
        self,
        phase: str,
        enclosing: str | None,
        kept: frozenset[str],
        *,
        at_rest: bool = False,
    ) -> Plan:
        """The policy's plan under a budget of 0 bytes. Handles that it still wants on the device
        are needed; others may be offloaded.

        `at_rest`: as if nothing were on the device, so that handles that a checkpoint merely leaves
        there do not count as needed.
        """
        view = replace(self.view(phase, enclosing, kept), budget_bytes=0)
        if at_rest:
            handles = {name: handle.at_rest() for name, handle in view.handles.items()}
            view = replace(view, handles=handles)
        return ask_policy(self._policy, view)

    def view(self, phase: str, enclosing: str | None, kept: frozenset[str]) -> View:
        handles = {name: handle_view(handle, kept) for name, handle in self._handles.items()}
        budget_bytes = self.budget_bytes(phase, handles.values())
        if self.least is not None:
            budget_bytes = min(budget_bytes, self.least.budget_bytes)
        return View(
            phase=phase,
            enclosing=enclosing,
            upcoming=self.history.upcoming(phase),
            handles=handles,
            budget_bytes=budget_bytes,
            worker_role=self._settings.worker_role,
            phases=self._settings.phases,
        )

    def whereabouts(self) -> dict[str, tuple[int, bool, list[str]]]:
        """Where each handle is: its device bytes, whether they are on the device, and an engine's
        tags there. Ranks compare these facts."""
        # else ranks that step other parameters from now on would not compare their plans
        _follow_param_groups(self._handles.values())
        places = {}
        for name, handle in self._handles.items():
            tags = sorted(handle.storage.resident_tags)
            places[name] = handle.num_bytes, handle.is_on_device, tags
        return places

    def computing_roles(self, phase: str) -> tuple[str, ...]:
        """The roles whose models a phase computes outputs with; none for a phase that only has them
        on the device."""
        return _COMPUTING.get(phase, tuple(self._settings.phases.get(phase, ())))

    # --- the budget

    def budget_bytes(
        self, phase: str, views: Iterable[HandleView] | None = None, *, measured: bool = False
    ) -> int:
        """Device bytes that all handles (`views`) of this rank together may hold in a phase, as of
        now. `measured`: the device has room for so many, whatever number the user gave. May be
        called on any thread."""
        if self._settings.budget_bytes is not None and not measured:
            return self._settings.budget_bytes
        handles = [*self._handles.values()] if views is None else views
        available_bytes = self._available_bytes(handles)
        others_bytes = self._others_bytes.get(phase)
        if others_bytes is None:
            return int(available_bytes * (1 - HEADROOM))
        missing_bytes = max(0, others_bytes - self._reserved_by_others())
        return max(0, available_bytes - missing_bytes)

    def _available_bytes(self, handles: Iterable[Handle | HandleView]) -> int:
        """Device bytes that are free, or that handles hold which can leave."""
        available_bytes = self.memory.free_bytes + self._born_bytes
        for handle in handles:
            if not handle.external:
                available_bytes += handle.resident_bytes
        # new state of an optimizer is in ordinary memory on the simulated device
        most_bytes = self.memory.total_bytes - self.memory.poison_bytes
        return available_bytes if available_bytes < most_bytes else most_bytes

    def limit_bytes(self, view: View) -> int:
        """Device bytes that a plan may take: the budget, and before the phase has run once
        everything that is available.

        The least budget of a group may be a guess: that of a rank that was restarted, which takes
        the headroom off. Here it is put back, because that rank refuses by itself what it lacks."""
        handles = view.handles.values()
        if self._settings.budget_bytes is None and view.phase not in self._others_bytes:
            limit_bytes = self._available_bytes(handles)
        else:
            limit_bytes = self.budget_bytes(view.phase, handles)
        if self.least is not None:
            limit_bytes = min(limit_bytes, int(self.least.budget_bytes / (1 - HEADROOM)))
        return limit_bytes

    def other_rank(self, phase: str) -> int | None:
        """The rank of the group whose budget the plan for a phase must fit; None if it is this
        process's own budget."""
        if self.least is None or self.budget_bytes(phase) <= self.least.budget_bytes:
            return None
        return self.least.budget_rank

    def room_bytes(self, phase: str, plan: Plan) -> int:
        """Device bytes that the budget of a phase leaves beside its plan, for what arrives
        early."""
        view = self.view(phase, None, frozenset())
        return max(0, view.budget_bytes - view.bytes_of(plan))

    def growth_bytes(self, phase: str, memory: DeviceMemory) -> int:
        """Bytes that others may still take in a phase that has begun, as of this measurement: the
        most that was seen, or the headroom."""
        others_bytes = self._others_bytes.get(phase)
        if others_bytes is None:
            return int(memory.free_bytes * HEADROOM)
        return max(0, others_bytes - memory.torch_reserved_bytes)

    def measure(self, memory: DeviceMemory) -> int:
        """Measure the handles, beside the device's memory. Returns the device bytes that they
        hold."""
        self.memory = memory
        held_bytes = born_bytes = unadopted_bytes = 0
        for handle in self._handles.values():
            storage = handle.storage
            storage.measure()
            held_bytes += storage.sizes()[1]
            if handle.kind == "optimizer":
                born_bytes += storage.born_bytes
                unadopted_bytes += storage.unadopted_bytes
        self._born_bytes = born_bytes
        self._state_bytes = born_bytes + unadopted_bytes
        return held_bytes

    def note_memory_of_others_in(self, phase: str) -> None:
        """Remember how much torch memory others than the handles (activations) need in a phase.
        Called as it ends, after `measure`."""
        self._others_bytes[phase] = max(
            self._reserved_by_others(), self._others_bytes.get(phase, 0)
        )

    def _reserved_by_others(self) -> int:
        """The bytes that torch's allocator has reserved, without optimizer state."""
        return max(0, self.memory.torch_reserved_bytes - self._state_bytes)


def _follow_param_groups(handles: Iterable[Handle]) -> bool:
    """Measure the offloaded optimizers among these anew that step other parameters than before.
    Returns whether there are any. Every parameter is compared, so the optimizers that a phase does
    not use are left out."""
    has_any = False
    for handle in handles:
        if handle.kind == "optimizer" and isinstance(handle.storage, ManagedStorage):
            has_any |= handle.storage.follow_param_groups()
    return has_any


def handle_view(handle: Handle, kept: frozenset[str] = frozenset()) -> HandleView:
    """One handle as a policy sees it. The object is the last one as long as every fact is the same:
    making one takes as long as asking."""
    storage = handle.storage
    streamed = handle.streamed
    adapter = handle.adapter
    state, is_on_device = handle.node
    num_bytes, resident_bytes, prefetched_bytes = storage.sizes()
    facts: dict[str, Any] = {
        "name": handle.name,
        "kind": handle.kind,
        "role": handle.role,
        "state": state,
        "num_bytes": num_bytes,
        "resident_bytes": resident_bytes,
        "prefetched_bytes": prefetched_bytes,
        "can_prefetch": storage.can_prefetch,
        "owners": tuple([owner.name for owner in handle.owners]) if handle.owners else (),
        "readonly": handle.readonly,
        "external": adapter is not None and adapter.external is not None,
        "gathers": handle.gathers is not None,
        "built": adapter is not None,
        "kept": handle.name in kept,
        "tags": storage.bytes_by_tag() if storage.tags else NO_TAGS,
        "resident_tags": storage.resident_tags,
        "streaming": state is not State.CPU_OFFLOADED and not is_on_device,
        "window_bytes": handle.window_bytes,
        "unstreamable": None if streamed is None else streamed.refusal,
    }
    last = handle.last_view
    if last is None or last[0] != facts:
        last = facts, HandleView(**facts)
        handle.last_view = last
    return last[1]


def ask_policy(policy: Any, view: View) -> Plan:
    """Ask the policy for a plan, and check it.

    Raises PolicyError: the policy raised an error, or its answer is not a plan, misses a handle,
    names an unknown handle, or contains something impossible (a readonly handle in TRAINING, parts
    that a handle does not have, ...).
    """
    try:
        plan = policy.plan(view)
    except PolicyError:
        raise
    except Exception as error:
        raise PolicyError(
            f"policy {policy.name!r} failed on phase {view.phase!r}: {error!r}"
        ) from error
    if not isinstance(plan, Plan):
        raise PolicyError(
            f"policy {policy.name!r} returned {type(plan).__name__} for phase {view.phase!r}, not "
            "a Plan"
        )
    problems = list(_problems(view, plan))
    if problems:
        raise PolicyError(
            f"policy {policy.name!r} gave no usable plan for phase {view.phase!r}: "
            f"{'; '.join(problems)}"
        )
    return plan


def _problems(view: View, plan: Plan) -> Iterable[str]:
    forgotten = [name for name in view.handles if name not in plan.targets]
    if forgotten:
        yield f"it forgets {', '.join(map(repr, forgotten))}"
    named = dict.fromkeys(plan.targets)
    for names in (plan.streamed, plan.dropped, plan.parts, plan.prefetch):
        named.update(dict.fromkeys(names))
    unknown = [name for name in named if name not in view.handles]
    if unknown:
        yield f"it names {', '.join(map(repr, unknown))}, which are not registered"
    for name, state in plan.targets.items():
        if state is State.TRAINING and name in view.handles and view.handles[name].readonly:
            yield f"it wants {name!r} in TRAINING, which is readonly"
    yield from _wrongly_streamed(view, plan)
    for name, tags in plan.parts.items():
        own_tags = frozenset(view.handles[name].tags if name in view.handles else ())
        unknown_tags = tags - own_tags
        if unknown_tags:
            yield f"it wants {', '.join(sorted(unknown_tags))} of {name!r}, which has no such part"
        elif not tags or name not in plan.targets or not plan.on_device(name):
            yield (
                f"it wants parts of {name!r}, but not the handle on the device: leave {name!r} out "
                "of parts"
            )
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
            yield (
                f"it prefetches {name!r}, of which nothing can arrive early "
                "(HandleView.can_prefetch)"
            )
        elif plan.targets.get(name, State.CPU_OFFLOADED) is not State.CPU_OFFLOADED:
            yield (
                f"it prefetches {name!r}, which it wants {plan.targets[name]}: only what is "
                "CPU_OFFLOADED can arrive early"
            )
        elif not isinstance(nbytes, int) or nbytes < 0:
            yield f"it prefetches {nbytes!r} bytes of {name!r}"


def _wrongly_streamed(view: View, plan: Plan) -> Iterable[str]:
    """The problems of the handles that a plan streams. A model must be SYNCING, an optimizer
    TRAINING with a step that can be streamed."""
    wrong = []
    for name in plan.streamed:
        handle = view.handles.get(name)
        state = plan.targets.get(name)
        if handle is None or handle.kind != "optimizer" or state is not State.TRAINING:
            if state is not State.SYNCING:
                wrong.append(name)
        elif handle.external:
            yield (
                f"it streams the state of {name!r}, which a framework moves: leave {name!r} out of "
                "streamed"
            )
        elif handle.unstreamable is not None:
            yield (
                f"it streams the state of {name!r}, whose step cannot be made in parts: "
                f"{handle.unstreamable}"
            )
    if wrong:
        yield (
            f"it streams {', '.join(map(repr, wrong))} without SYNCING, and they are no optimizers "
            "in TRAINING"
        )


def meant(
    only: Sequence[str] | None,
    handles: Mapping[str, Handle],
) -> set[str] | None:
    """The handles that `only=` means now: the named ones, unless they were unregistered meanwhile,
    and the optimizers that they own."""
    if only is None:
        return None
    named = {name for name in only if name in handles}
    owned = set()
    for handle in handles.values():
        if any(owner.name in named for owner in handle.owners):
            owned.add(handle.name)
    return named | owned


def with_kept(
    plan: Plan,
    kept: Iterable[str],
    handles: Mapping[str, Handle],
) -> Plan:
    """A plan with kept handles added. A keep loads nothing: of an engine only the tags that are on
    the device stay there."""
    for name in kept:
        plan = plan.also(name, State.GPU_RESIDENT, handles[name].storage.resident_tags or None)
    return plan


def target_of(handle: Handle, plan: Plan) -> Node:
    """The state (and whether it is on the device) that a plan wants a handle in."""
    # a `Lazy` that is not built yet: only the beginning of a phase builds it
    if handle.adapter is None:
        return OFFLOADED
    state = plan.targets[handle.name]
    is_streamed = handle.name in plan.streamed and not handle.external
    return state, state is not State.CPU_OFFLOADED and not is_streamed


def wanted_tags(handle: Handle, plan: Plan) -> frozenset[str]:
    if not plan.on_device(handle.name):
        return frozenset()
    return plan.parts.get(handle.name, frozenset(handle.storage.tags))


def is_there(handles: Mapping[str, Handle], plan: Plan) -> bool:
    """Whether all handles are where the plan wants them, with nothing to repair."""
    for handle in handles.values():
        state, is_on_device = target_of(handle, plan)
        if handle.node != (state, is_on_device) or handle.broken is not None:
            return False
        if not handle.storage.is_consistent_in(state):
            return False
    return True


def unknown_handle(name: object, handles: Iterable[str]) -> str:
    """The message for a name that no handle has, with the nearest one."""
    registered = list(handles)
    advice = nearest(str(name), registered)
    if not advice:
        advice = f"; registered: {', '.join(registered) or 'none'}"
    return f"no handle {name!r}{advice}"


def check_fits(view: View, plan: Plan, planner: Planner | None = None) -> int:
    """Refuse a plan that does not fit, before a byte moves. Returns the bytes that the budget, or
    `Planner.limit_bytes` of a plan that needs it, leaves beside those that are held now.

    `planner` knows the budgets of a running job; None: that of the view applies. Raises
    DeviceMemoryError, with a table of bytes that each handle holds and wants.
    """
    needed_bytes = view.bytes_of(plan)
    limit_bytes = view.budget_bytes
    other_rank = None
    own = [handle for handle in view.handles.values() if not handle.external]
    if needed_bytes > limit_bytes and planner is not None:
        limit_bytes = planner.limit_bytes(view)
        other_rank = planner.other_rank(view.phase)
    if needed_bytes <= limit_bytes:
        resident_bytes = sum([handle.resident_bytes for handle in own])
        return max(0, limit_bytes - resident_bytes)
    if other_rank is not None:
        reason = (
            f"has a budget of {mib(view.budget_bytes)}, and phase {view.phase!r} needs "
            f"{mib(needed_bytes)} on the device of each rank: raise budget_bytes there, or name "
            "the handles that the phase needs together (only=[...])"
        )
        other = OtherBudgetError(f"rank {other_rank} {reason}")
        other.blames = {other_rank: reason}
        raise other
    table = _bytes_table(
        [(handle.name, handle.resident_bytes, bytes_under(plan, handle)) for handle in own]
    )
    streaming = ""
    for handle in own:
        is_streamable = handle.unstreamable is None and handle.name not in plan.streamed
        if handle.kind == "optimizer" and is_streamable and plan.on_device(handle.name):
            streaming = "stream the optimizer's state (policy option optimizer_in='streamed'), "
    error = DeviceMemoryError(
        f"phase {view.phase!r} needs {mib(needed_bytes)} on the device, the budget is "
        f"{mib(limit_bytes)}.\n{table}\n"
        f'Name the handles that it needs together: manager.phase("{view.phase}", only=[...]), '
        f"{streaming}or raise budget_bytes."
    )
    error.wanted_bytes = needed_bytes
    raise error


def _bytes_table(rows: Iterable[tuple[str, int, int]]) -> str:
    """A table of the bytes that each handle holds and wants, largest first."""
    lines = [f"  {'handle':<24} {'holds':>18} {'wants':>18}"]
    largest_first = sorted(rows, key=lambda row: -max(row[1:]))
    for name, held_bytes, wanted_bytes in largest_first:
        lines.append(f"  {name:<24} {held_bytes:>18,} {wanted_bytes:>18,}")
    return "\n".join(lines)


def without_surplus(view: View, plan: Plan, needed: Plan) -> Plan:
    """Make a plan fit: offload the cheapest handles that `needed` does not have on the device, just
    enough for the missing bytes."""
    freed = {}
    for handle in view.handles.values():
        if plan[handle.name] is not State.GPU_RESIDENT:
            continue
        if needed[handle.name] not in (State.CPU_OFFLOADED, State.GPU_RESIDENT):
            continue
        nbytes = bytes_under(plan, handle) - bytes_under(needed, handle)
        if nbytes > 0:
            freed[handle.name] = nbytes
    missing_bytes = view.bytes_of(plan) - view.budget_bytes
    leaving = view.evicted(freed, missing_bytes)
    return needed.limited_to(leaving, plan)
