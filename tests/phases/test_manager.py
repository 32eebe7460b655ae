"""The manager as a user sees it: a policy of one's own, the policies that ship, snapshots, the
end."""

from __future__ import annotations

import json
import logging
import sys
import weakref
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from placement import DeviceMemoryError, Manager, PhaseError, PlacementError, TorchEngine
from placement.observe import figures
from placement.testing import Faults, SimulatedDevice
from tests.support.threads import in_a_thread, in_threads
from tests.support.worker import CAPACITY, OFF, Worker, assert_same, batch, learn, make_manager, net

# --- policies


@pytest.mark.parametrize("policy", ["colocated", "resident", "async_rollout", "cyclic"])
def test_every_policy_trains_to_the_same_bits(policy: str) -> None:
    torch.manual_seed(5)
    worker = Worker(policy=policy)
    inner = net()
    engine = TorchEngine(inner)
    worker.manager.register("rollout", engine, role="rollout")
    twin = net()
    twin.load_state_dict(worker.values)
    adam = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    for seed in range(3):
        with worker.manager.phase("rollout") as phase:
            inner(batch(seed))
            phase.switch("log_prob", only=["actor", "ref"])
            found = worker.net(batch(seed)).detach(), worker.ref_net(batch(seed)).detach()
            assert_same(found[0], twin(batch(seed)).detach())
            phase.switch("train")
            learn(worker.net, worker.adam, seed)
            phase.switch("weight_sync")
            for bucket in worker.actor.weights():
                engine.update_weights(bucket)
        learn(twin, adam, seed)
        assert_same(dict(inner.state_dict()), dict(twin.state_dict()))
    assert_same(worker.optimizer.state_dict(), adam.state_dict())
    worker.manager.check_integrity()
    assert worker.manager.audit().ok


# --- asking


def test_a_snapshot_counts_what_happened(worker: Worker) -> None:
    for _ in range(2):
        with worker.manager.phase("train") as phase:
            learn(worker.net, worker.adam)
            phase.switch("log_prob")
    snapshot = worker.manager.snapshot()
    actor = snapshot.handles[0]
    assert (actor.kind, actor.role, actor.state, actor.adapter) == (
        "module",
        "actor",
        OFF,
        "ModuleAdapter",
    )
    assert {t: n for t, n in actor.transitions.items() if n} == {
        "load": 2,
        "begin_train": 2,
        "end_train": 2,
        "offload": 2,
    }
    nbytes = sum(p.nbytes for p in worker.net.parameters())
    assert actor.loaded_bytes >= 2 * nbytes
    assert actor.offloaded_bytes >= 2 * nbytes
    assert snapshot.handles[1].owners == ("actor",)
    assert snapshot.phases == ()
    assert snapshot.peak_bytes >= 3 * nbytes
    assert set(snapshot.phase_seconds) >= {"train", "log_prob", "idle"}
    assert set(snapshot.phase_stall_seconds) == {"train", "log_prob", "idle"}
    assert {d.operation: sum(d.counts) for d in snapshot.durations}["load"] == sum(
        h.transitions.get("load", 0) for h in snapshot.handles
    )
    assert snapshot.unaccounted_bytes == 0
    assert (snapshot.pairing_violations, snapshot.unpaired_bytes) == (0, 0)
    assert snapshot.policy_decisions["load"] > 0
    json.loads(snapshot.model_dump_json())


def test_a_wait_for_bytes_counts_for_the_phase_that_needs_them() -> None:
    class Ordering(SimulatedDevice):
        """A device on which the work waits for bytes, and not the caller."""

        waits: ClassVar[list[float]] = []

        def waited_seconds(self) -> float:
            return sum(self.waits.pop() for _ in [*self.waits])

    device = Ordering(capacity_bytes=1 << 24, chunk_bytes=1 << 12)
    worker = Worker(device=device)
    manager = worker.manager
    with manager.phase("log_prob") as phase:
        device.waits.append(100.0)  # known at the next transition
        phase.switch("train")
        device.waits.append(1000.0)
    figures = manager.metrics()
    assert 100 <= figures["placement/stall_seconds/log_prob"] < 1000
    assert figures["placement/stall_seconds/train"] >= 1000


ALWAYS = ("stall_seconds", "to_device_gb", "to_host_gb", "skipped_gb", "host_gb")


