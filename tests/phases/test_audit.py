"""Declared against measured."""

from __future__ import annotations

import pytest
import torch

from placement import Audit, IntegrityError, RegistrationError, State
from placement.storage.watch.strays import known_aliases
from placement.testing import Faults, SimulatedDevice, assert_nothing_resident
from tests.support.worker import CAPACITY, Worker, learn


def findings(audit: Audit) -> list[tuple[str | None, str]]:
    return [(finding.handle, finding.what) for finding in audit.findings]


@pytest.mark.parametrize("phase", [None, "log_prob"])
def test_drift_is_named_with_its_bytes(worker: Worker, phase: str | None) -> None:
    if phase:
        worker.manager.enter(phase)
    fresh = torch.zeros(64)
    # what a framework that places by itself does
    worker.net[0].bias.untyped_storage()._swap_data_ptr_(fresh.untyped_storage())
    audit = worker.manager.audit()
    assert ("actor", "drift") in findings(audit)
    assert audit.report.endswith(
        f"{len(audit.findings)} finding{'s' if len(audit.findings) > 1 else ''}"
    )
    assert "0.bias (256 bytes)" in next(f.detail for f in audit.findings if f.what == "drift")
    assert worker.manager.snapshot().handles[0].drift_bytes == 256
    assert "drift: actor: 0.bias" in audit.report
    worker.net[0].bias.untyped_storage()._swap_data_ptr_(fresh.untyped_storage())
    assert worker.manager.audit().ok
    assert worker.manager.snapshot().handles[0].drift_bytes == 0


def test_a_leak_is_what_stays_where_the_plan_does_not_want_it() -> None:
    device = Faults(SimulatedDevice(CAPACITY))
    worker = Worker(device=device)
    worker.manager.enter("train", only=["actor"])
    learn(worker.net, worker.adam)
    device.fail("copy", forever=True)
    with pytest.raises(RuntimeError, match="injected"):
        worker.manager.leave()
    audit = worker.manager.audit()
    assert not audit.ok
    leaks = [f for f in audit.findings if f.what == "leak"]
    assert {f.handle for f in leaks} <= {"actor", "actor.optimizer"}
    assert (
        f"{worker.manager.handles[str(leaks[0].handle)].resident_bytes:,} bytes on the device"
    ) in leaks[0].detail
    with pytest.raises(AssertionError, match="outside every phase"):
        assert_nothing_resident(worker.manager)
    device.clear()
    with worker.manager.phase("values"):
        pass
    assert_nothing_resident(worker.manager)


def test_stray_references_are_counted_named_and_forgotten(worker: Worker) -> None:
    with worker.manager.phase("log_prob"):
        views = [
            worker.net[0].weight.detach(),
            worker.net[0].weight[0],
            worker.ref_net[2].bias.data,
        ]
    audit = worker.manager.audit()
    assert findings(audit) == [("actor", "stray_reference"), ("ref", "stray_reference")]
    assert "2 references" in audit.findings[0].detail
    assert "0.weight" in audit.findings[0].detail
    assert "2.bias" in audit.findings[1].detail
    assert [h.stray_references for h in worker.manager.snapshot().handles[:3]] == [2, 0, 1]
    del views
    with worker.manager.phase("log_prob"):
        pass
    assert worker.manager.audit().ok


def test_strict_raises_for_stray_references_after_the_transition_is_complete() -> None:
    worker = Worker(strict=True)
    with pytest.raises(IntegrityError, match=r"1 references to storages of 'actor' .*0\.weight"):  # noqa: SIM117
        with worker.manager.phase("log_prob"):
            mine = worker.net[0].weight.detach()
    assert mine.isnan().all()
    assert worker.on_device() == set()
    del mine
    with worker.manager.phase("log_prob"):
        pass
    assert_nothing_resident(worker.manager)


