"""Host copies that several mappings share, and how they are divided. Two mappings of one process
stand for those of two ranks."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from placement.core.errors import HostMemoryError
from placement.devices.base import Device
from placement.devices.host import slab as slab_module
from placement.devices.host.shared_slab import new_file, opened_file
from placement.devices.host.slab import PAGE
from placement.devices.memory import Copy
from placement.storage.layout import Adoptee, RangeLayout
from placement.storage.shared import SharedCopy, SharedRange, Shares, spans_of
from placement.testing import SimulatedDevice
from tests.contract.ranges import poisoned, random_bytes, whole
from tests.support.forked import exit_code

EXTRA = 64


def test_all_mappings_have_the_same_bytes_and_copy_them_to_the_device(device: Device) -> None:
    nbytes = device.chunk_bytes
    with new_file(nbytes + EXTRA) as (file, words):
        first = device.shared_host(file, nbytes, [(0, nbytes // 2)], EXTRA)
        with opened_file(words) as again:
            second = device.shared_host(again, nbytes, [(nbytes // 2, nbytes // 2)], EXTRA)
    content = random_bytes(nbytes)
    first.view(0, nbytes // 2).copy_(content[: nbytes // 2])
    second.view(nbytes // 2, nbytes // 2).copy_(content[nbytes // 2 :])
    first.extra.fill_(7)
    assert (second.extra == 7).all()
    assert first.held_bytes + second.held_bytes == nbytes
    addresses = poisoned(device, nbytes)
    device.map(addresses, [device.create(nbytes)])
    for slab in (first, second):
        slab.pin()
        assert slab.view(0, nbytes).equal(content)
        device.copy([Copy(addresses.base, slab.address, nbytes)], "to_device")
        mark = device.mark("to_device")
        with device.after(mark):
            found = whole(device, addresses).clone()
        device.order()
        assert found.cpu().equal(content)
        whole(device, addresses).zero_()
    assert device.torch_device.type == "cpu" or (first.pinned and second.pinned)


def mapped(words: str) -> list[str]:
    """This process's mappings of a memory file, by its name. How many there are of others is
    nobody's business here: the interpreter takes memory, and threads begin and end, whenever they
    like."""
    name = f"/memfd:{words.split(':')[2]} "
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if name in line]


def test_it_is_there_as_long_as_anybody_looks_at_it_and_then_gone(device: Device) -> None:
    with new_file(PAGE + EXTRA) as (file, words):
        slab = device.shared_host(file, PAGE, [(0, PAGE)], EXTRA)
    address, view = slab.address, slab.view(8, 16).fill_(3)
    del slab
    assert (view == 3).all()
    (line,) = mapped(words)
    assert line.startswith(f"{address:x}-")
    del view
    assert mapped(words) == []


def test_a_forked_child_does_not_have_it(device: Device) -> None:
    with new_file(PAGE + EXTRA) as (file, _):
        slab = device.shared_host(file, PAGE, [(0, PAGE)], EXTRA)
    view = slab.view(0, PAGE)
    assert exit_code(lambda: int(view.sum())) == -signal.SIGSEGV
    assert (view == 0).all()


def test_lack_of_memory_is_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slab_module, "available_bytes", lambda: PAGE)
    with new_file(4 * PAGE) as (file, _), pytest.raises(HostMemoryError, match="shared copy"):
        SimulatedDevice(1 << 20).shared_host(file, 4 * PAGE, [(0, 2 * PAGE)], 0)


def test_the_file_of_another_machine_is_not_opened() -> None:
    with new_file(PAGE) as (file, words), pytest.raises(OSError, match="another file"):
        opened_file(words + "x")
    assert words.startswith(f"{os.getpid()}:{file}:")
    with pytest.raises(OSError, match="No such file"):
        opened_file(words)
    with pytest.raises(OSError, match="No such file"):
        opened_file(f"{2**22 + 1}:3:none")


@pytest.mark.parametrize("world_size", [2, 3, 4, 7])
@pytest.mark.parametrize("elements", [1, 1000, 40_000, 123_457])
def test_the_shares_of_all_ranks_are_the_whole_and_nothing_twice(
    world_size: int, elements: int
) -> None:
    device = SimulatedDevice(1 << 24, chunk_bytes=12 * PAGE)
    tensors = [torch.zeros(elements), torch.zeros(17)]
    held = torch.zeros(2 * (4 * elements + 4096 + 12 * PAGE), dtype=torch.uint8)
    for rank in range(world_size):
        shares = Shares(rank, tuple(range(world_size)))
        layout = RangeLayout(
            device,
            [Adoptee(str(i), each.untyped_storage(), (each,)) for i, each in enumerate(tensors)],
        )
        for start, nbytes in spans_of(layout.nbytes, device.chunk_bytes, shares):
            assert start % PAGE == nbytes % PAGE == 0
            held[start : start + nbytes] += 1
        extra_bytes = SharedCopy.extra_bytes(shares, 1)
        with new_file(layout.nbytes + 2 * PAGE + extra_bytes) as (file, _):
            slab = device.shared_host(file, layout.nbytes, [], extra_bytes)
        r = SharedRange(device, layout, SharedCopy(slab, shares), ())
        brought = torch.zeros(r.nbytes, dtype=torch.uint8)
        for index in range(len(r.chunk_sizes)):
            for copy in (*r.copies(index)[0], *r.copies(index)[1]):
                assert (
                    copy.device_address - layout.addresses.base
                    == copy.host_address - r.host.address
                )
                brought[copy.host_address - r.host.address :][: copy.nbytes] += 1
            start, nbytes = r.gathered(index)
            assert nbytes == world_size * r.part_bytes(index)
            assert start + nbytes <= r.starts[index] + r.used_sizes[index] + PAGE
        assert (brought == 1).all()
    whole_pages = -(-r.nbytes // PAGE) * PAGE
    assert (held[:whole_pages] == 1).all()
    assert not held[whole_pages:].any()
