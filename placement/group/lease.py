"""A lease: how many bytes of a GPU this process may use, agreed on with the other processes there before a byte is loaded.

What keeps two processes that swap places from waiting for each other: who waits holds nothing that it could give up. `grow`
answers at once; where it says no, the caller offloads, `settle`s for what is left, and only then `wait`s. First come, first
served, higher priorities first; a process that is stopped while it waits loses its turn until it goes on.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from placement.core.errors import DeviceMemoryError, PlacementError
from placement.core.settings import LEASES_FOLDER
from placement.core.snapshot import LeaseHolder, LeaseSnapshot
from placement.group.lease_ledger import MAX_BYTES, Claim, Ledger, Note
from placement.group.messages import shortened

if TYPE_CHECKING:
    from placement.core.settings import Settings
    from placement.devices.base import Device

_LOOK_SECONDS = (0.001, 0.02)
"""Between two looks of a process that waits: at first, and after a while."""
_MAX_PRIORITY = 1 << 31
"""So that a note has room for it."""
STALE_SECONDS = 1.0
"""After so long without a look, a process that waits is passed over."""


class Lease:
    """One claim on a GPU's bytes, from now until `close()` or the end of the process, however it ends. Begins with 0 bytes.

        lease = Lease("GPU-5b27...", 80 << 30, name="rollout")
        with lease.holding(60 << 30):        # waits until the others leave that much
            ...

    Args:
        gpu: its UUID; all processes that share it have to use the same name.
        capacity_bytes: what all of them may use together.
        name: who this is, in the others' error messages and metrics.
        folder: where the ledger lies, the same for all; None: `/dev/shm/placement-<uid>`.
        priority: higher is served first.
        deadline_seconds: how long `wait` waits.

    Raises:
        PlacementError: the ledger cannot be opened, or a stopped process is in the middle of a change.
        ValueError: a capacity, deadline or priority that is none, or a `gpu` without a name.
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
            raise ValueError("a lease needs the UUID of its GPU, by which the processes there find each other")
        if not 0 < capacity_bytes < MAX_BYTES:
            raise ValueError(f"capacity_bytes must be more than 0 and less than {MAX_BYTES:,}, not {capacity_bytes}")
        if not deadline_seconds > 0:
            raise ValueError(f"deadline_seconds must be more than 0, not {deadline_seconds}")
        if abs(priority) > _MAX_PRIORITY:
            raise ValueError(f"priority must be between -{_MAX_PRIORITY:,} and {_MAX_PRIORITY:,}")
        self.gpu, self.capacity_bytes, self.priority, self.deadline_seconds = gpu, capacity_bytes, priority, deadline_seconds
        self.held_bytes = 0
        self._waited_seconds = 0.0
        self._waiting: tuple[int, float] | None = None
        """How many bytes it waits for, and since when."""
        self._ledger = Ledger.of(LEASES_FOLDER if folder is None else folder, gpu)
        self._own = Note(token=secrets.token_hex(8), pid=os.getpid(), name=shortened(name, 80), priority=priority)
        self._is_closed = False
        weakref.finalize(self, self._ledger.leave, self._own.token).atexit = False
        with self._ledger.turn():
            self._ledger.join(self._own)

    # --- changing

    def grow(self, nbytes: int, *, is_free: Callable[[], bool] = lambda: True) -> bool:
        """Hold `nbytes` in all from now on, if they are free and nobody with an older claim waits. Never waits for memory.

        Args:
            is_free: asked before more is leased: whether the device has the bytes. What a process held that was killed comes back
                to the driver a moment after its lease.

        Returns:
            Whether they are leased. If not, nothing has changed. Fewer bytes than now are always granted, and change nothing.
        """
        return nbytes <= self.held_bytes or self._attempt(nbytes, time.monotonic(), is_free)

    def wait(self, nbytes: int, *, what: str = "a lease", is_free: Callable[[], bool] = lambda: True) -> None:
        """Hold `nbytes` in all as soon as the others leave them.

        Offload and `settle` first: who waits must hold nothing that it could give up.

        Args:
            what: what they are for, in the error message.
            is_free: see `grow`.

        Raises:
            DeviceMemoryError: they are more than there is, or were not free in time; with a table of who holds and who waits.
        """
        if nbytes > self.capacity_bytes:
            raise DeviceMemoryError(f"{what} needs {nbytes:,} bytes of {self.gpu}, and all its processes share {self.capacity_bytes:,}")
        if self._ledger.is_my_turn:
            raise DeviceMemoryError(f"{what} cannot wait for {nbytes:,} bytes of {self.gpu} in the middle of another lease's turn")
        began = time.monotonic()
        pause = _LOOK_SECONDS[0]
        self._waiting = (nbytes, began)
        try:
            while not self._attempt(nbytes, began, is_free, is_waiting=True):
                if time.monotonic() >= began + self.deadline_seconds:
                    raise DeviceMemoryError(self._refusal(nbytes, what, is_free()))
                time.sleep(pause)
                pause = min(pause * 1.5, _LOOK_SECONDS[1])
        finally:
            self._waiting = None
            self._waited_seconds += time.monotonic() - began
            self._ledger.note(self._own)

    def settle(self, nbytes: int) -> None:
        """Hold `nbytes`, because that is what this process uses: what it held beyond goes to the others at once.

        More than before is taken without asking: what is used is used, and the others must know.
        """
        self._check_open()
        # Giving needs no turn, so that a process stopped in its own keeps nobody from it.
        if nbytes <= self.held_bytes and self._ledger.hold(self._own.token, nbytes):
            self.held_bytes = nbytes
            return
        with self._turn():
            self._take(nbytes)

    @contextlib.contextmanager
    def holding(self, nbytes: int) -> Iterator[None]:
        """Wait for `nbytes`, and give them back at the end: for a process whose memory placement does not move.

        Raises:
            DeviceMemoryError: see `wait`.
            ValueError: inside another `holding`, where it would wait for itself.
        """
        if self.held_bytes:
            raise ValueError(f"this lease holds {self.held_bytes:,} bytes already; give them back first")
        try:
            self.wait(nbytes)
            yield
        finally:
            if not self._is_closed:
                self.settle(0)

    def close(self) -> None:
        """Give everything back. Idempotent, at any moment, from any thread; nothing in a forked child."""
        self._is_closed = True  # first: whoever is in a turn looks at it at its end
        self._ledger.leave(self._own.token)
        self.held_bytes = 0

    # --- asking

    @property
    def waited_seconds(self) -> float:
        """Time spent in `wait`, the present one included."""
        waiting = self._waiting
        return self._waited_seconds + (0.0 if waiting is None else time.monotonic() - waiting[1])

    def snapshot(self) -> LeaseSnapshot:
        """Who holds and who waits now. Takes no lock."""
        waiting = self._waiting
        return LeaseSnapshot(
            gpu=self.gpu,
            capacity_bytes=self.capacity_bytes,
            held_bytes=self.held_bytes,
            wanted_bytes=0 if waiting is None else waiting[0],
            waited_seconds=self.waited_seconds,
            holders=tuple(_holder(claim, self._own.token) for claim in self._ledger.claims()),
        )

    # --- in turn

    def _attempt(self, nbytes: int, since: float, is_free: Callable[[], bool], *, is_waiting: bool = False) -> bool:
        if self._ledger.is_my_turn:
            return False  # a collection in the middle of the turn of another lease, which counts on what it has found free
        now = time.monotonic()
        mine = self._own.model_copy(update={"wanted_bytes": nbytes, "since_seconds": since, "seen_seconds": now})
        with self._turn():
            slot = self._ledger.join(self._own, self.held_bytes)
            others = [claim for claim in self._ledger.claims() if claim.slot != slot]
            fits = sum(claim.held_bytes for claim in others) + nbytes <= self.capacity_bytes
            # The driver last: whoever has just died may be gone from the ledger, and not yet from the device.
            if fits and not any(_is_before(claim.note, mine, now) for claim in others) and is_free():
                self._take(nbytes)
                return True
            if is_waiting:
                self._ledger.note(mine)
            return False

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """The ledger's, which leaves nothing of a lease that is closed in the meantime."""
        self._check_open()
        with self._ledger.turn():
            try:
                yield
            finally:
                if self._is_closed:
                    self.close()
        self._check_open()

    def _take(self, nbytes: int) -> None:
        if not 0 <= nbytes < MAX_BYTES:
            raise ValueError(f"a lease of {nbytes:,} bytes")
        self._ledger.join(self._own, nbytes)
        self.held_bytes = nbytes

    def _check_open(self) -> None:
        if self._is_closed:
            raise PlacementError("this lease is closed")

    def _refusal(self, nbytes: int, what: str, is_free: bool) -> str:
        waited = f"{what} waited {self.deadline_seconds:g} s for {nbytes:,} bytes of {self.gpu}"
        lines = [f"{waited}; its processes share {self.capacity_bytes:,}:"]
        lines.append(f"  {'process':<32} {'pid':>8} {'holds':>18} {'waits for':>18}")
        for each in self.snapshot().holders:
            name = f"{each.name} (this one)" if each.is_mine else each.name
            lines.append(f"  {name:<32} {each.pid:>8} {each.held_bytes:>18,} {each.wanted_bytes:>18,}")
        if not is_free:
            lines.append("What they hold would leave enough: the rest is used by processes that take no lease, or was not given back yet.")
        lines.append("Let a holder leave its phase, need less at once (only=[...]), or wait longer (lease_deadline_seconds).")
        return "\n".join(lines)


