"""Tensors in objects that modules hold (a KV cache, an attention mask, a teacher's shadow weights)
leave the device with the module."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections import deque, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask

import placement
from placement import Manager
from placement.devices import base
from placement.tensors.plain import nested_tensors
from placement.testing import assert_nothing_resident
from tests.ownership.test_optimizer_containers import more, run, values
from tests.support.worker import (
    assert_same,
    batch,
    in_a_range,
    learn,
    make_manager,
    net,
    through_a_file,
)


class Held:
    """Somebody's own class."""

    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)


class Slotted:
    __slots__ = ("keys",)

    def __init__(self, keys: Any) -> None:
        self.keys = keys


@dataclasses.dataclass(frozen=True)
class Frozen:
    keys: Any


def _ones() -> torch.Tensor:
    return torch.ones(300)


Pair = namedtuple("Pair", ["left", "right"])
HOLDERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "list of objects": lambda tensor: [Held(matrix=tensor)],
    "slots": lambda tensor: Slotted({"m": [tensor]}),
    "frozen": lambda tensor: Frozen((tensor, 3)),
    "deque": lambda tensor: deque([tensor], maxlen=2),
    "named tuple": lambda tensor: Pair(Held(matrix=tensor), 0),
}
"""They hold one tensor."""
FORMS: dict[str, Callable[[], Any]] = {
    **{name: functools.partial(lambda hold: hold(_ones()), hold) for name, hold in HOLDERS.items()},
    "layers": lambda: Held(
        layers=[Held(keys=_ones(), values=_ones()), Held(keys=_ones())], length=3
    ),
    "cross": lambda: Held(
        own=Held(layers=[Held(keys=_ones())]), cross=Held(layers=[Held(keys=_ones())])
    ),
    "mask": lambda: create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 128, 128, device="cpu"),
    "inference": torch.inference_mode()(lambda: Held(keys=_ones())),
}


def _tensors(held: Any) -> list[torch.Tensor]:
    return [tensor for _, tensor in nested_tensors(held, "", 3)]


WHEN = ("before", "in a phase", "steady")


