"""State dicts that are computed: hooks, overridden methods and extra state see the values, wherever
the handle is."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from placement import Handle, Manager, NotResidentError
from placement.registration.state_dicts import is_reading
from placement.testing import assert_nothing_resident
from tests.support.worker import assert_same, learn, make_manager, net, through_a_file


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    yield
    assert not is_reading()


class Layer(torch.nn.Linear):
    """A linear layer with a buffer and a plain tensor attribute."""

    def __init__(self) -> None:
        super().__init__(6, 6)
        self.register_buffer("seen", torch.arange(4.0))
        self.scale = torch.tensor([1.5, -0.0, 2.0])


def cast(layer: torch.nn.Module, found: dict[str, Any], prefix: str, _: Any) -> None:
    found[prefix + "weight"] = found[prefix + "weight"].to(torch.bfloat16)


def double(_: torch.nn.Module, found: dict[str, Any], prefix: str, __: Any) -> None:
    found.update({name: value * 2 for name, value in found.items() if name.startswith(prefix)})


class SavesItself(Layer):
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "packed"] = torch.cat([self.weight.flatten(), self.bias, self.scale])


class Extra(Layer):
    """As Transformer Engine and torchao do: extra state of any kind, computed in any way."""

    def get_extra_state(self) -> dict[str, Any]:
        return {
            "amax": self.weight.detach().abs().max(),
            "file": through_a_file({"weight": self.weight, "seen": self.seen}, weights_only=False),
            "pickled": pickle.loads(pickle.dumps(self.scale)),
            "norms": torch._foreach_norm([self.weight.detach(), self.bias.detach()]),
            "out": torch.add(self.bias.detach(), 1, out=torch.empty(6)),
            "scale": self.scale,
        }

    def set_extra_state(self, state: Any) -> None:
        pass


class Overridden(Layer):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {
            f"{name}.half": value.to(torch.float16)
            for name, value in super().state_dict(*args, **kwargs).items()
        }


class Alone(Layer):
    """It asks nobody, and shows live tensors in containers of its own."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return OrderedDict(
            weight=self.weight.detach(),
            nested={"pair": (self.bias.detach(), self.scale)},
            total=self.weight.detach().sum(),
        )


class Phased(Layer):
    """It goes where it can gather."""

    manager: Manager

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        with self.manager.phase("log_prob"):
            return {
                name: value.clone() for name, value in super().state_dict(*args, **kwargs).items()
            }


KINDS: dict[str, tuple[type[Layer], Callable[[Layer], Any]]] = {
    "cast": (Layer, lambda layer: layer._register_state_dict_hook(cast)),
    "computed": (Layer, lambda layer: layer.register_state_dict_post_hook(double)),
    "saves itself": (SavesItself, lambda _: None),
    "extra state": (Extra, lambda _: None),
    "overridden": (Overridden, lambda _: None),
    "alone": (Alone, lambda _: None),
    "wrapped around": (Layer, torch.nn.utils.parametrizations.weight_norm),
    "phased": (Phased, lambda _: None),
}


def make(kind: str) -> tuple[Manager, Handle, Layer]:
    cls, prepare = KINDS[kind]
    layer = cls()
    prepare(layer)
    manager = make_manager()
    if isinstance(layer, Phased):
        layer.manager = manager
    return manager, manager.register("actor", layer, role="actor"), layer


@pytest.mark.parametrize("kind", KINDS)
def test_computed_state_dicts_are_the_same_while_offloaded(kind: str) -> None:
    manager, handle, layer = make(kind)
    placed = {
        name: (id(p), p.data_ptr(), p._version, p.requires_grad)
        for name, p in layer.named_parameters()
    }
    with manager.phase("log_prob"):
        held = [layer.state_dict()]
        wanted = copy.deepcopy(held[0])
    for ask in (layer.state_dict, handle.state_dict, lambda: layer.state_dict(prefix="")):
        found = ask()
        assert_same(dict(found), dict(wanted))
        assert type(found) is type(wanted)
        held.append(found)
    assert not is_reading()
    assert_nothing_resident(manager)
    with manager.phase("train"), torch.no_grad():
        assert {
            name: (id(p), p.data_ptr(), p._version, p.requires_grad)
            for name, p in layer.named_parameters()
        } == placed
    # what is a copy stays as it is; live tensors show what the object has, and are no stray
    # references
    for each in held:
        assert_same(dict(each), dict(wanted))
    assert manager.audit().ok, manager.audit()
    manager.close()
    for each in held:
        assert_same(dict(each), dict(wanted))


