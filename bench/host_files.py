"""How fast do a device's copies go to a host copy in a file and come back, beside plain sequential
writes and reads of a file of that size, and beside a host copy in memory?

The folder is `BENCH_DISK`, else that for temporary files: name one on the disk in question. Rates
on a disk that others use differ from run to run, so systems take turns, and the median counts. The
page cache of a file is dropped first, as far as this user may, except for "cache" rows.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence

from bench import _rig
from bench._results import Results
from bench._rig import Rig
from placement.devices.base import round_up
from placement.devices.host.file_slab import FileSlab
from placement.devices.host.slab import MADV_DONTNEED, PAGE, libc
from placement.devices.memory import Copy, Direction, HostSlab
from placement.devices.select import select_device
from placement.testing import SimulatedDevice

_SCENARIO = "a host copy in a file"
_ROUNDS = 7
_BLOCK_BYTES = 4 << 20
_MS_SYNC = 4
_PAUSE_SECONDS = 1.0  # a disk in a cloud is slower for a while after much was read or written


class _Plain:
    """A file that is written and read from its beginning to its end, through the page cache."""

    def __init__(self, file: int, nbytes: int) -> None:
        self._file = file
        self._block = bytearray(os.urandom(_BLOCK_BYTES))
        self._offsets = range(0, nbytes, _BLOCK_BYTES)
        os.posix_fallocate(file, 0, nbytes)

    def write(self) -> None:
        for offset in self._offsets:
            os.pwrite(self._file, self._block, offset)
        os.fdatasync(self._file)

    def read(self) -> None:
        for offset in self._offsets:
            os.preadv(self._file, [self._block], offset)

    def forget(self) -> None:
        os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)


class _Copies:
    """A device's copies between its memory and slabs of one size."""

    def __init__(self, rig: Rig, nbytes: int) -> None:
        self.device = (
            select_device(rig.device) if rig.is_cuda else SimulatedDevice(2 * nbytes + (1 << 20))
        )
        self._addresses = self.device.reserve(nbytes)
        sizes = [self.device.chunk_bytes] * (nbytes // self.device.chunk_bytes)
        if rest := nbytes % self.device.chunk_bytes:
            sizes.append(round_up(rest, self.device.granularity))
        self._chunks = [self.device.create(size) for size in sizes]
        self.device.map(self._addresses, self._chunks)
        self.device.view(self._addresses, 0, nbytes).fill_(1)

    def run(self, slab: HostSlab, direction: Direction) -> None:
        copy = Copy(self._addresses.base, slab.address, slab.nbytes)
        self.device.copy([copy], direction)
        self.device.sync()


def _write_back(slab: FileSlab) -> None:
    libc.msync(ctypes.c_void_p(slab.address), ctypes.c_size_t(slab.nbytes), _MS_SYNC)


def _forget(slab: FileSlab) -> float:
    """Have the kernel drop the pages of a slab that is written back. Returns the share that it
    keeps."""
    libc.madvise(slab.address, slab.nbytes, MADV_DONTNEED)
    with contextlib.suppress(PermissionError):
        path = f"/proc/self/map_files/{slab.address:x}-{slab.address + slab.nbytes:x}"
        file = os.open(path, os.O_RDWR)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)
    pages = (ctypes.c_ubyte * (slab.nbytes // PAGE))()
    libc.mincore(ctypes.c_void_p(slab.address), ctypes.c_size_t(slab.nbytes), pages)
    return bytes(pages).count(1) / len(pages)


def measure(rig: Rig, results: Results) -> None:
    folder = os.environ.get("BENCH_DISK", tempfile.gettempdir())
    nbytes = rig.pick(8 << 20, 256 << 20, 2 << 30)
    with (
        results.system(_SCENARIO, "placement"),
        tempfile.TemporaryFile(buffering=0, dir=folder) as opened,
    ):
        plain, copies = _Plain(opened.fileno(), nbytes), _Copies(rig, nbytes)
        memory, file = copies.device.host(nbytes), FileSlab(folder, nbytes)
        memory.ready.wait()
        kept: list[float] = []

        def forget() -> None:
            _write_back(file)
            kept.append(_forget(file))

        def offload() -> None:
            copies.run(file, "to_host")

        def offload_and_write_back() -> None:
            offload()
            _write_back(file)

        def load() -> None:
            copies.run(file, "to_device")

        steps: list[tuple[str, str, Callable[[], object], Callable[[], object]]] = [
            ("plain file", "write", plain.forget, plain.write),
            ("plain file", "read", plain.forget, plain.read),
            ("in memory", "offload", forget, lambda: copies.run(memory, "to_host")),
            ("in memory", "load", forget, lambda: copies.run(memory, "to_device")),
            ("placement", "offload", forget, offload),
            ("placement", "offload and write back", forget, offload_and_write_back),
            ("placement", "load", forget, load),
            ("placement", "load from the cache", load, load),
            ("placement", "offload into the cache", offload_and_write_back, offload),
        ]
        seconds: dict[tuple[str, str], list[float]] = {}
        offload()
        plain.write()
        for number in range(_ROUNDS):
            turned = number % len(steps)
            for system, what, prepare, work in steps[turned:] + steps[:turned]:
                prepare()
                if rig.size != "tiny":
                    time.sleep(_PAUSE_SECONDS)
                seconds.setdefault((system, what), []).append(rig.seconds(work))
        rates = {key: nbytes / statistics.median(took) / 1e9 for key, took in seconds.items()}
        for (system, what), rate in sorted(rates.items()):
            results.add(_SCENARIO, system, f"{what}, rate", rate, "GB/s")
        for what, plainly in (("load", "read"), ("offload and write back", "write")):
            share = 100 * rates["placement", what] / rates["plain file", plainly]
            results.add(_SCENARIO, "placement", f"{what}, share of a plain {plainly}", share, "%")
        results.add(_SCENARIO, "placement", "pages kept in the cache", 100 * max(kept), "%")


def main(arguments: Sequence[str] | None = None) -> None:
    _rig.run("host_files", __doc__, measure, arguments)


if __name__ == "__main__":
    main()
