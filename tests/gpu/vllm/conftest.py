"""The model that every engine of these tests starts with, and the skip where vLLM is not
installed."""

from __future__ import annotations

import pytest

from tests.gpu.vllm import models


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return models.saved_for("vllm", "0.24.0", tmp_path_factory.mktemp("vllm"))
