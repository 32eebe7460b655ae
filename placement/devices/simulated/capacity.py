"""The capacity that simulated devices of several processes share.

Each device has a file beside the path that they share. The text of the file is the number of bytes
that the device holds. The device has the file locked for as long as it lives, so the kernel tells
which files are those of dead processes.
"""

from __future__ import annotations

import glob
import os
import secrets
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

_PAUSE_SECONDS = 0.0005


class SharedCapacity:
    """One device's part of a capacity, and the sum of the other parts.
    `path`: the same for all processes."""

    def __init__(self, path: Path, capacity_bytes: int) -> None:
        self.path = Path(os.path.realpath(path))
        self.capacity_bytes = capacity_bytes
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._one_at_a_time = FileLock(f"{self.path}.lock", poll_interval=_PAUSE_SECONDS)
        self._file = Path(f"{self.path}.{secrets.token_hex(8)}.device")
        self._life = FileLock(self._file, thread_local=False)
        self._pid = os.getpid()
        with self._one_at_a_time:
            self._life.acquire()
            self._file.write_text("0")

    def leave(self) -> None:
        """Hold nothing from now on. Waits for nothing, because a finalizer calls it. In a forked
        child it does nothing, because the parent holds the bytes."""
        if os.getpid() == self._pid:
            self._file.unlink(missing_ok=True)

    def claim(self, held_bytes: int, more_bytes: int) -> int:
        """Note that this device holds `held_bytes`, and `more_bytes` besides if the others leave
        that much. Returns the bytes that the others hold. The device may have more if the total is
        within the capacity."""
        with self._one_at_a_time:
            others_bytes = self._others_bytes()
            if held_bytes + more_bytes + others_bytes <= self.capacity_bytes:
                held_bytes += more_bytes
            self._file.write_text(str(held_bytes))
            return others_bytes

    def _others_bytes(self) -> int:
        total = 0
        for name in glob.glob(f"{glob.escape(str(self.path))}.*.device"):
            if name == str(self._file):
                continue
            if _is_dead(name):
                Path(name).unlink(missing_ok=True)
                continue
            with suppress(FileNotFoundError):  # a device of this process has just been collected
                total += int(Path(name).read_text())
        return total


def _is_dead(name: str) -> bool:
    lock = FileLock(name)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        return False
    lock.release()
    return True
