"""Which page of host memory carries which answer, with a stream of our own: what kernels wrote shows when the event is waited for."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from placement.devices.cuda.answers import NUM_BYTES, Answers

PAGES = 16
PAGE = 1024


class Words:
    """What the device wrote and what the host sees of it by now."""

    def __init__(self) -> None:
        self.host = torch.zeros(NUM_BYTES // 8, dtype=torch.int64)
        self.device: torch.Tensor | None = self.host.clone()
        self.is_done = True
        """Whether the device is through with what it was asked."""

    def record_event(self) -> Any:
        assert self.device is not None
        written = self.device.clone()
        return SimpleNamespace(synchronize=lambda: self.host.copy_(written), query=lambda: self.is_done)


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch) -> Iterator[Words]:
    made = Words()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: made)
    return made


def numbers(count: int, seed: int) -> torch.Tensor:
    return torch.randint(-(2**63), 2**63 - 1, (count,), generator=torch.Generator().manual_seed(seed))


def written(words: Words) -> torch.Tensor:
    assert words.device is not None
    return words.device


def test_a_page_has_one_answer_at_a_time_and_then_the_next(words: Words) -> None:
    answers, draw = Answers(words), random.Random(0)  # type: ignore[arg-type]
    waiting: list[Any] = []
    read_again = []
    for seed in range(500):
        values = numbers(draw.choice([1, 114, PAGE]), seed)
        waiting.append((values, answers.ask(values)))
        if len(waiting) == PAGES:  # every page is out: each further one goes another way, and is right as well
            more = numbers(7, 1000 + seed)
            before = written(words).clone()
            assert answers.ask(more)().equal(more)
            assert written(words).equal(before)
            draw.shuffle(waiting)
            while len(waiting) > draw.randrange(PAGES):
                values, read = waiting.pop()
                answer = read()
                del read
                assert answer.equal(values)
                read_again.append((values, answer))
    assert all(answer.equal(values) for values, answer in read_again), "an answer that was read belongs to the caller"


@pytest.mark.parametrize("count", [0, PAGE + 1, 5 * PAGE])
def test_what_fits_no_page_takes_none(words: Words, count: int) -> None:
    answers = Answers(words)  # type: ignore[arg-type]
    for seed in range(2 * PAGES):
        values = numbers(count, seed)
        assert answers.ask(values)().equal(values)
    assert not written(words).any()
    full = numbers(PAGE, 99)
    assert answers.ask(full)().equal(full)
    assert words.host[:PAGE].equal(full), "the pages are still there"


def test_memory_that_kernels_cannot_write_is_not_used(words: Words) -> None:
    words.device = None
    answers, values = Answers(words), numbers(114, 0)  # type: ignore[arg-type]
    assert answers.ask(values)().equal(values)
    assert not words.host.any()
