"""Holds: phases that end in any order, from anywhere, and with the iterator that they were given to."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from placement import PhaseError
from placement.testing import assert_nothing_resident
from tests.support.worker import SYNC, Worker


def test_a_hold_outlives_the_block_in_which_it_was_opened(worker: Worker) -> None:
    with pytest.raises(ZeroDivisionError), worker.manager.phase("train"):  # noqa: PT012 - what its end leaves
        hold = worker.manager.hold("ref_log_prob", only=["ref"])
        raise ZeroDivisionError
    assert worker.on_device() == {"ref"}
    assert worker.manager.phase_name == "ref_log_prob"
    hold.release()
    assert_nothing_resident(worker.manager)
    with pytest.raises(PhaseError, match="not open"):
        hold.switch("train")
    assert repr(hold) == "<hold 'ref_log_prob', released>"


def test_a_release_loads_nothing_into_memory_that_others_use() -> None:
    """The inner hold took the room of a handle that the idle plan would like to have: it comes back with the next plan, not at once."""
    worker = Worker(policy="resident", budget_bytes=48_000)  # room for two models of 20,480 bytes
    first = worker.manager.hold("ref_log_prob", only=["ref"])
    assert worker.on_device() == {"actor", "ref"}
    second = worker.manager.hold("values", only=["critic"])
    assert worker.on_device() == {"critic", "ref"}
    first.release()
    assert worker.on_device() == {"critic", "ref"}
    second.release()
    with worker.manager.phase("log_prob", only=["actor"]):
        assert "actor" in worker.on_device()


# --- around an iterator


def weights(worker: Worker) -> Iterator[str]:
    for name in ("a", "b"):
        assert worker.actor.state is SYNC
        yield name


def publishing(worker: Worker) -> Iterator[str]:
    return worker.manager.hold("weight_sync", only=["actor"]).around(weights(worker))


@pytest.mark.parametrize("begun", [False, True])
def test_an_iterator_that_is_exhausted_closed_or_dropped_is_released(begun: bool) -> None:
    worker = Worker()
    for end in ("exhaust", "close", "drop"):
        items = publishing(worker)
        if begun:
            assert next(items) == "a"
        assert worker.on_device() == {"actor"}
        if end == "close":
            items.close()  # type: ignore[attr-defined]
        elif end == "exhaust":
            assert [*items][-1] == "b"
            assert [*items] == []
            assert_nothing_resident(worker.manager)
        del items
        gc.collect()
        assert_nothing_resident(worker.manager)


def test_an_iterator_that_raises_is_released_and_its_error_comes_out(worker: Worker) -> None:
    def broken() -> Iterator[int]:
        yield 1
        raise ZeroDivisionError

    items = worker.manager.hold("weight_sync", only=["actor"]).around(broken())
    assert next(items) == 1
    with pytest.raises(ZeroDivisionError):
        next(items)
    assert_nothing_resident(worker.manager)
    with pytest.raises(TypeError, match="not iterable"):
        worker.manager.hold("weight_sync", only=["actor"]).around(3)  # type: ignore[arg-type]
    assert_nothing_resident(worker.manager)
