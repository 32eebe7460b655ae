"""Prometheus metrics from one immutable `Snapshot`.

This is a custom collector, not metric objects that are set one by one. So every family of a scrape
shows the same moment (separate gauges tear: a scrape can see no state or two). The collector writes
no files of `PROMETHEUS_MULTIPROC_DIR`, and no `_created` series appear. The series of an
unregistered handle end. The time in the present state is included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from operator import attrgetter
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.utils import floatToGoString

from placement.core import __version__
from placement.core.journal import REASONS
from placement.core.snapshot import HandleSnapshot, Snapshot
from placement.core.states import IDLE, PHASES, State, Trigger

DECISIONS: tuple[str, ...] = ("load", "offload", "keep", "refuse")

_INITIAL: Mapping[str, Callable[[Any], Iterable[str]]] = {
    "state": lambda _: State,
    "memory": lambda _: (),
    "trigger": lambda _: Trigger,
    "reason": lambda _: REASONS,
    "phase": lambda snapshot: (
        *PHASES,
        *snapshot.phase_seconds,
        *snapshot.phase_stall_seconds,
        *snapshot.phases,
    ),
    "decision": lambda _: DECISIONS,
}
"""The values of a label for which series begin at 0."""


class _Metric(NamedTuple):
    """A gauge, or a counter where the name ends with `_total`.

    Its value is `value(source)`, by default the source's field of the metric's name: a number, or
    None where the metric is absent. With a label it is a number for each label value.
    """

    name: str
    text: str
    label: str = ""
    value: Callable[[Any], Any] | None = None

    def family(
        self,
        keys: tuple[str, ...],
        sources: Iterable[tuple[tuple[str, ...], HandleSnapshot | Snapshot]],
    ) -> Metric:
        """The family with a sample of each source, or several; `keys` are the labels that tell the
        sources apart."""
        kind = CounterMetricFamily if self.name.endswith("_total") else GaugeMetricFamily
        labels = (*keys, self.label) if self.label else keys
        family = kind(self.name, self.text, labels=labels)
        field = self.name.removeprefix("placement_").removesuffix("_total")
        value_of = self.value or attrgetter(field)
        for key, source in sources:
            value = value_of(source)
            if self.label:
                numbers = dict.fromkeys(_INITIAL[self.label](source), 0) | value
                for label, number in numbers.items():
                    family.add_metric((*key, label), float(number))
            elif value is not None:
                family.add_metric(key, float(value))
        return family


_OF_HANDLE = (
    _Metric(
        "placement_state",
        "1 for the state that the handle is in, 0 for the others.",
        "state",
        lambda handle: {handle.state: 1},
    ),
    _Metric(
        "placement_state_seconds_total",
        "Seconds spent in each state, including the present one.",
        "state",
    ),
    _Metric(
        "placement_resident_bytes",
        "Bytes that the handle holds, by memory: device, host, or files on a disk.",
        "memory",
        lambda handle: {
            "device": handle.resident_bytes,
            "host": handle.host_bytes,
            "disk": handle.disk_bytes,
        },
    ),
    _Metric("placement_transitions_total", "Finished state transitions.", "trigger"),
    _Metric(
        "placement_transition_failures_total",
        "Failed attempts at a state transition.",
        "reason",
        attrgetter("failures"),
    ),
    _Metric(
        "placement_prefetched_bytes", "Device bytes that arrived early, part of the resident bytes."
    ),
    _Metric(
        "placement_mirror_bytes",
        "Host bytes in which a rollout engine keeps its weights itself, part of the host bytes.",
    ),
    _Metric(
        "placement_last_transition_timestamp_seconds", "Unix time of the last state transition."
    ),
    _Metric(
        "placement_broken",
        "1 if a failed move left the handle unusable.",
        value=lambda handle: handle.broken is not None,
    ),
    _Metric(
        "placement_drift_bytes",
        "Bytes of tensors that the last audit found outside the handle's ranges.",
    ),
    _Metric(
        "placement_stray_references",
        "References to offloaded storages beyond those at adoption, counted at the last offload.",
    ),
    _Metric("placement_loaded_bytes_total", "Bytes copied from host to device."),
    _Metric("placement_offloaded_bytes_total", "Bytes copied from device to host."),
    _Metric("placement_skipped_bytes_total", "Bytes proved clean at an offload and not copied."),
    _Metric(
        "placement_prefetch_used_bytes_total",
        "Bytes that had arrived before the load that needed them.",
    ),
)
_OF_WORKER = (
    _Metric(
        "placement_phase",
        "1 for the innermost open phase, 0 for the others.",
        "phase",
        lambda snapshot: {snapshot.phases[-1] if snapshot.phases else IDLE: 1},
    ),
    _Metric(
        "placement_phase_seconds_total",
        "Seconds inside each phase; the innermost open phase counts.",
        "phase",
    ),
    _Metric(
        "placement_phase_stall_seconds_total",
        "Seconds that the worker, and then its kernels, waited for moves in the phase transitions "
        "to each phase (idle: leaving the outermost one). Time in which kernels compute is none.",
        "phase",
    ),
    _Metric(
        "placement_unpaired_bytes",
        "Device bytes held by handles that their closed phases should have offloaded.",
    ),
    _Metric(
        "placement_unaccounted_bytes",
        "Device bytes in use that neither torch, nor placement, nor a visible process explains.",
    ),
    _Metric(
        "placement_communicator_bytes",
        "Device bytes of communicators, part of the unaccounted; absent where NCCL does not say.",
    ),
    _Metric(
        "placement_other_processes_bytes",
        "Device bytes of other processes; absent where NVML does not report them.",
    ),
    _Metric("placement_budget_bytes", "Device bytes that the handles may hold together."),
    _Metric("placement_device_used_bytes", "Device bytes in use, all processes."),
    _Metric("placement_device_total_bytes", "Device bytes in total."),
    _Metric("placement_peak_bytes", "The most device bytes that the handles have held together."),
    _Metric(
        "placement_kept_bytes",
        "Device bytes of handles that phase.keep carried over the end of a phase.",
    ),
    _Metric(
        "placement_host_pageable_bytes",
        "Bytes of host copies that could not be pinned.",
        value=lambda snapshot: sum(handle.host_pageable_bytes for handle in snapshot.handles),
    ),
    _Metric(
        "placement_prefetch_discarded_bytes_total",
        "Bytes that arrived early and were given up unused.",
    ),
    _Metric(
        "placement_pairing_violations_total",
        "Phases that ended and left a handle on the device that belongs on the host.",
    ),
    _Metric(
        "placement_ipc_collected_bytes_total",
        "Bytes of shared tensors taken back after other processes had dropped them.",
    ),
    _Metric(
        "placement_wrong_writes_total", "Writes found at device addresses of offloaded handles."
    ),
    _Metric("placement_expired_keeps_total", "Kept handles that the next phase did not take over."),
    _Metric("placement_suspended", "1 while the manager is suspended."),
    _Metric("placement_suspended_seconds_total", "Seconds that phases waited while suspended."),
)
_DECISIONS_OF_POLICY = _Metric(
    "placement_policy_decisions_total",
    "Decisions of the policy.",
    "decision",
    attrgetter("policy_decisions"),
)


class SnapshotCollector:
    """Turns the snapshot that `read()` returns into metric families. It calls `read` once a scrape,
    and never at registration. An exception from it makes the scrape fail."""

    def __init__(self, read: Callable[[], Snapshot]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        """The families of one snapshot. A list, not a generator, so that a failing `read` fails
        before a family is exposed."""
        snapshot = self._read()
        keys = ("handle", "kind")
        handles = [((handle.name, handle.kind), handle) for handle in snapshot.handles]
        durations = HistogramMetricFamily(
            "placement_transition_duration_seconds",
            "Seconds that a move or a weight sync took the worker. Bytes of a load may come later.",
            labels=("operation",),
        )
        # prometheus_client adds _info to these two names.
        handle_info = InfoMetricFamily("placement_handle", "Properties of the handle.", labels=keys)
        worker_info = InfoMetricFamily("placement_worker", "Properties of the worker.")
        for key, handle in handles:
            # Flags and class names only: the texts of `external` and `broken` are for people, and
            # metrics are public.
            properties = {
                "role": handle.role or "",
                "adapter": handle.adapter,
                "readonly": "true" if handle.readonly else "false",
                "external": "false" if handle.external is None else "true",
            }
            handle_info.add_metric(key, properties)
        for histogram in snapshot.durations:
            edges = [*map(floatToGoString, histogram.upper_bounds_seconds), "+Inf"]
            buckets = list(zip(edges, accumulate(histogram.counts), strict=True))
            durations.add_metric((histogram.operation,), buckets, histogram.sum_seconds)
        facts = {
            "policy": snapshot.policy,
            "device": snapshot.device,
            "worker_role": snapshot.worker_role,
        }
        worker_info.add_metric((), {"version": __version__, **facts})
        return [
            *(metric.family(keys, handles) for metric in _OF_HANDLE),
            *(metric.family((), [((), snapshot)]) for metric in _OF_WORKER),
            _DECISIONS_OF_POLICY.family(("policy",), [((snapshot.policy,), snapshot)]),
            *(durations, handle_info, worker_info),
        ]


def make_registry(read: Callable[[], Snapshot]) -> CollectorRegistry:
    """A registry with one `SnapshotCollector`. Two managers in a process never clash, and the
    default registry is not touched."""
    registry = CollectorRegistry()
    registry.register(SnapshotCollector(read))
    return registry
