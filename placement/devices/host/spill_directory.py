"""The folder in which one manager keeps its spill files, and the removal of what crashed processes left there.

Its owner holds a lock (`flock`) on the folder, which the kernel gives back however the process ends. So a folder whose lock is free has
no living owner, also where the owner's process number is not visible (another container) or belongs to another process by now.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import re
import shutil
import socket
import weakref
from pathlib import Path

_NAME = re.compile(r"placement-(?P<host>.+)-\d+-\d+\.\d+")
_NO_TMPFILE = (OSError,)  # file systems refuse O_TMPFILE with several numbers: EOPNOTSUPP, EISDIR, EINVAL
_READ_WRITE = os.O_RDWR | os.O_CLOEXEC


class SpillDirectory:
    """One folder inside the given one, for this user alone. Its files have no name once they are open, so none outlives the process.

    Args:
        within: an existing folder on a local disk.

    Raises:
        ValueError: `within` is no folder, or files cannot be made there; the message says what to do.
    """

    def __init__(self, within: str | os.PathLike[str]) -> None:
        advice = "set disk_directory to a folder on a local disk that this process may write"
        if not os.path.isdir(within):
            raise ValueError(f"disk_directory {os.fspath(within)!r} is no folder; {advice}")
        try:
            remove_abandoned(within)
            self.path, held = _make(Path(within))
        except OSError as error:
            raise ValueError(f"disk_directory {os.fspath(within)!r}: {error.strerror}; {advice}") from error
        self._close = weakref.finalize(self, _remove, str(self.path), held, os.getpid())

    def open(self, name: str) -> int:
        """The descriptor of a new, empty file without a name, with direct IO where the file system allows it.

        Args:
            name: stands in for the missing name in messages; used for a moment where the file system has no nameless files.

        Raises:
            OSError: the file system refused.
        """
        try:
            return self._open(name, os.O_DIRECT)
        except OSError:
            return self._open(name, 0)

    def _open(self, name: str, direct: int) -> int:
        try:
            return os.open(self.path, _READ_WRITE | os.O_TMPFILE | direct, 0o600)
        except _NO_TMPFILE:
            file = os.open(self.path / name, _READ_WRITE | os.O_CREAT | os.O_EXCL | direct, 0o600)
            try:
                os.unlink(self.path / name)
            except BaseException:
                os.close(file)
                raise
            return file

    def close(self) -> None:
        """Remove the folder. Open files stay readable. Idempotent."""
        self._close()


def remove_abandoned(within: str | os.PathLike[str]) -> list[Path]:
    """Remove the folders that this user's crashed processes of this machine left. Returns their paths.

    Folders of other machines stay: the file system may be shared, and its locks need not be.
    """
    gone = []
    for path in Path(within).iterdir():
        match = _NAME.fullmatch(path.name)
        if match is None or match["host"] != _host():
            continue
        with contextlib.suppress(OSError):  # it has an owner, belongs to another user, or went in this moment
            held = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if os.fstat(held).st_uid == os.getuid():
                    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path)
                    gone.append(path)
            finally:
                os.close(held)
    return gone


def _make(within: Path) -> tuple[Path, int]:
    """Make a folder that nobody has, and lock it. Returns its path and the descriptor that holds the lock."""
    for number in itertools.count():
        path = within / f"placement-{_host()}-{os.getpid()}-{_start_ticks()}.{number}"
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:  # another manager of this process
            continue
        held = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(held, fcntl.LOCK_EX)
        if path.exists() and os.path.samestat(os.stat(path), os.fstat(held)):
            return path, held
        os.close(held)  # another process took it for an abandoned one, before it was locked
    raise AssertionError("unreachable")


def _remove(path: str, held: int, pid: int) -> None:
    if os.getpid() == pid:  # a forked child has neither the folder nor the lock
        shutil.rmtree(path, ignore_errors=True)
        os.close(held)


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9_.]", "_", socket.gethostname())


def _start_ticks() -> int:
    """When this process started, in clock ticks since the machine did: a process number may be used again, the pair is not."""
    return int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
