"""An FSDP2 actor, its optimizer and a replicated reference under a group: what each rank of a GRPO job holds. One rank is full."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist

from placement import Manager, State
from placement.core.errors import GroupError
from placement.devices.base import Device
from placement.testing import SimulatedDevice, assert_nothing_resident
from tests.group.replicated_worker import Reference, as_bytes
from tests.sharded.one_of_each import fsdp2
from tests.sharded.training import Program, device_of, here
from tests.sharded.training import as_bytes as loss_bytes
from tests.support.ranks import group_of_all

DEADLINE_SECONDS = 60.0


@contextmanager
def little_left(device: Device, nbytes: int) -> Iterator[None]:
    """Somebody else has all of the device's memory but `nbytes`."""
    if isinstance(device, SimulatedDevice):
        capacity, device.capacity_bytes = device.capacity_bytes, device.memory().chunk_bytes + nbytes
        yield
        device.capacity_bytes = capacity
    else:
        device.trim()
        taken = torch.empty(device.memory().free_bytes - nbytes, dtype=torch.uint8, device=device.torch_device)
        yield
        del taken
        device.trim()


def _step(program: Program, manager: Manager, reference: Reference, wanted: dict[str, bytes], step: int) -> list[bytes]:
    losses = []
    for phase, method in program.phases:
        with manager.phase(phase):
            losses.append(loss_bytes(getattr(program, method)(step)))
            if phase == "log_prob":
                assert as_bytes(reference) == wanted
    assert_nothing_resident(manager)
    return losses


def trains_on(generation: int, device: str, full: int) -> list[str]:
    """A step, an entry of each phase for which rank `full` has too little memory, another step. Returns what the entries raised."""
    plain = fsdp2(device)
    expected = [loss_bytes(getattr(plain, method)(step)) for step in range(2) for _, method in plain.phases]

    program = fsdp2(device)
    manager = Manager(device=device_of(device), group=group_of_all(generation, DEADLINE_SECONDS), budget_bytes=1 << 40)
    program.register(manager)
    torch.manual_seed(5)
    reference = Reference(200 if device == "cuda" else 1).to(here(device))
    wanted = as_bytes(reference)
    manager.register("ref", reference, role="ref", readonly=True, replicated=True)

    losses = _step(program, manager, reference, wanted, 0)
    told = []
    for phase in ("log_prob", "train"):
        needed = sum(h.num_bytes for h in manager.handles.values() if (h.role == "ref") == (phase == "log_prob"))
        with little_left(manager.device, needed // 2) if dist.get_rank() == full else nullcontext():
            try:
                with manager.phase(phase):
                    raise AssertionError(f"phase {phase} was entered")
            except GroupError as error:
                told.append(str(error))
        assert all(handle.state is State.CPU_OFFLOADED for handle in manager.handles.values())
        assert_nothing_resident(manager)
        manager.check_integrity()
    losses += _step(program, manager, reference, wanted, 1)
    assert losses == expected, "the losses are not those of a run without placement"
    manager.close()
    return told
