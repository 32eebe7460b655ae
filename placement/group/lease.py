"""A lease: how many bytes of a GPU this process may use, agreed with the other processes on that GPU before a byte is loaded.

Two processes that swap places cannot wait for each other for ever, because a waiting process holds nothing that it could give up.
`grow` answers at once. If it refuses, the caller offloads, calls `settle` with the bytes that are left, and only then calls `wait`.
Higher priorities are served first, then earlier requests. A process that is stopped while it waits loses its turn until it goes on.

The kernel keeps the numbers, without a daemon. Each claim is a POSIX lock on a span of the GPU's ledger file, and the length of the
span is the number of bytes. No write can damage such a claim and no crash can leave it half made. It ends with its process, however
that is killed; a forked child does not inherit it; a stopped process keeps it. The file itself holds only notes, one for each claim: who
the process is, and what it waits for. A lost or damaged note costs a name in a message; a waiting process writes its note anew at each
look. The processes of a node find each other by the folder. Containers must share it (`/dev/shm` of the host).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import secrets
import stat
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pydantic import Field, ValidationError

from placement.core import interrupts
from placement.core.errors import DeviceMemoryError, PlacementError
from placement.core.settings import LEASES_FOLDER
from placement.core.snapshot import Frozen, LeaseHolder, LeaseSnapshot
from placement.group.protocol import shortened

if TYPE_CHECKING:
    from placement.core.settings import Settings
    from placement.devices.base import Device

MAX_BYTES = (1 << 44) - 2  # the largest claim: almost 16 TiB
MAX_CLAIMS = 128  # the largest number of claims on one GPU
TURN_SECONDS = 10.0  # a process that has been in the middle of a change for so long counts as stopped
_TURN_PAUSE_SECONDS = 0.0005
STALE_SECONDS = 1.0  # a waiting process that has not looked for so long is passed over
_LOOK_SECONDS = (0.001, 0.02)  # pause between two looks of a waiting process: the first pause, and the longest
_MAX_PRIORITY = 1 << 31  # fits into a note
_SPAN = MAX_BYTES + 2
"""Distance of two claims in file offsets. Spans must not touch, because the kernel merges locks that do. Byte 0 is the turn's."""
_NOTE_BYTES = 512  # the longest note takes 505 bytes: 80 characters of a name without control characters, four bytes each
_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, length, pid


class Note(Frozen):
    """A process's entry about its claim. Times are on the monotonic clock, which all processes of a node share."""

    token: str = Field(max_length=32)
    """Identifies the claim. The process number would not do, because the kernel reuses it."""
    pid: int
    """The process number inside the process's own container."""
    name: str = Field(max_length=80)
    priority: int = 0
    wanted_bytes: int = 0
    """Bytes that the process waits for; 0 when it does not wait."""
    since_seconds: float = 0.0
    seen_seconds: float = 0.0
    """When it began to wait, and when it last checked whether its turn has come."""

    def comes_before(self, other: Note) -> bool:
        """Whether this process waits, still looks, and is served before the other: by priority, then by the time of the request."""
        is_waiting = self.wanted_bytes > 0 and other.seen_seconds - self.seen_seconds < STALE_SECONDS
        place, others_place = ((-each.priority, each.since_seconds, each.token) for each in (self, other))
        return is_waiting and place < others_place


class Claim(NamedTuple):
    """The part of the GPU that one living process has. `pid` is 0 for a process of another container, `note` None where it is damaged."""

    slot: int
    pid: int
    held_bytes: int
    note: Note | None


