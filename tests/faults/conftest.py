"""What holds for every file of fault tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.harness import many_cases


@pytest.fixture(scope="module", autouse=True)
def _many_cases() -> Iterator[None]:
    with many_cases():
        yield
