"""A lease: how many bytes of a GPU this process may use, agreed with the other processes on that
GPU before a byte is loaded.

Two processes that swap places cannot wait for each other for ever, because a waiting process holds
nothing that it could give up. `grow` answers at once. If it refuses, the caller offloads, calls
`settle` with the bytes that are left, and only then calls `wait`. Higher priorities are served
first, then earlier requests. A process that is stopped while it waits loses its turn until it goes
on.

The `Ledger` of the GPU has the numbers of all its processes.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import time
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from placement.core import interrupts
from placement.core.errors import DeviceMemoryError, PlacementError
from placement.core.settings import LEASES_FOLDER
from placement.core.snapshot import LeaseHolder, LeaseSnapshot
from placement.devices.ledger import MAX_BYTES, Claim, Ledger, Note
from placement.group.protocol import Group, shortened

if TYPE_CHECKING:
    from placement.core.settings import Settings
    from placement.devices.base import Device

# pause between two looks of a waiting process: the first pause, and the longest
_LOOK_SECONDS = (0.001, 0.02)
_MAX_PRIORITY = 1 << 31  # fits into a note


class Lease:
    """One claim on a GPU's bytes, from now until `close()` or the end of the process, however it
    ends. It begins with 0 bytes.

        lease = Lease("GPU-5b27...", 80 << 30, name="rollout")
        with lease.holding(60 << 30):        # waits until the others leave that much
            ...

    Args:
        gpu: the GPU's UUID; all processes that share the GPU must give the same text.
        capacity_bytes: device bytes that all processes may use together.
        name: this process's name in the error messages and metrics of all processes.
        folder: the folder of the ledger, the same for all processes; None:
            `/dev/shm/placement-<uid>`.
        priority: a higher priority is served first.
        deadline_seconds: the longest time that `wait` waits.

    Raises:
        PlacementError: the ledger cannot be opened, or a stopped process is in the middle of a
            change.
        ValueError: the capacity, deadline or priority is out of range, or `gpu` is empty.
    """

    def __init__(
        self,
        gpu: str,
        capacity_bytes: int,
        *,
        name: str = "",
        folder: str | os.PathLike[str] | None = None,
        priority: int = 0,
        deadline_seconds: float = 600.0,
    ) -> None:
        if not gpu:
            raise ValueError(
                "gpu is empty; a lease needs the GPU's UUID, by which processes on that GPU find "
                "each other"
            )
        if not 0 < capacity_bytes < MAX_BYTES:
            raise ValueError(
                f"capacity_bytes must be more than 0 and less than {MAX_BYTES:,}, not "
                f"{capacity_bytes}"
            )
        if not deadline_seconds > 0:
            raise ValueError(f"deadline_seconds must be more than 0, not {deadline_seconds}")
        if abs(priority) > _MAX_PRIORITY:
            raise ValueError(
                f"priority must be between -{_MAX_PRIORITY:,} and {_MAX_PRIORITY:,}, not {priority}"
            )
        self.gpu, self.capacity_bytes, self.deadline_seconds = gpu, capacity_bytes, deadline_seconds
        self.held_bytes = 0
        self._waited_seconds = 0.0
        self._ledger = Ledger.of(LEASES_FOLDER if folder is None else folder, gpu)
        self._own = Note(
            token=secrets.token_hex(8), pid=os.getpid(), name=shortened(name, 80), priority=priority
        )
        self._is_closed = False
        weakref.finalize(self, self._ledger.leave, self._own.token).atexit = False
        with self._ledger.turn():
            self._ledger.join(self._own)

    def grow(self, nbytes: int, *, is_free: Callable[[], bool] = lambda: True) -> bool:
        """Hold `nbytes` in all from now on, if they are free and no older request waits. Never
        waits for memory.

        Args:
            is_free: returns whether the device really has the bytes free, asked before more is
                leased. When a process is killed, its lease ends a moment before the driver has its
                memory back.

        Returns:
            Whether the bytes are leased. If not, nothing has changed. Fewer bytes than now are
                always granted, and change nothing.
        """
        return nbytes <= self.held_bytes or self._attempt(nbytes, is_free)

    def wait(
        self, nbytes: int, *, what: str = "a lease", is_free: Callable[[], bool] = lambda: True
    ) -> None:
        """Hold `nbytes` in all as soon as the other processes leave them.

        Offload and `settle` first: a waiting process must hold nothing that it could give up.

        Args:
            what: what the bytes are for, in the error message.
            is_free: see `grow`.

        Raises:
            DeviceMemoryError: the bytes exceed the capacity, or were not free in time; the message
                has a table of holders and waiters.
        """
        if nbytes > self.capacity_bytes:
            raise DeviceMemoryError(
                f"{what} needs {nbytes:,} bytes of {self.gpu}, but all its processes share "
                f"{self.capacity_bytes:,}"
            )
        began = time.monotonic()
        try:
            self._own = self._own.model_copy(
                update={"wanted_bytes": nbytes, "since_seconds": began}
            )
            for _ in interrupts.looks(self.deadline_seconds, *_LOOK_SECONDS):
                if self._attempt(nbytes, is_free):
                    return
            raise DeviceMemoryError(self._refusal(nbytes, what, is_free()))
        finally:
            self._own = self._own.model_copy(update={"wanted_bytes": 0})
            self._waited_seconds += time.monotonic() - began
            self._ledger.write(self._own)

    def settle(self, nbytes: int) -> None:
        """Hold `nbytes`, because this process uses that much. Bytes held beyond that go to the
        others at once.

        More bytes than before are taken without asking: they are in use already, and the others
        must know.
        """
        self._check_open()
        # Giving back needs no turn, so a process that is stopped in its turn does not block it.
        if nbytes <= self.held_bytes and self._ledger.hold(self._own.token, nbytes):
            self.held_bytes = nbytes
            return
        with self._ledger.turn():
            self._ledger.join(self._own, nbytes)
        self.held_bytes = nbytes

    @contextlib.contextmanager
    def holding(self, nbytes: int) -> Iterator[None]:
        """Wait for `nbytes`, and give them back at the end. For a process whose memory placement
        does not move.

        Raises:
            DeviceMemoryError: see `wait`.
            ValueError: inside another `holding`, where the lease would wait for itself.
        """
        if self.held_bytes:
            raise ValueError(
                f"this lease holds {self.held_bytes:,} bytes already; give them back first"
            )
        try:
            self.wait(nbytes)
            yield
        finally:
            if not self._is_closed:
                self.settle(0)

    def close(self) -> None:
        """Give everything back. Idempotent."""
        self._is_closed = True
        self._ledger.leave(self._own.token)
        self.held_bytes = 0

    @property
    def waited_seconds(self) -> float:
        """Total time spent in `wait`, including a wait in progress."""
        own = self._own
        return self._waited_seconds + (
            time.monotonic() - own.since_seconds if own.wanted_bytes else 0.0
        )

    def snapshot(self) -> LeaseSnapshot:
        """The processes that hold or wait now. Takes no lock."""
        return LeaseSnapshot(
            gpu=self.gpu,
            capacity_bytes=self.capacity_bytes,
            held_bytes=self.held_bytes,
            wanted_bytes=self._own.wanted_bytes,
            waited_seconds=self.waited_seconds,
            holders=tuple(_holder(claim, self._own.token) for claim in self._ledger.claims()),
        )

    def _attempt(self, nbytes: int, is_free: Callable[[], bool]) -> bool:
        self._check_open()
        now, is_waiting = time.monotonic(), self._own.wanted_bytes > 0
        asked = {
            "wanted_bytes": nbytes,
            "since_seconds": self._own.since_seconds if is_waiting else now,
            "seen_seconds": now,
        }
        mine = self._own.model_copy(update=asked)
        with self._ledger.turn():
            slot = self._ledger.join(self._own, self.held_bytes)
            others = [claim for claim in self._ledger.claims() if claim.slot != slot]
            fits = sum(claim.held_bytes for claim in others) + nbytes <= self.capacity_bytes
            # The device is asked last: a process that just died may be gone from the ledger before
            # its memory is free.
            if (
                fits
                and not any(
                    each.note is not None and each.note.comes_before(mine) for each in others
                )
                and is_free()
            ):
                self._ledger.join(self._own, nbytes)
                self.held_bytes = nbytes
                return True
            if is_waiting:
                self._ledger.write(mine)
            return False

    def _check_open(self) -> None:
        if self._is_closed:
            raise PlacementError("this lease is closed; make a new one")

    def _refusal(self, nbytes: int, what: str, is_free: bool) -> str:
        waited = f"{what} waited {self.deadline_seconds:g} s for {nbytes:,} bytes of {self.gpu}"
        lines = [f"{waited}; its processes share {self.capacity_bytes:,}:"]
        lines.append(f"  {'process':<32} {'pid':>8} {'holds':>18} {'waits for':>18}")
        for each in self.snapshot().holders:
            name = f"{each.name} (this one)" if each.is_mine else each.name
            lines.append(
                f"  {name:<32} {each.pid:>8} {each.held_bytes:>18,} {each.wanted_bytes:>18,}"
            )
        if not is_free:
            lines.append(
                "The leases leave enough, but the device does not: a process without a lease uses "
                "it, or it is not freed yet."
            )
        lines.append(
            "Let a holder leave its phase, need less at once (only=[...]), or wait longer "
            "(lease_deadline_seconds)."
        )
        return "\n".join(lines)


def _holder(claim: Claim, own_token: str) -> LeaseHolder:
    note = claim.note or Note(token="", pid=claim.pid, name="?")
    return LeaseHolder(
        name=note.name,
        pid=claim.pid or note.pid,
        held_bytes=claim.held_bytes,
        wanted_bytes=note.wanted_bytes,
        waiting_seconds=max(0.0, time.monotonic() - note.since_seconds)
        if note.wanted_bytes
        else 0.0,
        priority=note.priority,
        is_mine=note.token == own_token,
    )


def lease_for(device: Device, settings: Settings, group: Group | None) -> Lease:
    """Make the lease of a manager on its device. It waits no longer than the other ranks of the
    group wait for this one.
    Raises PlacementError: no other process can use this device; or see `Lease`."""
    from placement.observe.discovery import Identity

    if not device.uuid:
        raise PlacementError(
            f"leases: device {device.name!r} is private to this process; give a SimulatedDevice "
            "shared_with="
        )
    memory = device.memory()
    return Lease(
        device.uuid,
        settings.lease_capacity_bytes or memory.total_bytes - memory.poison_bytes,
        name=f"{settings.worker_role} {Identity.from_launcher().instance}",
        folder=settings.leases,
        priority=settings.lease_priority,
        deadline_seconds=min(
            settings.lease_deadline_seconds, math.inf if group is None else group.deadline_seconds
        ),
    )
