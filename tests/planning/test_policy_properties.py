"""What holds for every shipped policy in every situation: plans are total, legal, pure, stable and
within the budget."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement import HandleView, State, View
from placement.core.states import KINDS, PHASES, ROLES, WORKER_ROLES
from placement.policies import AsyncRollout, Colocated, Cyclic, Policy, Resident
from tests.support.views import after
from tests.support.worker import GPU, OFF, SYNC, TRAIN

# Made once: Hypothesis asks each new strategy what it is made of.
NAMES = st.lists(st.sampled_from("abcdefgh"), unique=True, max_size=8)
HANDLE = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(KINDS),
        "role": st.sampled_from([*ROLES, None]),
        "state": st.sampled_from(State),
        "num_bytes": st.integers(0, 20),
        "owners": st.frozensets(st.integers(0, 7)),
        "readonly": st.booleans(),
        "external": st.booleans(),
        "built": st.booleans(),
        "kept": st.booleans(),
    }
)
BUDGETS = st.integers(0, 80)
WORKERS = st.sampled_from(WORKER_ROLES)
UPCOMING = st.lists(st.sampled_from(PHASES), max_size=6).map(tuple)


@st.composite
def views(draw: st.DrawFn, phases: st.SearchStrategy[str]) -> View:
    names = draw(NAMES)
    handles = []
    for name in names:
        drawn = draw(HANDLE)
        readonly = drawn["kind"] == "module" and drawn["readonly"]
        state = GPU if readonly and drawn["state"] is TRAIN else drawn["state"]
        owners = tuple(names[number] for number in sorted(drawn["owners"]) if number < len(names))
        drawn |= {
            "owners": owners if drawn["kind"] == "optimizer" else (),
            "readonly": readonly,
            "state": state,
        }
        handles.append(
            HandleView(
                name=name,
                resident_bytes=0 if drawn["state"] is OFF else drawn["num_bytes"],
                **drawn,
            )
        )
    return View(
        phase=draw(phases),
        handles={h.name: h for h in handles},
        budget_bytes=draw(BUDGETS),
        upcoming=draw(UPCOMING),
        worker_role=draw(WORKERS),
        phases=OWN_PHASES,
    )


OWN_PHASES = {"distill": ("actor", "teacher"), "nothing": ()}
POLICIES = [
    Colocated(),
    Colocated("optimizer_step", stream_sync=True),
    Resident(),
    Resident("optimizer_step", drop_gradients=True),
    AsyncRollout(),
    AsyncRollout("optimizer_step", stream_sync=True, drop_gradients=True),
    Colocated("optimizer_step", drop_gradients=True),
    Cyclic(),
    Cyclic(cycle=("rollout", "log_prob", "train", "distill"), drop_gradients=True),
]
ALL = st.sampled_from([*PHASES, *OWN_PHASES])
MOVING = st.sampled_from([p for p in (*PHASES, *OWN_PHASES) if p != "checkpoint"])


def vars_of(given: View) -> dict[str, Any]:
    return {
        "phase": given.phase,
        "handles": dict(given.handles),
        "budget": given.budget_bytes,
        "phases": dict(given.phases),
    }


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: f"{p.name}-{POLICIES.index(p)}")
@settings(deadline=None, max_examples=30)
@given(given=views(ALL))
def test_plans_are_pure_total_legal_and_stable(policy: Policy, given: View) -> None:
    """Planning the same phase again from where the first plan led changes nothing: a phase
    transition repeated moves no byte."""
    before = copy.deepcopy(vars_of(given))
    plan = policy.plan(given)
    assert policy.plan(given) == plan
    assert vars_of(given) == before
    assert plan.targets.keys() == given.handles.keys()
    for h in given.handles.values():
        assert not (plan[h.name] is TRAIN and h.readonly)
    assert all(plan[name] is SYNC for name in plan.streamed)
    assert all(
        plan[name] is not TRAIN and given.handles[name].kind != "optimizer" for name in plan.dropped
    )
    if given.phase != "checkpoint":
        assert not any(given.handles[name].external for name in plan.streamed)
        assert {n for n, s in plan.targets.items() if s is SYNC} <= {
            h.name for h in given.with_role("actor")
        }
        if given.fits(plan):
            assert policy.plan(after(given, plan)) == plan


@pytest.mark.parametrize("policy", [Resident(), Resident("optimizer_step")])
@settings(deadline=None, max_examples=30)
@given(given=views(MOVING))
def test_resident_stays_within_the_budget_whenever_the_need_fits(
    policy: Resident, given: View
) -> None:
    need = Colocated(policy.optimizer_in).plan(given)
    plan = policy.plan(given)
    if given.fits(need):
        assert given.fits(plan)
        for h in given.handles.values():  # and evicts for the deficit only
            if h.state is not OFF and plan[h.name] is OFF and h.built and not h.external:
                assert not given.fits(plan, h)
    else:
        assert all(plan[n] is need[n] or given.handles[n].num_bytes == 0 for n in need.targets)


@pytest.mark.parametrize(
    "policy", [Cyclic(), Cyclic(cycle=("rollout", "train", "checkpoint"), idle="empty")]
)
@settings(deadline=None, max_examples=60)
@given(given=views(ALL))
def test_cyclic_stays_within_the_budget_with_what_arrives_early(
    policy: Cyclic, given: View
) -> None:
    need, plan = Colocated().plan(given), policy.plan(given)
    if given.fits(need):
        room = given.budget_bytes - given.bytes_of(plan)
        coming = [
            nbytes
            for name, nbytes in plan.prefetch.items()
            if not given.handles[name].resident_bytes
        ]
        # what leaves may hold its bytes there until they are saved
        assert max(sum(coming), *plan.prefetch.values(), 0) <= room
    else:
        assert plan == need
    for name, nbytes in plan.prefetch.items():
        assert plan[name] is OFF
        assert 0 < nbytes <= given.handles[name].num_bytes
        assert given.handles[name].built
        assert not given.handles[name].external
    # nothing is on the device that was not there and is not needed
    for name, state in plan.targets.items():
        assert state is need[name] or (state is GPU and given.handles[name].state is not OFF)


def test_what_is_kept_because_it_would_come_early_takes_its_room() -> None:
    """`d` is there, and the next phase needs it. So it stays, and nothing of `e` is left to be
    saved in the room that `d` has."""
    d = HandleView(
        name="d",
        kind="module",
        role="actor",
        state=GPU,
        num_bytes=16,
        resident_bytes=16,
        readonly=True,
        can_prefetch=True,
    )
    e = HandleView(
        name="e",
        kind="module",
        role="actor",
        state=GPU,
        num_bytes=1,
        resident_bytes=1,
        can_prefetch=True,
    )
    f = HandleView(
        name="f",
        kind="module",
        role="rollout",
        state=OFF,
        num_bytes=12,
        resident_bytes=0,
        can_prefetch=True,
    )
    g = HandleView(
        name="g",
        kind="optimizer",
        role="actor",
        state=OFF,
        num_bytes=1,
        resident_bytes=0,
        can_prefetch=True,
    )
    h = HandleView(
        name="h",
        kind="optimizer",
        role="actor",
        state=OFF,
        num_bytes=0,
        resident_bytes=0,
        can_prefetch=True,
        owners=("d",),
    )
    given = View(
        phase="rollout",
        handles={each.name: each for each in (d, e, f, g, h)},
        budget_bytes=28,
        worker_role="trainer",
    )
    plan = Cyclic(cycle=("rollout", "train", "checkpoint"), idle="empty").plan(given)
    assert plan["d"] is GPU
    assert given.bytes_of(plan) + sum(plan.prefetch.values()) <= 28