class Packing(torch.optim.AdamW):
    """Moments in half the bytes, and what it computes from its parameters."""

    def state_dict(self) -> Any:
        found = super().state_dict()
        found["norms"] = [
            parameter.norm() for group in self.param_groups for parameter in group["params"]
        ]
        found["state"] = {
            key: {name: value.bfloat16() for name, value in entry.items()}
            for key, entry in found["state"].items()
        }
        return found


def cloned(_: Any, found: dict[str, Any]) -> dict[str, Any]:
    return {
        **found,
        "state": {
            key: {name: value * 3 for name, value in entry.items()}
            for key, entry in found["state"].items()
        },
    }


@pytest.mark.parametrize("kind", ["post hook", "overridden"])
def test_an_optimizer_computes_its_state_dict_from_the_host_copy(kind: str) -> None:
    model = net()
    optimizer = (
        torch.optim.AdamW(model.parameters())
        if kind == "post hook"
        else Packing(model.parameters())
    )
    if kind == "post hook":
        optimizer.register_state_dict_post_hook(cloned)
    manager = make_manager()
    manager.register("actor", model, role="actor")
    handle = manager.register("actor.optimizer", optimizer)
    assert not optimizer.state_dict()["state"]
    with manager.phase("train"):
        learn(model, optimizer)
        wanted = copy.deepcopy(optimizer.state_dict())
    assert_same(optimizer.state_dict(), wanted)
    assert_same(handle.state_dict(), wanted)
    with manager.phase("optimizer_step"):
        assert_same(optimizer.state_dict(), wanted)
    assert manager.audit().ok


def test_writes_of_a_hook_reach_the_values() -> None:
    manager, layer = make_manager(), Layer()

    def write(module: Any, found: dict[str, Any], prefix: str, _: Any) -> None:
        with torch.no_grad():
            assert module.weight.zero_() is module.weight
            module.bias[:2] = 7.0
            module.seen += 1  # a buffer is assigned what an in-place operation returns

    layer._register_state_dict_hook(write)
    seen = layer.seen
    manager.register("actor", layer, role="actor")
    for phase in range(2):
        layer.state_dict()
        with manager.phase("log_prob"):
            assert not layer.weight.any()
            assert layer.bias[:2].eq(7.0).all()
            assert layer.seen is seen
            assert layer.seen.equal(torch.arange(4.0) + phase + 1)
    manager.check_integrity()
    assert manager.audit().ok


def test_a_hook_that_raises_leaves_nothing_behind() -> None:
    manager, layer = make_manager(), Layer()
    fails = [KeyboardInterrupt, ZeroDivisionError, RuntimeError]

    def fail(*_: Any) -> None:
        if fails:
            raise fails.pop()

    layer._register_state_dict_hook(fail)
    wanted = {name: value.detach().clone() for name, value in layer.named_parameters()}
    manager.register("actor", layer, role="actor")
    for error in (RuntimeError, ZeroDivisionError, KeyboardInterrupt):
        with pytest.raises(error) as caught:
            layer.state_dict()
        if error is not KeyboardInterrupt:
            assert "'actor' is CPU_OFFLOADED in phase 'idle'" in caught.value.__notes__[0]
        assert not is_reading()
        assert layer.weight.isnan().all(), "outside of a state dict nothing reads the host copy"
    assert_same({name: layer.state_dict()[name] for name in wanted}, wanted)


def test_values_computed_in_another_thread_are_refused_by_name() -> None:
    """Only the thread of the call reads the host copy: there is an error in place of poison."""
    manager, layer = make_manager(), Layer()

    def elsewhere(module: Any, found: dict[str, Any], prefix: str, _: Any) -> None:
        with ThreadPoolExecutor(1) as threads:
            found[prefix + "weight"] = threads.submit(copied).result()

    def copied() -> torch.Tensor:
        return layer.weight.detach().clone()

    layer._register_state_dict_hook(elsewhere)
    manager.register("actor", layer, role="actor")
    with pytest.raises(
        NotResidentError,
        match=r"weight of the state dict of 'actor' "
        r"came "
        r"out "
        r"as "
        r"NaN.*CPU_OFFLOADED in phase 'idle'",
    ):
        layer.state_dict()
    with manager.phase("log_prob"):
        assert layer.state_dict()["weight"].isfinite().all()


def test_true_nans_are_shown() -> None:
    manager, layer = make_manager(), Layer()
    with torch.no_grad():
        layer.weight[0, 0] = float("nan")
    layer._register_state_dict_hook(cast)
    wanted = layer.weight.detach().bfloat16()
    manager.register("actor", layer, role="actor")
    assert_same(layer.state_dict()["weight"], wanted)


