"""The public names, and what importing them brings in."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import placement

ROOT = Path(placement.__file__).parent


def test_all_is_sorted_and_names_everything_public() -> None:
    def rank(name: str) -> tuple[int, str]:  # as ruff sorts it: CONSTANTS, Classes, functions
        return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)

    assert list(placement.__all__) == sorted(placement.__all__, key=rank)
    assert len(set(placement.__all__)) == len(placement.__all__)
    imported = {
        alias.asname or alias.name
        for node in ast.parse((ROOT / "__init__.py").read_text()).body
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("placement")
        for alias in node.names
        if not (alias.asname or alias.name).startswith("_")
    }
    lazy = set(placement.__all__) - imported
    assert imported <= set(placement.__all__)
    assert {"policies", "testing"} <= lazy
    assert set(placement.__all__) <= set(dir(placement))
    for name in placement.__all__:
        assert getattr(placement, name) is not None
        if name not in lazy and hasattr(getattr(placement, name), "__module__"):
            assert getattr(placement, name).__module__.startswith("placement.")
    with pytest.raises(AttributeError, match="no attribute 'Manger'"):
        placement.Manger  # noqa: B018


def test_every_public_exception_is_one_of_ours_and_no_name_has_an_engines_verb() -> None:
    for name in placement.__all__:
        if name.endswith(("Error", "Lost")):
            assert issubclass(getattr(placement, name), placement.PlacementError)
        assert "sleep" not in name.lower()
        assert "park" not in name.lower()


def test_what_only_talks_and_shows_needs_no_torch() -> None:
    """They start anew beside a job, some of them after a crash that the job waits out."""
    modules = "placement.cli.plan, placement.cli.workers"
    program = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_importing_and_using_the_core_brings_in_nothing_optional() -> None:
    code = """
import sys, torch
of_torch = set(sys.modules)  # where cuda-bindings is installed, torch imports it
import placement, placement.observe
placement.Manager, placement.Engine, placement.WeightInfo  # loaded when they are first used
optional = ("placement.policies", "placement.testing", "prometheus_client", "ray", "vllm", "sglang")
optional += ("verl", "transformers", "cuda")
optional += ("torch.distributed.checkpoint", "accelerate", "deepspeed", "megatron", "torchao")
print([name for name in optional if name in sys.modules and name not in of_torch])
from placement.testing import SimulatedDevice
manager = placement.Manager(device=SimulatedDevice(1 << 20))
model = torch.nn.Linear(4, 4)
manager.register("actor", model, role="actor")
with manager.phase("train"):
    pass
manager.snapshot(); manager.audit()
print([name for name in optional[2:] if name in sys.modules and name not in of_torch])
print(placement.policies.Colocated.__name__)
print(placement.engines.vllm.VllmServer.__name__, placement.engines.sglang.SglangServer.__name__)
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT.parent,
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["[]", "[]", "Colocated", "VllmServer SglangServer"]
