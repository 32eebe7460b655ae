"""A folder for each incident: memory ran out, or a value could not be trusted.

Off unless `Settings.incidents` names a folder: nothing is written to a disk unasked.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from placement.core.errors import (
    BrokenHandleError,
    DeviceMemoryError,
    HostMemoryError,
    IntegrityError,
)
from placement.core.journal import Journal, logger
from placement.core.settings import Settings
from placement.core.states import Plan
from placement.devices.base import Device
from placement.observe.nvml import processes_on
from placement.phases.audit import audit, take_snapshot
from placement.phases.phase import OpenPhases
from placement.phases.reconciler import Reconciler
from placement.registration.registry import Registry

_KINDS = (
    DeviceMemoryError,
    HostMemoryError,
    IntegrityError,
    BrokenHandleError,
    torch.OutOfMemoryError,  # of the user's own computing
)
_KEPT = 8  # the folders of one process; the oldest goes
_RECORDS = 500  # the end of the journal
_NOTE = "placement: incident: "


class Incidents:
    """Writes the folders of one manager. Nothing that goes wrong here hides the user's error.

    Called with the manager's lock held, on the thread that has the error.
    """

    def __init__(
        self,
        registry: Registry,
        phases: OpenPhases,
        reconciler: Reconciler,
        device: Device,
        policy: str,
        settings: Settings,
        journal: Journal,
    ) -> None:
        self._handles, self._phases, self._reconciler = registry.handles, phases, reconciler
        self._device, self._journal = device, journal
        self._take_snapshot = partial(
            take_snapshot,
            registry,
            phases,
            reconciler,
            policy,
            settings.worker_role,
            device,
            journal,
        )
        self._directory = None if settings.incidents is None else Path(settings.incidents)
        self._folders: deque[Path] = deque()
        self._broken: set[str] = set()  # names of the handles that were broken at the last error

    def report(self, error: BaseException, told: BaseException | None = None) -> None:
        """Write the folder of an error in the phase that is open. `told`: the error that the user
        sees instead of it."""
        plan = self._phases.all[-1].plan if self._phases.all else Plan({})
        with self.of(error, self._phases.name, plan, told):
            pass

    @contextmanager
    def of(
        self,
        error: BaseException | None,
        phase: str,
        plan: Plan,
        told: BaseException | None = None,
    ) -> Iterator[None]:
        """Write the folder of an error, if it is an incident, and name it in the error's last line
        once the block has ended."""
        seen = error if told is None else told
        folder = None
        if error is not None and seen is not None and self._is_new(error, seen):
            folder = self._write(error, phase, plan)
        try:
            yield
        finally:
            if folder is not None and seen is not None:
                with suppress(Exception):  # an exception that is a frozen dataclass refuses notes
                    seen.add_note(f"{_NOTE}{folder} (placement status --incident {folder})")

    def _is_new(self, error: BaseException, seen: BaseException) -> bool:
        if self._directory is None or any(
            note.startswith(_NOTE) for note in getattr(seen, "__notes__", ())
        ):
            return False
        broken = {name for name, handle in self._handles.items() if handle.broken is not None}
        before, self._broken = self._broken, broken
        return isinstance(error, _KINDS) or not broken <= before

    def _write(self, error: BaseException, phase: str, plan: Plan) -> Path | None:
        try:
            folder = self._make_folder()
        except OSError as failure:
            logger.warning("an incident cannot be written: %s", failure)
            return None
        head = {
            "timestamp_seconds": time.time(),
            "error": f"{type(error).__name__}: {error}",
            "phase": phase,
            "plan": plan,
        }
        parts: dict[str, Callable[[], Any]] = {
            "incident.json": lambda: head,
            "snapshot.json": lambda: self._take_snapshot().model_dump(mode="json"),
            "journal.json": self._end_of_journal,
            "processes.json": lambda: processes_on(self._device.uuid),
            "audit.json": lambda: self._audit(plan).model_dump(mode="json"),
            "traceback.txt": lambda: "".join(traceback.format_exception(error)),
            "torch_memory.pickle": lambda: _torch_memory(folder / "torch_memory.pickle"),
        }
        for name, content in parts.items():
            try:
                found = content()
                if found is not None:
                    text = found if isinstance(found, str) else json.dumps(found, default=_plain)
                    (folder / name).write_text(text)
            except Exception as failure:
                logger.warning("%s of the incident %s is missing: %s", name, folder, failure)
        return folder

    def _make_folder(self) -> Path:
        assert self._directory is not None
        when = time.strftime("%Y%m%d-%H%M%S")
        folder = self._directory / f"{when}-{socket.gethostname()}-{os.getpid()}-{time.time_ns()}"
        folder.mkdir(parents=True)
        self._folders.append(folder)
        if len(self._folders) > _KEPT:
            shutil.rmtree(self._folders.popleft(), ignore_errors=True)
        return folder

    def _audit(self, plan: Plan) -> Any:
        targets = {
            name: plan.targets.get(name, handle.state) for name, handle in self._handles.items()
        }
        writes, outside = self._reconciler.writes, self._reconciler.outside
        return audit(
            self._handles,
            Plan(targets),
            self._device,
            writes.findings,
            outside,
            self._reconciler.turn,
        )

    def _end_of_journal(self) -> dict[str, Any]:
        records, failures = [*self._journal], [*self._journal.failures]
        return {"records": records[-_RECORDS:], "failures": failures[-_RECORDS:]}


def _torch_memory(file: Path) -> None:
    """torch's record of its allocations, where the user has switched that on
    (`torch.cuda.memory._record_memory_history`)."""
    if torch.cuda.is_initialized() and torch._C._cuda_isHistoryEnabled():
        torch.cuda.memory._dump_snapshot(str(file))


def _plain(value: Any) -> Any:
    """The plain form of plans, records and their parts, which JSON has none for."""
    if is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        return dict(value)
    return sorted(value) if isinstance(value, Set) else str(value)
