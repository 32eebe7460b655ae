"""What the tests on a GPU share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import placement
from placement.testing import assert_nothing_resident
from tests.gpu.on_gpus import gpus
from tests.gpu.vllm.apart import Apart
from tests.support.ranks import Ranks


@pytest.fixture
def manager() -> Iterator[placement.Manager]:
    torch.cuda.empty_cache()
    manager = placement.Manager(device="cuda:0")
    yield manager
    assert_nothing_resident(manager)
    manager.close()


@pytest.fixture(scope="module")
def one_gpu() -> Iterator[Ranks]:
    yield from gpus(1)


@pytest.fixture(scope="module")
def two_gpus() -> Iterator[Ranks]:
    yield from gpus(2)


@pytest.fixture(scope="module")
def trainer() -> Iterator[Apart]:
    """A process for a trainer beside an engine's server."""
    process = Apart()
    yield process
    process.close()
