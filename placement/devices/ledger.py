"""The ledger of one device: how many of its bytes each process claims.

The kernel keeps the numbers, without a daemon. Each claim is a POSIX lock on a span of the ledger's
file, and the length of the span is the number of bytes. No write can damage such a claim and no
crash can leave it half made. It ends with its process, however that is killed; a forked child does
not inherit it; a stopped process keeps it. The file itself holds only notes, one for each claim:
who the process is, and what it waits for. A lost or damaged note costs a name in a message; a
waiting process writes its note anew at each look. The processes of a node find each other by the
folder. Containers must share it (`/dev/shm` of the host).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import stat
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from pydantic import Field, ValidationError

from placement.core import interrupts
from placement.core.errors import PlacementError
from placement.core.settings import LEASES_FOLDER
from placement.core.snapshot import Frozen

MAX_BYTES = (1 << 44) - 2  # the largest claim: almost 16 TiB
MAX_CLAIMS = 128  # the largest number of claims on one GPU
# a process that has been in the middle of a change for so long counts as stopped
TURN_SECONDS = 10.0
_TURN_PAUSE_SECONDS = 0.0005
STALE_SECONDS = 1.0  # a waiting process that has not looked for so long is passed over
_SPAN = MAX_BYTES + 2
"""Distance of two claims in file offsets. Spans must not touch, because the kernel merges locks
that do. Byte 0 is the turn's."""
# the longest note takes 505 bytes: 80 characters of a name without control characters, four bytes
# each
_NOTE_BYTES = 512
_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, length, pid


class Note(Frozen):
    """A process's entry about its claim. Times are on the monotonic clock, which all processes of a
    node share."""

    # identifies the claim; the process number would not do, because the kernel reuses it
    token: str = Field(max_length=32)
    pid: int  # the process number inside the process's own container
    name: str = Field(max_length=80)
    priority: int = 0
    wanted_bytes: int = 0  # bytes that the process waits for; 0 when it does not wait
    since_seconds: float = 0.0
    seen_seconds: float = 0.0
    """When it began to wait, and when it last checked whether its turn has come."""

    def comes_before(self, other: Note) -> bool:
        """Whether this process waits, still looks, and is served before the other: by priority,
        then by the time of the request."""
        is_waiting = (
            self.wanted_bytes > 0 and other.seen_seconds - self.seen_seconds < STALE_SECONDS
        )
        place, others_place = (
            (-each.priority, each.since_seconds, each.token) for each in (self, other)
        )
        return is_waiting and place < others_place


class Claim(NamedTuple):
    """The part of the GPU that one living process has. `pid` is 0 for a process of another
    container, `note` None where it is damaged."""

    slot: int
    pid: int
    held_bytes: int
    note: Note | None


