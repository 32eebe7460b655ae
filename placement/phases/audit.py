"""Snapshots of a manager's state, and audits, which compare the declared state with the measured
one."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from placement.core.errors import IntegrityError, RegistrationError, listed
from placement.core.snapshot import Audit, Finding, HandleSnapshot, Snapshot
from placement.core.states import Plan
from placement.engines.base import UNPUBLISHED
from placement.registration.handle import Handle
from placement.registration.registry import unregistered
from placement.storage.managed import ManagedStorage
from placement.storage.watch.writes import message

if TYPE_CHECKING:
    from placement.core.journal import Journal
    from placement.devices.base import Device
    from placement.phases.phase import OpenPhases
    from placement.phases.reconciler import Reconciler


# NVML takes milliseconds. Where it does not answer, an audit has the measurement before.
_OTHERS_SECONDS = 1.0


def take_snapshot(
    registered: dict[str, Handle],
    phases: OpenPhases,
    reconciler: Reconciler,
    policy: str,
    worker_role: str,
    device: Device,
    journal: Journal,
) -> Snapshot:
    """The state of the manager and all handles at this moment. Takes no lock."""
    memory, outside = reconciler.planner.memory, reconciler.outside
    handles = tuple(snapshot_of(handle, phases.kept) for handle in registered.copy().values())
    return Snapshot(
        taken_timestamp_seconds=time.time(),
        policy=policy,
        worker_role=worker_role,
        device=device.name,
        phases=tuple(phase.name for phase in phases.all),
        handles=handles,
        phase_seconds=journal.phase_seconds(),
        phase_stall_seconds=dict(journal.stall_seconds),
        durations=journal.histograms(),
        policy_decisions=dict(journal.decisions),
        pairing_violations=journal.pairing_violations,
        unpaired_bytes=sum(handle.resident_bytes for handle in reconciler.left_behind),
        unaccounted_bytes=outside.unaccounted_bytes(memory),
        other_processes_bytes=outside.others_bytes,
        communicators=outside.communicators,
        communicator_bytes=outside.communicator_bytes,
        ipc_collected_bytes=device.ipc_collected_bytes,
        prefetch_discarded_bytes=reconciler.prefetcher.copies.discarded_bytes,
        wrong_writes=journal.wrong_writes,
        kept_bytes=sum(handle.resident_bytes for handle in handles if handle.kept),
        expired_keeps=journal.expired_keeps,
        budget_bytes=reconciler.planner.budget_bytes(phases.name),
        device_used_bytes=memory.used_bytes,
        device_total_bytes=memory.total_bytes,
        peak_bytes=max(journal.peak_bytes.copy().values(), default=0),
        phase_peak_bytes=journal.peak_bytes.copy(),
        suspended=phases.is_suspended,
        suspended_seconds=phases.suspended_seconds,
    )


_OF_HANDLE = (
    *("name", "kind", "role", "readonly", "num_bytes", "host_bytes"),
    *(
        "broken",
        "resident_bytes",
        "foreign_bytes",
        "disk_bytes",
        "drift_bytes",
        "stray_references",
        "stale",
    ),
)
_OF_STORAGE = ("prefetched_bytes", "host_pageable_bytes", "moved_by")
_OF_COUNTERS = (
    *("loaded_bytes", "offloaded_bytes", "skipped_bytes", "prefetch_used_bytes"),
    *("last_transition_timestamp_seconds", "registered_timestamp_seconds"),
)
"""The fields that have the same name in a snapshot and where they come from."""


def snapshot_of(handle: Handle, kept: frozenset[str]) -> HandleSnapshot:
    """The state of one handle at this moment. Takes no lock; each value is read once."""
    counters, storage = handle.counters, handle.storage
    sources = ((handle, _OF_HANDLE), (storage, _OF_STORAGE), (counters, _OF_COUNTERS))
    copied: dict[str, Any] = {
        name: getattr(source, name) for source, names in sources for name in names
    }
    return HandleSnapshot(
        **copied,
        owners=tuple(owner.name for owner in handle.owners),
        adapter=type(handle.adapter).__name__ if handle.adapter is not None else "Lazy",
        state=counters.state,
        external=handle.external_reason,
        built=handle.is_built,
        kept=handle.name in kept,
        mirror_bytes=min(storage.mirror_bytes, copied["host_bytes"]),
        state_seconds=counters.seconds_by_state(time.monotonic()),
        transitions=dict(counters.transitions),
        failures=dict(counters.failures),
        resident_tags=tuple(sorted(storage.resident_tags)),
        offloaded_tags=tuple(sorted(storage.offloaded_tags)),
    )


def audit(
    handles: Mapping[str, Handle], device: Device, reconciler: Reconciler, plan: Plan
) -> Audit:
    """Compare what every handle declares with its tensors and with the device. Looks at every
    tensor, so not for the hot path. `plan`: where every handle belongs now."""
    outside = reconciler.outside
    findings: list[Finding] = []
    for handle in handles.values():
        handle.storage.measure()
        for what, detail in _differences(handle, plan.on_device(handle.name)):
            findings.append(Finding(handle=handle.name, what=what, detail=detail))
    memory = device.memory()
    outside.measure(memory)
    outside.wait_for_others(_OTHERS_SECONDS)
    findings += _device_findings(handles.values(), plan, memory.chunk_bytes, reconciler)
    for handle in handles.values():
        handle.storage.look_at_framework_memory(everywhere=True)
    resident_bytes = sum(handle.resident_bytes for handle in handles.values())
    lines = [*_table(handles.values()), *outside.report()]
    lines += [f"{f.what}: {f.handle or 'device'}: {f.detail}" for f in findings]
    count = f"{len(findings) or 'no'} finding{'s' * (len(findings) != 1)}"
    lines.append(f"{resident_bytes:,} bytes of handles on {device.name}, {count}")
    return Audit(
        ok=not findings,
        findings=tuple(findings),
        resident_bytes=resident_bytes,
        foreign_bytes=sum(handle.foreign_bytes for handle in handles.values()),
        unaccounted_bytes=outside.unaccounted_bytes(memory),
        report="\n".join(lines),
    )


def _table(handles: Collection[Handle]) -> list[str]:
    """The lines of a report about these handles: a row for each, then the foreign memory."""
    lines = [f"{'handle':<24} {'state':<14} {'on device':>16} {'host copy':>16}"]
    for handle in handles:
        figures = f"{handle.resident_bytes:>16,} {handle.host_bytes:>16,}"
        lines.append(f"{handle.name:<24} {handle.state:<14} {figures}")
    for handle in handles:
        for name, nbytes in handle.storage.kept_by_framework:
            lines.append(f"foreign: {handle.name}: {name} ({nbytes:,} bytes) stays on the device")
    return lines


def _device_findings(
    handles: Collection[Handle], plan: Plan, held_bytes: int, reconciler: Reconciler
) -> Iterable[Finding]:
    """The findings about all handles together. `held_bytes`: those of the device's chunks."""
    declared_bytes = chunk_bytes(handles)
    if held_bytes != declared_bytes:
        detail = f"the device holds {held_bytes:,} bytes of chunks, the handles {declared_bytes:,}"
        yield Finding(handle=None, what="unaccounted", detail=detail)
    writes = reconciler.changes.writes
    for name in dict.fromkeys(change.handle for change in writes):
        detail = message(change for change in writes if change.handle == name)
        yield Finding(handle=name, what="wrong_write", detail=detail)
    turn = reconciler.turn
    if turn is not None and turn.is_held:
        staying = []
        for handle in handles:
            if handle.is_on_device and not plan.on_device(handle.name):
                staying.append(handle.name)
        if staying:
            detail = f"the turn on {turn.gpu} does not end while {listed(staying)} is on the device"
            yield Finding(handle=None, what="turn", detail=detail)