def test_figures_for_a_trainers_log_are_of_the_time_since_the_last_call(worker: Worker) -> None:
    manager, gb = worker.manager, 1e9
    first = manager.metrics()
    assert set(first) == {
        *(f"placement/{name}" for name in ALWAYS),
        "placement/stall_seconds/idle",
        "placement/peak_device_gb/idle",
    }
    with manager.phase("train"):
        learn(worker.net, worker.adam)
        at_train = sum(handle.resident_bytes for handle in manager.handles.values())
    trained = manager.metrics()
    assert trained["placement/peak_device_gb/train"] == at_train / gb
    before = manager.snapshot()
    with manager.phase("log_prob"):
        held = worker.actor.resident_bytes + worker.ref.resident_bytes
        figures, now = manager.metrics(), manager.snapshot()
        assert figures["placement/peak_device_gb/log_prob"] == held / gb
        loaded = [
            new.loaded_bytes - old.loaded_bytes
            for new, old in zip(now.handles, before.handles, strict=True)
        ]
        assert figures["placement/to_device_gb"] == sum(loaded) / gb > 0
        assert figures["placement/host_gb"] == sum(each.host_bytes for each in now.handles) / gb
        assert figures["placement/to_host_gb"] == figures["placement/skipped_gb"] == 0
        # what was on the device at the call is on it since the call, too
        assert manager.metrics()["placement/peak_device_gb/log_prob"] == held / gb
    assert figures["placement/stall_seconds"] == figures["placement/stall_seconds/log_prob"] > 0
    # it trained before: the keys stay, so that no curve has holes
    assert figures["placement/stall_seconds/train"] == 0
    assert figures["placement/peak_device_gb/train"] == 0


def test_the_peak_of_a_phase_into_which_nothing_moved() -> None:
    """It is asked for before the phase ends, as a trainer's first line does."""
    worker = Worker(policy="resident")
    with worker.manager.phase("train"):
        held = sum(handle.resident_bytes for handle in worker.manager.handles.values())
        assert worker.manager.metrics()["placement/peak_device_gb/train"] == held / 1e9 > 0


def test_two_threads_that_log_share_the_bytes(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = worker.manager
    with manager.phase("log_prob"):
        pass
    count = figures._counters
    others = {}

    def count_while_another_logs(*arguments: Any) -> dict[str, float]:
        monkeypatch.undo()
        others.update(in_a_thread(manager.metrics))
        return count(*arguments)

    monkeypatch.setattr(figures, "_counters", count_while_another_logs)
    row, key = manager.metrics(totals=True), "placement/to_device_gb"
    assert others[key] > 0
    assert row[key] + others[key] == row["placement/total/to_device_gb"]


def test_totals_of_a_run_have_what_was_unregistered(worker: Worker) -> None:
    manager = worker.manager
    with manager.phase("train"):
        learn(worker.net, worker.adam)
    with manager.phase("log_prob"):
        pass
    manager.metrics()
    taken = manager.snapshot()
    manager.unregister("ref")
    with manager.phase("values"):
        pass
    figures = manager.metrics(totals=True)
    assert (
        figures["placement/total/to_device_gb"]
        == (sum(each.loaded_bytes for each in taken.handles)) / 1e9
        + figures["placement/to_device_gb"]
    )
    assert figures["placement/total/stall_seconds"] == sum(
        manager.snapshot().phase_stall_seconds.values()
    )
    peaks = manager.snapshot().phase_peak_bytes
    assert figures["placement/total/peak_device_gb/train"] == peaks["train"] / 1e9
    assert max(peaks.values()) == manager.snapshot().peak_bytes


def test_a_streamed_step_counts_for_the_peak_of_its_phase() -> None:
    worker = Worker(policy="colocated('streamed')")
    with worker.manager.phase("train"):
        held = worker.actor.resident_bytes
        learn(worker.net, worker.adam)
        worker.manager.metrics()
        learn(worker.net, worker.adam)  # its state is there for a bucket at a time
        figures = worker.manager.metrics()
    assert figures["placement/to_device_gb"] > 0
    assert figures["placement/peak_device_gb/train"] > held / 1e9
    assert sum(handle.resident_bytes for handle in worker.manager.handles.values()) == 0


def test_every_state_change_is_one_record_one_count_and_one_line_of_the_log(
    worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="placement"):
        for name in ("values", "train", "log_prob", "weight_sync"):
            with worker.manager.phase(name):
                pass
    assert [each.message for each in caplog.records[:2]] == [
        "critic: load, CPU_OFFLOADED -> GPU_RESIDENT",
        "critic: offload, GPU_RESIDENT -> CPU_OFFLOADED",
    ]
    assert sum(hasattr(each, "placement") for each in caplog.records) == len(worker.manager.journal)
    for handle in worker.manager.handles.values():
        records = [record for record in worker.manager.journal if record.handle == handle.name]
        assert len(records) == sum(handle.counters.transitions.values())
        for before, after in zip(records, records[1:], strict=False):
            assert before.target is after.source
            assert before.at_seconds <= after.at_seconds
        assert handle.counters.loaded_bytes == sum(r.nbytes for r in records if r.trigger == "load")
        assert handle.counters.offloaded_bytes == sum(
            r.nbytes for r in records if r.trigger == "offload"
        )


@pytest.mark.parametrize(
    ("given", "is_tight"),
    [({}, False), ({"budget_bytes": "1GiB"}, True), ({"turns": "turns"}, True)],
)
def test_the_device_is_told_whether_its_memory_was_portioned_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: dict[str, Any], is_tight: bool
) -> None:
    asked: list[tuple[str, bool]] = []

    def select(name: str, *, is_tight: bool) -> SimulatedDevice:
        asked.append((name, is_tight))
        return SimulatedDevice(1 << 30, shared_with=tmp_path / "device")

    monkeypatch.setattr("placement.manager.select_device", select)
    Manager(
        device="cuda:0",
        **{key: str(tmp_path / value) if key == "turns" else value for key, value in given.items()},
    ).close()
    assert asked == [("cuda:0", is_tight)]


