"""Tensors in objects that modules hold (a KV cache, an attention mask, a teacher's shadow weights) leave the device with the module."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import types
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import placement
from placement.devices import adoption
from placement.tensors.plain import nested_tensors
from placement.testing import assert_nothing_resident
from tests.support.worker import assert_same, batch, in_a_range, learn, make_manager, net


class Held:
    """Somebody's own class."""

    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)


class Slotted:
    __slots__ = ("keys",)

    def __init__(self, keys: torch.Tensor) -> None:
        self.keys = keys


@dataclasses.dataclass(frozen=True)
class Frozen:
    keys: torch.Tensor


def _ones() -> torch.Tensor:
    return torch.ones(300)


FORMS: dict[str, Callable[[], Any]] = {
    "layers": lambda: Held(layers=[Held(keys=_ones(), values=_ones()), Held(keys=_ones())], length=3),
    "cross": lambda: Held(own=Held(layers=[Held(keys=_ones())]), cross=Held(layers=[Held(keys=_ones())])),
    "dataclass": lambda: Frozen(_ones()),
    "slots": lambda: Slotted(_ones()),
    "namespace": lambda: types.SimpleNamespace(keys={"a": (_ones(),)}),
    "in a list": lambda: [Held(keys=_ones())],
    "deque": lambda: deque([_ones()]),
    "mask": lambda: create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 128, 128, device="cpu"),
    "inference": torch.inference_mode()(lambda: Held(keys=_ones())),
}


def _tensors(held: Any) -> list[torch.Tensor]:
    return [tensor for _, tensor in nested_tensors(held, "", 3)]


WHEN = ("before", "in a phase", "steady")


@pytest.mark.parametrize(
    ("form", "engine", "when", "swaps"),
    [
        *((form, False, when, True) for form in FORMS for when in WHEN),
        *((form, False, "before", False) for form in FORMS),
        *(("layers", True, when, swaps) for when in WHEN for swaps in (True, False)),
    ],
)
def test_what_an_object_holds_leaves_with_the_module(
    form: str, engine: bool, when: str, swaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not swaps:
        monkeypatch.setattr(adoption, "can_swap", lambda: False)
    model, manager, make = net(), make_manager(), FORMS[form]
    phase = "rollout" if engine else "log_prob"
    cache: dict[str, Any] = {}
    model.cache = make() if when == "before" else None  # type: ignore[assignment]
    if when == "steady":
        model.cache = cache  # type: ignore[assignment]
    manager.register("it", placement.TorchEngine(model) if engine else model, role="rollout" if engine else "actor")
    for _ in range(2):
        with manager.phase(phase):
            pass
    if when != "before":
        with manager.phase(phase):
            if when == "steady":
                cache["inside"] = make()  # the attribute is the object that it was
            else:
                model.cache = make()
    assert all(map(in_a_range, _tensors(model.cache)))
    assert_nothing_resident(manager)
    with manager.phase(phase):
        assert_same(_tensors(model.cache), _tensors(make()))
    assert not any(bool((each == wanted).all()) for each, wanted in zip(_tensors(model.cache), _tensors(make()), strict=True))
    manager.close()
    assert_same(_tensors(model.cache), _tensors(make()))
    assert not any(map(in_a_range, _tensors(model.cache)))


@pytest.mark.parametrize("swaps", [True, False], ids=["swap", "rebind"])
def test_a_view_of_a_weight_in_an_object_stays_a_view(swaps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not swaps:
        monkeypatch.setattr(adoption, "can_swap", lambda: False)
    model, twin = net(), net()
    twin.load_state_dict(model.state_dict())
    model.held = Held(weight=model[0].weight, rows=model[0].weight.detach()[1:], shadow=[p.detach().clone() for p in model.parameters()])  # type: ignore[assignment]
    before = [each.clone() for each in model.held.shadow]
    sgd, other = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, twin))
    manager = make_manager()
    actor = manager.register("actor", model, role="actor")
    manager.register("sgd", sgd)
    for step in range(2):
        with manager.phase("train"):
            learn(model, sgd, step)
            assert_same(model.held.rows, model[0].weight.detach()[1:])
            assert model.held.rows.data_ptr() == model[0].weight[1:].data_ptr()
            assert_same(model.held.shadow, before)
        learn(twin, other, step)
        assert_nothing_resident(manager)
    assert_same(dict(actor.state_dict()), dict(twin.state_dict()))
    manager.close()
    assert_same(model.held.rows, twin[0].weight.detach()[1:])
    assert model.held.rows.data_ptr() == model[0].weight[1:].data_ptr()


LEFT: dict[str, Callable[[], torch.Tensor]] = {
    "sparse": lambda: torch.eye(4).to_sparse(),
    "shared": lambda: torch.ones(4).share_memory_(),
    "conjugated": lambda: torch.ones(4, dtype=torch.complex64).conj(),
}


@pytest.mark.parametrize("when", ["before", "in a phase"])
@pytest.mark.parametrize("form", LEFT)
def test_what_cannot_be_moved_is_left_and_named(form: str, when: str) -> None:
    model, manager = net(), make_manager()
    if when == "before":
        model.held = Held(it=LEFT[form]())  # type: ignore[assignment]
    actor = manager.register("actor", model, role="actor")
    with manager.phase("log_prob"):
        model.held = Held(it=LEFT[form]())  # type: ignore[assignment]
    assert actor.foreign_bytes > 0
    assert "held.it" in manager.audit().report
    with pytest.raises(AssertionError, match=r"held\.it"):
        assert_nothing_resident(manager)
    del model.held
    with manager.phase("log_prob"):
        pass
    assert_nothing_resident(manager)


def test_what_belongs_to_another_handle_or_cannot_be_seen_is_left_alone() -> None:
    model, critic, manager = net(), net(), make_manager()
    wanted = [parameter.detach().clone() for parameter in critic.parameters()]
    manager.register("critic", critic, role="critic")
    model.held = Held(critic=critic, weights=list(critic.parameters()), nothing=torch.empty(4, device="meta"))  # type: ignore[assignment]
    actor = manager.register("actor", model, role="actor")
    own = sum(parameter.nbytes for parameter in model.parameters())
    for phase in ("log_prob", "values", "log_prob"):
        with manager.phase(phase):
            if phase == "values":
                assert_same([parameter.detach() for parameter in critic.parameters()], wanted)
        assert_nothing_resident(manager)
    assert actor.num_bytes < 2 * own
    manager.unregister("actor")
    with manager.phase("values"):
        assert_same([parameter.detach() for parameter in critic.parameters()], wanted)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_what_autocast_has_cast_goes_with_the_weights(nested: bool, grad: bool) -> None:
    """Inside an open region autocast keeps a half-precision copy of each weight: half the model, and stale after a change."""
    model, manager = net(), make_manager()
    actor = manager.register("actor", model, role="actor")
    region = functools.partial(torch.autocast, "cpu", torch.bfloat16)
    with region(), region() if nested else contextlib.nullcontext():
        with manager.phase("log_prob"):
            model(batch())
        for value in actor.state_dict().values():
            value.fill_(0)  # the value from now on
        with manager.phase("log_prob"), torch.set_grad_enabled(grad):
            assert_same(model(batch()), torch.zeros(4, 8, dtype=torch.bfloat16))
    assert_nothing_resident(manager)