class Ledger:
    """The ledger file of one GPU in this process. All leases of a process share it, see
    `Ledger.of`."""

    def __init__(self, folder: Path, gpu: str) -> None:
        digest = hashlib.sha256(gpu.encode()).hexdigest()[:12]
        self.path = folder / f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', gpu)[-40:]}-{digest}.leases"
        self._threads = threading.RLock()
        self._file: int | None = None
        self._slots: dict[str, int] = {}  # the slots of this process's claims, by token

    @classmethod
    def of(cls, folder: str | os.PathLike[str], gpu: str) -> Ledger:
        """The ledger of a GPU: one object for the life of the process, because closing any
        descriptor of the file drops all its locks."""
        where = Path(folder).absolute()
        return _LEDGERS.setdefault((where, gpu), cls(where, gpu))

    def claims(self) -> list[Claim]:
        """Every living claim, this process's own included, by slot. Takes no lock: a claim that
        changes meanwhile may be seen old, new, or in part. While this process has the `turn`, no
        claim grows."""
        found = []
        for slot in range(MAX_CLAIMS):
            kind, _, start, length, pid = self._lock(
                fcntl.F_OFD_GETLK, fcntl.F_WRLCK, (slot + 1) * _SPAN, _SPAN
            )
            # else no lock, or one that no ledger makes
            if kind != fcntl.F_UNLCK and start == (slot + 1) * _SPAN:
                found.append(Claim(slot, max(pid, 0), length - 1, self._note(slot)))
        return found

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Let one process at a time look and take. If the process dies inside, the turn is given
        back."""
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
        """Make a claim, or find this process's claim with the same token. Call it in a `turn`.
        Returns the claim's slot. Where the file was removed, or the lock on it was lost, the claim
        is made again, for as many bytes as it held."""
        if self.hold(note.token, held_bytes):
            return self._slots[note.token]
        taken = {claim.slot for claim in self.claims()} | {*self._slots.values()}
        for slot in range(MAX_CLAIMS):
            self._slots[note.token] = slot
            if slot not in taken and self.hold(note.token, held_bytes):
                self.write(note)
                return slot
        del self._slots[note.token]
        raise PlacementError(
            f"{self.path} has {MAX_CLAIMS} claims already, the most that a GPU can have; end some "
            "of its processes"
        )

    def hold(self, token: str, held_bytes: int) -> bool:
        """Set the number of bytes of a claim. A larger number only in a `turn`, when the bytes are
        free. Returns False where the claim has to `join` again: the file was removed, or another
        process has its slot."""
        if token not in self._slots or self._is_gone():
            return False
        start = (self._slots[token] + 1) * _SPAN
        try:
            # Each call takes effect at once and whole. A process killed between the two has no
            # claim at all.
            self._lock(fcntl.F_SETLK, fcntl.F_WRLCK, start, held_bytes + 1)
            self._lock(
                fcntl.F_SETLK, fcntl.F_UNLCK, start + held_bytes + 1, MAX_BYTES + 1 - held_bytes
            )
        except (BlockingIOError, PermissionError):
            return False
        return True

    def write(self, note: Note) -> None:
        if note.token in self._slots:
            text = note.model_dump_json().encode().ljust(_NOTE_BYTES - 1) + b"\n"
            # a full file system costs a name and a place in the queue, no bytes
            with contextlib.suppress(OSError):
                os.pwrite(self._open(), text, self._slots[note.token] * _NOTE_BYTES)

    def leave(self, token: str) -> None:
        """End one of this process's claims. Waits for nobody, because a finalizer may call it at
        any moment. Idempotent."""
        if self._file is not None and token in self._slots:
            self._lock(
                fcntl.F_SETLK, fcntl.F_UNLCK, (self._slots.pop(token) + 1) * _SPAN, MAX_BYTES + 1
            )

    # --- the file

    def _await_turn(self) -> None:
        for _ in interrupts.looks(TURN_SECONDS, _TURN_PAUSE_SECONDS, _TURN_PAUSE_SECONDS):
            with contextlib.suppress(BlockingIOError, PermissionError):
                self._lock(fcntl.F_SETLK, fcntl.F_WRLCK, 0, 1)
                return
        holder = self._lock(fcntl.F_GETLK, fcntl.F_WRLCK, 0, 1)[4]
        raise PlacementError(
            f"process {holder} has kept {self.path} locked for {TURN_SECONDS:g} s and may be "
            "stopped. Continue that process or end it, which gives back its lease."
        )

    def _is_gone(self) -> bool:
        try:
            return not os.path.samestat(
                os.fstat(self._open()), os.stat(self.path, follow_symlinks=False)
            )
        except FileNotFoundError:
            return True

    def _open(self) -> int:
        if self._file is None:
            folder = self.path.parent
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                found = os.stat(folder, follow_symlinks=False)
                # Anybody may have made a folder with the well-known name.
                if str(folder) == LEASES_FOLDER and (
                    found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode)
                ):
                    raise PlacementError(
                        f"{folder} belongs to another user; set another folder for leases: "
                        "PLACEMENT_LEASES=/path"
                    )
                self._file = os.open(
                    self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666
                )
            except OSError as error:
                raise PlacementError(
                    f"cannot open {self.path}, the ledger of leases on this GPU: {error.strerror}"
                ) from error
        return self._file

    def _note(self, slot: int) -> Note | None:
        with contextlib.suppress(ValidationError):
            return Note.model_validate_json(os.pread(self._open(), _NOTE_BYTES, slot * _NOTE_BYTES))
        return None

    def _lock(
        self, command: int, kind: int, start: int, length: int
    ) -> tuple[int, int, int, int, int]:
        """One call of the system about a lock on the file. Returns the lock's type, whence, start,
        length and process."""
        answer: tuple[int, int, int, int, int] = _FLOCK.unpack(
            fcntl.fcntl(self._open(), command, _FLOCK.pack(kind, 0, start, length, 0))
        )
        return answer


_LEDGERS: dict[tuple[Path, str], Ledger] = {}