@pytest.mark.parametrize(
    "device",
    [
        pytest.param(None, id="a device each", marks=pytest.mark.sweep),
        pytest.param(SimulatedDevice(1 << 20), id="one device"),
    ],
)
def test_managers_of_three_threads_come_and_go_at_once(device: SimulatedDevice | None) -> None:
    def come_and_go() -> None:
        for _ in range(5):
            worker = Worker(device=device or SimulatedDevice(1 << 20))
            with worker.manager.phase("train"):
                learn(worker.net, worker.adam)
            worker.manager.close()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        assert in_threads(come_and_go, come_and_go, come_and_go) == [None, None, None]
    finally:
        sys.setswitchinterval(interval)


def test_a_closed_manager_says_so_and_its_objects_are_free(worker: Worker) -> None:
    with worker.manager.phase("train"):
        with pytest.raises(PhaseError, match="'train' is open"):
            worker.manager.close()
        learn(worker.net, worker.adam)
    worker.manager.close()
    worker.manager.close()
    for work in (
        lambda: worker.manager.enter("train"),
        worker.manager.audit,
        lambda: worker.manager.register("x", worker.net),
    ):
        with pytest.raises(PlacementError, match="closed"):
            work()
    assert worker.manager.snapshot().handles == ()
    assert (worker.actor.state, worker.actor.resident_bytes) == (OFF, 0)
    learn(worker.net, worker.adam)


def test_a_close_that_fails_keeps_nothing_alive_that_was_handed_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither does its error, whose traceback has the frame of the loop."""
    manager, actor, other = make_manager(), net(), net()
    handle = manager.register("actor", actor, role="actor")
    with manager.phase("weight_sync"):
        for _ in handle.weight_changes(since=None):
            pass
    ref = manager.register("ref", other, role="ref")
    ranges = [weakref.ref(r) for r in handle.holding.ranges]
    del handle

    def fail() -> None:
        raise MemoryError("no host memory")

    monkeypatch.setattr(ref.storage, "unadopt", fail)
    with pytest.raises(MemoryError) as caught:
        manager.close()
    assert caught.value.__traceback__ is not None
    assert [r() for r in ranges] == [None] * len(ranges)
    monkeypatch.undo()
    manager.close()


# --- the look at what a first step has born


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_the_users_exception_leaves_a_phase_even_where_newborn_state_cannot_be_moved() -> None:
    worker = Worker(policy="resident")

    with pytest.raises(LookupError, match="the user's") as caught, worker.manager.phase("train"):  # noqa: PT012 - what its end does
        learn(worker.net, worker.adam)
        worker.adam.state[worker.net[0].weight]["odd"] = torch.eye(4).to_sparse_csr()
        raise LookupError("the user's")
    assert any("sparse" in note for note in caught.value.__notes__)
    del worker.adam.state[worker.net[0].weight]["odd"]
    with worker.manager.phase("train"):
        learn(worker.net, worker.adam)
    assert worker.manager.audit().ok


# --- memory without a budget


def test_a_first_phase_may_take_what_the_headroom_leaves_to_others() -> None:
    model = torch.nn.Linear(1024, 4608, bias=False)  # 18 MiB
    manager = Manager(device=SimulatedDevice(20 << 20))
    actor = manager.register("actor", model, role="actor")
    with manager.phase("log_prob"):
        assert actor.resident_bytes == 18 << 20
    assert manager.audit().ok
    manager.close()


def test_a_driver_that_refuses_memory_is_told_of_with_the_phase_and_its_loads() -> None:
    device = Faults(SimulatedDevice(CAPACITY))
    worker = Worker(device=device)
    with worker.manager.phase("log_prob", only=["actor"]) as phase:
        device.fail("create")
        with pytest.raises(DeviceMemoryError) as caught:
            phase.switch("log_prob", only=["actor", "ref"])
    (note,) = caught.value.__notes__
    assert f"phase 'log_prob' was to load ref ({worker.ref.num_bytes:,} bytes) within" in note


@pytest.mark.parametrize(
    ("policy", "is_told"), [("colocated", True), ("colocated('streamed')", False)]
)
def test_optimizers_that_do_not_fit_are_told_of_streaming(policy: str, is_told: bool) -> None:
    worker = Worker(policy=policy, budget_bytes=30_000)
    with pytest.raises(DeviceMemoryError) as caught:
        worker.manager.enter("train")
    assert ("optimizer_in='streamed'" in str(caught.value)) is is_told


def test_a_first_phase_is_refused_what_the_device_does_not_have() -> None:
    model = torch.nn.Linear(1024, 4608, bias=False)  # 18 MiB
    manager = Manager(device=SimulatedDevice(17 << 20))
    manager.register("actor", model, role="actor")
    with pytest.raises(DeviceMemoryError, match=r"needs 18.0 MiB .* the budget is 17.0 MiB"):
        manager.phase("log_prob").__enter__()
    assert manager.audit().ok
    manager.close()
