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
    """Device bytes of all other processes, as last measured.

    Args:
        uuid: the GPU's UUID as in `nvidia-smi -L`; empty for a device that is no GPU, whose result is always None.
        nvml: the NVML module; None: `pynvml` if it is installed.
    """

    def __init__(self, uuid: str, nvml: Any = None) -> None:
        self.nbytes: int | None = None
        """The last measurement; None while unknown."""
        self._then: Callable[[int | None], None] | None = None
        self._wake = _Wake()
        nvml = _library() if nvml is None and uuid else nvml
        if nvml is not None and uuid:
            wake = self._wake
            me = weakref.ref(self, lambda _: wake.end())
            threading.Thread(target=_watch, args=(me, wake, nvml, uuid), name="placement-nvml", daemon=True).start()

    def ask(self, then: Callable[[int | None], None]) -> None:
        """Measure soon, in place of what was asked before and has not begun. `then` gets the bytes, on the measuring thread."""
        self._then = then
        self._wake.now.set()

    def asked(self) -> Callable[[int | None], None] | None:
        """Take over what waits for a measurement that begins now. Called by the measuring thread."""
        then, self._then = self._then, None
        return then

    def close(self) -> None:
        """Stop measuring."""
        self._wake.end()


class _Wake:
    """When the measuring thread has to go on before its interval is over."""

    def __init__(self) -> None:
        self.now = threading.Event()
        self.is_over = False

    def end(self) -> None:
        self.is_over = True
        self.now.set()


def _watch(me: weakref.ref[OtherProcesses], wake: _Wake, nvml: Any, uuid: str) -> None:
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return
    try:
        device = nvml.nvmlDeviceGetHandleByUUID(uuid)
        while not wake.is_over:
            if (watcher := me()) is None:
                return
            then = watcher.asked()
            del watcher
            nbytes = _others(nvml, device)
            if then is not None:  # before anybody sees the number that it subtracts
                then(nbytes)
                del then
            if (watcher := me()) is None:
                return
            watcher.nbytes = nbytes
            del watcher
            wake.now.wait(ASK_SECONDS)
            wake.now.clear()
    except nvml.NVMLError:  # a MIG slice, or the driver is gone: the last measurement is no longer true
        if (watcher := me()) is not None:
            watcher.nbytes = None
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