class Ledger:
    """The ledger file of one GPU in this process. All leases of a process share it, see `Ledger.of`."""

    def __init__(self, folder: Path, gpu: str) -> None:
        digest = hashlib.sha256(gpu.encode()).hexdigest()[:12]
        self.path = folder / f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', gpu)[-40:]}-{digest}.leases"
        self._threads = threading.RLock()
        self._file: int | None = None
        self._slots: dict[str, int] = {}  # the slots of this process's claims, by token

    @classmethod
    def of(cls, folder: str | os.PathLike[str], gpu: str) -> Ledger:
        """The ledger of a GPU: one object for the life of the process, because closing any descriptor of the file drops all its locks."""
        where = Path(folder).absolute()
        return _LEDGERS.setdefault((where, gpu), cls(where, gpu))

    def claims(self) -> list[Claim]:
        """Every living claim, this process's own included, by slot. Takes no lock: a claim that changes meanwhile may be seen old, new, or
        in part. While this process has the `turn`, no claim grows."""
        found = []
        for slot in range(MAX_CLAIMS):
            kind, _, start, length, pid = self._lock(fcntl.F_OFD_GETLK, fcntl.F_WRLCK, (slot + 1) * _SPAN, _SPAN)
            if kind != fcntl.F_UNLCK and start == (slot + 1) * _SPAN:  # else no lock, or one that no ledger makes
                found.append(Claim(slot, max(pid, 0), length - 1, self._note(slot)))
        return found

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Let one process at a time look and take. If the process dies inside, the turn is given back."""
        with self._threads:
            if self._is_gone():  # every claim of this process has to join again, in a new file
                os.close(self._open())
                self._file = None
                self._slots.clear()
            self._await_turn()
            try:
                yield
            finally:
                self._lock(fcntl.F_SETLK, fcntl.F_UNLCK, 0, 1)

    def join(self, note: Note, held_bytes: int = 0) -> int:
        """Make a claim, or find this process's claim with the same token. Call it in a `turn`. Returns the claim's slot. Where the file was
        removed, or the lock on it was lost, the claim is made again, for as many bytes as it held."""
        if self.hold(note.token, held_bytes):
            return self._slots[note.token]
        taken = {claim.slot for claim in self.claims()} | {*self._slots.values()}
        for slot in range(MAX_CLAIMS):
            self._slots[note.token] = slot
            if slot not in taken and self.hold(note.token, held_bytes):
                self.write(note)
                return slot
        del self._slots[note.token]
        raise PlacementError(f"{self.path} has {MAX_CLAIMS} claims already, the most that a GPU can have; end some of its processes")

    def hold(self, token: str, held_bytes: int) -> bool:
        """Set the number of bytes of a claim. A larger number only in a `turn`, when the bytes are free. Returns False where the claim has
        to `join` again: the file was removed, or another process has its slot."""
        if token not in self._slots or self._is_gone():
            return False
        start = (self._slots[token] + 1) * _SPAN
        try:
            # Each call takes effect at once and whole. A process killed between the two has no claim at all.
            self._lock(fcntl.F_SETLK, fcntl.F_WRLCK, start, held_bytes + 1)
            self._lock(fcntl.F_SETLK, fcntl.F_UNLCK, start + held_bytes + 1, MAX_BYTES + 1 - held_bytes)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def write(self, note: Note) -> None:
        if note.token in self._slots:
            text = note.model_dump_json().encode().ljust(_NOTE_BYTES - 1) + b"\n"
            with contextlib.suppress(OSError):  # a full file system costs a name and a place in the queue, no bytes
                os.pwrite(self._open(), text, self._slots[note.token] * _NOTE_BYTES)

    def leave(self, token: str) -> None:
        """End one of this process's claims. Waits for nobody, because a finalizer may call it at any moment. Idempotent."""
        if self._file is not None and token in self._slots:
            self._lock(fcntl.F_SETLK, fcntl.F_UNLCK, (self._slots.pop(token) + 1) * _SPAN, MAX_BYTES + 1)

    # --- the file

    def _await_turn(self) -> None:
        for _ in interrupts.looks(TURN_SECONDS, _TURN_PAUSE_SECONDS, _TURN_PAUSE_SECONDS):
            with contextlib.suppress(BlockingIOError, PermissionError):
                self._lock(fcntl.F_SETLK, fcntl.F_WRLCK, 0, 1)
                return
        holder = self._lock(fcntl.F_GETLK, fcntl.F_WRLCK, 0, 1)[4]
        raise PlacementError(
            f"process {holder} has kept {self.path} locked for {TURN_SECONDS:g} s and may be stopped. "
            "Continue that process or end it, which gives back its lease."
        )

    def _is_gone(self) -> bool:
        try:
            return not os.path.samestat(os.fstat(self._open()), os.stat(self.path, follow_symlinks=False))
        except FileNotFoundError:
            return True

    def _open(self) -> int:
        if self._file is None:
            folder = self.path.parent
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                found = os.stat(folder, follow_symlinks=False)
                # Anybody may have made a folder with the well-known name.
                if str(folder) == LEASES_FOLDER and (found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode)):
                    raise PlacementError(f"{folder} belongs to another user; set another folder for leases: PLACEMENT_LEASES=/path")
                self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            except OSError as error:
                raise PlacementError(f"cannot open {self.path}, the ledger of leases on this GPU: {error.strerror}") from error
        return self._file

    def _note(self, slot: int) -> Note | None:
        with contextlib.suppress(ValidationError):
            return Note.model_validate_json(os.pread(self._open(), _NOTE_BYTES, slot * _NOTE_BYTES))
        return None

    def _lock(self, command: int, kind: int, start: int, length: int) -> tuple[int, int, int, int, int]:
        """One call of the system about a lock on the file. Returns the lock's type, whence, start, length and process."""
        answer: tuple[int, int, int, int, int] = _FLOCK.unpack(fcntl.fcntl(self._open(), command, _FLOCK.pack(kind, 0, start, length, 0)))
        return answer


