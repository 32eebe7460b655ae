"""The model that SGLang starts with."""

from __future__ import annotations

import pytest

from tests.gpu.vllm import models


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return models.saved_for("sglang", "0.5.14", tmp_path_factory.mktemp("sglang"))
