"""A folder for each incident: memory ran out, or a value could not be trusted.

Off unless `Settings.incidents` names a folder: nothing is written to a disk unasked.
"""

from __future__ import annotations

import os
import shutil
import socket
import time
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from pydantic_core import to_json

from placement.core.errors import (
    BrokenHandleError,
    DeviceMemoryError,
    HostMemoryError,
    IntegrityError,
)
from placement.core.journal import Journal, logger
from placement.core.settings import Settings
from placement.core.snapshot import Audit, Snapshot
from placement.core.states import IDLE, Plan
from placement.observe.nvml import processes_on

# torch's is one of the user's own computing
_KINDS = (
    *(BrokenHandleError, DeviceMemoryError, HostMemoryError, IntegrityError),
    torch.OutOfMemoryError,
)
_RECORDS = 500  # the end of the journal
_NOTE = "placement: incident: "


class Incidents:
    """Writes the folders of one manager. Nothing that goes wrong here hides the user's error.

    Called with the manager's lock held, on the thread that has the error.
    """

    def __init__(
        self,
        settings: Settings,
        take_snapshot: Callable[[], Snapshot],
        take_audit: Callable[[Plan], Audit],
        journal: Journal,
        gpu: str,
    ) -> None:
        self._directory, self._num_kept = settings.incidents, settings.incidents_kept
        self._take_snapshot, self._take_audit = take_snapshot, take_audit
        self._journal, self._gpu = journal, gpu
        self._folders: deque[Path] = deque()
        self._broken: set[str] = set()  # names of the handles that were broken at the last error

    def report(
        self,
        error: BaseException,
        phase: str | None = None,
        plan: Plan | None = None,
        raised: BaseException | None = None,
    ) -> None:
        """Write the folder of an error, if it is an incident and has none yet, and name it in the
        error's last line.
        `phase`: the one that was to begin or to end; None: the open one.
        `raised`: the error that the user sees instead of this one."""
        if self._directory is None:
            return
        if raised is None:
            raised = error
        notes = getattr(raised, "__notes__", None) or []
        for note in notes:
            if str(note).startswith(_NOTE):
                notes.remove(note)  # the error has a folder: make this the last note again
                notes.append(note)
                return
        try:
            folder = self._write(Path(self._directory), error, phase, plan)
            if folder is not None:
                raised.add_note(f"{_NOTE}{folder} (placement status --incident {folder})")
        except Exception as failure:  # also of an exception that refuses notes
            logger.warning("an incident cannot be written, or not be named: %s", failure)

    def _write(
        self, directory: Path, error: BaseException, phase: str | None, plan: Plan | None
    ) -> Path | None:
        snapshot = self._take_snapshot()
        before = self._broken
        self._broken = {handle.name for handle in snapshot.handles if handle.broken}
        if not isinstance(error, _KINDS) and self._broken <= before:
            return None
        targets = {handle.name: handle.state for handle in snapshot.handles}
        plan = Plan(targets) if plan is None else Plan({**targets, **plan.targets})
        when = time.strftime("%Y%m%d-%H%M%S")
        incident = {
            "time": when,
            "error": f"{type(error).__name__}: {error}".encode(errors="backslashreplace").decode(),
            "phase": phase or (snapshot.phases or (IDLE,))[-1],
            "plan": plan,
            "processes": processes_on(self._gpu),
        }
        records, failures = [*self._journal], [*self._journal.failures]
        journal = {"records": records[-_RECORDS:], "failures": failures[-_RECORDS:]}
        trace = "".join(traceback.format_exception(error))
        writers: dict[str, Callable[[Path], object]] = {
            "incident.json": lambda file: file.write_bytes(to_json(incident)),
            "snapshot.json": lambda file: file.write_bytes(to_json(snapshot)),
            "journal.json": lambda file: file.write_bytes(to_json(journal)),
            "audit.json": lambda file: file.write_bytes(to_json(self._take_audit(plan))),
            "traceback.txt": lambda file: file.write_text(trace, errors="backslashreplace"),
            "torch_memory.pickle": _dump_torch_memory,
        }
        folder = directory / f"{when}-{socket.gethostname()}-{os.getpid()}-{time.time_ns()}"
        folder.mkdir(parents=True)
        self._folders.append(folder)
        if len(self._folders) > self._num_kept:
            shutil.rmtree(self._folders.popleft(), ignore_errors=True)
        for name, write in writers.items():
            try:
                write(folder / name)
            except Exception as failure:
                with suppress(OSError):  # a full disk has taken a part of it
                    (folder / name).unlink()
                logger.warning("%s of the incident %s is missing: %s", name, folder, failure)
        return folder


def _dump_torch_memory(file: Path) -> None:
    """torch's record of its allocations, where the user has switched that on
    (`torch.cuda.memory._record_memory_history`)."""
    if torch.cuda.is_initialized() and torch._C._cuda_isHistoryEnabled():
        torch.cuda.memory._dump_snapshot(str(file))
