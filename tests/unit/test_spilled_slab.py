"""The memory of a slab goes back to the system and comes again, at the same addresses."""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path

import pytest
import torch

from placement.core.errors import HostMemoryError
from placement.devices.host import spilled_slab
from placement.devices.host.mapping import PAGE, libc
from placement.devices.host.slab import Slab
from placement.devices.host.spilled_slab import release, renew

MIB = 1 << 20


def resident_bytes(slab: Slab) -> int:
    """What the kernel has in memory of the slab."""
    pages = (ctypes.c_ubyte * (slab.nbytes // PAGE))()
    assert libc.mincore(ctypes.c_void_p(slab.address), ctypes.c_size_t(slab.nbytes), pages) == 0
    return PAGE * sum(each & 1 for each in pages)


def process_bytes() -> int:
    """The resident memory of this process (RSS)."""
    return next(int(line.split()[1]) << 10 for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS:"))


def test_the_pages_are_really_freed_and_really_come_back() -> None:
    slab = Slab(16 * MIB)
    slab.view(0, slab.nbytes).fill_(7)
    assert resident_bytes(slab) == slab.nbytes == slab.held_bytes
    address = slab.address
    release(slab)
    assert resident_bytes(slab) == slab.held_bytes == 0
    assert renew(slab)
    assert resident_bytes(slab) == slab.nbytes == slab.held_bytes
    with_it = process_bytes()
    release(slab)
    assert process_bytes() < with_it - slab.nbytes // 2  # the rest of the process may have grown meanwhile
    assert slab.address == address


def test_a_tensor_over_it_stays_valid() -> None:
    slab = Slab(MIB)
    view = slab.view(8, 8)
    release(slab)
    renew(slab, lambda: bool(slab.view(0, MIB).fill_(3).numel()))
    assert view.tolist() == [3] * 8


def test_views_are_counted_however_they_are_kept() -> None:
    slab = Slab(MIB)
    assert not slab.has_views
    view = slab.view(0, 64)
    kept = view.view(torch.int64)[2:].untyped_storage()
    del view
    assert slab.has_views
    del kept
    assert not slab.has_views


def test_every_new_view_brings_the_bytes_first() -> None:
    slab = Slab(MIB)
    seen = []
    slab.before_use = lambda: seen.append(slab.has_views)
    slab.view(0, 8)
    assert seen == [True]


def test_a_fill_that_gives_up_leaves_it_released() -> None:
    slab = Slab(MIB)
    release(slab)
    assert not renew(slab, lambda: False)
    assert slab.held_bytes == 0
    assert resident_bytes(slab) == 0


def test_without_memory_it_stays_released(monkeypatch: pytest.MonkeyPatch) -> None:
    slab = Slab(MIB)
    release(slab)
    monkeypatch.setattr(spilled_slab, "available_bytes", lambda: MIB - 1)
    with pytest.raises(HostMemoryError, match=r"asked for 1,048,576 bytes of a host copy that had left it, 1,048,575 available"):
        renew(slab)
    assert slab.held_bytes == 0


@pytest.mark.parametrize("is_filled", [True, False])
def test_it_is_unpinned_before_it_goes_and_pinned_again_when_it_is_back(is_filled: bool) -> None:
    pinned: dict[int, int] = {}
    may_pin = threading.Event()
    may_pin.set()

    def register(address: int, nbytes: int) -> None:
        may_pin.wait(10)
        pinned[address] = nbytes

    slab = Slab(3 * MIB, register, pinned.pop)
    slab.ready.wait()
    assert sum(pinned.values()) == slab.pinned_bytes == slab.nbytes
    release(slab)
    assert pinned == {}
    assert slab.pinned_bytes == slab.pageable_bytes == 0
    may_pin.clear()
    renew(slab, (lambda: True) if is_filled else None)
    assert not slab.ready.is_set()  # device copies wait for that
    may_pin.set()
    assert slab.ready.wait(10)
    assert sum(pinned.values()) == slab.pinned_bytes == slab.nbytes
    del slab
    assert pinned == {}


def test_released_memory_is_promised_to_nobody() -> None:
    from placement.devices.host.reserve import promised_bytes

    slab = Slab(MIB, lambda address, nbytes: None, lambda address: None)
    slab.ready.wait()
    before = promised_bytes()
    release(slab)
    assert promised_bytes() == before
    renew(slab)
    slab.ready.wait()
    assert promised_bytes() == before


def test_a_fill_that_fails_leaves_it_released_and_pins_nothing() -> None:
    pinned: dict[int, int] = {}
    slab = Slab(MIB, pinned.__setitem__, pinned.pop)
    slab.ready.wait()
    release(slab)

    def broken() -> bool:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        renew(slab, broken)
    assert (slab.held_bytes, resident_bytes(slab), pinned) == (0, 0, {})
    renew(slab, lambda: True)
    assert slab.ready.wait(10)
    assert sum(pinned.values()) == slab.pinned_bytes == slab.nbytes
