"""The order of copies and kernels in which a streamed step relies: each bucket by itself, whatever else is on the link."""

from __future__ import annotations

import torch

from placement.devices.base import Device
from placement.devices.memory import Copy
from tests.contract.ranges import is_poison, poisoned, random_bytes, read, whole
from tests.support.threads import in_threads

BUCKETS = 6
AHEAD = 2


def test_buckets_come_are_changed_and_leave_in_one_another(device: Device) -> None:
    """The memory behind three buckets goes round: a bucket's chunk is taken only when its copy to the host has completed."""
    nbytes = device.chunk_bytes
    addresses = poisoned(device, BUCKETS * nbytes)
    slab = device.host(BUCKETS * nbytes)
    content = random_bytes(BUCKETS * nbytes)
    slab.view(0, slab.nbytes).copy_(content)
    added = torch.full((1,), 3, dtype=torch.uint8, device=device.torch_device)
    chunks = [device.create(nbytes) for _ in range(AHEAD + 1)]
    arrived, left = [], []

    def copy_of(index: int) -> list[Copy]:
        return [Copy(addresses.base + index * nbytes, slab.address + index * nbytes, nbytes)]

    def fetch(index: int) -> None:
        device.map(addresses, [chunks.pop()], index * nbytes)
        device.copy(copy_of(index), "to_device")
        arrived.append(device.mark("to_device"))

    device.order()
    held = {}
    for index in range(AHEAD):
        held[index] = chunks[-1]
        fetch(index)
    for index in range(BUCKETS):
        with device.after(arrived[index]):
            device.view(addresses, index * nbytes, nbytes).add_(added)
            device.copy(copy_of(index), "to_host")
            left.append(device.mark("to_host"))
        if index:
            device.wait(left[index - 1])
            device.unmap(addresses, nbytes, (index - 1) * nbytes)
            chunks.append(held.pop(index - 1))
            assert is_poison(device, addresses, (index - 1) * nbytes, nbytes)
        if index + AHEAD < BUCKETS:
            held[index + AHEAD] = chunks[-1]
            fetch(index + AHEAD)
    device.wait(left[-1])
    device.order()
    assert read(device, addresses, (BUCKETS - 1) * nbytes, nbytes).equal(content[-nbytes:] + 3)
    device.unmap(addresses, addresses.nbytes)
    assert slab.view(0, slab.nbytes).equal(content + 3)
    assert is_poison(device, addresses, 0, addresses.nbytes)
    assert not device.heal_poison()


def test_what_is_enqueued_after_a_mark_sees_work_from_before_the_order(device: Device) -> None:
    addresses = poisoned(device, device.chunk_bytes)
    device.map(addresses, [device.create(device.chunk_bytes)])
    slab = device.host(device.chunk_bytes)
    whole(device, addresses).fill_(5)
    device.order()
    with device.after(device.mark("to_device")):
        whole(device, addresses).mul_(2)
        device.copy([Copy(addresses.base, slab.address, device.chunk_bytes)], "to_host")
        mark = device.mark("to_host")
    device.wait(mark)
    assert (slab.view(0, slab.nbytes) == 10).all()
    device.order()


def test_two_threads_hand_chunks_from_range_to_range(device: Device) -> None:
    """Each between two ranges of its own, with the bytes in the chunk, as the thread of a prefetch does beside a streamed step."""
    nbytes, turns = device.chunk_bytes, 20
    contents = [random_bytes(nbytes) for _ in range(2)]
    chunks = [device.create(nbytes) for _ in range(2)]
    ranges = [[poisoned(device, 2 * nbytes) for _ in range(2)] for _ in range(2)]
    slabs = [device.host(nbytes) for _ in range(2)]

    def hand_on(mine: int) -> None:
        slabs[mine].view(0, nbytes).copy_(contents[mine])
        here, there = ranges[mine]
        device.map(here, [chunks[mine]])
        device.copy([Copy(here.base, slabs[mine].address, nbytes)], "to_device")
        device.wait(device.mark("to_device"))
        for turn in range(turns):
            device.unmap(here, nbytes, turn % 2 * nbytes)
            device.map(there, [chunks[mine]], (turn + 1) % 2 * nbytes)
            here, there = there, here

    assert in_threads(lambda: hand_on(0), lambda: hand_on(1)) == [None, None]
    for mine, (first, second) in enumerate(ranges):
        assert read(device, first, 0, nbytes).equal(contents[mine])
        assert is_poison(device, first, nbytes, nbytes)
        assert is_poison(device, second, 0, 2 * nbytes)
    assert not device.heal_poison()
