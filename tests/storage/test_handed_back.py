"""Values come back when a manager lets an object go, whatever the object has got meanwhile."""

from __future__ import annotations

import gc
import unittest.mock
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import placement
from placement import IntegrityError, State
from placement.devices import base
from placement.storage import handing_back, layout
from placement.testing import SimulatedDevice
from tests.support.sweeps import diagonal, few
from tests.support.worker import CAPACITY, assert_same, make_manager

CAN_SWAP = base.can_swap()


@pytest.fixture(params=few(["followed", "named"], "followed"), autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test runs twice: as it is, and with a torch that cannot exchange the memory of
    storages, which CI also has.

    There, and wherever an object goes from the device to the host, only those tensors follow that
    are named.
    """
    if request.param == "named":
        monkeypatch.setattr(base, "can_swap", lambda: False)
    return str(request.param)


Change = Callable[[nn.Sequential, nn.Sequential], None]


class Special(nn.Parameter):
    """A kind of parameter that cannot be moved."""


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))


def values(*models: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for model in models for parameter in model.parameters()]


def gets_a_kind_that_cannot_move(actor: nn.Sequential, _: nn.Sequential) -> None:
    actor.scale = Special(torch.ones(300))


def gets_an_inference_tensor(actor: nn.Sequential, _: nn.Sequential) -> None:
    with torch.inference_mode():
        actor.last_hidden = torch.ones(300) + 1


def borrows_a_layer(actor: nn.Sequential, critic: nn.Sequential) -> None:
    actor[0] = critic[0]


def swaps_layers(actor: nn.Sequential, critic: nn.Sequential) -> None:
    actor[1], critic[1] = critic[1], actor[1]


CHANGES = [gets_a_kind_that_cannot_move, gets_an_inference_tensor, borrows_a_layer, swaps_layers]


@pytest.mark.parametrize("how", ["close", "drop"])
@pytest.mark.parametrize("change", CHANGES)
def test_immovable_tensors_keep_no_other_from_leaving(change: Change, how: str) -> None:
    manager = make_manager()
    actor, critic, ref = net(), net(), net()
    expected = dict(zip("acr", (values(actor), values(critic), values(ref)), strict=True))
    for name, model in (("actor", actor), ("critic", critic), ("ref", ref)):
        manager.register(name, model, role=name)
    change(actor, critic)
    if change is borrows_a_layer:
        expected["a"][:2] = expected["c"][:2]
    if change is swaps_layers:
        expected["a"][2:], expected["c"][2:] = expected["c"][2:], expected["a"][2:]
    if how == "close":
        manager.close()
    del manager
    gc.collect()
    for name, model in (("a", actor), ("c", critic), ("r", ref)):
        moved = [each for each in values(model) if each.numel() != 300]
        assert_same(moved, expected[name])


LETS_GO = {
    "close": lambda manager: manager.close(),
    "unregister": lambda manager: manager.unregister("actor"),
    "on the device": lambda manager: manager.unregister("actor", on_device=True),
    "drop": lambda _: None,
}


@pytest.mark.parametrize(
    ("how", "policy", "loads_back"),
    diagonal(LETS_GO.keys(), ["colocated", "resident"], [False, True]),
)
def test_a_layer_taken_out_keeps_its_values_when_the_model_leaves(
    policy: str, how: str, loads_back: bool
) -> None:
    manager = make_manager(policy=policy)
    model = net()
    model.register_buffer("row", model[0].weight.detach()[3])
    expected = values(model[1])
    manager.register("actor", model, role="actor")
    head, row = model[1], model[1].weight.detach()[3]
    with manager.phase("log_prob"):
        model[1] = nn.Linear(32, 32)
        model(torch.ones(1, 32))
        if loads_back:
            model.load_state_dict(model.state_dict(), assign=True)
    LETS_GO[how](manager)
    del manager
    gc.collect()
    assert_same(values(head), expected)
    assert torch.equal(row, expected[0][3])
    for written, view in ((row, head.weight[3]), (model[0].weight.data, model.row)):
        written.zero_()
        assert not bool(view.any()), "a view is a view of the same bytes still"


def test_a_handle_that_cannot_be_handed_back_does_not_keep_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manager = make_manager()
    models = {name: net() for name in ("actor", "critic", "ref")}
    expected = {name: values(model) for name, model in models.items()}
    for name, model in models.items():
        manager.register(name, model, role=name)
    fails = unittest.mock.Mock(side_effect=MemoryError("no host memory"))
    for holding in [vars(manager.handles[name])["storage"] for name in ("actor", "critic")]:
        monkeypatch.setattr(holding.state_dict_tensors, "leave", fails)
    with pytest.raises(MemoryError) as raised:
        manager.close()
    assert raised.value.__notes__ == ["placement: MemoryError: no host memory"]
    assert list(manager.handles) == ["actor", "critic"]
    monkeypatch.undo()
    manager.audit()
    assert not manager.handles, "any phase transition goes on with them"
    manager.close()
    for name, model in models.items():
        assert_same(values(model), expected[name])


def test_gradients_zeroed_or_written_while_offloaded_come_back_zero_or_are_told_once() -> None:
    manager = make_manager()
    model = net()
    handle = manager.register("actor", model, role="actor")
    with manager.phase("log_prob"):
        model(torch.ones(2, 32)).sum().backward()
    assert handle.state is State.CPU_OFFLOADED
    model[0].zero_grad(set_to_none=False)
    model[1].weight.grad.mul_(2)  # type: ignore[union-attr]
    with pytest.raises(IntegrityError, match=r"1\.weight\.grad"):
        manager.close(on_device=["actor"])
    manager.close(on_device=["actor"])
    assert [
        bool(parameter.grad.any())
        for parameter in model[0].parameters()
        if parameter.grad is not None
    ] == [False] * 2
    assert not any(bool(parameter.isnan().any()) for parameter in model.parameters())


swap_only = pytest.mark.skipif(
    not CAN_SWAP,
    reason="torch before 2.13 cannot take in such a gradient on a device in host memory",
)


class Odd(nn.Module):
    """A model whose tensors can be seen in many ways."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16))
        self.rotation = nn.Parameter(torch.randn(16, dtype=torch.complex64))
        self.words = nn.Embedding(8, 4, sparse=True)


def a_parameter_of_another_kind(model: Odd) -> torch.Tensor:
    return Special(model.weight.data)


def a_conjugate(model: Odd) -> torch.Tensor:
    return model.rotation.detach().conj()


def a_conjugate_gradient(model: Odd) -> torch.Tensor:
    model.rotation.grad = torch.randn(16, dtype=torch.complex64).conj()
    return model.rotation.grad


def a_sparse_gradient(model: Odd) -> torch.Tensor:
    model.words(torch.tensor([1, 2, 2])).sum().backward()
    assert model.words.weight.grad is not None
    return model.words.weight.grad


KEEPS = [
    *((each, False) for each in (a_parameter_of_another_kind, a_conjugate)),
    *(
        pytest.param(each, drops, marks=swap_only)
        for each in (a_conjugate_gradient, a_sparse_gradient)
        for drops in (False, True)
    ),
]
"""Each, and whether the model drops its gradient."""


def plain(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_sparse:
        return tensor.detach().to_dense()
    return tensor.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg().clone()


@pytest.mark.parametrize("how", LETS_GO)
@pytest.mark.parametrize(("keep", "drops"), KEEPS)
def test_every_kind_of_tensor_in_its_memory_follows_an_object_that_leaves(
    keep: Callable[[Odd], torch.Tensor],
    drops: bool,
    how: str,
    way: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if way == "named":  # only when it leaves
        monkeypatch.setattr(base, "can_swap", lambda: CAN_SWAP)
    manager = make_manager()
    model = Odd()
    manager.register("actor", model, role="actor")
    with manager.phase("log_prob"):
        kept = keep(model)
        expected, own = plain(kept), [each.detach().clone() for each in model.parameters()]
    if drops:
        model.zero_grad()  # a gradient is the variable's alone now
    if way == "named":
        monkeypatch.setattr(base, "can_swap", lambda: False)
    LETS_GO[how](manager)
    del manager
    gc.collect()
    assert torch.equal(plain(kept), expected)
    assert_same([*model.parameters()], own)


def test_a_view_that_torch_gives_no_answers_about_keeps_no_object_from_being_let_go() -> None:
    whole = torch.ones(64, requires_grad=True) * 3
    somewhere, _ = whole.chunk(2)
    with torch.no_grad():
        whole.mul_(2)
    with pytest.raises(RuntimeError, match="is a view and its base"):
        _ = somewhere.is_leaf
    manager = make_manager()
    model = Odd()
    expected = model.weight.detach().clone()
    manager.register("actor", model, role="actor")
    kept = model.weight.detach()
    model.weight = nn.Parameter(torch.ones(2))
    manager.close()
    assert torch.equal(kept, expected)
    assert somewhere.requires_grad


def test_an_unregistration_that_fails_leaves_the_handle_as_it_was() -> None:
    manager, model = make_manager(), net()
    handle = manager.register("actor", model, role="actor")
    with manager.phase("weight_sync"):
        with (
            unittest.mock.patch(
                "placement.registration.registry.Registry.remove", side_effect=KeyError
            ),
            pytest.raises(KeyError),
        ):
            manager.unregister("actor", on_device=True)
        assert handle.state is State.SYNCING
        assert_same(
            [value for bucket in handle.weights() for _, value in bucket],
            [*model.state_dict().values()],
        )


def test_a_model_that_the_class_of_its_attribute_knows_is_collected_after_close() -> None:
    def run() -> weakref.ref[nn.Module]:
        manager, model = make_manager(), net()
        model.helper = type("Helper", (), {"size": lambda _: len(model)})()
        manager.register("actor", model, role="actor")
        manager.close()
        return weakref.ref(model)

    alive = run()
    gc.collect()
    assert alive() is None


def test_memory_goes_back_while_a_model_is_handed_back_on_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A real device has no room for the values twice, in the ranges and in torch's own memory."""
    device = SimulatedDevice(CAPACITY, chunk_bytes=4096)
    manager, model = placement.Manager(device=device), net()
    expected = values(model)
    manager.register("actor", model, role="actor")
    held_bytes: list[int] = []
    move_out = layout.move_out

    def noted(*arguments: Any) -> None:
        move_out(*arguments)
        held_bytes.append(device.memory().chunk_bytes)

    monkeypatch.setattr(handing_back, "move_out", noted)
    monkeypatch.setattr(handing_back, "_LEAVING_TOGETHER_BYTES", 1)
    manager.unregister("actor", on_device=True)
    assert held_bytes[-1] < held_bytes[0]
    assert device.memory().chunk_bytes == 0
    assert_same(values(model), expected)


def test_what_lacks_memory_half_way_goes_on_where_it_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What has left needs no memory again, and the rest stays on the device."""
    device = SimulatedDevice(CAPACITY, chunk_bytes=4096)
    manager, model = placement.Manager(device=device), net()
    expected = values(model)
    manager.register("actor", model, role="actor")
    move_out, moved = layout.move_out, list[bool]()

    def fails_once(_: Any, storage: torch.UntypedStorage, *others: Any) -> None:
        moved.append(holding.on_device)
        if len(moved) == 3:
            device.outside_bytes = CAPACITY - device.memory().chunk_bytes  # torch has all the rest
            raise torch.OutOfMemoryError
        move_out(device, storage, *others)

    holding = vars(manager.handles["actor"])["storage"]
    monkeypatch.setattr(handing_back, "move_out", fails_once)
    monkeypatch.setattr(handing_back, "_LEAVING_TOGETHER_BYTES", 1)
    with pytest.raises(torch.OutOfMemoryError):
        manager.unregister("actor", on_device=True)
    held_bytes = device.memory().chunk_bytes
    manager.audit()
    assert not manager.handles, "any phase transition goes on with it"
    assert held_bytes > 0
    assert all(moved)
    assert device.memory().chunk_bytes == 0
    assert_same(values(model), expected)
