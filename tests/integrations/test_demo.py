"""The demo through its command line: a managed run leaves nothing behind and computes what an
unmanaged run computes. Also its loop under torchrun."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from placement.cli import main

ROOT = Path(__file__).parents[2]


def demo(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["demo", "--steps", "2", *arguments]) == 0
    return capsys.readouterr().out


@pytest.fixture(scope="module")
def managed(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """One managed run, which also serves: the text it printed, and the file it wrote."""
    file = tmp_path_factory.mktemp("demo") / "run.json"
    with contextlib.redirect_stdout(io.StringIO()) as text:
        assert (
            main(
                [
                    "demo",
                    "--steps",
                    "2",
                    "--device",
                    "simulated",
                    "--serve",
                    "0",
                    "--json",
                    str(file),
                ]
            )
            == 0
        )
    return text.getvalue(), json.loads(file.read_text())


@pytest.mark.slow  # the examples are compared with their twins in test_grpo_examples.py
def test_losses_are_bit_identical_with_and_without_placement(
    managed: tuple[str, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    demo(
        capsys, "--device", "simulated", "--no-placement", "--json", str(tmp_path / "resident.json")
    )
    with_placement, without = managed[1], json.loads((tmp_path / "resident.json").read_text())
    assert with_placement["placement"]
    assert not without["placement"]
    for key in ("losses", "rewards", "weights_sha256"):
        assert with_placement[key] == without[key]


def test_output_shows_phases_and_an_empty_device(managed: tuple[str, dict[str, Any]]) -> None:
    text, _ = managed
    assert "would not fit" in text
    for word in ("rollout", "log_prob", "train", "weight_sync", "idle", "skipped", "stall"):
        assert word in text
    assert "audit: 0 bytes left on the device" in text
    assert "metrics at http://127.0.0.1:" in text


def test_every_phase_holds_only_what_it_needs_and_the_step_ends_empty(
    managed: tuple[str, dict[str, Any]],
) -> None:
    _, result = managed
    seen = dict(result["phases"])
    on_device = {
        name: {h for h, state in row["states"].items() if state != "CPU_OFFLOADED"}
        for name, row in seen.items()
    }
    assert on_device["rollout"] == {"rollout"}
    assert on_device["log_prob"] == {"actor", "ref"}
    assert on_device["train"] == {"actor", "actor.optimizer"}
    assert {"actor", "rollout"} == on_device["weight_sync"]
    assert seen["idle"]["device_bytes"] == 0
    assert seen["train"]["states"]["actor"] == "TRAINING"
    assert result["resident_bytes"] == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_cuda_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["demo", "--device", "cuda:0"])
    assert "torch sees no CUDA device for 'cuda:0'" in capsys.readouterr().err


@pytest.mark.gpu
def test_losses_are_bit_identical_on_cuda(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = []
    for extra in ([], ["--no-placement"]):
        file = tmp_path / f"run{len(extra)}.json"
        assert (
            main(["demo", "--steps", "20", "--device", "cuda:0", "--json", str(file), *extra]) == 0
        )
        results.append(json.loads(file.read_text()))
    assert results[0]["losses"] == results[1]["losses"]
    assert results[0]["weights_sha256"] == results[1]["weights_sha256"]


def test_example_worker_runs_and_learns() -> None:
    from examples.worker import main as run_example

    losses = run_example()
    assert len(losses) == 3
    assert all(map(math.isfinite, losses)), "NaN: something was read while it was offloaded"


@pytest.mark.slow
@pytest.mark.timeout(240)  # three fresh interpreters on a machine with other work
def test_the_loop_under_torchrun() -> None:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "examples/torchrun_grpo.py",
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("0 bytes left on the device") == 2 * 3
    # no more: the ranks share a pipe, and their lines may touch
    weights = re.findall(r"rank (\d) weights ([0-9a-f]{16})", done.stdout)
    assert len(weights) == 2
    assert len({digest for _, digest in weights}) == 1
