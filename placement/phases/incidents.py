"""A folder for each incident: memory ran out, or a value could not be trusted."""

from __future__ import annotations

import os
import shutil
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import torch
from pydantic_core import to_json

from placement.core import errors
from placement.core.journal import Journal, logger
from placement.core.settings import Settings
from placement.core.snapshot import Audit, Snapshot
from placement.core.states import Plan

# the last one is torch's, of the user's own computing
_KINDS = (
    *(errors.BrokenHandleError, errors.IntegrityError),
    *(errors.HostMemoryError, errors.DeviceMemoryError, torch.OutOfMemoryError),
)
_NOTE = "placement: incident: "


@dataclass(eq=False)
class Incidents:
    """Writes the folders of one manager, whose lock is held. Nothing that goes wrong here hides the
    user's error."""

    _settings: Settings
    _take_snapshot: Callable[[], Snapshot]
    _take_audit: Callable[[Plan], Audit]
    _journal: Journal
    _device: torch.device
    _folders: deque[Path] = field(default_factory=deque)
    _broken: set[str] = field(default_factory=set)  # names of broken handles at the last error

    def report(
        self, error: BaseException, plan: Plan | None = None, raised: BaseException | None = None
    ) -> None:
        """Write the folder of an error, if it is an incident and has none yet, and name it in the
        error's last line. `plan`: that of the phase which was to begin or to end. `raised`: the
        error that the user sees instead of this one."""
        if self._settings.incidents is None:
            return
        raised = error if raised is None else raised
        try:
            for note in getattr(raised, "__notes__", None) or ():
                if str(note).startswith(_NOTE):
                    raised.__notes__.remove(note)
                    raised.add_note(note)  # the last one again
                    return
            snapshot = self._take_snapshot()
            before = self._broken
            self._broken = {handle.name for handle in snapshot.handles if handle.broken}
            if isinstance(error, _KINDS) or not self._broken <= before:
                folder = self._new_folder(self._settings.incidents)
                try:
                    self._fill(folder, error, plan, snapshot)
                finally:
                    raised.add_note(f"{_NOTE}{folder} (placement status --incident {folder})")
        except Exception as failure:  # of the disk, of the device, of an error that takes no note
            logger.warning(
                "incidents=%s: an incident is not complete: %s", self._settings.incidents, failure
            )

    def _new_folder(self, directory: str) -> Path:
        name = f"{datetime.now():%Y%m%d-%H%M%S-%f}-{os.uname().nodename}-{os.getpid()}"
        folder = Path(directory, name)
        folder.mkdir(parents=True)
        self._folders.append(folder)
        if len(self._folders) > self._settings.incidents_kept:
            shutil.rmtree(self._folders.popleft(), ignore_errors=True)
        return folder

    def _fill(self, to: Path, error: BaseException, plan: Plan | None, snapshot: Snapshot) -> None:
        """Write the files. A device that has failed ends the last ones."""
        states = Plan({handle.name: handle.state for handle in snapshot.handles})
        incident = {
            "error": f"{type(error).__name__}: {error}".encode(errors="backslashreplace").decode(),
            "phase": self._journal.phase,
            "plan": plan or states,
        }
        journal = {"records": [*self._journal], "failures": [*self._journal.failures]}
        (to / "incident.json").write_bytes(to_json(incident))
        (to / "snapshot.json").write_bytes(to_json(snapshot))
        (to / "journal.json").write_bytes(to_json(journal))
        # torch records it where the user has switched that on (`_record_memory_history`)
        if torch.cuda.is_initialized() and torch._C._cuda_isHistoryEnabled():
            torch.cuda.memory._dump_snapshot(str(to / "torch_memory.pickle"))
        if self._device.type == "cuda":
            (to / "processes.txt").write_text(torch.cuda.list_gpu_processes(self._device))
        (to / "audit.json").write_bytes(to_json(self._take_audit(states)))
