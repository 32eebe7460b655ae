"""The policy `cyclic` case by case: a worker that trains with PPO, what stays, and what arrives early."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from placement import HandleView, Plan, View
from placement.policies import Cyclic
from tests.support.views import after, handle, used
from tests.support.worker import GPU, TRAIN

STEP = ("rollout", "log_prob", "values", "train", "weight_sync")


WORKER = (
    handle("actor"),
    handle("actor.optimizer", "optimizer", "actor", owners=("actor",), num_bytes=60),
    handle("ref", readonly=True),
    handle("critic"),
    handle("critic.optimizer", "optimizer", "critic", owners=("critic",), num_bytes=60),
    handle("engine", "engine", "rollout", num_bytes=100, can_prefetch=False),
)


def view(phase: str, *handles: HandleView, **fields: Any) -> View:
    return View(**{"phase": phase, "handles": {h.name: h for h in handles or WORKER}, "budget_bytes": 150, **fields})


def resident(*names: str, of: tuple[HandleView, ...] = WORKER) -> tuple[HandleView, ...]:
    return tuple(replace(h, state=GPU, resident_bytes=h.num_bytes) if h.name in names else h for h in of)


def coming(phase: str, cycle: tuple[str, ...] = STEP) -> tuple[str, ...]:
    at = cycle.index(phase)
    return cycle[at + 1 :] + cycle[:at]


def steady(policy: Cyclic, budget_bytes: int, phases: tuple[str, ...]) -> dict[str, Plan]:
    """The plans of the third cycle."""
    now, plans = view(phases[0], budget_bytes=budget_bytes), {}
    for number, phase in enumerate(phases * 3):
        upcoming = coming(phase, phases) if number >= len(phases) else ()
        now = replace(now, phase=phase, upcoming=upcoming)
        plans[phase] = policy.plan(now)
        now = after(now, plans[phase])
    return plans


# --- a cycle that is known


def test_an_engine_stays_in_part() -> None:
    engine = handle("engine", "engine", "rollout", num_bytes=100, can_prefetch=False, tags={"weights": 30, "kv_cache": 70})
    there = replace(engine, state=GPU, resident_bytes=100, resident_tags=frozenset(engine.tags))
    now = view("train", *WORKER[:5], there, upcoming=coming("train"), budget_bytes=175)
    plan = Cyclic().plan(now)
    assert (plan["engine"], dict(plan.parts)) == (GPU, {"engine": {"weights"}})
    weights = replace(there, resident_bytes=30, resident_tags=frozenset({"weights"}))
    assert not Cyclic().plan(view("rollout", *WORKER[:5], weights, upcoming=coming("rollout"))).parts
    syncing = view("weight_sync", *WORKER[:5], there, upcoming=coming("weight_sync"))
    assert not Cyclic().plan(syncing).parts  # the cache stays as well, because it fits
    assert Cyclic().plan(replace(syncing, budget_bytes=50)).parts == {"engine": {"weights"}}


def test_what_was_trained_and_leaves_is_saved_while_the_phase_computes() -> None:
    handles = (handle("actor"), handle("actor.optimizer", "optimizer", "actor", owners=("actor",), num_bytes=60), *WORKER[3:4], WORKER[5])
    now = view("values", *resident("actor", "actor.optimizer", of=handles), budget_bytes=60, upcoming=("rollout", "train"))
    plan = Cyclic().plan(now)
    assert (used(plan), dict(plan.prefetch)) == ({"critic": GPU}, {"actor.optimizer": 50, "actor": 10})
    there = after(now, plan)
    assert Cyclic().plan(there) == plan
    full = replace(there, phase="rollout", upcoming=("train", "values"), budget_bytes=100)
    assert not Cyclic().plan(full).prefetch  # the memory goes, and nothing is left to save


def test_streamed_state_neither_stays_nor_arrives_early_in_the_phase_that_streams_it() -> None:
    """`restore` needs the optimizer as a whole. In `train` it is TRAINING without being on the device."""
    policy, phases = Cyclic(optimizer_in="streamed"), ("rollout", "train", "restore")
    plans = steady(policy, 1000, phases)
    trained = {"actor": TRAIN, "actor.optimizer": TRAIN, "critic": TRAIN, "critic.optimizer": TRAIN}
    assert {name: plans["train"][name] for name in trained} == {name: plans["restore"][name] for name in trained} == trained
    assert plans["train"].streamed == {"actor.optimizer", "critic.optimizer"}
    assert not plans["train"].prefetch
    assert not plans["restore"].streamed
    assert dict(plans["rollout"].prefetch) == {"actor.optimizer": 60, "critic.optimizer": 60}  # `restore` wrote them: they are saved


# --- outside a known cycle


def test_outside_every_phase_it_keeps_and_prefetches() -> None:
    now = view("idle", *resident("engine", "actor"), upcoming=STEP)
    plan = Cyclic().plan(now)
    assert used(plan) == {"engine": GPU, "actor": GPU}
    assert sum(plan.prefetch.values()) == 40
    assert next(iter(plan.prefetch)) == "ref"  # for log_prob, before the critic
    empty = Cyclic(idle="empty").plan(now)
    assert (used(empty), dict(empty.prefetch)) == ({}, {})
    assert used(Cyclic(idle="empty").plan(replace(now, phase="rollout", upcoming=coming("rollout")))) == {"engine": GPU, "actor": GPU}


def test_a_cycle_that_is_given_need_not_be_seen() -> None:
    policy = Cyclic(cycle=STEP)
    first = view("idle")
    assert policy.plan(first).prefetch == Cyclic().plan(replace(first, upcoming=STEP)).prefetch != {}
    for phase in STEP:
        now = view(phase, *resident("actor", "ref"))
        assert policy.plan(now) == Cyclic().plan(replace(now, upcoming=coming(phase)))
    inserted = view("eval", *resident("actor", "engine"), upcoming=("log_prob", "values"))
    assert policy.plan(inserted) == Cyclic().plan(replace(inserted, upcoming=(*coming("rollout"), "rollout")))


def test_in_a_phase_inside_another_one_stays_what_that_one_needs() -> None:
    names = [h.name for h in WORKER[:5]]
    now = view("reward", *resident(*names), enclosing="train", upcoming=("rollout", "train"), budget_bytes=150)
    assert used(Cyclic().plan(now)) == dict.fromkeys(names, GPU)
    tight = replace(now, phase="ref_log_prob", budget_bytes=145)
    assert used(Cyclic().plan(tight)).keys() == {*names} - {"critic"}
    saving = view("checkpoint", *resident(*names), enclosing="train", upcoming=("rollout", "train"))
    assert used(Cyclic().plan(saving)) == dict.fromkeys(names, GPU)


def test_in_a_checkpoint_nothing_moves_but_what_arrives_early() -> None:
    phases = ("rollout", "checkpoint", "train")
    now = view("checkpoint", *resident("engine"), upcoming=coming("checkpoint", phases))
    plan = Cyclic().plan(now)
    assert used(plan) == {"engine": GPU}
    assert sum(plan.prefetch.values()) == 50


def test_a_phase_never_seen_takes_no_more_than_it_needs() -> None:
    there = resident("actor", "actor.optimizer", "critic", "ref")
    now = view("distill", *there, upcoming=STEP, phases={"distill": ("critic",)}, budget_bytes=90)
    plan = Cyclic().plan(now)
    assert used(plan) == {"critic": GPU, "ref": GPU}
    assert plan.prefetch == {"actor": 10, "actor.optimizer": 60}  # saved, and there when they are needed
    plan = Cyclic().plan(replace(now, budget_bytes=30))
    assert (used(plan), dict(plan.prefetch)) == ({"critic": GPU, "ref": GPU}, {"actor": 10, "actor.optimizer": 20})
    assert used(Cyclic().plan(replace(now, budget_bytes=15))).keys() == {"critic"}


def test_options() -> None:
    with pytest.raises(ValueError, match="idle must be one of keep, empty, not 'off'"):
        Cyclic(idle="off")  # type: ignore[arg-type]
    for wrong in ("rollout", ("rollout", 3)):
        with pytest.raises(ValueError, match="cycle must be the names of phases in order"):
            Cyclic(cycle=wrong)  # type: ignore[arg-type]
