"""Measure the GPU memory of other processes, which neither torch nor CUDA shows. Needs `nvidia-ml-py` (extra `nvml`).

NVML is queried on a thread of its own, every few seconds and when somebody asks: a call may take milliseconds, and hangs if the driver
hangs. In a container NVML may list no processes, or process ids of another namespace; then the result is None.
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
    """Device bytes of all other processes, as last measured. The measuring thread ends with this object.

    Args:
        uuid: the GPU's UUID as in `nvidia-smi -L`; empty for a device that is no GPU, whose result is always None.
        nvml: the NVML module; None: `pynvml` if it is installed.
    """

    def __init__(self, uuid: str, nvml: Any = None) -> None:
        self._shared = _Shared()
        nvml = _library() if nvml is None and uuid else nvml
        if nvml is not None and uuid:
            weakref.finalize(self, self._shared.end)
            threading.Thread(target=_watch, args=(self._shared, nvml, uuid), name="placement-nvml", daemon=True).start()

    @property
    def nbytes(self) -> int | None:
        """The last measurement; None while unknown."""
        return self._shared.nbytes

    def ask(self, then: Callable[[int | None], None]) -> None:
        """Measure soon, in place of what was asked before and has not begun. `then` gets the bytes, on the measuring thread."""
        self._shared.then = then
        self._shared.wake.set()


class _Shared:
    """What the measuring thread shares with the object that it must not keep alive."""

    def __init__(self) -> None:
        self.nbytes: int | None = None
        self.then: Callable[[int | None], None] | None = None
        self.wake = threading.Event()
        self.is_over = False

    def end(self) -> None:
        self.is_over = True
        self.wake.set()


def _watch(shared: _Shared, nvml: Any, uuid: str) -> None:
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return
    try:
        device = nvml.nvmlDeviceGetHandleByUUID(uuid)
        while not shared.is_over:
            then, shared.then = shared.then, None
            nbytes = _others(nvml, device)
            if then is not None:  # before anybody sees the number that it subtracts
                then(nbytes)
                del then
            shared.nbytes = nbytes
            shared.wake.wait(ASK_SECONDS)
            shared.wake.clear()
    except nvml.NVMLError:  # a MIG slice, or the driver is gone: the last measurement is no longer true
        shared.nbytes = None
    finally:
        nvml.nvmlShutdown()


def _others(nvml: Any, device: Any) -> int | None:
    """Bytes of the listed processes except this one; None if this one is not listed, because then the ids come from elsewhere."""
    listed = {each.pid: each.usedGpuMemory for each in nvml.nvmlDeviceGetComputeRunningProcesses(device)}
    if os.getpid() not in listed or any(nbytes is None for nbytes in listed.values()):
        return None
    return int(sum(nbytes for pid, nbytes in listed.items() if pid != os.getpid()))


def _library() -> Any:
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        return None
