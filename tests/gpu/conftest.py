"""What the tests on a GPU share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import placement
from placement.testing import assert_nothing_resident


@pytest.fixture
def manager() -> Iterator[placement.Manager]:
    manager = placement.Manager(device="cuda:0")
    yield manager
    assert_nothing_resident(manager)
    manager.close()
