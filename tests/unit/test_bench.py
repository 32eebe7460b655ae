"""Every benchmark runs on the simulated device with tiny sizes and writes a result file. What it measures there means nothing."""

from __future__ import annotations

import functools
import importlib
import json
import math
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench import _peers, _results, _sampler, report, run
from bench._results import Results

PEERS = {"accelerate", "deepspeed", "megatron", "torch_memory_saver", "torch_memory_saver(retain)", "verl"}


@pytest.fixture(scope="module", autouse=True)
def _whole_packages() -> Iterator[None]:
    """The benchmarks load parts of their peers by themselves; whoever imports a peer afterwards gets the whole."""
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("deepspeed", "verl", "accelerate"):
            del sys.modules[name]


@functools.cache
def file_of(name: str) -> dict[str, Any]:
    """What a benchmark writes. Run once."""
    with tempfile.TemporaryDirectory() as folder:
        importlib.import_module(f"bench.{name}").main(["--device", "simulated", "--size", "tiny", "--out", folder])
        content: dict[str, Any] = json.loads(Path(folder, f"{name}_simulated.json").read_text(encoding="utf-8"))
    return content


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=[pytest.mark.slow] if each in ("forecast", "replicated", "rollout_only") else []) for each in run.LIMITS],
)
def test_every_benchmark_writes_a_valid_file(name: str) -> None:
    content = file_of(name)
    assert content["benchmark"] == name
    assert content["machine"]["device"] == "simulated"
    assert content["rows"]
    for row in content["rows"]:
        assert set(row) == {"scenario", "system", "metric", "value", "unit"}
        assert math.isfinite(row["value"])
    # A peer may not be installed, or need a GPU. Then it says so; nothing of ours may.
    assert {row["system"] for row in content["rows"] if row["metric"] == "error"} <= PEERS
    assert {error["system"] for error in content.get("errors", [])} <= PEERS
    assert all(row["value"] == 1 for row in content["rows"] if row["metric"] == "bit-exact")


@pytest.mark.slow
def test_what_a_rollout_only_worker_saves_is_measured() -> None:
    """Registered as they are, the trainer's objects take their size in host memory; as `Lazy` they take none (verl 4229)."""
    found = {(row["system"], row["metric"]): row["value"] for row in file_of("rollout_only")["rows"]}
    assert (found["placement, built", "objects built"], found["placement, Lazy", "objects built"]) == (3, 0)
    parameters = 8 * 256 * 256 * 4 / 1e6  # of the actor; the reference has as many, AdamW two moments of each
    assert found["placement, built", "host copies reserved"] - found["placement, Lazy", "host copies reserved"] >= 4 * parameters


def test_a_streamed_step_holds_a_window_of_the_state() -> None:
    found = {(row["system"], row["metric"]): row["value"] for row in file_of("streamed_adam")["rows"]}
    assert found["placement", "bit-exact"] == found["placement, whole state", "bit-exact"] == 1
    whole, peak = found["placement, whole state", "peak of the state on the device"], "peak of the state on the device"
    assert 0 < found["placement", peak] < whole
    moved = "step, bytes to the device"
    assert found["placement", moved] == pytest.approx(found["placement, whole state", moved], rel=0.01)  # but for alignment


def test_ref_log_prob_keeps_actor_and_reference_apart() -> None:
    """One model at a time has the smaller peak; with the reference first no more bytes move than with both together."""
    found = {(row["system"], row["metric"]): row["value"] for row in file_of("grpo_step")["rows"]}
    peak, moved = "peak of what is registered", "bytes both ways"
    both, last, first = "placement", "placement, ref_log_prob last", "placement, ref_log_prob first"
    assert found[last, peak] == found[first, peak] < found[both, peak]
    assert found[first, moved] == found[both, moved] < found[last, moved]


def test_a_system_that_fails_is_a_row_and_the_next_one_goes_on(tmp_path: Path) -> None:
    results = Results("some", "simulated", "tiny", tmp_path)
    with results.system("moving", "broken peer"):
        raise RuntimeError("no such thing")
    with results.system("moving", "placement"):
        results.add("moving", "placement", "load", 0.5, "s")
    content = _results.read(tmp_path)["some"]
    assert [(row["system"], row["metric"]) for row in content["rows"]] == [("broken peer", "error"), ("placement", "load")]
    assert content["errors"] == [{"scenario": "moving", "system": "broken peer", "message": "RuntimeError: no such thing"}]


