"""Rules about values: what users do to their tensors, legally and not, and what they read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from placement import NotResidentError, PhaseError, State, TorchEngine
from tests.model.architectures import backward
from tests.model.shadow import Facts, Shadow, raw
from tests.model.world import REPLACED, World

ANY = st.integers(0, 5)
WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "fill_": lambda tensor: tensor.data.fill_(1),
    "mul_": lambda tensor: tensor.mul_(0.5),
    "mul_ through data": lambda tensor: tensor.data.mul_(0.5),
    "copy_ of poison": lambda tensor: tensor.data.copy_(tensor.detach().clone()),
}
"""Into offloaded memory. All but the first leave the bytes of float32 poison as they were."""
REPLACES: dict[str, Callable[[torch.Tensor], object]] = {
    "data": lambda tensor: setattr(tensor, "data", torch.ones_like(tensor)),
    "half": lambda tensor: setattr(tensor, "data", tensor.data.half()),
    "share": lambda tensor: tensor.untyped_storage().share_memory_(),
}
Wanted = Callable[[Shadow], bool]


def is_module(shadow: Shadow) -> bool:
    return isinstance(shadow.object, torch.nn.Module)


def is_optimizer(shadow: Shadow) -> bool:
    return isinstance(shadow.object, torch.optim.Optimizer)


def has_state_dict(shadow: Shadow) -> bool:
    return (is_module(shadow) or is_optimizer(shadow)) and not shadow.is_tainted


def may_change(shadow: Shadow) -> bool:
    return not shadow.handle.readonly


def is_trainable(shadow: Shadow) -> bool:
    return not shadow.is_tainted and any(p.requires_grad for p in shadow.object.parameters())


def is_not_stepped(shadow: Shadow) -> bool:
    return not shadow.optimizers


def is_engine(shadow: Shadow) -> bool:
    return isinstance(shadow.object, TorchEngine)


def is_on(shadow: Shadow) -> bool:
    return shadow.handle.is_on_device and shadow.handle.is_built


def is_off(shadow: Shadow) -> bool:
    return (
        shadow.handle.is_built
        and not shadow.handle.is_on_device
        and not (is_optimizer(shadow) and trains(shadow))
    )


def trains(shadow: Shadow) -> bool:
    owner = shadow.optimizer_of
    return shadow.handle.state is State.TRAINING and (
        owner is None or owner.handle.state is State.TRAINING
    )


def about(*wanted: Wanted, **drawn: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A rule about one of the registered objects that are so, which it gets. It runs only when
    there is one."""

    def made(method: Callable[..., None]) -> Callable[..., None]:
        def run(self: World, index: int, **values: Any) -> None:
            found = self.shadows_that(*wanted)
            method(self, found[index % len(found)], **values)

        run.__name__ = method.__name__
        return precondition(
            lambda self: bool(hasattr(self, "manager") and self.shadows_that(*wanted))
        )(rule(index=ANY, **drawn)(run))

    return made


