"""What the tests of groups and leases share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.group.processes import Processes


@pytest.fixture
def processes() -> Iterator[Processes]:
    """Starts processes; those that a test leaves are killed."""
    started = Processes()
    yield started
    started.clear()