READS: list[Callable[[torch.Tensor], Any]] = [
    lambda t: t.clone(),
    lambda t: t.to(torch.bfloat16).float(),
    lambda t: t[1:].sum(),
    lambda t: t.reshape(-1).sort().values,
    lambda t: torch.cat((t.flatten(), t.flatten())),
    lambda t: torch.einsum("ij,kj->ik", t, t),
    lambda t: torch.nn.functional.layer_norm(t, t.shape[1:]),
    lambda t: torch.tensor([float(value) for row in t.detach() for value in row]),
    lambda t: torch.from_numpy(t.detach().numpy().copy()),
    lambda t: pickle.loads(pickle.dumps(t.detach())),
    lambda t: torch.frombuffer(bytearray(bytes(t.untyped_storage())), dtype=torch.uint8),
    lambda t: torch.utils.dlpack.from_dlpack(t.detach()).clone(),
    lambda t: torch.empty_like(t).copy_(t),
    lambda t: t.new_zeros(t.shape).add_(t),
    torch.ops.aten.clone.default,
    lambda t: max(t.detach().flatten().unbind()),
    lambda t: torch.tensor([t.requires_grad, t.is_leaf, t.is_contiguous(), t._version, t.dim()]),
]


@settings(deadline=None)
@given(read=st.sampled_from(READS), also=st.sampled_from(READS), requires_grad=st.booleans())
def test_every_way_of_reading_gives_the_value(
    read: Callable[[Any], Any], also: Callable[[Any], Any], requires_grad: bool
) -> None:
    model = torch.nn.Linear(5, 4, bias=False).requires_grad_(requires_grad)

    def compute(module: Any, found: dict[str, Any], prefix: str, _: Any) -> None:
        value = read(module.weight).detach()
        found["found"] = value, also(value.reshape(1, -1).float())

    model._register_state_dict_hook(compute)
    wanted = copy.deepcopy(model.state_dict()["found"])
    manager = make_manager()
    manager.register("actor", model, role="actor")
    assert_same(model.state_dict()["found"], wanted)
    manager.close()


def test_a_method_that_the_user_put_on_the_object_is_called_and_comes_back() -> None:
    manager, model = make_manager(), torch.nn.Linear(4, 4)
    plain = model.state_dict
    mine = (
        lambda self, *_, **__: {"mine": plain()["weight"] * 2, "bias": self.bias.detach().clone()}
    ).__get__(model, type(model))
    model.state_dict = mine  # type: ignore[method-assign]
    wanted = copy.deepcopy(model.state_dict())
    handle = manager.register("actor", model, role="actor")
    assert_same(handle.state_dict(), wanted)
    assert_same(model.state_dict(), wanted)
    with manager.phase("log_prob"):
        assert_same(model.state_dict(), wanted)
    manager.unregister("actor")
    assert model.__dict__["state_dict"] is mine


@pytest.mark.parametrize("cls", [torch.optim.AdamW, Packing])
def test_nothing_can_be_loaded_into_an_optimizer_that_has_nothing(
    cls: type[torch.optim.Optimizer],
) -> None:
    """Accelerate's wrapper does so with the optimizer's own state dict."""
    manager, model = make_manager(), net()
    optimizer = cls(model.parameters(), lr=1e-2)  # type: ignore[call-arg]
    manager.register("actor", model, role="actor")
    manager.register("actor.optimizer", optimizer)
    empty = optimizer.state_dict()
    empty["param_groups"][0]["lr"] = 0.5
    optimizer.load_state_dict(empty)
    assert optimizer.param_groups[0]["lr"] == 0.5
    with manager.phase("train"):
        learn(model, optimizer)
        full = copy.deepcopy(torch.optim.Optimizer.state_dict(optimizer))
    with pytest.raises(NotResidentError, match=r"'actor.optimizer'.*cannot be given a state dict"):
        optimizer.load_state_dict(empty)
    optimizer.state.clear()
    with pytest.raises(NotResidentError, match=r"'actor.optimizer'.*cannot be given a state dict"):
        optimizer.load_state_dict(full)


class References(dict[str, Any]):
    """Keeps weak references, and shows tensors."""

    def items(self) -> Any:
        return [(key, reference()) for key, reference in super().items()]


def test_a_dictionary_with_items_of_its_own_is_read_by_them() -> None:
    class Extra(torch.nn.Linear):
        def get_extra_state(self) -> Any:
            return References(weight=weakref.ref(self.weight))

        def set_extra_state(self, state: Any) -> None:
            pass

    model = Extra(4, 4)
    weight = model.weight.detach().clone()
    manager = make_manager()
    handle = manager.register("actor", model, role="actor")
    assert torch.equal(handle.state_dict()["_extra_state"]["weight"], weight)