@pytest.mark.parametrize(
    ("form", "engine", "when", "swaps"),
    [
        *((form, False, "before", True) for form in FORMS),
        *(("layers", False, when, swaps) for when in WHEN for swaps in (True, False)),
        ("layers", True, "steady", True),
    ],
)
def test_what_an_object_holds_leaves_with_the_module(
    form: str, engine: bool, when: str, swaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not swaps:
        monkeypatch.setattr(base, "can_swap", lambda: False)
    model, manager, make = net(), make_manager(), FORMS[form]
    phase = "rollout" if engine else "log_prob"
    cache: dict[str, Any] = {}
    model.cache = make() if when == "before" else None  # type: ignore[assignment]
    if when == "steady":
        model.cache = cache  # type: ignore[assignment]
    manager.register(
        "it",
        placement.TorchEngine(model) if engine else model,
        role="rollout" if engine else "actor",
    )
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
    assert not any(
        bool((each == wanted).all())
        for each, wanted in zip(_tensors(model.cache), _tensors(make()), strict=True)
    )
    manager.close()
    assert_same(_tensors(model.cache), _tensors(make()))
    assert not any(map(in_a_range, _tensors(model.cache)))


@pytest.mark.parametrize("swaps", [True, False], ids=["swap", "rebind"])
def test_a_view_of_a_weight_in_an_object_stays_a_view(
    swaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not swaps:
        monkeypatch.setattr(base, "can_swap", lambda: False)
    model, twin = net(), net()
    twin.load_state_dict(model.state_dict())
    model.held = Held(
        weight=model[0].weight,
        rows=model[0].weight.detach()[1:],
        shadow=[p.detach().clone() for p in model.parameters()],
    )  # type: ignore[assignment]
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
    model.held = Held(
        critic=critic, weights=list(critic.parameters()), nothing=torch.empty(4, device="meta")
    )  # type: ignore[assignment]
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
    """Inside an open region autocast keeps a half-precision copy of each weight: half the model,
    and stale after a change."""
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


class HeldState(torch.optim.SGD):
    """Keeps a mean of squared gradients in objects in its state."""

    def __init__(self, parameters: Any, form: str = "slots") -> None:
        super().__init__(parameters, lr=0.1)
        self.form = form

    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            entry = self.state[p]
            entry.setdefault("factor", HOLDERS[self.form](torch.zeros_like(p)))
            (mean,) = (tensor for _, tensor in nested_tensors(entry["factor"], "", levels=1))
            mean.lerp_(p.grad.square(), 0.1)
            p.data.sub_(p.grad / (mean.sqrt() + 1e-3), alpha=1e-3)

    def tensors(self) -> list[torch.Tensor]:
        return [tensor for _, tensor in nested_tensors([*self.state.values()], "", levels=4)]


@pytest.mark.parametrize("form", HOLDERS)
def test_tensors_in_objects_move_and_are_saved(form: str, tmp_path: Path) -> None:
    def made(model: nn.Module) -> HeldState:
        return HeldState(model.parameters(), form)

    twin, twins = run(made, 3)
    manager, other = make_manager(), make_manager()
    model, optimizer = run(made, 2, manager)
    mine = optimizer.tensors()
    assert len(mine) == 4
    assert all(torch.isnan(each).all() for each in mine)
    assert_nothing_resident(manager)
    handle = manager.handles["actor.optimizer"]
    assert handle.host_bytes >= sum(each.nbytes for each in mine)
    placement.checkpoint.save(manager, tmp_path)
    saved = [
        tensor
        for _, tensor in nested_tensors(
            through_a_file(handle.state_dict(), weights_only=False), "", levels=1
        )
    ]
    with manager.phase("train"):
        assert_same(saved, [each.clone() for each in mine])
    loaded = run(made, 0, other)
    placement.checkpoint.load(other, tmp_path)
    for each, its, its_manager in ((model, optimizer, manager), (*loaded, other)):
        more(each, its, its_manager, range(2, 3))
        assert_same(values(each, its_manager), values(twin))
        with its_manager.phase("train"):
            assert_same(copy.deepcopy(its.tensors()), twins.tensors())
    if form == "deque":
        assert {entry["factor"].maxlen for entry in loaded[1].state.values()} == {2}


def test_what_does_not_move_is_named() -> None:
    class Deep(HeldState):
        """Has tensors two objects deep, and in an attribute of its own."""

        def step(self, closure: Any = None) -> None:
            self.shadow = {"w": [torch.ones(7)], "scale": torch.ones(())}
            self.grads = [p.grad for p in self.param_groups[0]["params"]]
            for p in self.param_groups[0]["params"]:
                self.state[p]["deep"] = Held(matrix=Held(matrix=torch.ones(5)))

    manager, model = make_manager(), net(8)
    optimizer = Deep(model.parameters())
    manager.register("actor", model, role="actor")
    handle = manager.register("actor.optimizer", optimizer)
    with manager.phase("train"):
        learn(model, optimizer, 0, 8)
        del optimizer.grads
    audit = manager.audit()
    named = [f"state.{index}.deep.matrix.matrix" for index in range(4)] + ["Deep.shadow.w.0"]
    assert all(
        f"foreign: actor.optimizer: {name}, which is no part of its state" in audit.report
        for name in named
    )
    assert audit.foreign_bytes == handle.foreign_bytes == 4 * 20 + 28
    with pytest.raises(AssertionError, match=r"28 bytes on the device: .*Deep.shadow.w.0"):
        assert_nothing_resident(manager)
    assert_nothing_resident(manager, allow_foreign=True)


CACHES = ["attribute", "list", "buffer", "persistent", "view"]


class Rotary(nn.Module):
    """Makes its cache anew wherever it cannot use the one that it has, as model code does."""

    def __init__(self, form: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(64, 8)
        self.form, self.length = form, 0
        self.caches: list[torch.Tensor] = []
        self.table: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > self.length or (torch.is_grad_enabled() and self.cache.is_inference()):
            self.length = len(x)
            table = torch.cos(torch.arange(8.0) * len(x))
            if self.form == "attribute":
                self.table = table
            elif self.form == "list":
                self.caches = [table]
            elif self.form == "view":
                self.caches = [table, table[2:], table.view(2, 4)]
            else:
                self.register_buffer("table", table, persistent=self.form == "persistent")
        return self.linear(x) * self.cache

    @property
    def cache(self) -> torch.Tensor:
        return self.caches[0] if self.caches else self.table


def _managed(model: nn.Module, role: str, **keywords: Any) -> Manager:
    manager = make_manager(**keywords)
    target = placement.TorchEngine(model) if role == "rollout" else model
    manager.register("it", target, role=role, readonly=role == "ref")
    return manager


@pytest.mark.parametrize(
    ("form", "role", "policy", "swaps"),
    [
        *((form, "actor", "colocated", swaps) for form in CACHES for swaps in (True, False)),
        ("list", "actor", "resident", True),
        ("buffer", "ref", "colocated", True),
        ("attribute", "rollout", "colocated", False),
    ],
)
def test_a_cache_born_in_inference_mode_moves_with_its_module(
    form: str, role: str, policy: str, swaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not swaps:
        monkeypatch.setattr(base, "can_swap", lambda: False)
    model, twin = Rotary(form), Rotary(form)
    manager = _managed(model, role, policy=policy)
    phase = "rollout" if role == "rollout" else "log_prob"
    for rows in (2, 5, 5, 3):
        with manager.phase(phase), torch.inference_mode():
            assert_same(model(torch.ones(rows, 64)), twin(torch.ones(rows, 64)))
            assert model.cache.is_inference()
        if policy == "colocated":
            assert in_a_range(model.cache)
            assert bool(model.cache.isnan().all())
            assert_nothing_resident(manager)
    if role == "actor":
        sgd, other = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, twin))
        manager.register("it.optimizer", sgd)
        with manager.phase("train"):
            learn(model, sgd)
        learn(twin, other)
    assert_same(
        dict(manager.handles["it"].state_dict()) if role != "rollout" else {},
        dict(twin.state_dict()) if role != "rollout" else {},
    )
    manager.close()
    assert not in_a_range(model.cache)
    assert_same(model.cache, twin.cache)
    assert_same(dict(model.state_dict()), dict(twin.state_dict()))


def test_optimizer_state_born_in_inference_mode_moves() -> None:
    model = nn.Linear(64, 8)
    adam = torch.optim.AdamW(model.parameters())
    manager = _managed(model, "actor")
    handle = manager.register("adam", adam)
    with manager.phase("train"):
        model(torch.ones(1, 64)).sum().backward()
        with torch.inference_mode():
            adam.state[model.weight]["average"] = torch.full((8, 64), 3.0)
        adam.zero_grad()
    assert_nothing_resident(manager)
    assert bool((handle.state_dict()["state"][0]["average"] == 3).all())


# --- tensors in attributes of parameters and buffers: gradients in float32, momenta


HUNG: dict[str, Callable[[torch.Tensor], Any]] = {
    "tensor": lambda p: torch.ones(p.shape),
    "parameter": lambda p: nn.Parameter(torch.ones(p.shape)),
    "list": lambda p: [torch.ones(p.shape), 3],
    "dict": lambda p: {"exp_avg": torch.ones(p.shape), "step": 3},
    "object": lambda p: Held(first=Held(second=[torch.ones(p.shape)])),
    "alias": lambda p: p.detach(),
}


def _hung(module: nn.Module) -> list[torch.Tensor]:
    return [tensor for p in module.parameters() for tensor in _tensors(getattr(p, "hung", None))]


@pytest.mark.parametrize("when", ["before", "in a phase", "replaced"])
@pytest.mark.parametrize("form", HUNG)
def test_what_hangs_on_parameters_leaves_with_them(form: str, when: str) -> None:
    model, twin, manager = net(), net(), make_manager()
    twin.load_state_dict(model.state_dict())

    def hang(module: nn.Module) -> None:
        for p in module.parameters():
            p.hung = HUNG[form](p)  # type: ignore[attr-defined]
            p.is_tuned = True  # type: ignore[attr-defined]

    sgd, other = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, twin))
    if when != "in a phase":
        hang(model)
    hang(twin)
    actor = manager.register("actor", model, role="actor")
    manager.register("sgd", sgd)
    for step in range(3):
        with manager.phase("train"):
            if step == 1 and when != "before":
                hang(model)
            learn(model, sgd, step)
        learn(twin, other, step)
        assert all(map(in_a_range, _hung(model)))
        assert_nothing_resident(manager)
    with manager.phase("log_prob"):
        assert_same(_hung(model), _hung(twin))
    assert_same(dict(actor.state_dict()), dict(twin.state_dict()))
    manager.close()
    assert_same(_hung(model), _hung(twin))
    assert not any(map(in_a_range, _hung(model)))