def test_who_was_known_and_is_no_more_is_a_stray() -> None:
    """The references are as many as at the last phase transition, where none was too many: only who
    holds them has changed."""
    worker = Worker()
    with worker.manager.phase("log_prob"):
        worker.net.shadow = worker.net[0].weight.detach()
    for _ in range(2):
        with worker.manager.phase("log_prob"):
            assert worker.manager.audit().ok
    mine = worker.net.shadow
    del worker.net.shadow
    with worker.manager.phase("log_prob"):
        pass
    assert findings(worker.manager.audit()) == [("actor", "stray_reference")]
    del mine
    with worker.manager.phase("log_prob"):
        pass
    assert worker.manager.audit().ok


def test_a_storage_at_the_address_of_a_dead_one_is_not_taken_for_it(worker: Worker) -> None:
    """What a handle knew of a tensor that is gone would count for whoever is born in its place:
    references too many, or too few."""
    with worker.manager.phase("log_prob"):
        worker.net.register_parameter("extra", torch.nn.Parameter(torch.ones(8)))
        worker.manager.audit()
        worker.net.extra = None
        born = [torch.ones(8) for _ in range(1000)]
        assert known_aliases([tensor.untyped_storage()._cdata for tensor in born]) == [0] * 1000
    assert worker.manager.audit().ok


def test_chunks_that_no_handle_declares_are_unaccounted(worker: Worker) -> None:
    stolen = worker.manager.device.create(1 << 20)
    audit = worker.manager.audit()
    assert findings(audit) == [(None, "unaccounted")]
    assert f"{1 << 20:,}" in audit.findings[0].detail
    with pytest.raises(
        IntegrityError, match=f"holds {1 << 20:,} bytes of chunks, the handles declare 0"
    ):
        worker.manager.check_integrity()
    worker.manager.device.release(stolen)
    worker.manager.check_integrity()


def test_check_integrity_has_the_numbers_of_what_was_tampered_with(worker: Worker) -> None:

    def wrong(match: str) -> None:
        with pytest.raises(IntegrityError, match=match):
            worker.manager.check_integrity()
        assert not worker.manager.audit().ok

    holding = worker.actor.holding
    assert holding is not None
    with worker.manager.phase("log_prob"):
        (page,) = holding.ranges[0].pages.table
        memory, page.memory = page.memory, None
        assert memory is not None
        wrong(
            r"'actor' is GPU_RESIDENT, so range 0 of \d+ bytes "
            r"needs "
            r"chunks "
            rf"\({memory.nbytes},\) "
            r"behind it, but has \(\)"
        )
        page.memory = memory
        worker.manager.check_integrity()
        worker.actor.counters.state = State.TRAINING
        wrong("'actor' is GPU_RESIDENT, but the journal's last record says TRAINING")
        worker.actor.counters.state = State.GPU_RESIDENT
    holding.on_device = True
    wrong("'actor' is CPU_OFFLOADED, but its bytes are on the device")
    holding.on_device = False
    worker.manager.check_integrity()


def test_a_tensor_in_another_handles_memory_is_a_finding(worker: Worker) -> None:
    own = worker.critic_net[0].weight
    with (
        pytest.raises(RegistrationError, match="belongs to 'actor' already"),
        worker.manager.phase("values"),
    ):
        worker.critic_net[0].weight = worker.net[0].weight
    found = worker.manager.audit().findings
    (finding,) = [each for each in found if (each.handle, each.what) == ("critic", "drift")]
    assert (
        "'0.weight' of 'critic' lies in a storage that belongs to 'actor' already"
    ) in finding.detail
    worker.critic_net[0].weight = own
    with worker.manager.phase("values"):
        pass
    assert worker.manager.audit().ok


def test_parameters_of_no_registered_module_that_are_stepped_are_named_as_such(
    worker: Worker,
) -> None:
    with worker.manager.phase("train"):
        worker.adam.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
    [finding] = worker.manager.audit().findings
    assert finding.handle == "actor.optimizer"
    assert "it steps 1 parameter(s) that actor does not have" in finding.detail
    assert "add_param_group() brought them" in finding.detail
    worker.adam.param_groups.pop()
    assert worker.manager.audit().ok
