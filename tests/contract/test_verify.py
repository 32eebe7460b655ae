"""verify=: a byte that changes on the way or in the host copy is found and named, and the good copy
is kept."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from placement import BrokenHandleError, IntegrityError, Manager, State
from placement.devices.base import Device
from placement.devices.memory import Copy, Direction
from placement.policies import Colocated
from placement.testing import Faults, SimulatedDevice, assert_nothing_resident
from tests.support.worker import Worker, assert_same, learn

CHUNK = 16384
SIDE = 64
"""A parameter of SIDE x SIDE floats fills one chunk."""


class BadLink(Faults):
    """Changes one bit of the first run of each copy in a direction while it is told to."""

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self.spoilt: range = range(0)
        self.direction: Direction = "to_host"

    def spoil(self, direction: Direction, *, first: int = 0, count: int = 1) -> None:
        """Spoil `count` copies of this direction from now on, the first `first` left out."""
        self.direction, self.spoilt = direction, range(-first, count)

    def copy(self, copies: Sequence[Copy], direction: Direction) -> None:
        super().copy(copies, direction)
        if direction != self.direction or not self.spoilt:
            return
        number, self.spoilt = self.spoilt[0], self.spoilt[1:]
        if number >= 0:
            address = (
                copies[0].device_address if direction == "to_device" else copies[0].host_address
            )
            at = ctypes.c_uint8.from_address(address + copies[0].nbytes // 2)
            at.value ^= 4


def blocks(count: int = 4) -> nn.ParameterList:
    return nn.ParameterList([nn.Parameter(torch.randn(SIDE, SIDE)) for _ in range(count)])


class VerifiedPair:
    """A model with plain SGD, and a reference that is readonly."""

    def __init__(self, verify: str = "always", count: int = 4, **settings: Any) -> None:
        torch.manual_seed(0)
        self.model, self.reference = blocks(count), blocks(3)
        self.values = copy.deepcopy(self.model.state_dict())
        self.reference_values = copy.deepcopy(self.reference.state_dict())
        self.device = BadLink(SimulatedDevice(64 * CHUNK, chunk_bytes=CHUNK))
        self.manager = Manager(device=self.device, verify=verify, **settings)
        self.actor = self.manager.register("actor", self.model, role="actor")
        self.sgd = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.manager.register("sgd", self.sgd)
        self.ref = self.manager.register("ref", self.reference, role="ref", readonly=True)

    def write(self) -> None:
        """Change every value, with a twin's values to compare."""
        for parameter in self.model:
            parameter.data.add_(1)
        self.values = {name: value + 1 for name, value in self.values.items()}


@pytest.fixture
def worker() -> VerifiedPair:
    return VerifiedPair()


def flip(handle: Any, chunk: int, at: int = 12345) -> None:
    """Turn one bit of a host copy over."""
    (r,) = handle.holding.ranges
    byte = r.host.view(r.starts[chunk] + at, 1)
    byte.bitwise_xor_(16)


# --- the host copy changes while it is the only one


@pytest.mark.parametrize("after", ["registration", "a clean offload", "a dirty offload"])
@pytest.mark.parametrize("chunk", [0, 3])
def test_a_flipped_bit_in_the_host_copy_is_caught_and_named(
    worker: VerifiedPair, chunk: int, after: str
) -> None:
    if after != "registration":
        with worker.manager.phase("train"):
            if after == "a dirty offload":
                worker.write()
    flip(worker.actor, chunk)
    named = (
        rf"chunk {chunk} of 4 \({chunk}\) changed in the host copy of 'actor' "
        r"after "
        r"it "
        r"was "
        rf"offloaded at \d{{4}}-\d\d-\d\dT"
    )
    with pytest.raises(IntegrityError, match=named), worker.manager.phase("train"):
        pytest.fail("the phase began")
    assert worker.actor.state is State.CPU_OFFLOADED
    assert worker.actor.broken is not None
    assert worker.device.memory().chunk_bytes == 0
    assert {
        handle.broken for name, handle in worker.manager.handles.items() if name != "actor"
    } == {None}


def test_what_is_lost_stays_unusable_and_everything_else_works() -> None:
    worker = VerifiedPair(policy=Colocated(stream_sync=True))
    flip(worker.actor, 2)
    with pytest.raises(IntegrityError), worker.manager.phase("train"):
        pass
    with (
        pytest.raises(BrokenHandleError, match="chunk 2 of 4"),
        worker.manager.phase("weight_sync"),
    ):
        pass  # it is not published either
    for _ in range(2):
        with pytest.raises(BrokenHandleError, match="chunk 2 of 4"), worker.manager.phase("train"):
            pass
        with worker.manager.phase("log_prob", only=["ref"]):
            assert_same(dict(worker.reference.state_dict()), dict(worker.reference_values))
    for read in (worker.actor.state_dict, worker.model.state_dict):
        with pytest.raises(BrokenHandleError, match="must not be saved"):
            read()
    assert [finding.what for finding in worker.manager.audit().findings] == ["broken"]
    assert worker.manager.snapshot().handles[0].failures == {"integrity": 1}
    worker.manager.close()
    assert_same(dict(worker.reference.state_dict()), dict(worker.reference_values))


# --- the host copy changes while the device has the good one


