"""The collector: every value of a snapshot under its name, and nothing else."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable

import pytest
from prometheus_client import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from placement.core.snapshot import HandleSnapshot, Snapshot
from placement.core.states import PHASES, State, Trigger
from placement.observe.collector import make_registry
from tests.observe.managed import make_handle, make_snapshot

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


def as_text(snapshot: Snapshot) -> str:
    return generate_latest(make_registry(lambda: snapshot)).decode()


def as_openmetrics(snapshot: Snapshot) -> str:
    return generate_openmetrics(make_registry(lambda: snapshot)).decode()


def series_of(text: str) -> Series:
    parse = parse_openmetrics if text.endswith("# EOF\n") else parse_text
    samples = [sample for family in parse(text) for sample in family.samples]
    series = {(s.name, frozenset(s.labels.items())): s.value for s in samples}
    assert len(series) == len(samples), "a series is exposed twice"
    return series


def expected_of_handle(handle: HandleSnapshot) -> Series:
    series: Series = {}

    def put(name: str, value: float, **labels: str) -> None:
        series[name, frozenset({"handle": handle.name, "kind": handle.kind, **labels}.items())] = (
            value
        )

    for state in ("CPU_OFFLOADED", "GPU_RESIDENT", "SYNCING", "TRAINING"):
        put("placement_state", 1.0 if handle.state == state else 0.0, state=state)
        put(
            "placement_state_seconds_total",
            handle.state_seconds.get(State(state), 0.0),
            state=state,
        )
    put("placement_resident_bytes", handle.resident_bytes, memory="device")
    put("placement_resident_bytes", handle.host_bytes, memory="host")
    put("placement_resident_bytes", handle.disk_bytes, memory="disk")
    for trigger in Trigger:
        put(
            "placement_transitions_total", handle.transitions.get(trigger, 0), trigger=trigger.value
        )
    for reason in ("device_memory", "host_memory", "integrity", "interrupted", "error"):
        put("placement_transition_failures_total", handle.failures.get(reason, 0), reason=reason)
    plain = (
        "loaded_bytes_total",
        "offloaded_bytes_total",
        "skipped_bytes_total",
        "prefetched_bytes",
        "prefetch_used_bytes_total",
    )
    plain += (
        "last_transition_timestamp_seconds",
        "drift_bytes",
        "stray_references",
    )
    plain += ("mirror_bytes",)
    for name in plain:
        put(f"placement_{name}", getattr(handle, name.removesuffix("_total")))
    put("placement_broken", 0.0 if handle.broken is None else 1.0)
    put(
        "placement_handle_info",
        1.0,
        role=handle.role or "",
        adapter=handle.adapter,
        readonly="true" if handle.readonly else "false",
        external="false" if handle.external is None else "true",
    )
    return series


def expected_of_worker(snapshot: Snapshot, version: str) -> Series:
    series: Series = {}

    def put(name: str, value: float, **labels: str) -> None:
        series[name, frozenset(labels.items())] = value

    current = snapshot.phases[-1] if snapshot.phases else "idle"
    for phase in {
        *PHASES,
        *snapshot.phases,
        *snapshot.phase_seconds,
        *snapshot.phase_stall_seconds,
    }:
        put("placement_phase", 1.0 if phase == current else 0.0, phase=phase)
        put("placement_phase_seconds_total", snapshot.phase_seconds.get(phase, 0.0), phase=phase)
        put(
            "placement_phase_stall_seconds_total",
            snapshot.phase_stall_seconds.get(phase, 0.0),
            phase=phase,
        )
    for histogram in snapshot.durations:
        name, operation = "placement_transition_duration_seconds", histogram.operation
        for i, bound in enumerate(histogram.upper_bounds_seconds):
            put(
                f"{name}_bucket", sum(histogram.counts[: i + 1]), operation=operation, le=str(bound)
            )
        put(f"{name}_bucket", sum(histogram.counts), operation=operation, le="+Inf")
        put(f"{name}_count", sum(histogram.counts), operation=operation)
        put(f"{name}_sum", histogram.sum_seconds, operation=operation)
    for decision in ("load", "offload", "keep", "refuse"):
        count = snapshot.policy_decisions.get(decision, 0)
        put("placement_policy_decisions_total", count, policy=snapshot.policy, decision=decision)
    plain = (
        "pairing_violations_total",
        "unpaired_bytes",
        "unaccounted_bytes",
        "budget_bytes",
        "device_used_bytes",
        "device_total_bytes",
    )
    plain += (
        "peak_bytes",
        "communicator_bytes",
        "ipc_collected_bytes_total",
        "prefetch_discarded_bytes_total",
        "kept_bytes",
    )
    suspended = ("suspended", "suspended_seconds_total")
    for name in (*plain, "wrong_writes_total", "expired_keeps_total", *suspended):
        put(f"placement_{name}", getattr(snapshot, name.removesuffix("_total")))
    put(
        "placement_host_pageable_bytes",
        sum(handle.host_pageable_bytes for handle in snapshot.handles),
    )
    worker = {
        "policy": snapshot.policy,
        "device": snapshot.device,
        "worker_role": snapshot.worker_role,
    }
    put("placement_worker_info", 1.0, version=version, **worker)
    return series


def sample_snapshot() -> Snapshot:
    return make_snapshot(
        make_handle(),
        make_handle(
            "actor.optimizer",
            kind="optimizer",
            state=State.TRAINING,
            resident_bytes=0,
            host_bytes=2,
            drift_bytes=3,
        ),
        make_handle(
            "ref",
            role="ref",
            state=State.CPU_OFFLOADED,
            readonly=True,
            broken="sticky error",
            transitions={},
            failures={},
        ),
        make_handle(
            "engine:0",
            kind="engine",
            role=None,
            state=State.SYNCING,
            external="the framework moves it",
            state_seconds={},
        ),
    )


@pytest.mark.parametrize("render", [as_text, as_openmetrics])
def test_every_value_is_the_snapshots(render: Callable[[Snapshot], str]) -> None:
    snapshot = sample_snapshot()

    series = series_of(render(snapshot))

    (version,) = {
        dict(labels)["version"] for name, labels in series if name == "placement_worker_info"
    }
    expected = expected_of_worker(snapshot, version)
    for handle in snapshot.handles:
        expected |= expected_of_handle(handle)
    assert series == expected


@pytest.mark.parametrize("nbytes", [None, 0, 71])
def test_bytes_of_communicators_are_shown_where_they_are_known(nbytes: int | None) -> None:
    shown = [
        line
        for line in as_text(make_snapshot(communicator_bytes=nbytes)).splitlines()
        if line.startswith("placement_communicator_b")
    ]
    assert shown == ([] if nbytes is None else [f"placement_communicator_bytes {float(nbytes)}"])


@pytest.mark.sweep
@pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool (Debian's package prometheus) is not on PATH"
)
def test_promtool_finds_nothing_to_say() -> None:
    text = as_text(sample_snapshot())
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
