"""What the tests of groups and leases share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.group.lease_processes import Processes


@pytest.fixture(scope="session")
def _forking() -> Iterator[Processes]:
    forking = Processes()
    yield forking
    forking.close()


@pytest.fixture
def processes(_forking: Processes) -> Iterator[Processes]:
    """Forks processes; those that a test leaves are killed."""
    yield _forking
    _forking.clear()
