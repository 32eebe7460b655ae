"""What the tests of groups and turns share."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.group.processes import Processes
from tests.support.ranks import Ranks
from tests.support.sweeps import few

_generations = itertools.count(1000)


@pytest.fixture
def processes() -> Iterator[Processes]:
    """Starts processes; those that a test leaves are killed."""
    started = Processes()
    yield started
    started.clear()


@pytest.fixture
def generation() -> int:
    """The number of a group that no test before has made, because ranks meet over one store."""
    return next(_generations)


@pytest.fixture(scope="module")
def three() -> Iterator[Ranks]:
    started = Ranks(3)
    yield started
    started.close()


@pytest.fixture(params=few(["two_ranks", "three"], "three"))
def ranks(request: pytest.FixtureRequest) -> Ranks:
    found: Ranks = request.getfixturevalue(request.param)
    return found


def beside(
    function: Callable[..., Any], cases: Sequence[tuple[Any, ...]], *, dies: bool = True
) -> list[list[Any]]:
    """Each case with three ranks of its own, of which most wait for the one that it names first:
    that one dies or stops."""

    def one(case: tuple[Any, ...]) -> list[Any]:
        ranks = Ranks(3)
        try:
            return ranks.run(function, next(_generations), *case, dies=case[0] if dies else None)
        finally:
            ranks.close()

    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(one, cases))
