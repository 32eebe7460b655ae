"""Files that take the bytes of slabs, and slabs whose memory goes back to the system, whatever the
kernel answers."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.core.errors import HostMemoryError
from placement.devices.base import round_up
from placement.devices.host import disk_file
from placement.devices.host import slab as slab_module
from placement.devices.host.disk_file import DiskFile
from placement.devices.host.slab import PAGE, Slab, libc, promised_bytes

BLOCK = 8192
MIB = 1 << 20


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_file, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(disk_file, "_warning", threading.Lock())


def slab_of(nbytes: int) -> Slab:
    slab = Slab(nbytes)
    slab.view(0, nbytes).copy_(
        torch.randint(
            0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
        )
    )
    return slab


def round_trip(folder: Path, nbytes: int) -> None:
    source, target = slab_of(nbytes), Slab(nbytes)
    file = DiskFile(folder, "a", nbytes)
    assert file.write(source.address) == (round_up(nbytes, PAGE), True)
    assert file.read(target.address) == []
    assert torch.equal(source.view(0, nbytes), target.view(0, nbytes))


@settings(deadline=None)
@given(nbytes=st.integers(1, 12 * BLOCK))
def test_what_is_written_comes_back(tmp_path_factory: pytest.TempPathFactory, nbytes: int) -> None:
    round_trip(tmp_path_factory.getbasetemp(), nbytes)


def test_a_file_has_no_name_is_for_this_user_alone_and_goes_with_its_owner(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    file = DiskFile(tmp_path, "a", BLOCK)
    assert [*tmp_path.iterdir()] == []  # a killed process leaves nothing
    assert stat.S_IMODE(os.fstat(file._file).st_mode) == 0o600
    assert len(os.listdir("/proc/self/fd")) == before + 1
    del file
    assert len(os.listdir("/proc/self/fd")) == before


def test_only_blocks_that_differ_are_written(tmp_path: Path) -> None:
    slab = slab_of(5 * BLOCK + 1)
    file = DiskFile(tmp_path, "a", slab.nbytes)
    assert file.write(slab.address) == (5 * BLOCK + PAGE, True)
    assert file.write(slab.address) == (0, True)
    slab.view(2 * BLOCK + 7, 1).bitwise_xor_(1)
    assert file.write(slab.address) == (BLOCK, True)
    file.forget()
    assert file.write(slab.address) == (5 * BLOCK + PAGE, True)
    assert file.read(slab.address) == []


@pytest.mark.parametrize(("offset", "bit"), [(0, 0), (4 * BLOCK + PAGE - 1, 7)])
def test_every_changed_bit_is_found_in_its_block(tmp_path: Path, offset: int, bit: int) -> None:
    slab = slab_of(4 * BLOCK + PAGE)
    file = DiskFile(tmp_path, "a", slab.nbytes)
    file.write(slab.address)
    other = os.open(f"/proc/self/fd/{file._file}", os.O_RDWR)
    os.pwrite(other, bytes([os.pread(other, 1, offset)[0] ^ 1 << bit]), offset)
    os.close(other)
    assert file.read(slab.address) == [offset // BLOCK]


# --- what a file system may refuse


def test_without_direct_io_the_cache_is_used_and_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    set_flags, write = fcntl.fcntl, os.pwrite

    def refuses_request(file: int, *rest: Any) -> int:
        if set_flags(file, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct IO")
        return write(file, *rest)

    monkeypatch.setattr(os, "pwrite", refuses_request)
    round_trip(tmp_path, 3 * BLOCK + 5)
    round_trip(tmp_path, BLOCK)
    assert [record.getMessage().count("no direct IO here") for record in caplog.records] == [1]


def test_a_full_disk_shows_before_a_byte_is_written(tmp_path: Path) -> None:
    with pytest.raises(OSError) as caught:  # noqa: PT011 - the number is checked below
        DiskFile(tmp_path, "a", 1 << 60)
    assert caught.value.errno in (errno.ENOSPC, errno.EFBIG)


def test_short_calls_are_continued_and_a_file_that_ends_early_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, read = os.pwritev, os.preadv
    monkeypatch.setattr(
        os,
        "pwritev",
        lambda file, parts, offset: write(file, [memoryview(parts[0])[:4096]], offset),
    )
    monkeypatch.setattr(
        os, "preadv", lambda file, parts, offset: read(file, [memoryview(parts[0])[:4096]], offset)
    )
    round_trip(tmp_path, 3 * BLOCK)
    source, file = slab_of(4 * BLOCK), DiskFile(tmp_path, "a", 4 * BLOCK)
    file.write(source.address)
    os.ftruncate(file._file, BLOCK)
    with pytest.raises(OSError, match="the file ends at"):
        file.read(source.address)


def test_it_stops_when_it_is_told_to_and_goes_on_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # else the other threads may have done everything before it is told
    monkeypatch.setattr(disk_file, "DEPTH", 1)
    monkeypatch.setattr(disk_file, "_CHECKING", 0)
    source = slab_of(64 * BLOCK)
    file = DiskFile(tmp_path, "a", 64 * BLOCK)
    first, is_whole = file.write(source.address, goes_on=lambda: False)
    assert not is_whole
    assert 0 < first < file.nbytes
    assert file.write(source.address) == (file.nbytes - first, True)
    assert file.read(source.address, goes_on=lambda: False) is None
    assert file.read(source.address) == []


# --- the memory of a slab


def resident_bytes(slab: Slab) -> int:
    """What the kernel has in memory of the slab."""
    pages = (ctypes.c_ubyte * (slab.nbytes // PAGE))()
    assert libc.mincore(ctypes.c_void_p(slab.address), ctypes.c_size_t(slab.nbytes), pages) == 0
    return PAGE * sum(each & 1 for each in pages)


def test_the_pages_are_there_untouched_are_really_freed_and_come_back_at_the_same_addresses() -> (
    None
):
    slab = Slab(MIB)
    view = slab.view(8, 8)
    assert resident_bytes(slab) == slab.nbytes == slab.held_bytes
    slab.release()
    assert resident_bytes(slab) == slab.held_bytes == 0
    assert slab.renew(lambda: bool(slab.view(0, MIB).fill_(3).numel()))
    assert resident_bytes(slab) == slab.nbytes == slab.held_bytes
    assert view.tolist() == [3] * 8


def test_it_is_unpinned_before_it_goes_and_pinned_again_when_it_is_back() -> None:
    pinned: dict[int, int] = {}
    may_pin = threading.Event()
    may_pin.set()

    def register(address: int, nbytes: int) -> None:
        may_pin.wait(10)
        pinned[address] = nbytes

    slab = Slab(3 * MIB, register, pinned.pop)
    slab.ready.wait()
    promised = promised_bytes()
    for fill in (None, lambda: True):
        slab.release()
        assert pinned == {}
        assert (slab.pinned, slab.pageable_bytes) == (False, 0)
        assert promised_bytes() == promised  # to nobody
        may_pin.clear()
        slab.renew(fill)
        assert not slab.ready.is_set()  # device copies wait for that
        may_pin.set()
        assert slab.ready.wait(10)
        assert slab.pinned
        assert sum(pinned.values()) == slab.nbytes
        assert promised_bytes() == promised
    del slab
    assert pinned == {}


def broken() -> bool:
    raise ValueError("broken")


def test_what_cannot_come_back_stays_released_and_pins_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pinned: dict[int, int] = {}
    slab = Slab(MIB, pinned.__setitem__, pinned.pop)
    slab.ready.wait()
    with monkeypatch.context() as patched:
        patched.setattr(Slab, "_drop", lambda self: False)
        with pytest.raises(OSError, match="Errno"):
            slab.release()
    assert slab.ready.wait(10)
    assert (slab.held_bytes, slab.pinned) == (MIB, True)
    slab.release()
    with pytest.raises(ValueError, match="broken"):
        slab.renew(broken)
    assert not slab.renew(lambda: False)
    with monkeypatch.context() as patched:
        patched.setattr(slab_module, "available_bytes", lambda: MIB - 1)
        with pytest.raises(
            HostMemoryError,
            match=r"asked for 1,048,576 bytes of a "
            r"host "
            r"copy "
            r"that "
            r"had left it, 1,048,575 available",
        ):
            slab.renew()
    assert (slab.held_bytes, resident_bytes(slab), pinned) == (0, 0, {})
    slab.renew(lambda: True)
    assert slab.ready.wait(10)
    assert slab.pinned
    assert sum(pinned.values()) == slab.nbytes
