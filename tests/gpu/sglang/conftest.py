"""The model that SGLang starts with."""

from __future__ import annotations

import importlib.util
import warnings

import pytest

from tests.gpu.vllm import models


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("SGLang is not installed: pip install sglang==0.5.14")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # another version of transformers than that of the other tests
        return models.save(tmp_path_factory.mktemp("sglang") / "model")
