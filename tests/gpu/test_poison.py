"""Writes into offloaded memory of a real device: each must be found, whatever the type and the
arithmetic.

Through `.data`, whose version counter is another one, only the bytes of the poison tell. What
arithmetic makes of a NaN is the hardware's affair, so every type is tried with every operation. Two
kinds of writes leave the bytes as they were: `clamp_` of a float, which hands a NaN on as it is,
and a bit-identical copy of poison. They are found where the tensor's own counter counts them, and
lost through `.data`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import placement
from placement.testing import assert_nothing_resident
from tests.sharded.training import as_bytes

pytestmark = pytest.mark.gpu

SIZE = 3000
Write = Callable[[torch.Tensor, torch.Tensor], object]
"""Writes into the first, in place; the second is of the same type and on the device."""

ANY: dict[str, Write] = {
    "mul_": lambda t, other: t.mul_(3),
    "add_ a number": lambda t, other: t.add_(1),
    "add_ a tensor": lambda t, other: t.add_(other),
    "neg_": lambda t, other: t.neg_(),
    "copy_": lambda t, other: t.copy_(other),
    "zero_": lambda t, other: t.zero_(),
    "index_fill_ of one element": lambda t, other: t.index_fill_(
        0, torch.tensor([7], device="cuda"), 1
    ),
    "out=": lambda t, other: torch.mul(t, 3, out=t),
    "_foreach_mul_": lambda t, other: torch._foreach_mul_([t], 3),
}
INEXACT: dict[str, Write] = {
    "EMA": lambda t, other: t.mul_(0.4).add_(other, alpha=0.6),
    "lerp_": lambda t, other: t.lerp_(other, 0.1),
    "div_": lambda t, other: t.div_(2),
    "addcmul_": lambda t, other: t.addcmul_(other, other, value=0.5),
    "_foreach_lerp_": lambda t, other: torch._foreach_lerp_([t], [other], 0.1),
}
ORDERED: dict[str, Write] = {
    "clamp_": lambda t, other: t.clamp_(0, 5),
    "_foreach_clamp_min_": lambda t, other: torch._foreach_clamp_min_([t], 0),
}
REAL: dict[str, Write] = {
    "abs_": lambda t, other: t.abs_(),
    "sqrt_": lambda t, other: t.sqrt_(),
    "normal_": lambda t, other: t.normal_(),
    "nan_to_num_": lambda t, other: t.nan_to_num_(),
}
BY_COPY: dict[str, Write] = {
    "copy_": lambda t, other: t.copy_(other),
    "copy_ of what was computed": lambda t, other: t.copy_(t.float().mul(0.9).to(t.dtype)),
    "zero_": lambda t, other: t.zero_(),
    "fill_": lambda t, other: t.fill_(1),
}
BY_TYPE: dict[torch.dtype, dict[str, Write]] = {
    **dict.fromkeys(
        (torch.float64, torch.float32, torch.bfloat16, torch.float16),
        ANY | INEXACT | ORDERED | REAL,
    ),
    **dict.fromkeys((torch.complex64, torch.complex128), ANY | INEXACT),
    **dict.fromkeys((torch.float8_e4m3fn, torch.float8_e5m2), BY_COPY),
    **dict.fromkeys((torch.int64, torch.int8), ANY | ORDERED),
}


def keeps_bytes(dtype: torch.dtype, name: str) -> bool:
    """Whether the hardware hands a NaN on as it is: where numbers are only compared. Arithmetic
    makes another of it in every type."""
    return dtype.is_floating_point and name in ORDERED


def cases(*, keeping: bool) -> list[Any]:
    return [
        pytest.param(dtype, write, id=f"{str(dtype).removeprefix('torch.')} {name}")
        for dtype, writes in BY_TYPE.items()
        for name, write in writes.items()
        if keeps_bytes(dtype, name) is keeping
    ]


class Values(nn.Module):
    """One tensor of some type: a parameter where it can be one."""

    def __init__(self, values: torch.Tensor) -> None:
        super().__init__()
        if values.is_floating_point() or values.is_complex():
            self.values = nn.Parameter(values, requires_grad=False)
        else:
            self.register_buffer("values", values)


def some(dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(1, 5, (SIZE,), device="cuda").to(torch.float32).to(dtype)


@pytest.fixture
def manager() -> Iterator[placement.Manager]:
    made = placement.Manager(device="cuda:0")
    yield made
    made.close()


def found(manager: placement.Manager, reference: Values, write: Callable[[], object]) -> None:
    """The write is an error at the next phase transition, once, and no value has changed."""
    before, wrong_writes = as_bytes(reference.values), manager.snapshot().wrong_writes
    manager.register("ref", reference, role="ref")
    with torch.no_grad():
        write()
    with (
        pytest.raises(placement.IntegrityError, match="written values are lost"),
        manager.phase("log_prob"),
    ):
        pass
    with manager.phase("log_prob"):
        assert as_bytes(reference.values) == before
    assert manager.snapshot().wrong_writes == wrong_writes + 1
    assert_nothing_resident(manager)


@pytest.mark.parametrize(("dtype", "write"), cases(keeping=False))
def test_a_write_through_data_is_found(
    manager: placement.Manager, dtype: torch.dtype, write: Write
) -> None:
    reference, other = Values(some(dtype)), some(dtype)
    found(manager, reference, lambda: write(reference.values.data, other))


@pytest.mark.parametrize(("dtype", "write"), cases(keeping=True))
def test_a_write_that_keeps_the_bytes_of_nan_is_found_by_the_tensors_counter(
    manager: placement.Manager, dtype: torch.dtype, write: Write
) -> None:
    reference, other = Values(some(dtype)), some(dtype)
    found(manager, reference, lambda: write(reference.values, other))


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.complex128,
        torch.complex64,
    ],
    ids=str,
)
def test_a_reference_that_is_synced_with_an_offloaded_actor_is_found(
    manager: placement.Manager, dtype: torch.dtype
) -> None:
    """As trl's SyncRefModelCallback does it: both are offloaded, so poison is moved towards
    poison."""
    reference, actor = Values(some(dtype)), Values(some(dtype))
    manager.register("actor", actor, role="actor")
    found(
        manager,
        reference,
        lambda: reference.values.data.mul_(0.4).add_(actor.values.data, alpha=0.6),
    )


def test_a_write_is_found_although_nothing_is_offloaded_any_more(
    manager: placement.Manager,
) -> None:
    """The phase that loads the last handle does not wait for the comparison, which the next one
    reads."""
    actor = Values(some(torch.float32))
    before = as_bytes(actor.values)
    manager.register("actor", actor, role="actor")
    actor.values.data.add_(1)
    with (  # noqa: PT012
        pytest.raises(placement.IntegrityError, match="written values are lost"),
        manager.phase("log_prob") as phase,
    ):
        for _ in range(3):
            phase.switch("eval")
    with manager.phase("log_prob"):
        assert as_bytes(actor.values) == before


def after_a_backward(manager: placement.Manager) -> tuple[nn.Linear, torch.optim.Optimizer]:
    model = nn.Linear(64, 64).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager.register("actor", model, role="actor")
    manager.register("actor.optimizer", optimizer)
    with manager.phase("train"):
        model(torch.ones(2, 64, device="cuda")).square().sum().backward()
    return model, optimizer


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize(
    "write",
    [
        lambda grads: torch._foreach_mul_(grads, 0.5),
        lambda grads: [grad.mul_(0.5) for grad in grads],
        lambda grads: [grad.data.mul_(0.5) for grad in grads],
        lambda grads: torch._amp_foreach_non_finite_check_and_unscale_(
            grads, torch.zeros(1, device="cuda"), torch.full((1,), 0.25, device="cuda")
        ),
    ],
    ids=["clipped", "mul_", "through data", "unscaled"],
)
def test_gradients_written_while_offloaded_are_found_and_come_back(
    manager: placement.Manager, write: Callable[[list[torch.Tensor]], object]
) -> None:
    model, optimizer = after_a_backward(manager)
    with manager.phase("train"):
        before = [as_bytes(grad) for grad in gradients(model)]
    with torch.no_grad():
        write(gradients(model))
    with (
        pytest.raises(placement.IntegrityError, match="written values are lost"),
        manager.phase("train"),
    ):
        pass
    with manager.phase("train"):
        assert [as_bytes(grad) for grad in gradients(model)] == before
        optimizer.step()
        optimizer.zero_grad()
    assert_nothing_resident(manager)
