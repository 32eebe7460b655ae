"""`only=`: what the chosen handles get, what the others keep, and who gives way where not all of it
fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from placement import DeviceMemoryError, Manager, Plan, View
from placement.policies import AsyncRollout, Colocated, Policy, Resident
from placement.testing import SimulatedDevice
from tests.support.worker import GPU, SYNC, TRAIN, Scripted

UNIT = 4096


class Job:
    """Modules of so many units each, by role; what is trained has SGD without momentum, which needs
    no byte. Budgets are in units."""

    def __init__(
        self,
        policy: Any,
        budget: int | None,
        sizes: dict[str, int],
        trained: Iterable[str] = (),
        **keywords: Any,
    ) -> None:
        keywords = {"device": SimulatedDevice(1 << 24, chunk_bytes=UNIT)} | keywords
        self.manager = Manager(
            policy=policy, budget_bytes=None if budget is None else budget * UNIT, **keywords
        )
        self.models = {
            name: torch.nn.Linear(32, 32 * size, bias=False) for name, size in sizes.items()
        }
        for name, model in self.models.items():
            self.manager.register(
                name,
                model,
                role=name,
                readonly=name in ("ref", "reward", "teacher") and name not in trained,
            )
        self.optimizers = {
            name: torch.optim.SGD(self.models[name].parameters(), lr=0.1) for name in trained
        }
        for name, optimizer in self.optimizers.items():
            self.manager.register(f"{name}.optimizer", optimizer)

    def on_device(self) -> set[str]:
        return {name for name, handle in self.manager.handles.items() if handle.resident_bytes}

    def fits(self, name: str, only: Iterable[str] | None = None) -> set[str] | None:
        """What is on the device in the phase; None where it is refused."""
        try:
            with self.manager.phase(name, only=only):
                return self.on_device()
        except DeviceMemoryError:
            return None


class KeepReference(Colocated):
    """Colocated, but the reference model stays on the GPU whenever it fits."""

    def plan(self, view: View) -> Plan:
        plan = super().plan(view)
        ref = view.handles.get("ref")
        return plan.also(ref, GPU) if ref and view.fits(plan, ref) else plan


THREE = {"ref": 8, "actor": 8, "critic": 8}


def test_only_the_deficit_leaves_cheapest_first() -> None:
    """A readonly module and one that nobody trains before one that would be copied back; of them
    the smallest that is enough."""
    sizes = {"actor": 2, "ref": 6, "reward": 3, "critic": 4}
    assert Job("resident", 15, sizes, ["actor"]).fits("values", ["critic"]) == {
        "actor",
        "ref",
        "reward",
        "critic",
    }
    assert Job("resident", 14, sizes, ["actor"]).fits("values", ["critic"]) == {
        "actor",
        "ref",
        "critic",
    }
    assert Job("resident", 11, sizes, ["actor"]).fits("values", ["critic"]) == {
        "actor",
        "reward",
        "critic",
    }
    assert Job("resident", 6, sizes, ["actor"]).fits("values", ["critic"]) == {"actor", "critic"}
    assert Job("resident", 5, sizes, ["actor"]).fits("values", ["critic"]) == {"critic"}
    assert Job("resident", 3, sizes, ["actor"]).fits("values", ["critic"]) is None


def test_what_trains_or_is_published_never_gives_way() -> None:
    """Not even for a policy that would do without it in a smaller budget."""

    def either(view: View) -> Plan:
        wanted = view.total_plan({"actor": TRAIN if view.phase == "train" else SYNC})
        return wanted if view.fits(wanted) else view.total_plan({})

    for outer, state in (("train", TRAIN), ("weight_sync", SYNC)):
        job = Job(Scripted(train=either, weight_sync=either), 12, {"actor": 8, "critic": 8})
        with job.manager.phase(outer):
            assert job.fits("values", ["critic"]) is None
            assert job.manager.handles["actor"].state is state


def test_a_kept_handle_gives_way_like_whatever_else_only_leaves_out() -> None:
    job = Job("colocated", 12, THREE)
    with job.manager.phase("log_prob", only=["actor"]) as phase:
        phase.keep("actor")
    assert job.fits("log_prob", ["ref"]) == {"ref"}
    assert job.manager.snapshot().expired_keeps == 1


def test_an_entry_that_is_refused_leaves_the_keep_where_it_was() -> None:
    job = Job("colocated", 12, {**THREE, "critic": 16})
    with job.manager.phase("log_prob", only=["actor"]) as phase:
        phase.keep("actor")
    assert job.fits("values", ["critic"]) is None
    assert job.on_device() == {"actor"}
    assert job.manager.snapshot().expired_keeps == 0


# --- budgets from elsewhere


SIZES = st.dictionaries(
    st.sampled_from(["actor", "ref", "critic", "reward", "teacher"]), st.integers(1, 6), min_size=2
)
POLICIES: list[Callable[[], Policy]] = [
    Resident,
    KeepReference,
    Colocated,
    lambda: Colocated(stream_sync=True),
    lambda: Resident(drop_gradients=True),
    AsyncRollout,
]
PHASES = st.sampled_from(
    ["rollout", "log_prob", "ref_log_prob", "values", "reward", "train", "weight_sync", "distill"]
)
OWN = {"distill": ("actor", "teacher")}


def needed(job: Job, phase: str) -> set[str]:
    """By the table: shipped policies need in a phase what Colocated has there."""
    view = job.manager._stack.reconciler.planner.view(phase, None, frozenset())
    plan = Colocated().plan(view)
    return {name for name in plan.targets if plan.on_device(name)}


def total(job: Job, names: Iterable[str]) -> int:
    return sum(job.manager.handles[name].num_bytes for name in names)


@settings(deadline=None, max_examples=30)
@given(
    make=st.sampled_from(POLICIES),
    sizes=SIZES,
    trained=st.frozensets(st.sampled_from(["actor", "critic"])),
    budget=st.integers(1, 24),
    outer=st.lists(st.tuples(PHASES, st.booleans()), max_size=2),
    phase=PHASES,
    data=st.data(),
)
def test_a_phase_for_some_handles_fits_whenever_what_is_needed_together_does(
    make: Callable[[], Policy],
    sizes: dict[str, int],
    trained: frozenset[str],
    budget: int,
    outer: list[tuple[str, bool]],
    phase: str,
    data: st.DataObject,
) -> None:
    job = Job(make(), budget, sizes, sorted(trained & sizes.keys()), phases=OWN)
    streams = getattr(job.manager.policy, "stream_sync", False)
    held: set[str] = set()  # what the open phases need
    with ExitStack() as stack:
        for name, has_only in outer:
            chosen = needed(job, name)
            if has_only:
                chosen = set(
                    data.draw(
                        st.frozensets(st.sampled_from(sorted(chosen)))
                        if chosen
                        else st.just(frozenset())
                    )
                )
            try:
                stack.enter_context(job.manager.phase(name, only=chosen if has_only else None))
            except DeviceMemoryError:
                assume(False)
            held = {
                n
                for n in (held | chosen if has_only else chosen)
                if job.manager.handles[n].resident_bytes
            }
        wanted = needed(job, phase)
        only = set(
            data.draw(
                st.frozensets(st.sampled_from(sorted(wanted))) if wanted else st.just(frozenset())
            )
        )
        whole = job.fits(phase)
        part = job.fits(phase, only)
        must = total(job, held | only)
        if not streams:
            assert (part is not None) == (must <= budget * UNIT), (
                "refused although what is needed fits"
            )
        if not outer and whole is not None:
            assert part is not None
        if part is not None:
            # from the host copy: the inner phase decides about these
            published = only if streams and phase == "weight_sync" else set()
            assert held - published <= part, "what the enclosing phase needs was evicted"
            assert total(job, part) <= budget * UNIT
    job.manager.check_integrity()
    assert job.manager.snapshot().pairing_violations == 0
