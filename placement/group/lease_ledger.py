"""The ledger of one GPU: which process on this node has how many of its bytes. It needs no daemon.

The kernel keeps the numbers. Each claim is a POSIX lock on a span of the ledger file, and the length of the span is the number of
bytes. No write can damage such a claim and no crash can leave it half made. It ends with its process, however that is killed; a forked
child does not inherit it; a stopped process keeps it. The file itself holds only notes, one for each claim: who the process is, and
what it waits for. A lost or damaged note costs a name in a message; a waiting process writes its note anew at each look.

The processes of a node find each other by the folder. Containers must share it (`/dev/shm` of the host).
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
import time
import zlib
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from placement.core.errors import PlacementError
from placement.core.settings import LEASES_FOLDER

MAX_BYTES = (1 << 44) - 2
"""The largest claim: almost 16 TiB."""
MAX_CLAIMS = 1024
"""The largest number of claims on one GPU."""
LOCK_SECONDS = 10.0
"""A process that has been in the middle of a change for so long counts as stopped."""

_SPAN = MAX_BYTES + 2
"""Distance of two claims in file offsets. Spans must not touch, because the kernel merges locks that do."""
_NOTE_BYTES = 512
"""The longest note takes 505 bytes: 80 characters of a name without control characters, four bytes each."""
_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, length, pid
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]+")


class Note(BaseModel):
    """A process's entry about its claim. Times are on the monotonic clock, which all processes of a node share."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    token: str = Field(max_length=32)
    """Identifies the claim. The process number would not do, because the kernel reuses it."""
    pid: int
    """The process number inside the process's own container."""
    name: str = Field(max_length=80)
    priority: int = 0
    wanted_bytes: int = 0
    """Bytes that the process waits for; 0 when it does not wait."""
    since_seconds: float = 0.0
    """The time when it began to wait."""
    seen_seconds: float = 0.0
    """The time when it last checked whether its turn has come."""

    @property
    def turn(self) -> tuple[int, float, str]:
        """Sort key of the queue: the higher priority first, then the earlier request."""
        return -self.priority, self.since_seconds, self.token


class Claim(NamedTuple):
    """The part of the GPU that one living process has."""

    slot: int
    pid: int
    """The process number as seen here; 0 for a process of another container."""
    held_bytes: int
    note: Note | None
    """The claim's note; None where it is damaged."""


