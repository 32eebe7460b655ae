"""The model that every engine of these tests starts with, and the skip where vLLM is not installed."""

from __future__ import annotations

import importlib.util
import warnings

import pytest

from tests.gpu.vllm import models


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a saved model. Without vLLM every test that wants an engine is skipped here."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: pip install vllm==0.24.0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # another version of transformers than that of the other tests
        return models.save(tmp_path_factory.mktemp("vllm") / "model")
