"""The model of every engine here."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.verl import worker


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return worker.write_model(tmp_path_factory.mktemp("model"))
