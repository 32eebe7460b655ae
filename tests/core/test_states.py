"""The words: the table and the machine that follows it, plans and views."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import operator
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from placement import PhaseError, State
from placement.core.states import TRANSITIONS, HandleView, Plan, Trigger, View
from placement.registration.handle import PATHS, Handle
from tests.support.worker import GPU, OFF, SYNC, TRAIN


def handle(name: str, num_bytes: int = 10, **fields: object) -> HandleView:
    return HandleView(
        **{
            "name": name,
            "kind": "module",
            "role": None,
            "state": OFF,
            "num_bytes": num_bytes,
            **fields,
        }
    )  # type: ignore[arg-type]


def view(*handles: HandleView, **fields: object) -> View:
    return View(**{"phase": "train", "handles": {h.name: h for h in handles}, **fields})  # type: ignore[arg-type]


def test_every_trigger_stands_once_in_the_table_and_leads_back() -> None:
    assert sorted(t for t, _, _ in TRANSITIONS) == sorted(Trigger)
    pairs = {(source, target) for _, source, target in TRANSITIONS}
    assert len(pairs) == len(TRANSITIONS)
    assert pairs == {(target, source) for source, target in pairs}, "each has its way back"
    assert {t for t, source, _ in TRANSITIONS if source is OFF} == {
        Trigger.LOAD,
        Trigger.BEGIN_STREAM,
        Trigger.BEGIN_STREAMED_TRAIN,
    }


def test_a_handle_at_rest_is_off_the_device_and_otherwise_the_same() -> None:
    now = {
        "state": SYNC,
        "resident_bytes": 7,
        "prefetched_bytes": 3,
        "resident_tags": frozenset({"kv"}),
        "streaming": True,
    }
    stays = {"role": "rollout", "tags": {"kv": 5}, "window_bytes": 4, "kept": True}
    assert handle("engine", **now, **stays).at_rest() == handle("engine", **stays)


def test_a_plan_keeps_its_own_copy_takes_names_of_states_and_cannot_be_written() -> None:
    targets = {"actor": GPU}
    plan = Plan(targets)
    targets["actor"] = OFF
    assert plan["actor"] is GPU
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.streamed = frozenset({"actor"})  # type: ignore[misc]
    assert Plan({"actor": "TRAINING"})["actor"] is TRAIN  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="PARKED"):
        Plan({"actor": "PARKED"})  # type: ignore[dict-item]


def test_one_target_is_changed_or_left_out_and_what_was_said_of_others_stays() -> None:
    plan = Plan({"ref": OFF, "actor": TRAIN}, dropped=frozenset({"ref"}))
    assert plan.also(handle("ref"), GPU) == Plan(
        {"ref": GPU, "actor": TRAIN}, dropped=frozenset({"ref"})
    )
    assert plan.without("ref") == Plan({"actor": TRAIN})


def test_limited_to_takes_the_named_from_this_plan_and_the_rest_from_the_enclosing() -> None:
    enclosing = Plan(
        {"a": GPU, "b": SYNC, "c": OFF}, frozenset({"b"}), dropped=frozenset({"a", "c"})
    )
    inner = Plan({"a": OFF, "b": OFF, "c": SYNC}, frozenset({"c"}), dropped=frozenset({"b"}))
    assert inner.limited_to(["c"], enclosing) == Plan(
        {"a": GPU, "b": SYNC, "c": SYNC}, frozenset({"b", "c"}), dropped=frozenset({"a"})
    )
    assert inner.limited_to([], enclosing) == enclosing
    assert inner.limited_to(["a", "b", "c"], enclosing) == inner


def test_bytes_count_what_we_place_on_the_device() -> None:
    held = view(
        handle("a", 1),
        handle("b", 2),
        handle("c", 4),
        handle("d", 8, external=True),
        budget_bytes=3,
    )
    plan = Plan({"a": GPU, "b": TRAIN, "c": SYNC, "d": GPU}, frozenset({"c"}))
    assert held.bytes_of(plan) == 3
    assert held.fits(plan)
    assert held.fits(plan, held.handles["d"], held.handles["a"])  # external, and there already
    assert not held.fits(plan, held.handles["c"])


def test_a_streamed_step_counts_its_window() -> None:
    held = view(
        handle("a", 1), handle("adam", 64, kind="optimizer", window_bytes=6), budget_bytes=7
    )
    plan = Plan({"a": TRAIN, "adam": TRAIN}, frozenset({"adam"}))
    assert not plan.on_device("adam")
    assert held.bytes_of(plan) == 7
    assert held.fits(plan)
    assert held.bytes_of(Plan({"a": TRAIN, "adam": OFF})) == 1
    assert held.bytes_of(Plan({"a": TRAIN, "adam": TRAIN})) == 65


WRITES: dict[str, Callable[[Any], object]] = {
    "assignment": lambda mapping: operator.setitem(mapping, "new", 1),
    "|=": lambda mapping: operator.ior(mapping, {"new": 1}),
    "update": lambda mapping: mapping.update(new=1),
    "pop": lambda mapping: mapping.pop("a"),
    "clear": lambda mapping: mapping.clear(),
}


@pytest.mark.parametrize("how", WRITES)
def test_no_mapping_of_a_view_or_a_plan_can_be_written(how: str) -> None:
    given = view(handle("a", tags={"a": 1}), phases={"a": ("actor",)})
    plan = Plan({"a": GPU}, parts={"a": frozenset({"a"})})
    for mapping in (given.handles, given.phases, given.handles["a"].tags, plan.targets, plan.parts):
        before = dict(mapping)
        with pytest.raises(TypeError, match="read-only"):
            WRITES[how](mapping)
        assert mapping == before


def test_views_and_plans_are_copied_and_sent_like_any_data() -> None:
    given = view(handle("a", tags={"weights": 1}), phases={"own": ("actor",)})
    plan = Plan({"a": GPU}, parts={"a": frozenset({"weights"})})
    for each in (given, plan):
        assert pickle.loads(pickle.dumps(each)) == copy.deepcopy(each) == each
    assert json.loads(json.dumps(given.phases)) == {"own": ["actor"]}
    assert type(given.handles | {"b": handle("b")}) is dict  # a copy that may be changed


def machine_in(state: State) -> Handle:
    """A machine that was brought to a state by triggers alone."""
    machine = Handle("actor", kind="module", role=None, readonly=False)
    on_device = state is not State.CPU_OFFLOADED
    for trigger in PATHS[(State.CPU_OFFLOADED, False), (state, on_device)]:
        machine.require(trigger)
        machine.fire(trigger)
    return machine


def test_every_row_of_the_table_fires_and_nothing_else_does() -> None:
    rows = {(trigger, source): target for trigger, source, target in TRANSITIONS}
    assert len(rows) == len(TRANSITIONS)
    for trigger, source in itertools.product(Trigger, State):
        machine = machine_in(source)
        target = rows.get((trigger, source))
        if target is None:
            for refused in (machine.require, machine.fire):
                with pytest.raises(
                    PhaseError, match=f"'actor' cannot {trigger} while it is {source}"
                ):
                    refused(trigger)
                assert machine.state is source
        else:
            machine.require(trigger)
            assert machine.state is source
            machine.fire(trigger)
            assert machine.state is target
