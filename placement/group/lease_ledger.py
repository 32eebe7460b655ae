"""The ledger of one GPU: which process on this node has how many of its bytes, without a daemon.

The kernel keeps the bytes. Each claim is a POSIX lock on a span of the ledger file, and the length of the span is the number of
bytes: no write can damage it, no crash can leave it half made, it dies with its process whatever kills it, a forked child does not
inherit it, and a stopped process keeps it. The file itself holds only notes, one a claim: who it is, and what it waits for. A
note that is lost or damaged costs a name in a message; a process that waits writes its own anew at each look.

All processes of a node find each other by the folder; containers must share it (`/dev/shm` of the host).
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
"""The most that one claim can say: 16 TiB."""
MAX_CLAIMS = 1024
"""On one GPU."""
LOCK_SECONDS = 10.0
"""How long another process may be in the middle of a change before it is taken for stopped."""

_SPAN = MAX_BYTES + 2
"""Of file offsets between two claims: the kernel joins locks that touch."""
_NOTE_BYTES = 512
"""The longest note takes 505: 80 characters of a name without control characters, as of four bytes."""
_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, length, pid
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]+")


class Note(BaseModel):
    """What a process says about its claim. Times are on the monotonic clock, which all processes of a node share."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    token: str = Field(max_length=32)
    """Tells claims apart: process numbers are used again."""
    pid: int
    """As the process itself knows it."""
    name: str = Field(max_length=80)
    priority: int = 0
    wanted_bytes: int = 0
    """What it waits for; 0: nothing."""
    since_seconds: float = 0.0
    """When it began to wait."""
    seen_seconds: float = 0.0
    """When it last looked whether its turn has come."""

    @property
    def turn(self) -> tuple[int, float, str]:
        """Who comes first: the higher priority, then who came first."""
        return -self.priority, self.since_seconds, self.token


class Claim(NamedTuple):
    """One living process's part of the GPU."""

    slot: int
    pid: int
    """As this process sees it; 0 for one of another container."""
    held_bytes: int
    note: Note | None
    """None where it is damaged."""


