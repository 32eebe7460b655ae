"""Weights in 16 bits that have no host copy of their own, because an optimizer has the float32
masters of which they are the cast."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch

import placement
from placement import HostMemoryError, RegistrationError
from placement.policies import Colocated
from placement.storage.cast import CastStorage
from placement.storage.managed import MoveResult
from placement.testing import Faults, InjectedFault, SimulatedDevice
from tests.faults.harness import calls_to_fail
from tests.support.disk import settle
from tests.support.early import Foresight
from tests.support.masters import WIDTH, Job, MasterAdam, net
from tests.support.worker import CAPACITY, Scripted, assert_same, make_manager, through_a_file
from tests.unit.test_publish_changes import Receiver


@pytest.fixture
def job() -> Job:
    return Job()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_trains_the_same_and_saves_the_weights_host_memory(dtype: torch.dtype) -> None:
    job, usual = Job(dtype=dtype), Job(has_masters=False, dtype=dtype)
    before = job.actor.counters.offloaded_bytes
    for seed in range(3):
        job.train(seed)
        usual.train(seed)
        assert usual.actor.host_bytes - job.actor.host_bytes >= job.weight_bytes
        assert usual.optimizer.host_bytes == job.optimizer.host_bytes
    assert job.actor.counters.offloaded_bytes == before  # an offload copies nothing of them
    loaded = job.actor.counters.loaded_bytes
    with job.manager.phase("log_prob"):  # a load brings the masters, which do not stay
        assert not job.optimizer.resident_bytes
        assert job.actor.counters.loaded_bytes - loaded >= 2 * job.weight_bytes
    assert job.is_cast
    job.check()
    assert_same(job.actor.state_dict(), usual.actor.state_dict())


# --- weights that are no cast


def written_by_hand(job: Job) -> None:
    for model in (job.model, job.plain):
        model[0].weight.data[0, 0] = 0.5
        model[2].bias.data[3] = -0.0


def loaded(job: Job) -> None:
    """A state dict of the optimizer that is not the weights'."""
    old = copy.deepcopy(job.plain_adam.state_dict())
    job.learn()
    for adam in (job.adam, job.plain_adam):
        adam.load_state_dict(copy.deepcopy(old))


def with_nan(job: Job) -> None:
    for model, adam in ((job.model, job.adam), (job.plain, job.plain_adam)):
        adam.state[model[0].weight]["master"][0, :3] = float("nan")
        model[0].weight.data.copy_(adam.state[model[0].weight]["master"])


@pytest.mark.parametrize(
    ("change", "phase"),
    [
        (written_by_hand, "log_prob"),
        *((each, "train") for each in (written_by_hand, Job.add_to_masters, loaded, with_nan)),
    ],
)
def test_weights_that_are_no_cast_are_copied_until_a_step_writes_them(
    job: Job, change: Callable[[Job], None], phase: str
) -> None:
    job.train()
    with job.manager.phase(phase):
        change(job)
    assert not job.is_cast
    job.check()
    if change in (written_by_hand, loaded):
        job.train(1)  # writes all weights anew from the masters
        job.train(2)
        assert job.is_cast
        job.check()


def test_weights_that_are_nan_throughout_stay_so(job: Job) -> None:
    job.train()
    with job.manager.phase("train"), torch.no_grad():
        job.write(lambda model: model[0].weight.fill_(float("nan")))
    assert not job.is_cast
    job.check()


