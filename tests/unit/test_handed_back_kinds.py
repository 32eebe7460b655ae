"""Tensors of every kind that lie in an object's memory keep their values when a manager lets it go, whoever holds them."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn

from placement import Manager
from placement.devices import adoption
from placement.testing import SimulatedDevice

CHUNK = 4096


CAN_SWAP = adoption.can_swap()
swap_only = pytest.mark.skipif(not CAN_SWAP, reason="torch before 2.13 cannot take in such a gradient on a device in host memory")
LETS_GO = {
    "close": lambda manager: manager.close(),
    "unregister": lambda manager: manager.unregister("actor"),
    "on the device": lambda manager: manager.unregister("actor", on_device=True),
    "drop": lambda _: None,
}


class Special(nn.Parameter):
    """A kind of parameter that cannot be moved."""


class Subclass(torch.Tensor):
    """A class that keeps its bytes as plain tensors do."""


class Odd(nn.Module):
    """A model whose tensors can be seen in many ways."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16))
        self.rotation = nn.Parameter(torch.randn(16, dtype=torch.complex64))
        self.words = nn.Embedding(8, 4, sparse=True)


def a_parameter_of_another_kind(model: Odd) -> torch.Tensor:
    return Special(model.weight.data)


def a_tensor_of_another_class(model: Odd) -> torch.Tensor:
    return model.weight.detach().as_subclass(Subclass)


def a_conjugate(model: Odd) -> torch.Tensor:
    return model.rotation.detach().conj()


def the_imaginary_part_of_a_conjugate(model: Odd) -> torch.Tensor:
    return model.rotation.detach().conj().imag


def a_conjugate_gradient(model: Odd) -> torch.Tensor:
    model.rotation.grad = torch.randn(16, dtype=torch.complex64).conj()
    return model.rotation.grad


def a_sparse_gradient(model: Odd) -> torch.Tensor:
    model.words(torch.tensor([1, 2, 2])).sum().backward()
    assert model.words.weight.grad is not None
    return model.words.weight.grad


KEEPS = [
    a_parameter_of_another_kind,
    a_tensor_of_another_class,
    a_conjugate,
    the_imaginary_part_of_a_conjugate,
    pytest.param(a_conjugate_gradient, marks=swap_only),
    pytest.param(a_sparse_gradient, marks=swap_only),
]


def plain(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_sparse:
        return tensor.detach().to_dense()
    return tensor.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg().clone()


@pytest.mark.parametrize("how", LETS_GO)
@pytest.mark.parametrize("drops", [False, True], ids=["", "dropped"])
@pytest.mark.parametrize("follows", [pytest.param(True, id="followed", marks=swap_only), pytest.param(False, id="named")])
@pytest.mark.parametrize("keep", KEEPS)
def test_every_kind_of_tensor_in_its_memory_follows_an_object_that_leaves(
    keep: Callable[[Odd], torch.Tensor], follows: bool, drops: bool, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = Manager(device=SimulatedDevice(64 * CHUNK, chunk_bytes=CHUNK))
    model = Odd()
    manager.register("actor", model, role="actor")
    with manager.phase("log_prob"):
        kept = keep(model)
        expected, own = plain(kept), [each.detach().clone() for each in model.parameters()]
    if drops:
        model.zero_grad()  # a gradient is the variable's alone now
    if not follows:  # as wherever an object goes from the device to the host: only those tensors follow that are named
        monkeypatch.setattr(adoption, "can_swap", lambda: False)
    LETS_GO[how](manager)
    del manager
    gc.collect()
    assert torch.equal(plain(kept), expected)
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), own, strict=True))


def a_view_that_torch_gives_no_answers_about() -> torch.Tensor:
    whole = torch.ones(64, requires_grad=True) * 3
    first, _ = whole.chunk(2)
    with torch.no_grad():
        whole.mul_(2)
    with pytest.raises(RuntimeError, match="is a view and its base"):
        _ = first.is_leaf
    return first


def test_a_view_that_torch_gives_no_answers_about_keeps_no_object_from_being_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    somewhere = a_view_that_torch_gives_no_answers_about()
    manager = Manager(device=SimulatedDevice(64 * CHUNK, chunk_bytes=CHUNK))
    model = Odd()
    expected = model.weight.detach().clone()
    manager.register("actor", model, role="actor")
    kept = model.weight.detach()
    model.weight = nn.Parameter(torch.ones(2))
    monkeypatch.setattr(adoption, "can_swap", lambda: False)
    manager.close()
    assert torch.equal(kept, expected)
    assert somewhere.requires_grad
