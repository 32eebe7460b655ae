"""Every benchmark runs on the simulated device with tiny sizes and writes a result file. What it
measures there means nothing."""

from __future__ import annotations

import functools
import importlib
import json
import math
import os
import sys
import tempfile
import unittest.mock
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench import _peers, _results, report, run
from bench._process import measure_apart
from bench._results import Results
from bench._rig import Rig

SLOW = (
    "after_free",
    "first_load",
    "forecast",
    "foresight",
    "replicated",
    "rollout_only",
    "small_tensors",
    "weights",
)
PEERS = {
    "accelerate",
    "deepspeed",
    "megatron",
    "torch_memory_saver",
    "torch_memory_saver(retain)",
    "verl",
}


SHOWN = ("grpo_step", "swap", "phase_overhead", "publish")
"""The others run in CI: what is common to them is shown by these."""


@pytest.fixture(scope="module", autouse=True)
def _whole_packages() -> Iterator[None]:
    """The benchmarks load parts of their peers by themselves; whoever imports a peer afterwards
    gets the whole."""
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("deepspeed", "accelerate"):
            del sys.modules[name]


@functools.cache
def file_of(name: str) -> dict[str, Any]:
    """What a benchmark writes. Run once, and without verl, which takes longer to import than all
    benchmarks together."""
    verl = unittest.mock.patch.object(
        _peers, "verl", side_effect=ModuleNotFoundError("left out here")
    )
    with tempfile.TemporaryDirectory() as folder, verl:
        importlib.import_module(f"bench.{name}").main(
            ["--device", "simulated", "--size", "tiny", "--out", folder]
        )
        content: dict[str, Any] = json.loads(
            Path(folder, f"{name}_simulated.json").read_text(encoding="utf-8")
        )
    return content


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow])
        if name in SLOW
        else pytest.param(name, marks=[] if name in SHOWN else [pytest.mark.sweep])
        for name in run.LIMITS
    ],
)
def test_every_benchmark_writes_a_valid_file(name: str) -> None:
    content = file_of(name)
    assert (content["benchmark"], content["machine"]["device"]) == (name, "simulated")
    assert content["rows"]
    for row in content["rows"]:
        assert set(row) == {"scenario", "system", "metric", "value", "unit"}
        assert math.isfinite(row["value"])
    # A peer may not be installed, or need a GPU. Then it says so; nothing of ours may.
    assert {error["system"] for error in content.get("errors", [])} <= PEERS
    assert all(row["value"] == 1 for row in content["rows"] if row["metric"] == "bit-exact")


def test_ref_log_prob_keeps_actor_and_reference_apart() -> None:
    """One model at a time has the smaller peak; with the reference first no more bytes move than
    with both together."""
    found = {(row["system"], row["metric"]): row["value"] for row in file_of("grpo_step")["rows"]}
    peak, moved = "peak of what is registered", "bytes both ways"
    both, last, first = "placement", "placement, ref_log_prob last", "placement, ref_log_prob first"
    assert found[last, peak] == found[first, peak] < found[both, peak]
    assert found[first, moved] == found[both, moved] < found[last, moved]


def _ends_its_process(rows: int, rig: Rig, results: Results) -> None:
    for _ in range(rows):
        results.add("a scenario", "a system", "a metric", 1, "s")
        results.write()
    os._exit(1)


def test_what_a_process_has_measured_counts_whatever_its_end(tmp_path: Path) -> None:
    rig, results = Rig("simulated", "tiny"), Results("weights", "simulated", "tiny", tmp_path)
    results.add("a scenario", "placement", "a metric", 2, "s")
    measure_apart(rig, results, functools.partial(_ends_its_process, 1))
    assert [row.value for row in results.rows] == [2, 1]
    with pytest.raises(RuntimeError, match="measured nothing; exit status 1"):
        measure_apart(rig, results, functools.partial(_ends_its_process, 0))


def test_the_mirror_of_an_engine_is_compared_with_the_kernel(tmp_path: Path) -> None:
    from bench import engine_mirror

    engine_mirror.main(
        ["--device", "simulated", "--size", "tiny", "--out", str(tmp_path), "--system", "copied"]
    )
    content = json.loads(
        (tmp_path / "engine_mirror_copied_simulated.json").read_text(encoding="utf-8")
    )
    found = {row["metric"]: row["value"] for row in content["rows"]}
    assert "errors" not in content
    assert (
        found[("asleep, snapshot, the mirror")],
        found[("weights back, snapshot, the mirror")],
    ) == (8 << 20, 0)
    assert found["asleep, snapshot"] == found["all back, snapshot"] + (8 << 20)
    assert {f"asleep, snapshot off by, {who}" for who in ("process", "machine")} <= found.keys()
    assert found["bit-exact"] == 1


