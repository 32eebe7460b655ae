"""Turns: one manager at a time has a GPU, from the entry of its outermost phase until all of its
handles have left the device.

A turn is a lock on a file that is named after the GPU. The kernel ends it with the process that has
it. A manager that waits has a second file locked, `.next`: so one that has just left does not
overtake it.

Each rank of a group takes the turn of its own GPU, before the group's vote. Two groups may each get
some of the GPUs that both need. Neither goes on then, and the deadline ends their wait.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from placement.core import interrupts
from placement.core.errors import DeviceMemoryError, PlacementError
from placement.core.journal import logger
from placement.core.settings import TURNS_FOLDER

if TYPE_CHECKING:
    from filelock import FileLock

    from placement.core.settings import Settings
    from placement.devices.base import Device
    from placement.group.protocol import Group

# pause between two looks of a waiting manager: the first pause, and the longest
_LOOK_SECONDS = (0.001, 0.02)
_QUIET_SECONDS = 1.0  # a longer wait is logged
_ENDING_SECONDS = (
    5.0  # the longest wait for the end of a killed process, whose number may be reused
)


class Turn:
    """One manager's turn on a GPU.
    `gpu`: its UUID, the same text in all processes, as is the `folder` of the lock files.
    Raises PlacementError: the folder cannot be made, or the default one is another user's."""

    def __init__(self, gpu: str, folder: str, deadline_seconds: float) -> None:
        self.gpu = gpu
        self.deadline_seconds = deadline_seconds
        self._longest_seconds = deadline_seconds
        # Only a process that takes turns imports it: from Python 3.12 on its audit hook makes each
        # call of `id` take 0.5 us longer.
        from filelock import FileLock

        try:
            os.makedirs(folder, mode=0o700, exist_ok=True)
        except OSError as error:
            raise PlacementError(f"turns: cannot make the folder {folder}: {error}") from error
        # another user may have made the default one, or a link there, because its name is known
        if folder == TURNS_FOLDER and os.lstat(folder).st_uid != os.getuid():
            raise PlacementError(
                f"{folder} belongs to another user; set another folder: PLACEMENT_TURNS=/path"
            )
        readable = re.sub(r"[^A-Za-z0-9_.-]+", "-", gpu)[-40:]
        path = f"{folder}/{readable}-{hashlib.sha256(gpu.encode()).hexdigest()[:12]}"
        # not of a thread: `Manager.enter` and `Manager.leave` may be called in two
        self._lock = FileLock(f"{path}.turn", thread_local=False)
        self._next = FileLock(f"{path}.next", thread_local=False)
        # the process that has the turn, as a sentence for messages
        self._holder_file = Path(f"{path}.holder")

    @property
    def is_held(self) -> bool:
        return self._lock.is_locked

    def give_up_before(self, group: Group) -> None:
        """Wait less than the other ranks of a group do, so that they hear the reason."""
        self.deadline_seconds = min(self._longest_seconds, 0.9 * group.deadline_seconds)

    def take(self, phase: str) -> None:
        """Wait until this manager has the GPU, and no other. Raises DeviceMemoryError: another one
        still has it at the deadline, and the message names it; PlacementError: a file cannot be
        locked."""
        if self.is_held:
            return
        began = time.monotonic()
        is_logged = False
        try:
            for _ in interrupts.looks(self.deadline_seconds, *_LOOK_SECONDS):
                if _try_lock(self._next) and _try_lock(self._lock):
                    self._wait_for_killed_holder()
                    own = f"process {os.getpid()} has it since it entered phase {phase!r}"
                    with suppress(OSError):  # a full file system costs a name
                        self._holder_file.write_text(own)
                    return
                if not is_logged and time.monotonic() - began > _QUIET_SECONDS:
                    is_logged = True
                    logger.info(
                        "phase %s waits for its turn on %s: %s", phase, self.gpu, self._holder()
                    )
        except OSError as error:
            raise PlacementError(f"turns: cannot lock {self._lock.lock_file}: {error}") from error
        finally:
            self._next.release()
        raise DeviceMemoryError(
            f"phase {phase!r} waited {self.deadline_seconds:g} s for its turn on {self.gpu}: "
            f"{self._holder()}. Let that process leave its phase, or end it, or wait longer "
            "(turn_deadline_seconds)"
        )

    def _wait_for_killed_holder(self) -> None:
        """Wait until the process that had the turn has ended. It was killed if its file is still
        there, and the kernel may end its lock before the driver has freed its memory."""
        with suppress(OSError, ValueError, IndexError):  # no such file or process
            pid = int(self._holder_file.read_text().split()[1])
            for _ in interrupts.looks(_ENDING_SECONDS, *_LOOK_SECONDS):
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
                if pid == os.getpid() or state in ("Z", "X"):
                    return

    def give_back(self) -> None:
        """End the turn, if this manager has it."""
        if self.is_held:
            with suppress(OSError):
                self._holder_file.unlink()
            self._lock.release()

    def _holder(self) -> str:
        try:
            return self._holder_file.read_text()
        except (OSError, ValueError):  # it is gone, or damaged
            return "another process has it"


def _try_lock(lock: FileLock) -> bool:
    """Whether the lock is held now. Does not wait."""
    from filelock import Timeout  # see `Turn`

    # not every TimeoutError: that of a file system is no turn of another process
    with suppress(Timeout):
        if not lock.is_locked:
            lock.acquire(blocking=False)
    return lock.is_locked


def turn_for(device: Device, settings: Settings) -> Turn | None:
    """The turn of a manager on its device; None where the settings want none."""
    if settings.turns is None:
        return None
    if not device.uuid:
        raise PlacementError(
            f"turns: device {device.name!r} is private to this process; give a SimulatedDevice "
            "shared_with="
        )
    return Turn(device.uuid, settings.turns, settings.turn_deadline_seconds)
