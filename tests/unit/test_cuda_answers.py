"""Which part of host memory carries which answer, with a stream of our own: what kernels wrote shows when the event is waited for."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from placement.devices.cuda.answers import NUM_BYTES, Answers

NUM = NUM_BYTES // 8


class Words:
    """What the device wrote and what the host sees of it by now."""

    def __init__(self) -> None:
        self.host = torch.zeros(NUM_BYTES // 8, dtype=torch.int64)
        self.device: torch.Tensor | None = self.host.clone()

    def record_event(self) -> Any:
        assert self.device is not None
        written = self.device.clone()
        return SimpleNamespace(synchronize=lambda: self.host.copy_(written))


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


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_answers_are_right_in_any_order_while_their_memory_is_used_again(words: Words, dtype: torch.dtype) -> None:
    answers, draw = Answers(words, dtype), random.Random(0)  # type: ignore[arg-type]
    waiting: list[Any] = []
    read_again = []
    for seed in range(500):
        values = numbers(draw.choice([1, 114, 1024]), seed).to(dtype)
        waiting.append((values, answers.ask(values)))
        draw.shuffle(waiting)
        while len(waiting) > draw.randrange(60):
            values, read = waiting.pop()
            answer = read()
            assert answer.equal(values)
            read_again.append((values, answer))
    assert all(answer.equal(values) for values, answer in read_again), "an answer that was read belongs to the caller"


def test_an_answer_that_nobody_reads_leaves_its_place(words: Words) -> None:
    answers = Answers(words, torch.int64)  # type: ignore[arg-type]
    for seed in range(3):
        answers.ask(numbers(NUM, seed))
    values = numbers(7, 99)
    assert answers.ask(values)().equal(values)
    assert written(words)[:7].equal(values)


@pytest.mark.parametrize("count", [0, NUM + 1])
def test_what_does_not_fit_goes_another_way(words: Words, count: int) -> None:
    answers, values = Answers(words, torch.int64), numbers(count, 0)  # type: ignore[arg-type]
    assert answers.ask(values)().equal(values)
    assert not written(words).any()
    full = numbers(NUM, 99)
    assert answers.ask(full)().equal(full)
    assert words.host.equal(full), "all of the memory is there"


def test_memory_that_kernels_cannot_write_is_not_used(words: Words) -> None:
    words.device = None
    answers, values = Answers(words, torch.int64), numbers(114, 0)  # type: ignore[arg-type]
    assert answers.ask(values)().equal(values)
    assert not words.host.any()
