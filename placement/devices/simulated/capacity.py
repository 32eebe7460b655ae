"""The capacity that simulated devices of several processes share, through a file: an array of fixed-size records.

One call writes a whole record, so a process killed at any moment leaves the file intact. A record counts only while its process lives.
"""

from __future__ import annotations

import fcntl
import os
import struct
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple


class _Record(NamedTuple):
    pid: int
    start: int  # the process's start time in clock ticks since boot. The process number alone would not do, because the kernel reuses it.
    token: int  # distinguishes the devices of one process
    capacity_bytes: int
    held_bytes: int


_LAYOUT = struct.Struct("<5q")
_EMPTY = _Record(0, 0, 0, 0, 0)


class SharedCapacity:
    """This device's record in the file, and the sum of the other records. All processes must see each other's process numbers.
    Raises ValueError: the file has another format, or a living process uses it with another capacity."""

    def __init__(self, path: Path, capacity_bytes: int) -> None:
        self.path = path
        self.capacity_bytes = capacity_bytes
        self._token = int.from_bytes(os.urandom(7), "little")
        self._pid = os.getpid()
        self._start = _start_time(self._pid) or 0
        path.touch(0o600)
        self.claim(0, 0)

    def leave(self) -> None:
        """Record that this device holds nothing. Does nothing if the file is locked or gone: then the end of the process does the same. It
        must not wait, because a device may die during another device's claim on the same thread."""
        if os.getpid() == self._pid and self.path.exists():
            with suppress(BlockingIOError):
                self.claim(0, 0, wait=False)

    def claim(self, held_bytes: int, more_bytes: int, *, wait: bool = True) -> int:
        """Record that this device holds `held_bytes`, and `more_bytes` in addition if the others leave that much. Returns the bytes that
        the others hold: the claim for more was granted if the total is within the capacity."""
        # A new file object in each call, whose end releases the lock.
        with open(self.path, "r+b", buffering=0) as records_file:
            fcntl.flock(records_file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            content = records_file.read()
            if len(content) % _LAYOUT.size:
                raise ValueError(f"{self.path} is not a file of shared capacity: it has {len(content)} bytes")
            records = [_Record(*fields) for fields in _LAYOUT.iter_unpack(content)]
            mine, others, slot = None, 0, len(records)
            for index, record in reversed([*enumerate(records)]):
                if record[:3] == (self._pid, self._start, self._token):
                    mine = index
                elif record.held_bytes == 0 or _start_time(record.pid) != record.start:
                    slot = index
                elif record.capacity_bytes != self.capacity_bytes:
                    raise ValueError(f"{self.path} is used with a capacity of {record.capacity_bytes:,} bytes, not {self.capacity_bytes:,}")
                else:
                    others += record.held_bytes
            held = held_bytes + (more_bytes if held_bytes + more_bytes + others <= self.capacity_bytes else 0)
            record = _Record(self._pid, self._start, self._token, self.capacity_bytes, held) if held else _EMPTY
            if mine is not None or held:
                os.pwrite(records_file.fileno(), _LAYOUT.pack(*record), (slot if mine is None else mine) * _LAYOUT.size)
            return others


def _start_time(pid: int) -> int | None:
    """The start time of a living process; None for one that is dead, or was killed and not yet reaped by its parent."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            state, *fields = stat.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state in (b"Z", b"X") else int(fields[18])
