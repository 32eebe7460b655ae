"""Measure the GPU memory of other processes, which neither torch nor CUDA shows. Needs
`nvidia-ml-py` (extra `nvml`).

NVML is queried on a thread of its own, every few seconds and on demand: a call may take
milliseconds, and hangs if the driver hangs. In a container NVML may list no processes, or process
ids of another namespace; then the result is None.
"""

from __future__ import annotations

import importlib
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

ASK_SECONDS = 5.0


class OtherProcesses:
    """Device bytes of all other processes, as last measured. The measuring thread ends with this
    object.

    `uuid`: the GPU's UUID as in `nvidia-smi -L`; empty for a device that is no GPU, whose result is
    always None.
    """

    def __init__(self, uuid: str) -> None:
        self.nbytes: int | None = None  # the last measurement; None while unknown
        self._then: Callable[[int | None], None] | None = None
        self._wake = threading.Event()
        nvml = _library() if uuid else None
        if nvml is not None:
            weakref.finalize(self, self._wake.set).atexit = False
            threading.Thread(
                target=_watch,
                args=(weakref.ref(self), self._wake, nvml, uuid),
                name="placement-nvml",
                daemon=True,
            ).start()

    def ask(self, then: Callable[[int | None], None]) -> None:
        """Measure soon, in place of an earlier request that has not begun. `then` gets the bytes,
        on the measuring thread."""
        self._then = then
        self._wake.set()

    def measure(self, nvml: Any, device: Any) -> None:
        """Sum up the listed processes except this one. Where this one is not listed, the ids come
        from elsewhere, and the sum is not known."""
        then = self._then
        self._then = None
        processes = nvml.nvmlDeviceGetComputeRunningProcesses(device)
        sizes = {process.pid: process.usedGpuMemory for process in processes}
        nbytes = None
        if None not in sizes.values() and os.getpid() in sizes:
            nbytes = sum(sizes.values()) - sizes[os.getpid()]
        if then is not None:  # before the number that it subtracts can be read
            then(nbytes)
        self.nbytes = nbytes


def _watch(
    alive: Callable[[], OtherProcesses | None], wake: threading.Event, nvml: Any, uuid: str
) -> None:
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return
    try:
        device = nvml.nvmlDeviceGetHandleByUUID(uuid)
        measured = alive()
        while measured is not None:
            measured.measure(nvml, device)
            del measured
            wake.wait(ASK_SECONDS)
            wake.clear()
            measured = alive()
    # a MIG slice, or the driver is gone: the last measurement is no longer true
    except nvml.NVMLError:
        measured = alive()
        if measured is not None:
            measured.nbytes = None
    finally:
        nvml.nvmlShutdown()


def _library() -> Any:
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        return None
