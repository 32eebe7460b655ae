"""The shipped policies phase by phase, and `cyclic` case by case: a worker that trains with PPO,
what stays, and what arrives early."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from placement import HandleView, Plan, PolicyError, State, View
from placement.core.states import PHASES
from placement.policies import AsyncRollout, Colocated, Cyclic, Resident
from tests.support.views import after, handle, used
from tests.support.worker import GPU, OFF, SYNC, TRAIN


def view(phase: str, *handles: HandleView, **fields: Any) -> View:
    return View(
        **{"phase": phase, "handles": {h.name: h for h in handles}, "budget_bytes": 1000, **fields}
    )


WORKER = (
    handle("actor"),
    handle("actor.optimizer", "optimizer", "actor", owners=("actor",), num_bytes=60),
    handle("ref", readonly=True),
    handle("critic"),
    handle("critic.optimizer", "optimizer", "critic", owners=("critic",), num_bytes=60),
    handle("reward", readonly=True),
    handle("teacher", readonly=True),
    handle("engine", "engine", "rollout", num_bytes=100),
)


TRAINED = {"actor": TRAIN, "actor.optimizer": TRAIN, "critic": TRAIN, "critic.optimizer": TRAIN}
TABLE: dict[str, dict[str, State]] = {
    "idle": {},
    "rollout": {"engine": GPU},
    "eval": {"engine": GPU},
    "weight_sync": {"actor": SYNC, "engine": GPU},
    "log_prob": {"actor": GPU, "ref": GPU},
    "ref_log_prob": {"ref": GPU},
    "values": {"critic": GPU},
    "reward": {"reward": GPU},
    "train": TRAINED,
    "optimizer_step": TRAINED,
    "restore": TRAINED,
    "checkpoint": {},
}


class TestColocated:
    @pytest.mark.parametrize("phase", ["rollout", "eval"])
    def test_the_actor_generates_where_no_engine_is_registered(self, phase: str) -> None:
        assert used(Colocated().plan(view(phase, *WORKER[:-1]))) == {"actor": GPU}

    def test_a_module_that_no_optimizer_steps_is_not_trained(self) -> None:
        tower = handle("tower", role="actor")
        assert used(Colocated().plan(view("train", *WORKER, tower))) == TRAINED

    def test_the_optimizer_in_its_step_only(self) -> None:
        policy = Colocated(optimizer_in="optimizer_step")
        assert used(policy.plan(view("train", *WORKER))) == {"actor": TRAIN, "critic": TRAIN}
        assert used(policy.plan(view("optimizer_step", *WORKER, enclosing="train"))) == TRAINED
        assert used(policy.plan(view("restore", *WORKER))) == TRAINED

    def test_a_streamed_sync_loads_no_actor(self) -> None:
        plan = Colocated(stream_sync=True).plan(view("weight_sync", *WORKER))
        assert used(plan) == {"actor": SYNC, "engine": GPU}
        assert plan.streamed == {"actor"}
        assert not plan.on_device("actor")

    def test_an_external_actor_is_published_as_it_lies(self) -> None:
        handles = (replace(WORKER[0], external=True, num_bytes=0), *WORKER[1:])
        plan = Colocated(stream_sync=True).plan(view("weight_sync", *handles))
        assert used(plan) == {"actor": SYNC, "engine": GPU}
        assert not plan.streamed

    @pytest.mark.parametrize("state", State)
    def test_a_checkpoint_moves_nothing(self, state: State) -> None:
        there = view(
            "checkpoint",
            *(
                replace(h, state=state, resident_bytes=0 if state is OFF else h.num_bytes)
                for h in WORKER
            ),
        )
        plan = Colocated().plan(there)
        assert set(plan.targets.values()) == {state}
        assert not plan.streamed

    def test_a_checkpoint_brings_what_its_framework_gathers_on_the_device_for_it(self) -> None:
        gathering = [replace(h, gathers=h.name.startswith("actor")) for h in WORKER]
        for policy in (Colocated(), Resident(), AsyncRollout()):
            plan = policy.plan(view("checkpoint", *gathering))
            assert used(plan) == {"actor": GPU, "actor.optimizer": GPU}
            training = after(view("train", *gathering), Colocated().plan(view("train", *gathering)))
            assert used(policy.plan(replace(training, phase="checkpoint"))) == TRAINED
            unbuilt = [replace(h, built=False) for h in gathering]
            assert not used(policy.plan(view("checkpoint", *unbuilt)))

    def test_a_users_phase_loads_the_models_of_its_roles(self) -> None:
        plan = Colocated().plan(view("distill", *WORKER, phases={"distill": ("teacher", "actor")}))
        assert used(plan) == {"teacher": GPU, "actor": GPU}

    def test_an_unknown_phase_names_the_nearest(self) -> None:
        with pytest.raises(
            PolicyError,
            match=r"unknown phase 'trian'. "
            r"Did "
            r"you "
            r"mean "
            r"'train'\?.*rollout.*distill",
        ):
            Colocated().plan(view("trian", *WORKER, phases={"distill": ("teacher",)}))


def resident(*handles: HandleView) -> tuple[HandleView, ...]:
    return tuple(replace(h, state=GPU, resident_bytes=h.num_bytes) for h in handles)


class TestResident:
    @pytest.mark.parametrize("phase", PHASES)
    def test_with_room_for_everything_nothing_ever_leaves(self, phase: str) -> None:
        plan = Resident().plan(view(phase, *resident(*WORKER)))
        assert dict(plan.targets) == {h.name: GPU for h in WORKER} | TABLE[phase]

    def test_idle_loads_what_fits_in_the_order_of_registration(self) -> None:
        plan = Resident().plan(view("idle", *WORKER, budget_bytes=90))
        assert used(plan) == {"actor": GPU, "actor.optimizer": GPU, "ref": GPU, "critic": GPU}

    def test_an_unbuilt_handle_is_not_built_because_it_would_fit(self) -> None:
        lazy = replace(WORKER[3], built=False, num_bytes=0)
        assert used(Resident().plan(view("idle", WORKER[0], lazy))) == {"actor": GPU}
        assert used(Resident().plan(view("values", WORKER[0], lazy))) == {"critic": GPU}


class TestAsyncRollout:
    @pytest.mark.parametrize("phase", PHASES)
    def test_a_rollout_worker_never_touches_a_trainer(self, phase: str) -> None:
        plan = AsyncRollout().plan(view(phase, *WORKER, worker_role="rollout"))
        assert plan.targets.keys() == {h.name for h in WORKER}
        assert set(used(plan)) <= {"engine"}
        assert ("engine" in used(plan)) == (phase in ("idle", "rollout", "eval", "weight_sync"))

    @pytest.mark.parametrize("phase", PHASES)
    def test_a_trainer_keeps_its_own_and_never_touches_the_engine(self, phase: str) -> None:
        handles = (*resident(*WORKER[:-1]), WORKER[-1])
        plan = AsyncRollout().plan(view(phase, *handles, worker_role="trainer"))
        expected = {h.name: GPU for h in WORKER} | TABLE[phase] | {"engine": OFF}
        assert dict(plan.targets) == expected


STEP = ("rollout", "log_prob", "values", "train", "weight_sync")


CYCLING = (*WORKER[:5], replace(WORKER[-1], can_prefetch=False))


def turn(phase: str, *handles: HandleView, **fields: Any) -> View:
    return view(phase, *(handles or CYCLING), **{"budget_bytes": 150, **fields})


def staying(*names: str, of: tuple[HandleView, ...] = CYCLING) -> tuple[HandleView, ...]:
    return tuple(
        replace(h, state=GPU, resident_bytes=h.num_bytes) if h.name in names else h for h in of
    )


def coming(phase: str, cycle: tuple[str, ...] = STEP) -> tuple[str, ...]:
    at = cycle.index(phase)
    return cycle[at + 1 :] + cycle[:at]


def steady(policy: Cyclic, budget_bytes: int, phases: tuple[str, ...]) -> dict[str, Plan]:
    """The plans of the third cycle."""
    now, plans = turn(phases[0], budget_bytes=budget_bytes), {}
    for number, phase in enumerate(phases * 3):
        upcoming = coming(phase, phases) if number >= len(phases) else ()
        now = replace(now, phase=phase, upcoming=upcoming)
        plans[phase] = policy.plan(now)
        now = after(now, plans[phase])
    return plans


# --- a cycle that is known


def test_an_engine_stays_in_part() -> None:
    engine = handle(
        "engine",
        "engine",
        "rollout",
        num_bytes=100,
        can_prefetch=False,
        tags={"weights": 30, "kv_cache": 70},
    )
    there = replace(engine, state=GPU, resident_bytes=100, resident_tags=frozenset(engine.tags))
    now = turn("train", *CYCLING[:5], there, upcoming=coming("train"), budget_bytes=175)
    plan = Cyclic().plan(now)
    assert (plan["engine"], dict(plan.parts)) == (GPU, {"engine": {"weights"}})
    weights = replace(there, resident_bytes=30, resident_tags=frozenset({"weights"}))
    assert (
        not Cyclic().plan(turn("rollout", *CYCLING[:5], weights, upcoming=coming("rollout"))).parts
    )
    syncing = turn("weight_sync", *CYCLING[:5], there, upcoming=coming("weight_sync"))
    assert not Cyclic().plan(syncing).parts  # the cache stays as well, because it fits
    assert Cyclic().plan(replace(syncing, budget_bytes=50)).parts == {"engine": {"weights"}}


def test_what_was_trained_and_leaves_is_saved_while_the_phase_computes() -> None:
    handles = (
        handle("actor"),
        handle("actor.optimizer", "optimizer", "actor", owners=("actor",), num_bytes=60),
        *CYCLING[3:4],
        CYCLING[5],
    )
    now = turn(
        "values",
        *staying("actor", "actor.optimizer", of=handles),
        budget_bytes=60,
        upcoming=("rollout", "train"),
    )
    plan = Cyclic().plan(now)
    assert (used(plan), dict(plan.prefetch)) == (
        {"critic": GPU},
        {"actor.optimizer": 50, "actor": 10},
    )
    there = after(now, plan)
    assert Cyclic().plan(there) == plan
    full = replace(there, phase="rollout", upcoming=("train", "values"), budget_bytes=100)
    assert not Cyclic().plan(full).prefetch  # the memory goes, and nothing is left to save


def test_streamed_state_neither_stays_nor_arrives_early_in_the_phase_that_streams_it() -> None:
    """`restore` needs the optimizer as a whole. In `train` it is TRAINING without being on the
    device."""
    policy, phases = Cyclic(optimizer_in="streamed"), ("rollout", "train", "restore")
    plans = steady(policy, 1000, phases)
    trained = {"actor": TRAIN, "actor.optimizer": TRAIN, "critic": TRAIN, "critic.optimizer": TRAIN}
    assert (
        {name: plans["train"][name] for name in trained}
        == {name: plans["restore"][name] for name in trained}
        == trained
    )
    assert plans["train"].streamed == {"actor.optimizer", "critic.optimizer"}
    assert not plans["train"].prefetch
    assert not plans["restore"].streamed
    # `restore` wrote them: they are saved
    assert dict(plans["rollout"].prefetch) == {"actor.optimizer": 60, "critic.optimizer": 60}


# --- outside a known cycle


def test_outside_every_phase_it_keeps_and_prefetches() -> None:
    now = turn("idle", *staying("engine", "actor"), upcoming=STEP)
    plan = Cyclic().plan(now)
    assert used(plan) == {"engine": GPU, "actor": GPU}
    assert sum(plan.prefetch.values()) == 40
    assert next(iter(plan.prefetch)) == "ref"  # for log_prob, before the critic
    empty = Cyclic(idle="empty").plan(now)
    assert (used(empty), dict(empty.prefetch)) == ({}, {})
    assert used(
        Cyclic(idle="empty").plan(replace(now, phase="rollout", upcoming=coming("rollout")))
    ) == {"engine": GPU, "actor": GPU}


def test_a_cycle_that_is_given_need_not_be_seen() -> None:
    policy = Cyclic(cycle=STEP)
    first = turn("idle")
    assert (
        policy.plan(first).prefetch == Cyclic().plan(replace(first, upcoming=STEP)).prefetch != {}
    )
    for phase in STEP:
        now = turn(phase, *staying("actor", "ref"))
        assert policy.plan(now) == Cyclic().plan(replace(now, upcoming=coming(phase)))
    inserted = turn("eval", *staying("actor", "engine"), upcoming=("log_prob", "values"))
    assert policy.plan(inserted) == Cyclic().plan(
        replace(inserted, upcoming=(*coming("rollout"), "rollout"))
    )


def test_in_a_phase_inside_another_one_stays_what_that_one_needs() -> None:
    names = [h.name for h in CYCLING[:5]]
    now = turn(
        "reward",
        *staying(*names),
        enclosing="train",
        upcoming=("rollout", "train"),
        budget_bytes=150,
    )
    assert used(Cyclic().plan(now)) == dict.fromkeys(names, GPU)
    tight = replace(now, phase="ref_log_prob", budget_bytes=145)
    assert used(Cyclic().plan(tight)).keys() == {*names} - {"critic"}
    saving = turn("checkpoint", *staying(*names), enclosing="train", upcoming=("rollout", "train"))
    assert used(Cyclic().plan(saving)) == dict.fromkeys(names, GPU)


def test_in_a_checkpoint_nothing_moves_but_what_arrives_early() -> None:
    phases = ("rollout", "checkpoint", "train")
    now = turn("checkpoint", *staying("engine"), upcoming=coming("checkpoint", phases))
    plan = Cyclic().plan(now)
    assert used(plan) == {"engine": GPU}
    assert sum(plan.prefetch.values()) == 50


def test_a_phase_never_seen_takes_no_more_than_it_needs() -> None:
    there = staying("actor", "actor.optimizer", "critic", "ref")
    now = turn("distill", *there, upcoming=STEP, phases={"distill": ("critic",)}, budget_bytes=90)
    plan = Cyclic().plan(now)
    assert used(plan) == {"critic": GPU, "ref": GPU}
    # saved, and there when they are needed
    assert plan.prefetch == {"actor": 10, "actor.optimizer": 60}
    plan = Cyclic().plan(replace(now, budget_bytes=30))
    assert (used(plan), dict(plan.prefetch)) == (
        {"critic": GPU, "ref": GPU},
        {"actor": 10, "actor.optimizer": 20},
    )
    assert used(Cyclic().plan(replace(now, budget_bytes=15))).keys() == {"critic"}


def test_options() -> None:
    with pytest.raises(ValueError, match="idle must be one of keep, empty, not 'off'"):
        Cyclic(idle="off")  # type: ignore[arg-type]
    for wrong in ("rollout", ("rollout", 3)):
        with pytest.raises(ValueError, match="cycle must be the names of phases in order"):
            Cyclic(cycle=wrong)  # type: ignore[arg-type]