def lease_for(device: Device, settings: Settings, folder: str, deadline_seconds: float | None) -> Lease:
    """The lease of a manager on its device.

    Args:
        deadline_seconds: of the ranks that change phase together, which wait for this one no longer than that.

    Raises:
        PlacementError: no other process can use this device, or see `Lease`.
    """
    from placement.observe.discovery import Identity

    if not device.uuid:
        raise PlacementError(f"leases: no other process can use device {device.name!r}; a simulated one needs shared_with=")
    memory = device.memory()
    capacity_bytes = settings.lease_capacity_bytes or memory.total_bytes - memory.poison_bytes
    return Lease(
        device.uuid,
        capacity_bytes,
        name=f"{settings.worker_role} {Identity.from_launcher(run=settings.run).instance}",
        folder=folder,
        priority=settings.lease_priority,
        deadline_seconds=min(settings.lease_deadline_seconds, deadline_seconds or settings.lease_deadline_seconds),
    )


def _is_before(note: Note | None, mine: Note, now: float) -> bool:
    """Whether somebody waits whose turn is before mine, and still looks."""
    return note is not None and note.wanted_bytes > 0 and now - note.seen_seconds < STALE_SECONDS and note.turn < mine.turn


def _holder(claim: Claim, own_token: str) -> LeaseHolder:
    note = claim.note or Note(token="", pid=claim.pid, name="?")
    return LeaseHolder(
        name=note.name,
        pid=claim.pid or note.pid,
        held_bytes=claim.held_bytes,
        wanted_bytes=note.wanted_bytes,
        waiting_seconds=max(0.0, time.monotonic() - note.since_seconds) if note.wanted_bytes else 0.0,
        priority=note.priority,
        is_mine=note.token == own_token,
    )
