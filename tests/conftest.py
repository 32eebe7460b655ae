"""What holds for every test: seeded, no settings from the caller's environment, GPU tests only where there is a GPU."""

from __future__ import annotations

import os

import pytest
import torch


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    needs_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if needs_gpu:
        config.hook.pytest_deselected(items=needs_gpu)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


@pytest.fixture(autouse=True)
def _clean_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same random numbers for every test, and none of the caller's PLACEMENT_* variables."""
    for name in os.environ:
        if name.startswith("PLACEMENT_"):
            monkeypatch.delenv(name)
    torch.manual_seed(0)
    torch.set_grad_enabled(True)  # a test that interrupts at every bytecode can hit torch's own switch