class Ledger:
    """The file of one GPU, in this process. All leases of a process share it, see `Ledger.of`."""

    def __init__(self, folder: Path, gpu: str) -> None:
        stem = _file_name(gpu)
        self.path = folder / f"{stem}.leases"
        self._turn_path = folder / f"{stem}.lock"
        self._pid = os.getpid()
        self._threads = threading.RLock()  # whoever has it can let go of it without knowing whether it has it
        self._turn_of: int | None = None
        """The thread that has the turn."""
        self._file: int | None = None
        self._slots: dict[str, int] = {}
        """Of this process's claims, by token."""

    @classmethod
    def of(cls, folder: str | os.PathLike[str], gpu: str) -> Ledger:
        """The ledger of a GPU.

        One object a process, kept for its life: closing any descriptor of the file would drop every lock that the process has on it.
        """
        where = Path(folder).absolute()
        return _LEDGERS.setdefault((os.getpid(), where, gpu), cls(where, gpu))

    # --- reading

    def claims(self) -> list[Claim]:
        """Every living claim, this process's own among them, by slot. Takes no lock and waits for nobody.

        What changes in the meantime may be seen as it was, as it is, or in part; while it is this process's `turn`, nothing grows.

        Raises:
            PlacementError: the file cannot be opened.
        """
        file = self._open()
        found: dict[int, Claim] = {}
        gaps = [(_SPAN, 0)]  # not searched yet: from, and how far; 0: to the end
        while gaps:
            begin, reach = gaps.pop()
            kind, _, start, length, pid = self._fcntl(file, fcntl.F_OFD_GETLK, fcntl.F_WRLCK, begin, reach)
            if kind == fcntl.F_UNLCK or start < _SPAN or length == 0:  # nobody, or somebody who is none of ours
                continue
            slot, end = start // _SPAN - 1, start + length
            found[slot] = Claim(slot, max(pid, 0), length - 1, self._note(file, slot))
            # The kernel names any lock in the gap, not the first: it sorts them by owner.
            if start > begin:
                gaps.append((begin, start - begin))
            if not reach or end < begin + reach:
                gaps.append((end, reach and begin + reach - end))
        return [found[slot] for slot in sorted(found)]

    # --- changing

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """One process at a time may look and take. Whoever dies inside gives the turn back.

        Inside one of the same thread: a part of that, at whose end nothing is given back. Only what a collection runs comes to that.

        Raises:
            PlacementError: another process has had it for `LOCK_SECONDS`; names it.
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
        finally:  # again: an interrupt can fall between the end of the body and the first one
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
                        f"process {holder} has been in the middle of a change of {self.path} for {LOCK_SECONDS:g} s; is it stopped? "
                        "Let it go on or end it: what it holds comes back then."
                    ) from None
            time.sleep(0.0005)

    def _end_turn(self, turn_file: FileIO | None) -> None:
        if turn_file is not None:
            turn_file.close()  # a file of its own in each turn: closing one of the ledger itself would drop every claim of this process
        if self.is_my_turn:
            self._turn_of = None
        with contextlib.suppress(RuntimeError):  # not held, or no longer
            while True:
                self._threads.release()

    def join(self, note: Note, held_bytes: int = 0) -> int:
        """Make a claim, or find the one that this process has made; in a `turn`. Returns its slot.

        Where the file was removed, or the lock on it was lost, the claim is made anew, for as much as it held.

        Raises:
            PlacementError: too many, or the file cannot be written.
        """
        if self.is_gone():
            self._reopen()
        slot = self._slots.get(note.token)
        if slot is not None and self._lock(slot, held_bytes):
            return slot
        taken = {claim.slot for claim in self.claims()} | {*self._slots.values()}
        slot = next(each for each in range(len(taken) + 1) if each not in taken)
        if slot >= MAX_CLAIMS:
            raise PlacementError(f"{self.path} has {MAX_CLAIMS} claims already")
        self._write(slot, note)
        if not self._lock(slot, held_bytes):
            raise PlacementError(f"{self.path} is locked by another program; only placement may use it")
        self._slots[note.token] = slot
        return slot

    def hold(self, token: str, held_bytes: int) -> bool:
        """Let a claim be so many bytes, whatever it was. More of them only in a `turn`, when they are free.

        Returns:
            False where the claim has to `join` again.
        """
        slot = self._slots.get(token)
        return slot is not None and not self.is_gone() and self._lock(slot, held_bytes)

    def note(self, note: Note) -> None:
        """Put down what a claim of this process is now."""
        slot = self._slots.get(note.token)
        if slot is not None:
            self._write(slot, note)

    def leave(self, token: str) -> None:
        """End a claim of this process. Called at any moment, also where an object dies: waits for nobody. Idempotent."""
        if self._file is not None and os.getpid() == self._pid and token in self._slots:
            self._fcntl(self._file, fcntl.F_SETLK, fcntl.F_UNLCK, (self._slots[token] + 1) * _SPAN, MAX_BYTES + 1)
            self._slots.pop(token, None)

    def is_gone(self) -> bool:
        """Whether the file that this process holds its locks on is not the one that others find."""
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
        """False when another process has the slot: this one has lost it, because something in it opened and closed the file."""
        file, start = self._open(), (slot + 1) * _SPAN
        try:
            # Each call takes effect at once and whole; killed between the two, the process has no claim at all.
            self._fcntl(file, fcntl.F_SETLK, fcntl.F_WRLCK, start, held_bytes + 1)
            self._fcntl(file, fcntl.F_SETLK, fcntl.F_UNLCK, start + held_bytes + 1, MAX_BYTES + 1 - held_bytes)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def _write(self, slot: int, note: Note) -> None:
        text = note.model_dump_json().encode()
        line = b"%08x %s" % (zlib.crc32(text), text)
        file = self._open()
        with contextlib.suppress(OSError):  # the file system is full: that costs a name, and a place in the queue
            os.pwrite(file, line.ljust(_NOTE_BYTES - 1) + b"\n", slot * _NOTE_BYTES)

    def _reopen(self) -> None:
        """Go on with the file that others find, or a new one; every claim of this process has to join again."""
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
        # Its name is known to everybody, and everybody may write beside it.
        if str(folder) == LEASES_FOLDER and (found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode)):
            raise PlacementError(f"{folder} belongs to somebody else; give leases a folder of its own: PLACEMENT_LEASES=/path")

    def _note(self, file: int, slot: int) -> Note | None:
        for _ in range(2):  # once more, should it have been in the middle of being written
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
    """A UUID as it is; of another name its end, and what tells it apart from all others."""
    plain = _UNSAFE.sub("-", gpu)
    return plain if plain == gpu and len(gpu) <= 64 else f"{plain[-40:]}-{hashlib.sha256(gpu.encode()).hexdigest()[:12]}"


_LEDGERS: dict[tuple[int, Path, str], Ledger] = {}


def _open_plain(path: str | os.PathLike[str], flags: int) -> int:
    try:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise PlacementError(f"cannot open {path}, where processes agree on this GPU: {error.strerror}") from error
