"""The shipped policies phase by phase, the properties of every policy, a user's own, and how a name becomes a policy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from placement import HandleView, PolicyError, State, View
from placement.core.states import PHASES
from placement.policies import AsyncRollout, Colocated, Resident
from tests.support.views import after, handle, used
from tests.support.worker import GPU, OFF, SYNC, TRAIN


def view(phase: str, *handles: HandleView, **fields: Any) -> View:
    return View(**{"phase": phase, "handles": {h.name: h for h in handles}, "budget_bytes": 1000, **fields})


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
    @pytest.mark.parametrize("phase", PHASES)
    def test_only_what_the_phase_needs(self, phase: str) -> None:
        plan = Colocated().plan(view(phase, *WORKER))
        assert used(plan) == TABLE[phase]
        assert plan.targets.keys() == {h.name for h in WORKER}
        assert not plan.streamed

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
        there = view("checkpoint", *(replace(h, state=state, resident_bytes=0 if state is OFF else h.num_bytes) for h in WORKER))
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
        with pytest.raises(PolicyError, match=r"unknown phase 'trian'. Did you mean 'train'\?.*rollout.*distill"):
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
