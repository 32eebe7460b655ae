"""What the tests of trainers share: a saved model, and no telemetry."""

from __future__ import annotations

import pytest

from tests.support import huggingface


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return huggingface.saved_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "1")  # TRL sends telemetry otherwise