def test_what_hangs_on_a_buffer_leaves_with_it() -> None:
    model, manager = nn.BatchNorm1d(4), make_manager()
    model.running_mean.before = torch.ones(300)  # type: ignore[union-attr]
    manager.register("actor", model, role="actor")
    assert in_a_range(model.running_mean.before)  # type: ignore[union-attr]
    assert_nothing_resident(manager)
    manager.close()
    assert_same([model.running_mean.before], [torch.ones(300)])  # type: ignore[union-attr]


def test_gradients_that_are_summed_on_parameters_are_stepped_as_without_placement() -> None:
    """By hooks, as fused kernels do outside Megatron's own buffers."""

    def story(model: nn.Module, phase: Callable[[], Any]) -> None:
        def add(p: Any) -> None:
            p.main_grad = p.grad.float() + getattr(p, "main_grad", 0)
            p.grad = None

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(add)
        for _ in range(2):
            with phase():
                model(batch(0)).square().mean().backward()
            with phase():
                model(batch(1)).square().mean().backward()
                for p in model.parameters():
                    p.data.sub_(p.main_grad, alpha=0.1)  # type: ignore[attr-defined]
                    p.main_grad.zero_()  # type: ignore[attr-defined]

    model, twin, manager = net(), net(), make_manager()
    twin.load_state_dict(model.state_dict())
    actor = manager.register("actor", model, role="actor")
    manager.register("sgd", torch.optim.SGD(model.parameters(), lr=0.1))
    story(model, lambda: manager.phase("train"))
    story(twin, contextlib.nullcontext)
    assert_same(dict(actor.state_dict()), dict(twin.state_dict()))
    assert_nothing_resident(manager)
    manager.close()