class Values(World):
    """See `World` for what holds after every rule."""

    # --- values

    @about(is_module, is_on, is_trainable, seed=ANY)
    def gradients(self, shadow: Shadow, seed: int) -> None:
        backward(shadow.object, seed)
        shadow.learn()

    @about(is_optimizer, trains, lambda each: each.optimizer_of is not None, seed=ANY)
    def step(self, shadow: Shadow, seed: int) -> None:
        owner = shadow.optimizer_of
        assert owner is not None
        backward(owner.object, seed)
        shadow.object.step()
        owner.learn()
        shadow.learn()

    @about(
        is_module,
        may_change,
        trains,
        way=st.sampled_from(["data", "in place", "view", "attribute"]),
    )
    def write(self, shadow: Shadow, way: str) -> None:
        tensor = next(iter(shadow.object.parameters()))
        with torch.no_grad():
            if way == "data":
                tensor.data.add_(1)
            elif way == "in place":
                tensor.mul_(0.5)
            elif way == "view":
                tensor[0].zero_()
            else:
                for value in getattr(shadow.object, "ema", {}).values():
                    value.lerp_(torch.ones(()), 0.1)
        shadow.learn()

    @about(is_module, is_on, lambda each: each.handle.readonly and not each.dicts)
    def write_readonly(self, shadow: Shadow) -> None:
        """Never copied back: the next offload restores the registered values and says so."""
        next(iter(shadow.object.parameters())).data.add_(1)
        shadow.is_tainted = True

    @about(is_module, to_none=st.booleans())
    def zero_grad(self, shadow: Shadow, to_none: bool) -> None:
        if not to_none and is_off(shadow):
            self.zero_offloaded(shadow)
            return
        shadow.object.zero_grad(set_to_none=to_none)
        shadow.learn_gradients()

    def zero_offloaded(self, shadow: Shadow) -> None:
        """Gradients that are zeroed where only poison is: the zeros count, and nothing else has
        changed."""
        if self.was_written:
            return
        shadow.object.zero_grad(set_to_none=False)
        assert not [
            finding for finding in self.manager.audit().findings if finding.what == "wrong_write"
        ]
        for name, facts in shadow.facts.items():
            if name.endswith(".grad"):
                shadow.facts[name] = Facts(bytes(len(facts.data)), facts.layout, facts.identity)

    @about(
        is_module, may_change, trains, lambda each: not any("lora" in name for name in each.facts)
    )
    def load_state_dict(self, shadow: Shadow) -> None:
        shadow.object.load_state_dict(type(shadow.object)().state_dict())
        shadow.learn()

    @about(is_optimizer, trains, is_on, was_held=st.booleans())
    def reload_optimizer(self, shadow: Shadow, was_held: bool) -> None:
        """Load back a state dict of its own, one taken in another state too."""
        held = (
            shadow.full_dicts.pop()
            if was_held and shadow.full_dicts
            else shadow.object.state_dict()
        )
        shadow.full_dicts.clear()
        shadow.dicts.clear()
        shadow.object.load_state_dict(held)
        shadow.learn()

    @about(has_state_dict)
    def hold_state_dict(self, shadow: Shadow) -> None:
        if len(shadow.dicts) < 3:
            shadow.dicts.append(shadow.state_dict())
            if is_optimizer(shadow):
                shadow.full_dicts[:] = [shadow.object.state_dict()]

    @about(
        is_module,
        lambda each: each.handle.state is State.SYNCING,
        bucket_bytes=st.sampled_from([1, 4096, 1 << 20]),
    )
    def publish(self, shadow: Shadow, bucket_bytes: int) -> None:
        """What is published is what is there, on the device or streamed from the host copy."""
        names = []
        for bucket in shadow.handle.weights(bucket_bytes=bucket_bytes):
            for name, tensor in bucket:
                names.append(name)
                assert shadow.is_tainted or raw(tensor) == shadow.facts[name].data, name
        assert names == [each.name for each in shadow.handle.weights_info()]

    @about(is_module, is_on)
    def hold_stray(self, shadow: Shadow) -> None:
        stray = next(iter(shadow.object.parameters())).detach()
        # born since the last offload: not counted yet
        if shadow.handle.holding.read_host(stray) is not None:
            shadow.strays.append(stray)

    @about(lambda each: bool(each.strays))
    def drop_strays(self, shadow: Shadow) -> None:
        shadow.strays.clear()

    @about(is_module, may_change, trains, way=st.sampled_from(["data", "half", "replace"]))
    def drift(self, shadow: Shadow, way: str) -> None:
        net = shadow.object
        shadow.dicts.clear()  # what they show is not the object's any more
        shadow.strays.clear()
        if way == "half":
            net.half().float()
        else:
            path, parameter = next(iter(net.named_parameters()))
            new = parameter.detach().clone() + 1
            if way == "data":
                parameter.data = new
            else:
                owner, _, name = path.rpartition(".")
                setattr(net.get_submodule(owner), name, torch.nn.Parameter(new))
        shadow.learn()

    @about(is_module, may_change)
    def add_parameter(self, shadow: Shadow) -> None:
        """As LoRA does, in every state."""
        name, added = (
            f"lora_{len(shadow.object._parameters)}",
            torch.nn.Parameter(torch.randn(3, 5)),
        )
        if is_off(shadow):
            self.unreported.add((shadow.handle.name, name))
        shadow.object.register_parameter(name, added)
        for optimizer in shadow.optimizers:
            optimizer.object.add_param_group({"params": [added]})
            optimizer.full_dicts.clear()  # they know nothing of the new parameter
            optimizer.learn()
        shadow.learn()

    # --- mistakes

    @about(is_off)
    def use_offloaded(self, shadow: Shadow) -> None:
        if is_optimizer(shadow):
            with pytest.raises(
                (NotResidentError, PhaseError) if shadow.handle.is_streaming else NotResidentError
            ):
                shadow.object.step()
        elif is_module(shadow):
            with pytest.raises(NotResidentError):
                shadow.object(torch.zeros(4, 32))
            with pytest.raises(NotResidentError):
                shadow.object.load_state_dict({})

    @about(is_optimizer, is_on, lambda each: not trains(each))
    def step_too_early(self, shadow: Shadow) -> None:
        with pytest.raises((PhaseError, NotResidentError)):
            shadow.object.step()

    @about(is_off, which=ANY, way=st.sampled_from(sorted(WRITES)))
    def write_offloaded(self, shadow: Shadow, which: int, way: str) -> None:
        tensors = shadow.tensors().values()
        placed = [
            each
            for each in tensors
            if each.numel() and shadow.handle.holding.read_host(each) is not None
        ]
        if placed:
            tensor = placed[which % len(placed)]
            with torch.no_grad():
                WRITES[way if tensor.is_floating_point() else "fill_"](tensor)
            self.was_written = True

    @about(is_off, way=st.sampled_from(sorted(REPLACES)), phase=st.sampled_from(["train", None]))
    def replace_offloaded(self, shadow: Shadow, way: str, phase: str | None) -> None:
        """A phase that needs it is refused; `restore` brings everything back."""
        holding = shadow.handle.holding
        placed = [
            each
            for each in shadow.tensors().values()
            if each.is_leaf
            and each.numel()
            and each.is_floating_point()
            and each.dim()
            and holding.read_host(each) is not None
            and holding.has_place(each)
        ]
        name = shadow.handle.name
        if not placed or self.was_written or any(name == handle for handle, _ in self.unreported):
            return
        with torch.no_grad():
            REPLACES[way](placed[0])
        assert any(each.handle == shadow.handle.name for each in self.manager.audit().findings)
        self.unreported.add((name, REPLACED))
        if phase is not None and len(self.levels) < 4:
            self.armed = None
            context = self.manager.phase(phase)
            self.open(phase, None, context, context.__enter__)
            assert not shadow.handle.is_on_device
        shadow.handle.restore()
        self.unreported.discard((name, REPLACED))
        assert not [
            finding
            for finding in self.manager.audit().findings
            if finding.handle == shadow.handle.name
            and finding.what == "drift"
            # what was added has no place before a phase has the handle on the device
            and not finding.detail.startswith("lora_")
        ]

    @rule()
    def audit(self) -> None:
        audit = self.manager.audit()
        written = [finding for finding in audit.findings if finding.what == "wrong_write"]
        assert bool(written) is self.was_written
        assert not [f for f in audit.findings if f.what in ("broken", "unaccounted")]
        if self.is_settled:
            assert not [f for f in audit.findings if f.what == "leak"], audit.report