def test_an_interrupt_is_not_taken_for_a_peers_failure(tmp_path: Path) -> None:
    results = Results("some", "simulated", "tiny", tmp_path)
    with pytest.raises(KeyboardInterrupt), results.system("moving", "placement"):
        raise KeyboardInterrupt


def test_a_benchmark_that_finds_no_time_is_recorded(tmp_path: Path) -> None:
    arguments = ["--tiny", "--device", "simulated", "--only", "link", "--limit-seconds", "0.5", "--out", str(tmp_path)]
    assert run.main(arguments) == 1
    content = _results.read(tmp_path)["link"]
    assert [row["metric"] for row in content["rows"]] == ["error"]
    assert content["errors"][0]["message"] == "no time was left for it"


def test_what_a_killed_benchmark_had_written_stays(tmp_path: Path) -> None:
    before = Results("weights", "simulated", "tiny", tmp_path)
    before.add("weights", "placement", "load", 0.5, "s")
    before.write()
    run._record(tmp_path, "weights", "simulated", "tiny", "stopped after 3 s")
    rows = _results.read(tmp_path)["weights"]["rows"]
    assert [row["metric"] for row in rows] == ["load", "error"]


def test_a_missing_peer_is_told() -> None:
    assert _peers.check(["torch_memory_saver"]).keys() == {"torch_memory_saver"}
    with pytest.raises(ModuleNotFoundError, match="no_such_peer"):
        _peers._bare("no_such_peer.inner")


def test_the_table_names_the_best_peer_and_every_failure(tmp_path: Path) -> None:
    results = Results("weights", "simulated", "tiny", tmp_path)
    for system, value in (("link", 55.5), ("slow", 2.0), ("placement", 55.0), ("quick", 50.0)):
        results.add("weights, bf16", system, "load, rate", value, "GB/s")
    results.add("weights, bf16", "placement", "load, share of the link", 99.1, "%")
    results.failed("weights, bf16", "absent", "not installed")
    results.write()
    readme = tmp_path / "README.md"
    readme.write_text(f"# a\n{report.BEGIN}\nold\n{report.END}\nb\n", encoding="utf-8")
    report.put_into(readme, report.table(_results.read(tmp_path)))
    written = readme.read_text(encoding="utf-8")
    assert "| weights, bf16: load | **55 GB/s, 99.1 % of the link** | 50 GB/s (quick) | 2 GB/s (slow) |" in written
    assert "absent: not installed" in written
    assert "old" not in written
    assert written.startswith("# a\n")
    assert written.endswith("\nb\n")


def test_the_table_shows_other_ways_to_use_placement_beside_it_and_not_as_peers(tmp_path: Path) -> None:
    results = Results("grpo_step", "simulated", "tiny", tmp_path)
    for system, value in (("placement", 30e9), ("placement, ref_log_prob first", 22e9), ("verl", 23e9)):
        results.add("step", system, "bytes both ways", value, "bytes")
    results.write()
    assert "| **30.00 GB; ref_log_prob first: 22.00 GB** | 23.00 GB (verl) |  |" in report.table(_results.read(tmp_path))


def test_a_readme_without_marks_is_left_alone(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("# a\n", encoding="utf-8")
    with pytest.raises(ValueError, match="performance"):
        report.put_into(readme, "table")
    assert readme.read_text(encoding="utf-8") == "# a\n"


def test_the_sampler_says_when_the_driver_cannot_be_asked() -> None:
    with pytest.raises(RuntimeError, match="sampler"), _sampler.sampled("GPU-none"):
        pass


def test_the_sampler_keeps_the_peak() -> None:
    reading, writing = os.pipe()
    values = iter([5, 9, 7])

    def used() -> int:
        value = next(values)
        if value == 7:
            os.write(writing, b"end\n")
        return value

    with open(reading, encoding="ascii") as stop:
        assert _sampler._sample(used, stop) == "5 9 3"
    os.close(writing)