_LEDGERS: dict[tuple[Path, str], Ledger] = {}


class Lease:
    """One claim on a GPU's bytes, from now until `close()` or the end of the process, however it ends. It begins with 0 bytes.

        lease = Lease("GPU-5b27...", 80 << 30, name="rollout")
        with lease.holding(60 << 30):        # waits until the others leave that much
            ...

    Args:
        gpu: the GPU's UUID; all processes that share the GPU must give the same text.
        capacity_bytes: device bytes that all processes may use together.
        name: this process's name in the error messages and metrics of all processes.
        folder: the folder of the ledger, the same for all processes; None: `/dev/shm/placement-<uid>`.
        priority: a higher priority is served first.
        deadline_seconds: the longest time that `wait` waits.

    Raises:
        PlacementError: the ledger cannot be opened, or a stopped process is in the middle of a change.
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
            raise ValueError("gpu is empty; a lease needs the GPU's UUID, by which processes on that GPU find each other")
        if not 0 < capacity_bytes < MAX_BYTES:
            raise ValueError(f"capacity_bytes must be more than 0 and less than {MAX_BYTES:,}, not {capacity_bytes}")
        if not deadline_seconds > 0:
            raise ValueError(f"deadline_seconds must be more than 0, not {deadline_seconds}")
        if abs(priority) > _MAX_PRIORITY:
            raise ValueError(f"priority must be between -{_MAX_PRIORITY:,} and {_MAX_PRIORITY:,}, not {priority}")
        self.gpu, self.capacity_bytes, self.deadline_seconds = gpu, capacity_bytes, deadline_seconds
        self.held_bytes = 0
        self._waited_seconds = 0.0
        self._wanted: tuple[int, float] | None = None  # the number of bytes that the lease waits for, and since when
        self._ledger = Ledger.of(LEASES_FOLDER if folder is None else folder, gpu)
        self._own = Note(token=secrets.token_hex(8), pid=os.getpid(), name=shortened(name, 80), priority=priority)
        self._is_closed = False
        weakref.finalize(self, self._ledger.leave, self._own.token).atexit = False
        with self._ledger.turn():
            self._ledger.join(self._own)

    def grow(self, nbytes: int, *, is_free: Callable[[], bool] = lambda: True) -> bool:
        """Hold `nbytes` in all from now on, if they are free and no older request waits. Never waits for memory.

        Args:
            is_free: returns whether the device really has the bytes free, asked before more is leased. When a process is killed, its lease
                ends a moment before the driver has its memory back.

        Returns:
            Whether the bytes are leased. If not, nothing has changed. Fewer bytes than now are always granted, and change nothing.
        """
        return nbytes <= self.held_bytes or self._attempt(nbytes, time.monotonic(), is_free)

    def wait(self, nbytes: int, *, what: str = "a lease", is_free: Callable[[], bool] = lambda: True) -> None:
        """Hold `nbytes` in all as soon as the other processes leave them.

        Offload and `settle` first: a waiting process must hold nothing that it could give up.

        Args:
            what: what the bytes are for, in the error message.
            is_free: see `grow`.

        Raises:
            DeviceMemoryError: the bytes exceed the capacity, or were not free in time; the message has a table of holders and waiters.
        """
        if nbytes > self.capacity_bytes:
            raise DeviceMemoryError(f"{what} needs {nbytes:,} bytes of {self.gpu}, but all its processes share {self.capacity_bytes:,}")
        began = time.monotonic()
        self._wanted = nbytes, began
        try:
            for _ in interrupts.looks(self.deadline_seconds, *_LOOK_SECONDS):
                if self._attempt(nbytes, began, is_free, is_waiting=True):
                    return
            raise DeviceMemoryError(self._refusal(nbytes, what, is_free()))
        finally:
            self._wanted = None
            self._waited_seconds += time.monotonic() - began
            self._ledger.write(self._own)

    def settle(self, nbytes: int) -> None:
        """Hold `nbytes`, because this process uses that much. Bytes held beyond that go to the others at once.

        More bytes than before are taken without asking: they are in use already, and the others must know.
        """
        self._check_open()
        # Giving back needs no turn, so a process that is stopped in its turn does not block it.
        if nbytes <= self.held_bytes and self._ledger.hold(self._own.token, nbytes):
            self.held_bytes = nbytes
            return
        with self._ledger.turn():
            self._take(nbytes)

    @contextlib.contextmanager
    def holding(self, nbytes: int) -> Iterator[None]:
        """Wait for `nbytes`, and give them back at the end. For a process whose memory placement does not move.

        Raises:
            DeviceMemoryError: see `wait`.
            ValueError: inside another `holding`, where the lease would wait for itself.
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
        """Give everything back. Idempotent."""
        self._is_closed = True
        self._ledger.leave(self._own.token)
        self.held_bytes = 0

    @property
    def waited_seconds(self) -> float:
        """Total time spent in `wait`, including a wait in progress."""
        wanted = self._wanted
        return self._waited_seconds + (0.0 if wanted is None else time.monotonic() - wanted[1])

    def snapshot(self) -> LeaseSnapshot:
        """The processes that hold or wait now. Takes no lock."""
        wanted = self._wanted
        return LeaseSnapshot(
            gpu=self.gpu,
            capacity_bytes=self.capacity_bytes,
            held_bytes=self.held_bytes,
            wanted_bytes=0 if wanted is None else wanted[0],
            waited_seconds=self.waited_seconds,
            holders=tuple(_holder(claim, self._own.token) for claim in self._ledger.claims()),
        )

    def _attempt(self, nbytes: int, since: float, is_free: Callable[[], bool], *, is_waiting: bool = False) -> bool:
        self._check_open()
        mine = self._own.model_copy(update={"wanted_bytes": nbytes, "since_seconds": since, "seen_seconds": time.monotonic()})
        with self._ledger.turn():
            slot = self._ledger.join(self._own, self.held_bytes)
            others = [claim for claim in self._ledger.claims() if claim.slot != slot]
            fits = sum(claim.held_bytes for claim in others) + nbytes <= self.capacity_bytes
            # The device is asked last: a process that just died may be gone from the ledger before its memory is free.
            if fits and not any(each.note is not None and each.note.comes_before(mine) for each in others) and is_free():
                self._take(nbytes)
                return True
            if is_waiting:
                self._ledger.write(mine)
            return False

    def _take(self, nbytes: int) -> None:
        self._ledger.join(self._own, nbytes)
        self.held_bytes = nbytes

    def _check_open(self) -> None:
        if self._is_closed:
            raise PlacementError("this lease is closed; make a new one")

    def _refusal(self, nbytes: int, what: str, is_free: bool) -> str:
        waited = f"{what} waited {self.deadline_seconds:g} s for {nbytes:,} bytes of {self.gpu}"
        lines = [f"{waited}; its processes share {self.capacity_bytes:,}:"]
        lines.append(f"  {'process':<32} {'pid':>8} {'holds':>18} {'waits for':>18}")
        for each in self.snapshot().holders:
            name = f"{each.name} (this one)" if each.is_mine else each.name
            lines.append(f"  {name:<32} {each.pid:>8} {each.held_bytes:>18,} {each.wanted_bytes:>18,}")
        if not is_free:
            lines.append("The leases leave enough, but the device does not: a process without a lease uses it, or it is not freed yet.")
        lines.append("Let a holder leave its phase, need less at once (only=[...]), or wait longer (lease_deadline_seconds).")
        return "\n".join(lines)


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


def lease_for(device: Device, settings: Settings, folder: str, deadline_seconds: float | None) -> Lease:
    """Make the lease of a manager on its device. `deadline_seconds`: the deadline of the rank's group; the other ranks do not wait longer
    for this one. Raises PlacementError: no other process can use this device; or see `Lease`."""
    from placement.observe.discovery import Identity

    if not device.uuid:
        raise PlacementError(f"leases: device {device.name!r} is private to this process; give a SimulatedDevice shared_with=")
    memory = device.memory()
    return Lease(
        device.uuid,
        settings.lease_capacity_bytes or memory.total_bytes - memory.poison_bytes,
        name=f"{settings.worker_role} {Identity.from_launcher(run=settings.run).instance}",
        folder=folder,
        priority=settings.lease_priority,
        deadline_seconds=min(settings.lease_deadline_seconds, deadline_seconds or settings.lease_deadline_seconds),
    )
