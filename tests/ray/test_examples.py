"""The demo's GRPO loop with several ranks: driven from a driver on Ray, and under torchrun."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def test_the_loop_on_ray(ray: Any) -> None:
    from examples.ray_grpo import main

    weights = main(world_size=4, steps=2)
    assert [len(set(step)) for step in weights] == [1, 1]  # all workers have the same
    assert weights[0] != weights[1]


@pytest.mark.slow
@pytest.mark.timeout(240)  # three fresh interpreters on a machine with other work
def test_the_loop_under_torchrun() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "examples/torchrun_grpo.py"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("0 bytes left on the device") == 2 * 3
    weights = re.findall(r"rank (\d) weights ([0-9a-f]{16})", done.stdout)  # no more: the ranks share a pipe, and their lines may touch
    assert len(weights) == 2
    assert len({digest for _, digest in weights}) == 1
