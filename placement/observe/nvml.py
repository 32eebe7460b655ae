"""What other processes hold on the GPU, which neither torch nor CUDA can see; needs `nvidia-ml-py` (extra `nvml`).

NVML is asked on a thread of its own, every few seconds: a call may take milliseconds, and hangs with a driver that hangs. In a
container NVML may list no processes, or ones with ids of another namespace; then nothing is said.
"""

from __future__ import annotations

import importlib
import os
import threading
import weakref
from typing import Any

ASK_SECONDS = 5.0


class OtherProcesses:
    """Device bytes of all processes but this one, as last measured.

    Args:
        uuid: of the GPU, as `nvidia-smi -L` says it; empty for a device that is none: then nothing is ever known.
        nvml: the library; None: `pynvml` where it is installed.
    """

    def __init__(self, uuid: str, nvml: Any = None) -> None:
        self.nbytes: int | None = None
        """None while it is not known."""
        self._ended = threading.Event()
        nvml = _library() if nvml is None and uuid else nvml
        if nvml is not None and uuid:
            me = weakref.ref(self, lambda _: ended.set())
            ended = self._ended
            threading.Thread(target=_watch, args=(me, ended, nvml, uuid), name="placement-nvml", daemon=True).start()

    def close(self) -> None:
        """Stop asking."""
        self._ended.set()


def _watch(me: weakref.ref[OtherProcesses], ended: threading.Event, nvml: Any, uuid: str) -> None:
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return
    try:
        device = nvml.nvmlDeviceGetHandleByUUID(uuid)
        while not ended.is_set():
            nbytes = _others(nvml, device)
            watcher = me()
            if watcher is None:
                return
            watcher.nbytes = nbytes
            del watcher
            ended.wait(ASK_SECONDS)
    except nvml.NVMLError:  # a MIG slice, or the driver went away: what was measured last is no longer true
        if (watcher := me()) is not None:
            watcher.nbytes = None
    finally:
        nvml.nvmlShutdown()


def _others(nvml: Any, device: Any) -> int | None:
    """Bytes of the processes that are listed, this one left out; None where this one is not listed, so that ids mean nothing here."""
    listed = {each.pid: each.usedGpuMemory for each in nvml.nvmlDeviceGetComputeRunningProcesses(device)}
    if os.getpid() not in listed or any(nbytes is None for nbytes in listed.values()):
        return None
    return int(sum(nbytes for pid, nbytes in listed.items() if pid != os.getpid()))


def _library() -> Any:
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        return None