def chunk_bytes(handles: Iterable[Handle]) -> int:
    """Bytes of chunks that all handles together hold, without their tensors in torch's own
    memory."""
    return sum(handle.storage.chunk_bytes for handle in handles)


def _differences(handle: Handle, belongs_on_device: bool) -> Iterator[tuple[str, str]]:
    """The kind and the description of each finding about one handle. `belongs_on_device`: whether
    the plan has it there."""
    if handle.broken is not None:
        yield "broken", handle.broken
        return
    try:
        handle.check_integrity()
    except IntegrityError as error:
        yield "leak", str(error)
    if not belongs_on_device and (leftovers := handle.storage.leftovers) is not None:
        yield "leak", f"{leftovers}, although it should be off the device"
    if handle.stale == UNPUBLISHED:
        yield "needs_weights", UNPUBLISHED
    holding = handle.holding
    if holding is None:
        return
    try:
        drifted = holding.watch.drifted(on_device=holding.on_device)
    except RegistrationError as error:  # a tensor of it lies in another handle's memory
        yield "drift", str(error)
        return
    handle.drift_bytes = sum(nbytes for _, nbytes in drifted)
    for name, nbytes in drifted:
        detail = (
            f"{name} ({nbytes:,} bytes) is at no address of the handle: something outside "
            "placement added, moved or replaced it"
        )
        yield "drift", detail
    yield from _steppers(handle)
    yield from _references(handle, holding)


def _steppers(handle: Handle) -> Iterator[tuple[str, str]]:
    """Parameters that an optimizer steps in vain, and optimizers that are not registered."""
    detached = handle.detached_parameters() - handle.detached_at_registration
    if detached > 0:
        owners = ", ".join(owner.name for owner in handle.owners)
        detail = (
            f"it steps {detached} parameter(s) that {owners} does not have. If they were replaced "
            "(load_state_dict(assign=True), a new layer), the module does not learn: make a new "
            "optimizer. If add_param_group() brought them, they never move: register them as a "
            "part of the module"
        )
        yield "drift", detail
    for kind in unregistered(handle):
        detail = (
            f"a {kind} that is not registered stepped its parameters; its state stays on the "
            "device in every phase: register it"
        )
        yield "unregistered_optimizer", detail


def _references(handle: Handle, holding: ManagedStorage) -> Iterator[tuple[str, str]]:
    """References from outside that show the wrong bytes."""
    if holding.on_device:
        for _, name in holding.state_dict_tensors.left_on_host():
            detail = (
                f"a view of {name} of a state dict, taken while the handle was offloaded, shows "
                "the host copy and not the device"
            )
            yield "stray_reference", detail
    handle.look_for_strays()
    if handle.stray_references:
        detail = (
            f"{handle.stray_references} references to its storages existed outside it at the last "
            f"offload ({handle.stray_names})"
        )
        yield "stray_reference", detail


def check_integrity(handles: Mapping[str, Handle], device: Device) -> None:
    """Raise IntegrityError if a handle's declared bytes differ from those that it, or the device,
    really holds."""
    for handle in handles.values():
        handle.check_integrity()
    chunks, declared = device.memory().chunk_bytes, chunk_bytes(handles.values())
    if chunks != declared:
        raise IntegrityError(
            f"{device.name} holds {chunks:,} bytes of chunks, the handles declare {declared:,}"
        )