@pytest.mark.sweep
def test_a_model_is_trained_with_the_same_losses_in_every_system(tmp_path: Path) -> None:
    from bench import one_gpu

    placed = ["placement, colocated", "placement, cyclic"]
    run_of_two = ["--tokens", "128", "--steps", "2", "--only", "torch", *placed]
    one_gpu.main(["--device", "simulated", "--size", "tiny", "--out", str(tmp_path), *run_of_two])
    content = json.loads((tmp_path / "one_gpu_simulated.json").read_text(encoding="utf-8"))
    assert "errors" not in content
    rows = {(row["system"], row["metric"]): row["value"] for row in content["rows"]}
    assert rows["torch", "fits"] == 1
    for system in placed:
        assert rows[system, "losses as torch's"] == 1
        assert abs(rows[system, "registered, peak on the device, forecast off by"]) < 5
    assert rows["placement, colocated", "on the device outside phases"] == 0
    assert "| tiny, 128 tokens, the whole GPU | placement, cyclic | yes |" in report.one_gpu(
        {"one_gpu": content}
    )
    told = report.forecasts({"one_gpu": content})
    assert "| tiny, 128 tokens, the whole GPU, cyclic |" in told
    assert "not measured" not in told


def test_a_job_that_dies_keeps_its_rows_and_says_where(tmp_path: Path) -> None:
    from bench import one_gpu

    rig, results = Rig("simulated", "tiny"), Results("one_gpu", "simulated", "tiny", tmp_path)
    # 32 tokens are less than a micro-batch
    one_gpu._run(rig, results, one_gpu.Job("tiny", "torch", None, (128, 32), (1, 1)), seconds=600)
    fits = {row.scenario: row.value for row in results.rows if row.metric == "fits"}
    assert fits == {"tiny, 128 tokens, the whole GPU": 1, "tiny, 32 tokens, the whole GPU": 0}
    (error,) = results.errors
    assert error["scenario"] == "tiny, 32 tokens, the whole GPU"
    assert error["message"].startswith("ended in weight_sync, bench/_trainers.py:")
    one_gpu._run(rig, results, one_gpu.Job("tiny", "torch", None, (64,), (1,)), seconds=0)
    assert results.errors[-1]["message"] == "stopped after 0 s in its first lines"


def test_the_tables_name_the_best_peer_every_failure_and_what_is_worse(tmp_path: Path) -> None:
    results = Results("weights", "simulated", "tiny", tmp_path)
    for system, value in (("link", 55.5), ("slow", 2.0), ("placement", 55.0), ("quick", 50.0)):
        results.add("weights, bf16", system, "load, rate", value, "GB/s")
    results.add("weights, bf16", "placement", "load, share of the link", 99.1, "%")
    results.failed("weights, bf16", "broken", "no memory")
    results.failed("weights, bf16", "absent", "ModuleNotFoundError: No module named 'absent'")
    results.write()
    readme = tmp_path / "README.md"
    readme.write_text(
        "# a\n{}\nold\n{}\nb\n".format(*report.marks("performance")), encoding="utf-8"
    )
    report.put_into(readme, "performance", report.table(_results.read(tmp_path)))
    written = readme.read_text(encoding="utf-8")
    assert (
        "| weights, bf16: load | **55 GB/s, 99.1 % of the link** | 50 GB/s (quick) |"
    ) in written
    assert "broken: no memory" in written
    assert "Not on this machine: absent." in written
    assert (written[:4], "old" in written, written[-3:]) == ("# a\n", False, "\nb\n")
    row = {
        "scenario": "weights, bf16",
        "metric": "load, rate",
        "unit": "GB/s",
        "before": [55, 54],
        "after": [50, 51],
    }
    turns = {"commits": {"before": "a", "after": "b"}, "rows": [row], "problems": []}
    compared = report.by_turns(
        {"weights": {"machine": _results.machine("simulated"), "turns": turns}}
    )
    assert "| weights, bf16: load | 55 GB/s, 54 GB/s | 50 GB/s, 51 GB/s |" in compared
    assert "by more than 1 %: weights, bf16: load." in compared


def test_the_table_of_forecasts_has_every_job_of_placement_and_no_peer(tmp_path: Path) -> None:
    results = Results("one_gpu", "simulated", "tiny", tmp_path)
    job = "1.5B, 4,096 tokens, 80 GB"
    for metric, told, found, unit in (
        ("registered, peak on the device", 2e9, 2.004e9, "bytes"),
        ("registered, on the host", 21e9, 22.126e9, "bytes"),
        ("moves", 0.294, 0.178, "s"),
        ("streamed step", 1.2, 1.456, "s"),
    ):
        results.add(job, "placement, cyclic", f"{metric}, forecast", told, unit)
        results.add(job, "placement, cyclic", metric, found, unit)
    results.add(job, "torch", "step", 0.4, "s")
    results.failed(job, "placement, colocated", "no memory")
    results.write()
    lines = report.forecasts(_results.read(tmp_path)).splitlines()
    assert lines[-2:] == [
        f"| {job}, cyclic | 2.00, 2.00 GB | 21.00, 22.13 GB | 0.29, 0.18 s | 1.20, 1.46 s |",
        f"| {job}, colocated | {' | '.join(['not measured'] * 4)} |",
    ]
    assert ", torch " in lines[0]
    assert not [line for line in lines[1:] if "torch" in line]
