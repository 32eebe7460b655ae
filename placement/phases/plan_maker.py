"""The plan of a phase that is about to begin: asked of the policy, and checked before a byte
moves."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from placement.core.errors import BrokenHandleError, EngineError, PhaseError, PlacementError
from placement.core.journal import Journal
from placement.core.states import IDLE, Plan, State, View
from placement.engines.tagged import Residency
from placement.group.vote import GroupVote, Suspended
from placement.phases.phase import OpenPhase, innermost
from placement.planning.planner import (
    Planner,
    check_fits,
    meant,
    unknown_handle,
    with_kept,
    without_surplus,
)
from placement.registration.registry import Registry


class PhaseRequest(NamedTuple):
    """A phase that is to begin, and the phases and keeps around it."""

    name: str
    only: tuple[str, ...] | None
    # the plan for the handles that `only` leaves out, without kept handles; None where `only` is
    plan_of_others: Plan | None
    around: tuple[OpenPhase, ...]  # the enclosing phases, outermost first
    kept: frozenset[str]  # names of handles to keep, if the phase's plan takes them over


class PlanMaker:
    """Makes the plans of one manager's phases, and builds the `Lazy` objects that they need."""

    def __init__(self, planner: Planner, registry: Registry, journal: Journal) -> None:
        self._planner = planner
        self._registry = registry
        self._handles = registry.handles
        self._journal = journal
        self.latest = Plan({})  # the plan that was made last, also one that was refused

    def make(self, verb: str, request: PhaseRequest) -> tuple[Plan, int]:
        """The plan for a phase, and the device bytes that the budget leaves beside it (see
        `check_fits`). `verb`: "enter" or "switch to", which every rank of a group must do alike.
        Raises PlacementError: there is no plan, it does not fit, or it would generate with an
        engine that cannot."""
        try:
            view, plan = self.ask(request)
            for handle in list(self._handles.values()):
                if handle.adapter is None and plan.targets[handle.name] is not State.CPU_OFFLOADED:
                    self._registry.build(handle)
                    view, plan = self.ask(request)  # ask again, because its size is known only now
            self.latest = plan = self.agreed(request, plan)
            room_bytes = check_fits(view, plan, self._planner)
        except PlacementError:
            self._journal.decisions["refuse"] += 1
            raise
        self._refuse_engines(request.name, plan)
        return plan, room_bytes

    def agreed(self, request: PhaseRequest, plan: Plan) -> Plan:
        """The plan that all ranks carry out. One process carries out its own."""
        return plan

    def ask(self, request: PhaseRequest) -> tuple[View, Plan]:
        """The view that the policy was shown, and its plan, limited to what `only` names."""
        view, plan = self._planner.ask(request.name, innermost(request.around), request.kept)
        for name in request.only or ():
            if name not in self._handles:
                raise PhaseError(f"only=: {unknown_handle(name, self._handles)}")
        chosen = meant(request.only, self._handles)
        if chosen is None or request.plan_of_others is None:
            return view, plan
        taken_over = [name for name in request.kept if plan.on_device(name)]
        plan = plan.limited_to(chosen, with_kept(request.plan_of_others, taken_over, self._handles))
        if view.fits(plan):
            return view, plan
        return view, without_surplus(view, plan, self._needed(request))

    def _needed(self, request: PhaseRequest) -> Plan:
        """The plan with only what is needed: the phase decides about handles in `only`, the
        enclosing phases about the others."""
        needed = self._planner.needed(IDLE, None, request.kept)
        enclosing = None
        levels = [(phase.name, phase.only) for phase in request.around]
        for name, only in [*levels, (request.name, request.only)]:
            asked = self._planner.needed(name, enclosing, request.kept)
            chosen = meant(only, self._handles)
            needed = asked if chosen is None else asked.limited_to(chosen, needed)
            enclosing = name
        return needed

    def _refuse_engines(self, name: str, plan: Plan) -> None:
        """Raise for a phase that would generate with an engine that cannot: EngineError if it needs
        weights, BrokenHandleError if its state is unknown."""
        roles = self._planner.computing_roles(name)
        for handle in self._handles.values():
            if (
                handle.kind != "engine"
                or not plan.on_device(handle.name)
                or (handle.role or "rollout") not in roles
            ):
                continue
            storage, stale = handle.storage, handle.stale
            # not `handle.broken`: the user may have said meanwhile where its memory is
            if isinstance(storage, Residency) and storage.doubt is not None:
                raise BrokenHandleError(
                    f"phase {name!r} cannot use {handle.name!r}: {storage.doubt}"
                )
            if stale is not None:
                raise EngineError(
                    f"the weights of {handle.name!r} mean nothing now, so phase {name!r} cannot "
                    f"use it: {stale}. Publish first: inside manager.phase('weight_sync'), pass "
                    "every bucket of the actor's weights() to its update_weights()"
                )


class GroupPlanMaker(PlanMaker):
    """The `PlanMaker` of a rank. All ranks base their plans on the least budget of the group."""

    def __init__(
        self, planner: Planner, registry: Registry, journal: Journal, vote: GroupVote
    ) -> None:
        super().__init__(planner, registry, journal)
        self.vote = vote

    def make(self, verb: str, request: PhaseRequest) -> tuple[Plan, int]:
        action = f"{verb} {request.name}"
        if request.only is not None:
            action += f" only={','.join(sorted(request.only))}"
        self._planner.least = basis = self.vote.propose(
            action,
            lambda: self._planner.budget_bytes(request.name),
            self._planner.whereabouts,
        )
        self._planner.least_bytes[request.name] = basis.budget_bytes
        if basis.suspension is not None:  # all ranks hear of it, and end this epoch with no phase
            self.vote.agree(Plan({}))
            self.vote.agreed = basis.suspension
            raise Suspended
        return super().make(verb, request)

    def agreed(self, request: PhaseRequest, plan: Plan) -> Plan:
        """The plan without what merely stays on this rank's device and not on every other's,
        streaming what any rank streams. A policy that keeps what is on the device, or streams what
        does not fit, gives another plan to a rank that was restarted, or has larger handles."""
        if not self.vote.group.compares_plans:
            return plan
        chosen = meant(request.only, self._handles)
        needed = self._planner.needed(
            request.name, innermost(request.around), request.kept, at_rest=True
        )
        # the tag, by the handle's name and a text of state and tag, which the ranks compare
        staying: dict[tuple[str, str], str] = {}
        for name, state in plan.targets.items():
            tags = self._tags(name, plan)
            if chosen is None or name in chosen:
                tags -= self._tags(name, needed)  # those that are left merely stay
            for tag in tags:
                staying[name, f"{state.value} {tag}"] = tag
        staying_everywhere, streamed = self.vote.in_common(staying, plan.streamed)
        for name, text in staying.keys() - staying_everywhere:
            tags = self._tags(name, plan) - {staying[name, text]}
            parts = {**plan.parts, name: tags}
            plan = replace(plan, parts=parts) if tags else plan.giving_up(name)
        used = {name for name, state in plan.targets.items() if state is not State.CPU_OFFLOADED}
        return replace(plan, streamed=plan.streamed | (streamed & used))

    def _tags(self, name: str, plan: Plan) -> frozenset[str]:
        """The tags of an engine that a plan uses. Another handle that it uses has one, the empty
        text."""
        if plan.targets[name] is State.CPU_OFFLOADED:
            return frozenset()
        all_tags = frozenset(self._handles[name].storage.tags or ("",))
        return plan.parts.get(name, all_tags)
