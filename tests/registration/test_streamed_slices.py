"""Parameters whose state is larger than a bucket are stepped slice by slice: the ordinary step's
bits, within the window."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from placement import IntegrityError
from placement.registration.partial_step import sliceable_state
from tests.registration.test_streamed_optimizer import BUCKET, STEPPED, Pair, adamw
from tests.support.buckets import set_bucket_bytes

LARGE = 40_001
"""Elements of the largest parameter: 160 KB, and its moments 20 chunks. Odd, so that its end is
aligned to nothing."""


@pytest.fixture(autouse=True)
def _small_buckets() -> None:
    set_bucket_bytes(BUCKET)


class Lone(nn.Module):
    """A few parameters of given shapes, which are used as they are."""

    def __init__(self, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes
        )


def gradients(net: Any, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    for weight in net.weights:
        weight.grad = torch.randn(weight.shape, generator=draw).to(weight.dtype)


class Sliced(Pair):
    """A pair whose gradients are drawn. Large parameters need no forward pass."""

    def one_step(self, seed: int, change: Callable[[Any], None] = lambda net: None) -> None:
        for net, optimizer in self.both():
            gradients(net, seed)
            change(net)
            optimizer.step()
            optimizer.zero_grad()

    def steps(self, count: int = 3, **keywords: Any) -> None:
        for seed in range(count):
            with self.manager.phase("train"):
                self.one_step(seed, **keywords)

    def num_slices(self) -> list[int]:
        assert self.handle.streamed is not None
        return [
            len(self.handle.streamed.parts_of(self.optimizer, weight))
            for weight in self.net.weights
        ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    pair = Sliced(adamw, model=Lone((LARGE,), (LARGE, 3), dtype=dtype))
    pair.steps()
    pair.check()
    assert min(pair.num_slices()) > 2


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.integers(1, 40_000), min_size=1, max_size=4),
    st.sampled_from(["AdamW", "AdamW, fused", "Adam, amsgrad, foreach"]),
)
def test_any_sizes(sizes: list[int], name: str) -> None:
    pair = Sliced(STEPPED[name], model=Lone(*((size,) for size in sizes)))
    pair.steps()
    pair.check()
    pair.manager.close()


@pytest.mark.parametrize(
    ("shapes", "has_stepped"),
    [([(40, 8), (LARGE // 8, 8)], True), ([(40, 8), *[(1000,)] * 30], False)],
    ids=["sliced", "many"],
)
def test_state_that_is_begun_anew_beside_later_buckets(
    shapes: list[tuple[int, ...]], has_stepped: bool
) -> None:
    """The step creates it while later buckets have still to be used."""
    pair = Sliced(adamw, model=Lone(*shapes))
    pair.steps(2)
    with pair.manager.phase("train"):
        if has_stepped:
            pair.one_step(2)
        for net, optimizer in pair.both():
            del optimizer.state[net.weights[0]]
        pair.one_step(3)
    pair.check()
    pair.steps(2)
    pair.check()


def test_state_that_was_replaced_is_refused_by_name_until_it_is_restored() -> None:
    """In a streamed step the state is off the device in the phase, too."""
    pair = Sliced(adamw, model=Lone((40, 8), (LARGE // 8, 8)))
    pair.steps(2)
    with pair.manager.phase("train"):
        last = pair.net.weights[-1]
        pair.optimizer.state[last]["exp_avg"] = torch.full_like(last, 0.25)
        gradients(pair.net, 2)
        with pytest.raises(IntegrityError, match=r"state\.1\.exp_avg of 'adam' were replaced"):
            pair.optimizer.step()
    pair.handle.restore()
    pair.steps(2)
    pair.check()


@pytest.mark.parametrize("of_what", ["parameter", "gradient"])
def test_elements_that_do_not_lie_in_order_are_stepped_as_a_whole(of_what: str) -> None:
    model = Lone((100, 20, 20))
    if of_what == "parameter":
        model.weights[0] = nn.Parameter(torch.randn(20, 20, 100).permute(2, 0, 1))
    pair = Sliced(adamw, model=model)

    def transpose(net: Any) -> None:
        if of_what == "gradient":
            net.weights[0].grad = net.weights[0].grad.permute(2, 1, 0).contiguous().permute(2, 1, 0)

    for seed in range(3):
        with pair.manager.phase("train"):
            gradients(pair.net, seed)
            transpose(pair.net)
            assert not (seed and sliceable_state(pair.optimizer, pair.net.weights[0]))
            pair.one_step(seed, change=transpose)
    pair.check()


def test_state_that_is_not_of_the_parameters_shape_is_stepped_as_a_whole() -> None:
    weight = nn.Parameter(torch.zeros(4, 4))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.ones(4, 4)
    assert sliceable_state(optimizer, weight) == [], "no state yet"
    optimizer.step()
    assert [tuple(each.shape) for each in sliceable_state(optimizer, weight)] == [(16,), (16,)]
    optimizer.state[weight]["rows"] = torch.zeros(4)
    assert sliceable_state(optimizer, weight) == []
    optimizer.state[weight]["rows"] = "a word"
    assert sliceable_state(optimizer, weight) == []
    optimizer.state[weight]["rows"] = None
    assert len(sliceable_state(optimizer, weight)) == 2
    weight.grad = weight.grad.to_sparse()
    assert sliceable_state(optimizer, weight) == []
    weight.grad = None
    assert len(sliceable_state(optimizer, weight)) == 2
    if hasattr(weight, "grad_dtype"):  # torch 2.10
        weight.grad_dtype = torch.float64
        weight.grad = torch.ones(4, 4, dtype=torch.float64)
        assert sliceable_state(optimizer, weight) == []