class Ledger:
    """The ledger file of one GPU in this process. All leases of a process share it, see `Ledger.of`."""

    def __init__(self, folder: Path, gpu: str) -> None:
        stem = _file_name(gpu)
        self.path = folder / f"{stem}.leases"
        self._turn_path = folder / f"{stem}.lock"
        self._pid = os.getpid()
        self._threads = threading.RLock()  # re-entrant: a thread may release it without knowing whether it holds it
        self._turn_of: int | None = None
        """The thread that has the turn."""
        self._file: int | None = None
        self._slots: dict[str, int] = {}
        """The slots of this process's claims, by token."""

    @classmethod
    def of(cls, folder: str | os.PathLike[str], gpu: str) -> Ledger:
        """The ledger of a GPU.

        Each process keeps one object for its life, because closing any descriptor of the file would drop every lock the process has on it.
        """
        where = Path(folder).absolute()
        return _LEDGERS.setdefault((os.getpid(), where, gpu), cls(where, gpu))

    # --- reading

    def claims(self) -> list[Claim]:
        """Every living claim, including this process's own, by slot. Takes no lock and waits for nobody.

        A claim that changes meanwhile may be seen old, new, or in part. While this process has the `turn`, no claim grows.

        Raises:
            PlacementError: the file cannot be opened.
        """
        file = self._open()
        found: dict[int, Claim] = {}
        gaps = [(_SPAN, 0)]  # ranges still to search: begin and length; 0: to the end of the file
        while gaps:
            begin, reach = gaps.pop()
            kind, _, start, length, pid = self._fcntl(file, fcntl.F_OFD_GETLK, fcntl.F_WRLCK, begin, reach)
            if kind == fcntl.F_UNLCK or start < _SPAN or length == 0:  # no lock, or a lock that no ledger makes
                continue
            slot, end = start // _SPAN - 1, start + length
            found[slot] = Claim(slot, max(pid, 0), length - 1, self._note(file, slot))
            # The kernel names any lock in the range, not the first one: it sorts them by owner.
            if start > begin:
                gaps.append((begin, start - begin))
            if not reach or end < begin + reach:
                gaps.append((end, reach and begin + reach - end))
        return [found[slot] for slot in sorted(found)]

    # --- changing

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Let one process at a time look and take. If the process dies inside, the turn is given back.

        A turn inside a turn of the same thread gives nothing back at its end. Only code that a garbage collection runs comes to that.

        Raises:
            PlacementError: another process has had the turn for `LOCK_SECONDS`; the message names it.
        """
        self._check_process()
        if self.is_my_turn:
            yield
            return
        turn_file: FileIO | None = None
        try:
            try:
                self._threads.acquire()
                self._turn_of = threading.get_ident()
                self._folder()
                turn_file = open(self._turn_path, "ab", buffering=0, opener=_open_plain)  # noqa: SIM115
                self._lock_turn(turn_file)
                yield
            finally:
                self._end_turn(turn_file)
        finally:  # repeated, because an interrupt can fall between the end of the body and the first `finally`
            self._end_turn(turn_file)

    @property
    def is_my_turn(self) -> bool:
        """Whether this thread is inside a `turn`."""
        return self._turn_of == threading.get_ident()

    def _lock_turn(self, turn_file: FileIO) -> None:
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.lockf(turn_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except (BlockingIOError, PermissionError):
                if time.monotonic() >= deadline:
                    holder = self._fcntl(turn_file.fileno(), fcntl.F_GETLK, fcntl.F_WRLCK, 0, 0)[4]
                    raise PlacementError(
                        f"process {holder} has kept {self.path} locked for {LOCK_SECONDS:g} s and may be stopped. "
                        "Continue that process or end it, which gives back its lease."
                    ) from None
            time.sleep(0.0005)

    def _end_turn(self, turn_file: FileIO | None) -> None:
        if turn_file is not None:
            turn_file.close()  # a separate file for each turn: closing the ledger file would drop every claim of this process
        if self.is_my_turn:
            self._turn_of = None
        with contextlib.suppress(RuntimeError):  # not held any more
            while True:
                self._threads.release()

    def join(self, note: Note, held_bytes: int = 0) -> int:
        """Make a claim, or find this process's claim with the same token. Call it in a `turn`. Returns the claim's slot.

        Where the file was removed, or the lock on it was lost, the claim is made again, for as many bytes as it held.

        Raises:
            PlacementError: there are too many claims, or the file cannot be written.
        """
        if self.is_gone():
            self._reopen()
        slot = self._slots.get(note.token)
        if slot is not None and self._lock(slot, held_bytes):
            return slot
        taken = {claim.slot for claim in self.claims()} | {*self._slots.values()}
        slot = next(each for each in range(len(taken) + 1) if each not in taken)
        if slot >= MAX_CLAIMS:
            raise PlacementError(f"{self.path} has {MAX_CLAIMS} claims already, the most that a GPU can have; end some of its processes")
        self._write(slot, note)
        if not self._lock(slot, held_bytes):
            raise PlacementError(f"{self.path} is locked by another program; only placement may lock it")
        self._slots[note.token] = slot
        return slot

    def hold(self, token: str, held_bytes: int) -> bool:
        """Set the number of bytes of a claim. A larger number only in a `turn`, when the bytes are free.

        Returns:
            False where the claim has to `join` again.
        """
        slot = self._slots.get(token)
        return slot is not None and not self.is_gone() and self._lock(slot, held_bytes)

    def note(self, note: Note) -> None:
        """Write the note of one of this process's claims."""
        slot = self._slots.get(note.token)
        if slot is not None:
            self._write(slot, note)

    def leave(self, token: str) -> None:
        """End one of this process's claims. Waits for nobody, because a finalizer may call it at any moment. Idempotent."""
        if self._file is not None and os.getpid() == self._pid and token in self._slots:
            self._fcntl(self._file, fcntl.F_SETLK, fcntl.F_UNLCK, (self._slots[token] + 1) * _SPAN, MAX_BYTES + 1)
            self._slots.pop(token, None)

    def is_gone(self) -> bool:
        """Whether the path no longer leads to the file that this process has locked."""
        if self._file is None:
            return True
        mine = os.fstat(self._file)
        try:
            there = os.stat(self.path, follow_symlinks=False)
        except FileNotFoundError:
            return True
        return (mine.st_dev, mine.st_ino) != (there.st_dev, there.st_ino)

    # --- the file

    def _lock(self, slot: int, held_bytes: int) -> bool:
        """Lock a slot for so many bytes. Returns False when another process has the slot, because code here opened and closed the file."""
        file, start = self._open(), (slot + 1) * _SPAN
        try:
            # Each call takes effect at once and whole. A process killed between the two has no claim at all.
            self._fcntl(file, fcntl.F_SETLK, fcntl.F_WRLCK, start, held_bytes + 1)
            self._fcntl(file, fcntl.F_SETLK, fcntl.F_UNLCK, start + held_bytes + 1, MAX_BYTES + 1 - held_bytes)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def _write(self, slot: int, note: Note) -> None:
        text = note.model_dump_json().encode()
        line = b"%08x %s" % (zlib.crc32(text), text)
        file = self._open()
        with contextlib.suppress(OSError):  # a full file system costs a name and a place in the queue, no bytes
            os.pwrite(file, line.ljust(_NOTE_BYTES - 1) + b"\n", slot * _NOTE_BYTES)

    def _reopen(self) -> None:
        """Use the file that the path leads to now, or a new one. Every claim of this process has to join again."""
        old, self._file = self._file, None
        self._slots.clear()
        if old is not None:
            os.close(old)

    def _open(self) -> int:
        if self._file is None:
            self._folder()
            self._file = _open_plain(self.path, os.O_RDWR | os.O_CREAT)
        return self._file

    def _folder(self) -> None:
        folder = self.path.parent
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = os.stat(folder, follow_symlinks=False)
        except OSError as error:
            raise PlacementError(f"cannot make {folder}, the folder of leases: {error.strerror}") from error
        # Anybody may have made a folder with this well-known name.
        if str(folder) == LEASES_FOLDER and (found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode)):
            raise PlacementError(f"{folder} belongs to another user; set another folder for leases: PLACEMENT_LEASES=/path")

    def _note(self, file: int, slot: int) -> Note | None:
        for _ in range(2):  # a second time, in case the note was being written
            checksum, _, text = os.pread(file, _NOTE_BYTES, slot * _NOTE_BYTES).rstrip().partition(b" ")
            if checksum == b"%08x" % zlib.crc32(text):
                with contextlib.suppress(ValidationError):
                    return Note.model_validate_json(text)
        return None

    def _fcntl(self, file: int, command: int, kind: int, start: int, length: int) -> tuple[int, int, int, int, int]:
        self._check_process()
        answer: tuple[int, int, int, int, int] = _FLOCK.unpack(fcntl.fcntl(file, command, _FLOCK.pack(kind, 0, start, length, 0)))
        return answer

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise PlacementError(f"this lease belongs to process {self._pid}; a forked child has no part in it")


def _file_name(gpu: str) -> str:
    """The file name for a GPU. A UUID stays as it is; another text becomes its end and a digest."""
    plain = _UNSAFE.sub("-", gpu)
    return plain if plain == gpu and len(gpu) <= 64 else f"{plain[-40:]}-{hashlib.sha256(gpu.encode()).hexdigest()[:12]}"


_LEDGERS: dict[tuple[int, Path, str], Ledger] = {}


def _open_plain(path: str | os.PathLike[str], flags: int) -> int:
    try:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise PlacementError(f"cannot open {path}, the ledger of leases on this GPU: {error.strerror}") from error