@pytest.mark.parametrize("is_born", [True, False])
def test_state_that_an_optimizer_keeps_on_its_parameters_too_is_the_modules(is_born: bool) -> None:
    class Momentum(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            for p in self.param_groups[0]["params"]:
                if "m" not in self.state[p]:
                    self.state[p]["m"] = p.m = torch.zeros_like(p)
                p.m.add_(p.grad)
                p.data.sub_(p.m, alpha=0.1)

    model, twin, manager = net(), net(), make_manager()
    twin.load_state_dict(model.state_dict())
    momentum, other = (Momentum(each.parameters(), lr=0.1) for each in (model, twin))
    if is_born:
        learn(model, momentum, 9)
        learn(twin, other, 9)
    actor = manager.register("actor", model, role="actor")
    handle = manager.register("momentum", momentum)
    for step in range(3):
        with manager.phase("train"):
            learn(model, momentum, step)
        learn(twin, other, step)
        assert_nothing_resident(manager)
    assert_same(dict(actor.state_dict()), dict(twin.state_dict()))
    assert_same(handle.state_dict()["state"], other.state_dict()["state"])
    manager.close()
    assert all(p.m is momentum.state[p]["m"] for p in model.parameters())  # type: ignore[attr-defined]


def test_a_tensor_of_another_handle_that_hangs_on_a_parameter_stays_its_own() -> None:
    model, teacher, manager = net(), net(), make_manager()
    manager.register("teacher", teacher, role="teacher")
    for p, theirs in zip(model.parameters(), teacher.parameters(), strict=True):
        p.theirs = theirs  # type: ignore[attr-defined]
    actor = manager.register("actor", model, role="actor")
    with manager.phase("log_prob"):
        assert actor.resident_bytes > 0
        assert manager.handles["teacher"].resident_bytes == 0
    assert_nothing_resident(manager)
    manager.close()