@pytest.mark.parametrize(("chunk", "by_link"), [(2, False), (0, True)])
def test_a_chunk_whose_host_copy_went_bad_is_found_before_its_memory_is_given_up(
    worker: VerifiedPair, chunk: int, by_link: bool
) -> None:
    """One that was skipped, and one that arrived changed."""
    with worker.manager.phase("train") as phase:
        if by_link:
            worker.write()
            worker.device.spoil("to_host")
        else:
            flip(worker.actor, chunk)
        with pytest.raises(
            IntegrityError,
            match=rf"'actor': chunk {chunk} of 4 "
            r".* "
            r"differ "
            r"between "
            r"the device and the host copy .* its next offload copies them again",
        ):
            phase.switch("log_prob", only=["ref"])
        assert worker.actor.state is State.TRAINING
        assert_same(dict(worker.model.state_dict()), dict(worker.values))
        phase.switch("log_prob", only=["ref"])
        assert_same(dict(worker.actor.state_dict()), dict(worker.values))
    assert_nothing_resident(worker.manager)


def test_an_exit_makes_it_good_and_counts_it(worker: VerifiedPair) -> None:
    with worker.manager.phase("train"):
        flip(worker.actor, 1)
    assert_same(dict(worker.actor.state_dict()), dict(worker.values))
    assert worker.actor.counters.failures["integrity"] == 1
    assert worker.actor.broken is None
    assert_nothing_resident(worker.manager)


def test_a_readonly_host_copy_that_went_bad_is_written_again_from_the_device(
    worker: VerifiedPair,
) -> None:
    with worker.manager.phase("log_prob") as phase:
        flip(worker.ref, 1)
        with pytest.raises(IntegrityError, match=r"'ref': chunk 1 of 3 .* were copied again"):
            phase.switch("values")
        assert worker.ref.state is State.GPU_RESIDENT
        phase.switch("values")
    assert_same(dict(worker.ref.state_dict()), dict(worker.reference_values))
    assert (worker.ref.counters.offloaded_bytes, worker.ref.broken) == (0, None)
    with worker.manager.phase("log_prob"):
        assert_same(dict(worker.reference.state_dict()), dict(worker.reference_values))


# --- the link


def test_a_link_that_stays_bad_keeps_the_handle_on_the_device_until_it_is_good(
    worker: VerifiedPair,
) -> None:
    worker.manager.enter("train")
    worker.write()
    worker.device.spoil("to_host", count=10**6)
    with pytest.raises(IntegrityError, match="'actor': chunk 1 of 4"):
        worker.manager.leave()
    assert worker.actor.state is not State.CPU_OFFLOADED
    assert_same(dict(worker.model.state_dict()), dict(worker.values))
    assert worker.manager.snapshot().pairing_violations == 1
    worker.device.spoil("to_host", count=0)
    with worker.manager.phase("log_prob", only=["ref"]):
        assert_same(dict(worker.actor.state_dict()), dict(worker.values))
    assert_nothing_resident(worker.manager)


def test_a_copy_that_arrives_changed_on_the_device_is_undone_and_can_be_tried_again(
    worker: VerifiedPair,
) -> None:
    worker.device.spoil("to_device")
    with pytest.raises(
        IntegrityError,
        match=r"'actor': chunk \d of 4 .* did not arrive on the device",
    ):
        worker.manager.enter("train")
    assert (worker.actor.state, worker.actor.broken) == (State.CPU_OFFLOADED, None)
    assert worker.device.memory().chunk_bytes == 0
    with worker.manager.phase("train"):
        assert_same(dict(worker.model.state_dict()), dict(worker.values))
    assert_nothing_resident(worker.manager)


def test_state_on_its_first_way_to_the_host_is_compared_too() -> None:
    worker = Worker(
        device=(device := BadLink(SimulatedDevice(64 * CHUNK, chunk_bytes=CHUNK))), verify="always"
    )
    first = (
        r"'actor.optimizer': 'state.* differs between the device and the host "
        r"copy "
        r"after "
        r"its "
        r"first offload"
    )
    with worker.manager.phase("train", only=["actor"]) as phase:
        learn(worker.net, worker.adam)
        worker.adam.zero_grad()
        state, values = (
            copy.deepcopy(worker.adam.state_dict()),
            copy.deepcopy(worker.net.state_dict()),
        )
        device.spoil("to_host")
        with pytest.raises(IntegrityError, match=first):
            phase.switch("log_prob", only=["actor"])
        assert worker.optimizer.state is State.TRAINING
        assert_same(worker.adam.state_dict(), state)
        phase.switch("log_prob", only=["actor"])
        assert worker.optimizer.state is State.CPU_OFFLOADED
        assert_same(worker.optimizer.state_dict(), state)
    assert_same(dict(worker.actor.state_dict()), dict(values))


@pytest.mark.parametrize("verify", ["always", "off"])
def test_nothing_else_changes(verify: str) -> None:
    """The same bytes are copied, the same skipped, and the same values come out, whatever is
    verified."""
    worker, plain = VerifiedPair(verify), VerifiedPair("off")
    for each in (worker, plain):
        for seed in range(3):
            with each.manager.phase("train") as phase:
                if seed != 1:
                    each.write()
                phase.switch("log_prob")
        assert_nothing_resident(each.manager)
    for name, handle in worker.manager.handles.items():
        other = plain.manager.handles[name].counters
        assert (handle.counters.offloaded_bytes, handle.counters.skipped_bytes) == (
            other.offloaded_bytes,
            other.skipped_bytes,
        )
        assert (handle.counters.loaded_bytes, handle.counters.failures) == (
            other.loaded_bytes,
            other.failures,
        )
        assert_same(handle.state_dict(), plain.manager.handles[name].state_dict())


def test_zeroed_gradients_and_others_pass() -> None:
    worker = Worker(verify="always")
    for step in range(4):
        with worker.manager.phase("train"):
            learn(worker.net, worker.adam, step)
        if step % 2:
            worker.adam.zero_grad(set_to_none=False)
    assert_nothing_resident(worker.manager)
