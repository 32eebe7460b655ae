"""Prometheus metrics from one immutable `Snapshot`.

This is a custom collector, not metric objects that are set as things happen. So every family of a scrape shows the same moment
(separate gauges tear: a scrape can see no state or two). Nothing is written to the files of `PROMETHEUS_MULTIPROC_DIR`, no `_created`
series appear, the series of an unregistered handle end, and the time in the present state is included.

Series begin at 0 for every known label value: all states, all triggers, the shipped phases, the decisions, and the reasons of a
failed attempt (`placement.core.journal.REASONS`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from types import MappingProxyType

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from placement.core import __version__
from placement.core.journal import REASONS
from placement.core.snapshot import DurationHistogram, HandleSnapshot, LeaseSnapshot, Snapshot
from placement.core.states import IDLE, PHASES, State, Trigger

DECISIONS: tuple[str, ...] = ("load", "offload", "keep", "refuse")

_HANDLE = ("handle", "kind")
_GAUGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "placement_state": ("1 for the state that the handle is in, 0 for the others.", (*_HANDLE, "state")),
    "placement_resident_bytes": ("Bytes that the handle holds, by memory: device, host or disk.", (*_HANDLE, "memory")),
    "placement_prefetched_bytes": ("Device bytes that arrived early, part of the resident bytes.", _HANDLE),
    "placement_last_transition_timestamp_seconds": ("Unix time of the last state transition.", _HANDLE),
    "placement_broken": ("1 if a failed move left the handle unusable.", _HANDLE),
    "placement_drift_bytes": ("Bytes of tensors that the last audit found outside the handle's ranges.", _HANDLE),
    "placement_stray_references": ("References to offloaded storages beyond those at adoption, counted at the last offload.", _HANDLE),
    "placement_phase": ("1 for the innermost open phase, 0 for the others.", ("phase",)),
    "placement_unpaired_bytes": ("Device bytes held by handles that their closed phases should have offloaded.", ()),
    "placement_unaccounted_bytes": ("Device bytes in use that neither torch, nor placement, nor a visible process explains.", ()),
    "placement_communicator_bytes": ("Device bytes of communicators, part of the unaccounted; absent where NCCL does not say.", ()),
    "placement_other_processes_bytes": ("Device bytes of other processes; absent where NVML does not report them.", ()),
    "placement_lease_bytes": ("Device bytes that this process has leased; absent without leases.", ()),
    "placement_lease_capacity_bytes": ("Device bytes that all processes under leases may use together.", ()),
    "placement_lease_others_bytes": ("Device bytes leased by other processes.", ()),
    "placement_lease_wanted_bytes": ("Device bytes that this process waits to lease.", ()),
    "placement_lease_processes": ("Processes with a lease on the device, this one included.", ()),
    "placement_budget_bytes": ("Device bytes that the handles may hold together.", ()),
    "placement_device_used_bytes": ("Device bytes in use, all processes.", ()),
    "placement_device_total_bytes": ("Device bytes in total.", ()),
    "placement_peak_bytes": ("The most device bytes that the handles have held together.", ()),
    "placement_kept_bytes": ("Device bytes of handles that phase.keep carried over the end of a phase.", ()),
    "placement_host_pageable_bytes": ("Bytes of host copies that could not be pinned.", ()),
}
_COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "placement_state_seconds_total": ("Seconds spent in each state, including the present one.", (*_HANDLE, "state")),
    "placement_transitions_total": ("Finished state transitions.", (*_HANDLE, "trigger")),
    "placement_transition_failures_total": ("Failed attempts at a state transition.", (*_HANDLE, "reason")),
    "placement_loaded_bytes_total": ("Bytes copied from host to device.", _HANDLE),
    "placement_offloaded_bytes_total": ("Bytes copied from device to host.", _HANDLE),
    "placement_skipped_bytes_total": ("Bytes proved clean at an offload and not copied.", _HANDLE),
    "placement_prefetch_used_bytes_total": ("Bytes that had arrived before the load that needed them.", _HANDLE),
    "placement_spilled_bytes_total": ("Bytes of host copies written to disk.", _HANDLE),
    "placement_disk_read_bytes_total": ("Bytes of host copies read back from disk.", _HANDLE),
    "placement_disk_wait_seconds_total": ("Seconds spent waiting for host copies to leave for the disk or to come back.", ()),
    "placement_prefetch_discarded_bytes_total": ("Bytes that arrived early and were given up unused.", ()),
    "placement_phase_seconds_total": ("Seconds inside each phase; the innermost open phase counts.", ("phase",)),
    "placement_phase_stall_seconds_total": (
        "Seconds that the worker waited for moves at the phase transitions of each phase, without the time for its own kernels.",
        ("phase",),
    ),
    "placement_pairing_violations_total": ("Phases that ended and left a handle on the device that belongs on the host.", ()),
    "placement_policy_decisions_total": ("Decisions of the policy.", ("policy", "decision")),
    "placement_lease_wait_seconds_total": ("Seconds spent waiting for other processes to free memory, including a wait in progress.", ()),
    "placement_ipc_collected_bytes_total": ("Bytes of shared tensors taken back after other processes had dropped them.", ()),
    "placement_wrong_writes_total": ("Writes found at device addresses of offloaded handles.", ()),
    "placement_expired_keeps_total": ("Kept handles that the next phase did not take over.", ()),
}
_DURATION = "placement_transition_duration_seconds"
_HANDLE_INFO = "placement_handle"  # prometheus_client adds _info to the name
_WORKER_INFO = "placement_worker"
_WORKER_LABELS = ("policy", "device", "worker_role", "version")
_LABEL = re.compile(r"[a-z][a-z0-9_]*")


class _Families:
    """The metric families of one scrape, empty at first, in their order of exposition."""

    def __init__(self) -> None:
        self.gauges = {name: GaugeMetricFamily(name, text, labels=labels) for name, (text, labels) in _GAUGES.items()}
        self.counters = {name: CounterMetricFamily(name, text, labels=labels) for name, (text, labels) in _COUNTERS.items()}
        self.duration = HistogramMetricFamily(_DURATION, "Seconds that a move or a weight sync took.", labels=("operation",))
        self.handle_info = InfoMetricFamily(_HANDLE_INFO, "Properties of the handle.", labels=_HANDLE)
        self.worker_info = InfoMetricFamily(_WORKER_INFO, "Properties of the worker.")

    def all(self) -> list[Metric]:
        return [*self.gauges.values(), *self.counters.values(), self.duration, self.handle_info, self.worker_info]


class SnapshotCollector:
    """Turns the snapshot that `read()` returns into metric families. It calls `read` once a scrape, and never at registration.

    Args:
        read: returns the snapshot to expose. An exception from it makes the scrape fail.
        worker_info: further labels of `placement_worker_info`, beside policy, device, worker_role and version.

    Raises:
        ValueError: a key of `worker_info` is not a label name, or is one of the labels above.
    """

    def __init__(self, read: Callable[[], Snapshot], worker_info: Mapping[str, str] = MappingProxyType({})) -> None:
        for label in worker_info:
            if not _LABEL.fullmatch(label) or label in _WORKER_LABELS:
                raise ValueError(f"worker_info: {label!r} cannot be a label; use [a-z][a-z0-9_]*, but not {', '.join(_WORKER_LABELS)}")
        self._read = read
        self._worker_info = {"version": __version__, **worker_info}

    def describe(self) -> Iterable[Metric]:
        """The families without samples, in which a registry looks for name clashes."""
        return _Families().all()

    def collect(self) -> Iterable[Metric]:
        """The families of one snapshot. A list, not a generator, so that a failing `read` fails before anything is exposed."""
        snapshot = self._read()
        families = _Families()
        for handle in snapshot.handles:
            _add_handle(families, handle)
        _add_phases(families, snapshot)
        _add_durations(families.duration, snapshot.durations)
        _add_worker(families, snapshot)
        families.worker_info.add_metric(
            (),
            {"policy": snapshot.policy, "device": snapshot.device, "worker_role": snapshot.worker_role, **self._worker_info},
        )
        return families.all()


def make_registry(read: Callable[[], Snapshot], worker_info: Mapping[str, str] = MappingProxyType({})) -> CollectorRegistry:
    """A registry with one `SnapshotCollector`. Two managers in a process never clash, and the default registry is not touched."""
    registry = CollectorRegistry()
    registry.register(SnapshotCollector(read, worker_info))
    return registry


def _add_handle(families: _Families, handle: HandleSnapshot) -> None:
    gauges, counters = families.gauges, families.counters
    key = (handle.name, handle.kind)
    for state in State:
        gauges["placement_state"].add_metric((*key, state), float(handle.state is state))
        counters["placement_state_seconds_total"].add_metric((*key, state), handle.state_seconds.get(state, 0.0))
    for trigger in Trigger:
        counters["placement_transitions_total"].add_metric((*key, trigger), handle.transitions.get(trigger, 0))
    failures = dict.fromkeys(REASONS, 0)  # an unknown reason counts as "error", so that the number of series stays bounded
    for reason, count in handle.failures.items():
        failures[reason if reason in failures else "error"] += count
    for reason, count in failures.items():
        counters["placement_transition_failures_total"].add_metric((*key, reason), count)
    gauges["placement_resident_bytes"].add_metric((*key, "device"), handle.resident_bytes)
    gauges["placement_resident_bytes"].add_metric((*key, "host"), handle.host_bytes)
    gauges["placement_resident_bytes"].add_metric((*key, "disk"), handle.disk_bytes)
    gauges["placement_broken"].add_metric(key, float(handle.broken is not None))
    _add_fields(families, _HANDLE, key, handle)
    # Flags and class names only: the texts of `external` and `broken` are for people, and metrics are public.
    families.handle_info.add_metric(
        key,
        {
            "role": handle.role or "",
            "adapter": handle.adapter,
            "readonly": _flag(handle.readonly),
            "external": _flag(handle.external is not None),
        },
    )


def _add_fields(families: _Families, labels: tuple[str, ...], key: tuple[str, ...], source: HandleSnapshot | Snapshot) -> None:
    """Add the metrics with these labels that are named after a field of `source`. One whose field is None is absent."""
    for tables, members in ((_GAUGES, families.gauges), (_COUNTERS, families.counters)):
        for name, (_, own_labels) in tables.items():
            value = getattr(source, name.removeprefix("placement_").removesuffix("_total"), None)
            if own_labels == labels and isinstance(value, (int, float)):
                members[name].add_metric(key, value)


def _add_phases(families: _Families, snapshot: Snapshot) -> None:
    current = snapshot.phases[-1] if snapshot.phases else IDLE
    for phase in dict.fromkeys((*PHASES, *snapshot.phase_seconds, *snapshot.phase_stall_seconds, *snapshot.phases)):
        families.gauges["placement_phase"].add_metric((phase,), float(phase == current))
        families.counters["placement_phase_seconds_total"].add_metric((phase,), snapshot.phase_seconds.get(phase, 0.0))
        families.counters["placement_phase_stall_seconds_total"].add_metric((phase,), snapshot.phase_stall_seconds.get(phase, 0.0))


def _add_durations(family: HistogramMetricFamily, durations: Iterable[DurationHistogram]) -> None:
    for histogram in durations:
        edges = [*map(floatToGoString, histogram.upper_bounds_seconds), "+Inf"]
        family.add_metric((histogram.operation,), list(zip(edges, accumulate(histogram.counts), strict=True)), histogram.sum_seconds)


def _add_worker(families: _Families, snapshot: Snapshot) -> None:
    gauges, counters = families.gauges, families.counters
    _add_fields(families, (), (), snapshot)
    gauges["placement_host_pageable_bytes"].add_metric((), sum(handle.host_pageable_bytes for handle in snapshot.handles))
    if snapshot.lease is not None:
        _add_lease(families, snapshot.lease)
    for decision in dict.fromkeys((*DECISIONS, *snapshot.policy_decisions)):
        count = snapshot.policy_decisions.get(decision, 0)
        counters["placement_policy_decisions_total"].add_metric((snapshot.policy, decision), count)


def _add_lease(families: _Families, lease: LeaseSnapshot) -> None:
    gauges = families.gauges  # /state names the other processes: process numbers make bad labels
    gauges["placement_lease_bytes"].add_metric((), lease.held_bytes)
    gauges["placement_lease_capacity_bytes"].add_metric((), lease.capacity_bytes)
    gauges["placement_lease_others_bytes"].add_metric((), lease.others_bytes)
    gauges["placement_lease_wanted_bytes"].add_metric((), lease.wanted_bytes)
    gauges["placement_lease_processes"].add_metric((), len(lease.holders))
    families.counters["placement_lease_wait_seconds_total"].add_metric((), lease.waited_seconds)


def _flag(value: bool) -> str:
    return "true" if value else "false"