def test_new_tensors_in_place_of_weights(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    """The log says once that nothing is saved any more, and what to do: to register both anew, and
    not the optimizer alone."""
    with job.manager.phase("train"), torch.no_grad():
        job.write(lambda model: setattr(model[0].weight, "data", model[0].weight.data * 2))
    for seed in range(2):
        job.check()
        job.train(seed)
    job.check()
    assert not job.is_cast
    told = "1 of its weights have got other memory since they were registered"
    assert [told in each.getMessage() for each in caplog.records].count(True) == 1
    job.manager.unregister("actor.optimizer")
    with pytest.raises(RegistrationError, match=f"{told}.*register both anew"):
        job.manager.register("actor.optimizer", job.adam)
    job.manager.unregister("actor")
    job.actor = job.manager.register("actor", job.model, role="actor", masters=job.adam)
    job.optimizer = job.manager.register("actor.optimizer", job.adam)
    job.train(2)
    assert job.is_cast
    job.check()


# --- read while offloaded


def test_values_are_right_in_every_reading(job: Job) -> None:
    job.train()
    assert_same(job.model.state_dict(), job.plain.state_dict())
    job.train(1)
    assert job.is_cast
    assert_same(through_a_file(job.actor.state_dict()), job.plain.state_dict())
    assert job.manager.audit().ok
    job.train(2)
    assert job.is_cast
    job.actor.state_dict()["0.bias"].fill_(2.0)
    job.plain[0].bias.data.fill_(2.0)
    job.check()


@pytest.mark.parametrize("phase", ["idle", "train"])
def test_checkpoints(job: Job, tmp_path: Any, phase: str) -> None:
    job.train()
    with job.manager.phase(phase) if phase != "idle" else nullcontext():
        if phase == "train":
            job.learn(1)
        placement.checkpoint.async_save(job.manager, tmp_path).result()
    wanted = copy.deepcopy((job.plain.state_dict(), job.plain_adam.state_dict()))
    for seed in range(2, 5):
        job.train(seed)
    assert job.is_cast
    placement.checkpoint.load(job.manager, tmp_path)
    job.plain.load_state_dict(wanted[0])
    job.plain_adam.load_state_dict(wanted[1])
    job.check()


def test_weights_that_are_published_from_the_host_copy() -> None:
    job = Job(policy=Colocated(stream_sync=True))
    job.train()
    with job.manager.phase("weight_sync"):
        found = {name: tensor.clone() for bucket in job.actor.weights() for name, tensor in bucket}
    assert_same(found, dict(job.plain.state_dict()))
    job.check()


def test_published_changes(job: Job) -> None:
    """They are computed from what was published last. That is in a host copy only if the model
    stays on the device until it is trained."""
    job.train()
    receiver = Receiver(job.actor)
    with job.manager.phase("weight_sync") as phase:
        receiver.sync()
        assert job.is_cast
        phase.switch("train")
        assert not job.is_cast
        job.learn(1)
        phase.switch("weight_sync")
        receiver.take()
    job.train(3)
    with job.manager.phase("weight_sync"):
        receiver.take()
    job.check()


def test_a_read_in_another_thread_waits_for_the_end_of_the_offload(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One of the masters, while pages of the weights have arrived and others have no memory, waits
    for nothing."""
    job = Job(device=SimulatedDevice(CAPACITY, chunk_bytes=4096))
    found, readers = list[torch.Tensor](), list[threading.Thread]()
    commit = CastStorage.commit_offload

    def commit_while_somebody_reads(holding: CastStorage, *arguments: Any) -> MoveResult:
        (r,) = (each for each in holding.ranges if each.can_be_cast)
        readers.append(threading.Thread(target=lambda: found.append(r.view(0, r.nbytes).clone())))
        readers[0].start()
        readers[0].join(0.2)
        assert not found
        return commit(holding, *arguments)

    with job.manager.phase("train"):
        job.learn()
        wanted = torch.cat(
            [
                p.detach().view(-1).view(torch.uint8)
                for p in job.model.parameters()
                if p.requires_grad
            ]
        )
        monkeypatch.setattr(CastStorage, "commit_offload", commit_while_somebody_reads)
    readers[0].join()
    monkeypatch.undo()
    assert found[0][: WIDTH * WIDTH * 2].equal(wanted[: WIDTH * WIDTH * 2])
    monkeypatch.setattr(
        CastStorage,
        "bring",
        lambda *its, bring=CastStorage.bring: (bring(*its), job.optimizer.state_dict())[0],
    )
    job.train(1)
    job.check()


def test_a_state_dict_that_is_held_when_the_optimizer_is_registered(job: Job) -> None:
    job.manager.unregister("actor.optimizer")
    shown = job.actor.state_dict()
    job.optimizer = job.manager.register("actor.optimizer", job.adam)
    shown["0.bias"].fill_(2.0)
    job.plain[0].bias.data.fill_(2.0)
    del shown
    job.check()


def test_a_view_of_the_host_copy_that_outlives_a_phase(job: Job) -> None:
    job.train()
    view = job.actor.state_dict()["0.bias"][:4]
    job.train(1)
    assert not job.is_cast
    view.fill_(2.0)
    job.plain[0].bias.data[:4] = 2.0
    del view
    job.check()


def test_an_optimizer_that_is_registered_again(job: Job) -> None:
    job.train()
    job.manager.unregister("actor.optimizer")
    with job.manager.phase("log_prob"):
        job.optimizer = job.manager.register("actor.optimizer", job.adam)
        assert job.actor.resident_bytes
    assert job.is_cast
    job.train(1)
    assert job.is_cast
    job.check()


def test_a_policy_that_keeps_and_prefetches() -> None:
    for policy in ("cyclic", Foresight()):
        job = Job(policy=policy, budget_bytes=400_000)
        for seed in range(6):
            with job.manager.phase("values") as phase:
                phase.switch("log_prob", only=["actor"])
                phase.switch("values")
                phase.switch("train")
                job.learn(seed)
            assert_same(job.actor.state_dict(), job.plain.state_dict())
        job.manager.check_integrity()


# --- masters that change alone


@pytest.mark.parametrize("taken", ["offloaded", "on the device"])
def test_writing_into_the_optimizers_state_dict_leaves_the_weights(job: Job, taken: str) -> None:
    with job.manager.phase("train"):
        job.learn()
        shown = job.optimizer.state_dict()["state"][0]["master"]
    if taken == "offloaded":
        shown = job.optimizer.state_dict()["state"][0]["master"]
    shown.fill_(3.0)
    job.plain_adam.state_dict()["state"][0]["master"].fill_(3.0)
    job.check()


def test_weights_that_leave_after_their_masters() -> None:
    job = Job(policy=Colocated(optimizer_in="optimizer_step"))
    for seed in range(2):
        with job.manager.phase("train"):
            with job.manager.phase("optimizer_step"):
                job.learn(seed)
            assert not job.optimizer.resident_bytes
        assert job.is_cast
    with job.manager.phase("train"):
        with job.manager.phase("optimizer_step"):
            job.learn(2)
        job.write(lambda model: model[0].bias.data.add_(1.0))
    assert not job.is_cast
    job.check()


@pytest.mark.parametrize("writes", [True, False])
def test_streamed_steps_make_the_weights_like_any_others(*, writes: bool) -> None:
    job = Job(policy=Colocated(optimizer_in="streamed"))
    assert job.is_cast
    job.adam.writes_weights = job.plain_adam.writes_weights = writes
    for seed in range(2):
        job.train(seed)
        assert not job.is_cast
    job.check()


GOING: dict[str, Callable[[Job], object]] = {
    "cleared": lambda job: job.adam.state.clear(),
    "replaced": lambda job: [
        state.update(master=torch.zeros_like(state["master"])) for state in job.adam.state.values()
    ],
    "unregistered": lambda job: job.manager.unregister("actor.optimizer"),
    "collected": lambda job: delattr(job, "adam"),
}


@pytest.mark.parametrize("way", GOING)
def test_masters_that_go_while_offloaded(way: str) -> None:
    job = Job()
    job.train()
    assert job.is_cast
    GOING[way](job)
    gc.collect()
    assert ("actor.optimizer" in job.manager.handles) is (way in ("cleared", "replaced"))
    with job.manager.phase("train"):
        assert_same(job.model.state_dict(), job.plain.state_dict())
    assert_same(job.actor.state_dict(), job.plain.state_dict())


@pytest.mark.parametrize("how", ["close", "drop"])
def test_handing_back(how: str) -> None:
    job = Job()
    job.train()
    assert job.is_cast
    model, plain, adam = job.model, job.plain, job.adam
    if how == "close":
        job.manager.close()
    del job
    gc.collect()
    assert_same(model.state_dict(), plain.state_dict())
    assert adam.state[model[0].weight]["master"].bfloat16().equal(model[0].weight)


# --- errors and memory


@pytest.mark.parametrize("operation", ["create", "map", "copy", "sync", "host", "reserve"])
def test_any_failing_call(operation: str) -> None:
    """In a round of phases calls of an operation fail once. No value is lost, and the next round is
    right."""
    job = Job(
        device=(device := Faults(SimulatedDevice(CAPACITY, chunk_bytes=8192, granularity=4096)))
    )

    def round_of_phases(seed: int) -> None:
        with job.manager.phase("log_prob") as phase:
            phase.switch("train")
            job.learn(seed)
        with job.manager.phase("train"), job.manager.phase("reward"):
            pass  # if both are not loaded together on the way back, each is alone

    round_of_phases(0)
    for at in calls_to_fail(device, operation, lambda: round_of_phases(1)):
        device.fail(operation, at=at)
        with suppress(
            InjectedFault, HostMemoryError, placement.DeviceMemoryError, placement.BrokenHandleError
        ):
            round_of_phases(at)
        device.clear()
        job.check()


@pytest.mark.parametrize(("forever", "lacks"), [(False, True), (True, True), (True, False)])
def test_a_device_that_fails_in_an_offload_and_on_the_way_back(
    *, forever: bool, lacks: bool
) -> None:
    """If the memory that the weights gave up is not there any more, they end on the host, whole. If
    the device goes on failing, their masters may be on the device then. State dicts show the host
    copy, in which the weights may be their cast."""
    job = Job(
        device=(device := Faults(SimulatedDevice(CAPACITY, chunk_bytes=8192, granularity=4096)))
    )
    job.train()
    were_broken = 0
    for at in range(1, 20, 2):
        with (
            suppress(InjectedFault, placement.DeviceMemoryError, placement.BrokenHandleError),
            job.manager.phase("train"),
        ):
            job.learn(at)
            device.fail("sync", at=at, forever=forever)
            if lacks:
                device.fail("create", forever=True)
        device.clear()
        were_broken += job.actor.broken is not None
        assert_same(job.model.state_dict(), job.plain.state_dict())
        assert_same(job.adam.state_dict(), job.plain_adam.state_dict())
        job.check()
    assert were_broken or not forever


def test_no_host_memory_for_a_copy_of_their_own(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.train()
    monkeypatch.setattr("placement.devices.host.slab.available_bytes", lambda: 0)
    job.manager.enter("train")
    job.write(lambda model: model[0].bias.data.add_(1.0))
    with pytest.raises(HostMemoryError):
        job.manager.leave()
    assert job.actor.resident_bytes
    monkeypatch.undo()
    job.check()


def test_masters_that_are_loaded_without_the_weights_and_no_host_memory_for_these(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Job(
        policy=Scripted(
            eval=lambda view: view.total_plan({"actor.optimizer": placement.State.GPU_RESIDENT})
        )
    )
    job.train()
    with monkeypatch.context() as patched:
        patched.setattr("placement.devices.host.slab.available_bytes", lambda: 0)
        with pytest.raises(HostMemoryError):
            job.manager.enter("eval")
        with pytest.raises(HostMemoryError):
            job.actor.state_dict()
    assert job.is_cast
    with job.manager.phase("eval"), torch.no_grad():
        assert not job.is_cast
        job.add_to_masters()
    job.check()


def test_masters_on_disk_with_every_byte_verified(tmp_path: Any) -> None:
    job = Job(verify="always", host_limit_bytes=400_000, disk_directory=str(tmp_path))
    for seed in range(2):
        job.train(seed)
        settle(job.manager)
    assert job.is_cast
    with job.manager.phase("log_prob"):
        settle(job.manager)
        assert_same(job.model.state_dict(), job.plain.state_dict())
    assert_same(job.actor.state_dict(), job.plain.state_dict())
    job.check()


def test_weights_that_two_optimizers_step() -> None:
    """Those whose masters are in the one that was named have no host copy."""
    model = net()
    adam, sgd = MasterAdam(model[0].parameters()), torch.optim.SGD(model[2].parameters(), lr=0.1)
    manager = make_manager()
    actor = manager.register("actor", model, role="actor", masters=adam)
    manager.register("sgd", sgd)
    before = actor.host_bytes
    manager.register("adam", adam)
    saved = sum(each.nbytes for each in model[0].parameters())
    assert before - saved - 512 <= actor.host_bytes <= before - saved
    values = copy.deepcopy(actor.state_dict())
    with manager.phase("train"):
        assert_same(model.state_dict(), values)
    manager.close()


# --- refused


def test_what_cannot_be_had_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = make_manager()
    model = net()
    adam = MasterAdam(model[:3].parameters())
    for actor, keywords in (
        (model, {"readonly": True}),
        (model, {"external": True}),
        (placement.Lazy(net), {}),
    ):
        with pytest.raises(RegistrationError, match="masters="):
            manager.register("actor", actor, masters=adam, **keywords)  # type: ignore[arg-type]
    with pytest.raises(RegistrationError, match="is no optimizer"):
        manager.register("actor", model, masters=model)
    with pytest.raises(RegistrationError, match="no float32 tensor that placement moves for any"):
        manager.register("actor", model, masters=torch.optim.AdamW(model.parameters()))
    monkeypatch.setattr("placement.ownership.optimizer._external", lambda *_: "its framework")
    with pytest.raises(RegistrationError, match="no float32 tensor that placement moves"):
        manager.register("actor", model, masters=adam)
    monkeypatch.undo()
    assert not manager.handles
    adam.state[model[0].weight]["master"][0, 0] += 1.0
    values = copy.deepcopy(model.state_dict())
    manager.register("actor", model, masters=adam)
    with pytest.raises(RegistrationError, match="are not the cast of float32 masters in 'adam'"):
        manager.register("adam", adam)
    assert [*manager.handles] == ["actor"]
    assert_same(model.state_dict(), values)
