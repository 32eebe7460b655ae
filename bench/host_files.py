"""How fast do a handle's bytes go to a host copy in a file and come back, beside plain sequential
writes and reads of a file of that size, and beside a host copy in memory?

The folder is `BENCH_DISK`, else that for temporary files: name one on the disk in question. Rates
on a disk that others use differ from run to run, so systems take turns, and the median counts.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import statistics
import tempfile
from collections.abc import Sequence

import torch

import placement
from bench import _rig
from bench._results import Results
from bench._rig import Rig
from placement.devices.base import round_up
from placement.devices.host.file_slab import FileSlab
from placement.devices.host.slab import MADV_DONTNEED, PAGE, libc
from placement.testing import SimulatedDevice

_SCENARIO = "a host copy in a file"
_ROUNDS = 5
_BLOCK_BYTES = 4 << 20
_MS_SYNC = 4


class _Plain:
    """A file that is written and read from its beginning to its end, through the page cache."""

    def __init__(self, folder: str, nbytes: int) -> None:
        self._file = tempfile.TemporaryFile(buffering=0, dir=folder)  # noqa: SIM115
        self._block = bytearray(os.urandom(_BLOCK_BYTES))
        self._offsets = range(0, nbytes, _BLOCK_BYTES)
        os.posix_fallocate(self._file.fileno(), 0, nbytes)

    def write(self) -> None:
        for offset in self._offsets:
            os.pwrite(self._file.fileno(), self._block, offset)
        os.fdatasync(self._file.fileno())

    def forget(self) -> None:
        os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def read(self) -> None:
        for offset in self._offsets:
            os.preadv(self._file.fileno(), [self._block], offset)


class _Handle:
    """A model of so many bytes, all of which change in each phase."""

    def __init__(self, rig: Rig, nbytes: int, **settings: object) -> None:
        device = rig.device if rig.is_cuda else SimulatedDevice(4 * nbytes, chunk_bytes=1 << 22)
        self._manager = placement.Manager(device=device, **settings)  # type: ignore[arg-type]
        self._rig = rig
        with rig.torch_device:
            self._model = torch.nn.Linear(nbytes // 4096, 1024, bias=False)
        self.handle = self._manager.register("model", self._model, role="actor")

    @property
    def slabs(self) -> list[FileSlab]:
        return [r.host for r in self.handle.storage.ranges if isinstance(r.host, FileSlab)]

    def load(self) -> float:
        return self._rig.seconds(lambda: self._manager.enter("log_prob"))

    def offload(self) -> float:
        with torch.no_grad():
            self._model.weight.add_(1)
        return self._rig.seconds(self._manager.leave)

    def write_back(self) -> None:
        for slab in self.slabs:
            libc.msync(ctypes.c_void_p(slab.address), ctypes.c_size_t(slab.nbytes), _MS_SYNC)

    def forget(self) -> float:
        """Have the kernel drop its pages, as far as this user may. Returns the share that it
        keeps."""
        kept = total = 0
        for slab in self.slabs:
            size = round_up(slab.nbytes, PAGE)
            libc.madvise(slab.address, size, MADV_DONTNEED)
            with contextlib.suppress(PermissionError):
                path = f"/proc/self/map_files/{slab.address:x}-{slab.address + size:x}"
                file = os.open(path, os.O_RDWR)
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(file)
            pages = (ctypes.c_ubyte * (size // PAGE))()
            libc.mincore(ctypes.c_void_p(slab.address), ctypes.c_size_t(size), pages)
            kept, total = kept + bytes(pages).count(1), total + len(pages)
        return kept / total

    def close(self) -> None:
        self._manager.close()


def measure(rig: Rig, results: Results) -> None:
    folder = os.environ.get("BENCH_DISK", tempfile.gettempdir())
    nbytes = rig.pick(8 << 20, 256 << 20, 1 << 30)
    with results.system(_SCENARIO, "placement"):
        plain = _Plain(folder, nbytes)
        in_memory = _Handle(rig, nbytes)
        in_file = _Handle(rig, nbytes, host_limit_bytes=1, disk_directory=folder)
        seconds: dict[tuple[str, str], list[float]] = {}

        def note(system: str, what: str, took: float) -> None:
            seconds.setdefault((system, what), []).append(took)

        kept: list[float] = []
        for number in range(_ROUNDS + 1):
            if number == 1:  # the first writes of files, and torch's first calls
                seconds.clear()
                kept.clear()
            note("plain file", "write", rig.seconds(plain.write))
            plain.forget()
            note("plain file", "read", rig.seconds(plain.read))
            note("in memory", "load", in_memory.load())
            note("in memory", "offload", in_memory.offload())
            kept.append(in_file.forget())
            note("placement", "load", in_file.load())
            kept.append(in_file.forget())
            took = in_file.offload()
            note("placement", "offload", took)
            note("placement", "offload and write back", took + rig.seconds(in_file.write_back))
            note("placement", "load from the cache", in_file.load())
            note("placement", "offload into the cache", in_file.offload())
            in_file.write_back()
        in_memory.close()
        in_file.close()
        rates = {key: nbytes / statistics.median(took) / 1e9 for key, took in seconds.items()}
        for (system, what), rate in rates.items():
            results.add(_SCENARIO, system, f"{what}, rate", rate, "GB/s")
        for what, plainly in (("load", "read"), ("offload and write back", "write")):
            share = 100 * rates["placement", what] / rates["plain file", plainly]
            results.add(_SCENARIO, "placement", f"{what}, share of a plain {plainly}", share, "%")
        results.add(_SCENARIO, "placement", "pages that were kept", 100 * max(kept), "%")
    del plain
    gc.collect()


def main(arguments: Sequence[str] | None = None) -> None:
    _rig.run("host_files", __doc__, measure, arguments)


if __name__ == "__main__":
    main()
