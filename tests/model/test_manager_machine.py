"""Everything that users do, in any order, on a real manager: no byte is lost, and everything is where the plan says.

`HYPOTHESIS_PROFILE=nightly` runs for long. A failing example becomes a small test of its own in `test_found.py`.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from placement import Lazy, NotResidentError, PhaseError, State, TorchEngine
from placement.policies import Colocated, Resident
from tests.model.architectures import ARCHITECTURES, OPTIMIZERS, backward
from tests.model.drawn_policy import PHASES_USED, drawn_policies
from tests.model.shadow import Shadow
from tests.model.world import World

ANY = st.integers(0, 5)
ROLES = st.sampled_from(["actor", "actor", "ref", "critic", None])
PHASES = st.sampled_from(PHASES_USED + ("train", "train"))
ONLY = st.none() | st.frozensets(ANY, max_size=2)


def is_module(shadow: Shadow) -> bool:
    return isinstance(shadow.object, torch.nn.Module)


def is_optimizer(shadow: Shadow) -> bool:
    return shadow.optimizer_of is not None


def may_change(shadow: Shadow) -> bool:
    return not shadow.handle.readonly


def is_on(shadow: Shadow) -> bool:
    return shadow.handle.node[1] and shadow.handle.is_built


def is_off(shadow: Shadow) -> bool:
    return shadow.handle.is_built and not shadow.handle.node[1]


def trains(shadow: Shadow) -> bool:
    owner = shadow.optimizer_of
    return shadow.handle.state is State.TRAINING and (owner is None or owner.handle.state is State.TRAINING)


class ManagerMachine(World):
    """See `World` for what holds after every rule."""

    @initialize(
        policy=st.just(Colocated()) | st.just(Colocated("optimizer_step", stream_sync=True)) | st.just(Resident()) | drawn_policies(),
        budget=st.sampled_from([40_000, 80_000, 160_000]),
    )
    def begin(self, policy: Any, budget: int) -> None:
        torch.manual_seed(0)
        self.start(policy, budget if isinstance(policy, Resident) else None)

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "manager"):
            self.check_everything()

    def pick(self, found: list[Shadow], index: int) -> Shadow | None:
        return found[index % len(found)] if found else None

    def owned_by(self, shadow: Shadow) -> list[Shadow]:
        return self.shadows_that(lambda s: s.optimizer_of is shadow)

    # --- registration

    def register(self, name: str, target: Any, shadow: Shadow, **keywords: Any) -> None:
        """Register; when a fault or the budget forbids it, the object is as before."""
        shadow.learn()
        handles: list[Any] = []
        if self.border(lambda: handles.append(self.manager.register(name, target, **keywords)), checks_writes=False):
            shadow.handle = handles[0]
            shadow.learn() if not shadow.facts else None
            self.join(shadow)
        else:
            assert name not in self.manager.handles
            shadow.handle = _Unregistered()
            shadow.check()

    @precondition(lambda self: len(self.shadows) < 6)
    @rule(architecture=st.sampled_from(ARCHITECTURES), role=ROLES, readonly=st.booleans(), with_gradients=st.booleans())
    def register_module(self, architecture: Any, role: str | None, readonly: bool, with_gradients: bool) -> None:
        net = architecture()
        if with_gradients:
            backward(net, 0)
        readonly = readonly and role == "ref"
        net.train(not readonly)
        self.register(self.new_name(), net, Shadow(_Unregistered(), net), role=role, readonly=readonly)

    @precondition(lambda self: len(self.shadows) < 6)
    @rule(architecture=st.sampled_from(ARCHITECTURES))
    def register_engine(self, architecture: Any) -> None:
        engine = TorchEngine(architecture())
        self.register(self.new_name(), engine, Shadow(_Unregistered(), engine), role="rollout")

    @precondition(lambda self: len(self.shadows) < 6)
    @rule(architecture=st.sampled_from(ARCHITECTURES), role=ROLES)
    def register_lazy(self, architecture: Any, role: str | None) -> None:
        made: list[Any] = []

        def build() -> Any:
            made[:] = [architecture()]
            return made[0]

        self.register(self.new_name(), Lazy(build), Shadow(_Unregistered(), None, factory_object=made), role=role)

    @rule(index=ANY, kind=st.sampled_from(sorted(OPTIMIZERS)))
    def register_optimizer(self, index: int, kind: str) -> None:
        owner = self.pick(self.shadows_that(is_module, may_change, lambda s: not self.owned_by(s)), index)
        if owner is not None and len(self.shadows) < 8:
            optimizer = OPTIMIZERS[kind]([p for p in owner.object.parameters() if p.requires_grad])
            self.register(self.new_name(), optimizer, Shadow(_Unregistered(), optimizer, optimizer_of=owner))

    @rule(index=ANY)
    def unregister(self, index: int) -> None:
        shadow = self.pick(self.shadows_that(lambda s: not self.owned_by(s)), index)
        if shadow is not None and self.border(lambda: self.manager.unregister(shadow.handle), checks_writes=False):
            self.forget(shadow)
            if shadow.handle.is_built:
                shadow.check()

    @rule(index=ANY)
    def unregister_owner(self, index: int) -> None:
        shadow = self.pick(self.shadows_that(lambda s: bool(self.owned_by(s))), index)
        if shadow is not None:
            with pytest.raises(PhaseError, match="is stepped by"):
                self.manager.unregister(shadow.handle)

    @rule(index=ANY)
    def collect(self, index: int) -> None:
        """Drop the last reference to a registered object."""
        shadow = self.pick(self.shadows_that(lambda s: s.object is not None and not self.owned_by(s)), index)
        if shadow is None:
            return
        shadow.strays.clear()
        self.forget(shadow)
        gone = weakref.ref(shadow.object)
        shadow.object = None
        if gone() is not None:
            gc.collect()
        assert gone() is None
        if self.armed is not None:  # the fault hits the sweep; what follows it must still find the handle gone
            self.border(lambda: self.manager.check_integrity(), checks_writes=False)

    # --- phases

    def names(self, only: frozenset[int] | None) -> frozenset[str] | None:
        names = list(self.shadows)
        return None if only is None else frozenset(names[i % len(names)] for i in only if names)

    @precondition(lambda self: len(self.levels) < 4)
    @rule(name=PHASES, only=ONLY)
    def enter_with(self, name: str, only: frozenset[int] | None) -> None:
        names = self.names(only)
        self.open(name, names, self.manager.phase(name, only=names))

    @precondition(lambda self: len(self.levels) < 4)
    @rule(name=PHASES, only=ONLY)
    def enter_plain(self, name: str, only: frozenset[int] | None) -> None:
        self.open(name, self.names(only), None)

    @precondition(lambda self: self.levels)
    @rule(name=PHASES, only=ONLY)
    def switch(self, name: str, only: frozenset[int] | None) -> None:
        level, names = self.levels[-1], self.names(only)
        switch = self.manager.switch if level.phase is None else level.phase.switch
        kept = {name for name in level.kept if self.on_device(name)}
        if self.border(lambda: switch(name, only=names)):
            self.levels.pop()
            self.carried |= kept
            plan = self.limited(name, names, self.enclosing())
            self.carried = set()
            self.levels.append(type(level)(name, names, plan, level.phase))
            self.base = plan
        else:
            self.base = self.enclosing()

    @precondition(lambda self: self.levels)
    @rule(error=st.none() | st.just(ValueError("the user's")))
    def leave(self, error: Exception | None) -> None:
        phase = self.levels[-1].phase
        if phase is None:
            self.leave_innermost(self.manager.leave)
        else:
            self.leave_innermost(lambda: phase.__exit__(None, None, None))

    @precondition(lambda self: self.levels and self.levels[-1].phase is not None)
    @rule()
    def drop(self) -> None:
        """A generator that is never finished: its phase closes when it is dropped."""

        def drop() -> None:
            self.levels[-1].phase = None
            self.manager.check_integrity()

        armed, self.armed = self.armed, None  # a failure inside `__del__` can only be logged
        written, self.was_written = self.was_written, False
        del armed, written
        self.leave_innermost(drop, carries=False)

    @precondition(lambda self: len(self.levels) > 1)
    @rule(index=ANY)
    def leave_out_of_order(self, index: int) -> None:
        level = self.levels[index % (len(self.levels) - 1)]
        if level.phase is not None:
            with pytest.raises(PhaseError, match="leave it first"):
                level.phase.__exit__(None, None, None)
            with pytest.raises(PhaseError, match="leave it first"):
                level.phase.switch("train")
        elif self.levels[-1].phase is not None:
            with pytest.raises(PhaseError, match="leave it first"):
                self.manager.leave()

    @precondition(lambda self: self.levels and self.levels[-1].phase is not None)
    @rule(index=ANY)
    def keep(self, index: int) -> None:
        shadow, level = self.pick(list(self.shadows.values()), index), self.levels[-1]
        if shadow is not None and level.phase is not None:
            level.phase.keep(shadow.handle)
            level.kept.add(shadow.handle.name)

    # --- values

    @rule(index=ANY, seed=ANY)
    def gradients(self, index: int, seed: int) -> None:
        shadow = self.pick(self.shadows_that(is_module, is_on, lambda s: any(p.requires_grad for p in s.object.parameters())), index)
        if shadow is not None:
            backward(shadow.object, seed)
            shadow.learn()

    @rule(index=ANY, seed=ANY)
    def step(self, index: int, seed: int) -> None:
        shadow = self.pick(self.shadows_that(is_optimizer, trains), index)
        if shadow is not None:
            owner = shadow.optimizer_of
            backward(owner.object, seed)
            shadow.object.step()
            owner.learn()
            shadow.learn()

    @rule(index=ANY, way=st.sampled_from(["data", "in place", "view", "attribute"]))
    def write(self, index: int, way: str) -> None:
        shadow = self.pick(self.shadows_that(is_module, may_change, trains), index)
        if shadow is None:
            return
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

    @rule(index=ANY, to_none=st.booleans())
    def zero_grad(self, index: int, to_none: bool) -> None:
        shadow = self.pick(self.shadows_that(is_module), index)
        if shadow is None:
            return
        has_gradients = any(p.grad is not None for p in shadow.object.parameters())
        shadow.object.zero_grad(set_to_none=to_none)
        if to_none or is_on(shadow):
            shadow.learn()
        elif has_gradients:
            self.was_written = True

    @rule(index=ANY)
    def load_state_dict(self, index: int) -> None:
        shadow = self.pick(self.shadows_that(is_module, may_change, trains), index)
        if shadow is not None and not any("lora" in name for name in shadow.facts):
            shadow.object.load_state_dict(type(shadow.object)().state_dict())
            shadow.learn()

    @rule(index=ANY)
    def reload_optimizer(self, index: int) -> None:
        shadow = self.pick(self.shadows_that(is_optimizer, trains), index)
        if shadow is not None:
            shadow.dicts.clear()
            shadow.object.load_state_dict(shadow.object.state_dict())
            shadow.learn()

    @rule(index=ANY)
    def hold_state_dict(self, index: int) -> None:
        shadow = self.pick(self.shadows_that(lambda s: is_module(s) or is_optimizer(s)), index)
        if shadow is not None and len(shadow.dicts) < 3:
            shadow.dicts.append(shadow.state_dict())

    @rule(index=ANY)
    def hold_stray(self, index: int) -> None:
        shadow = self.pick(self.shadows_that(is_module, is_on), index)
        if shadow is not None:
            shadow.strays.append(next(iter(shadow.object.parameters())).detach())

    @rule(index=ANY)
    def drop_strays(self, index: int) -> None:
        shadow = self.pick(self.shadows_that(lambda s: bool(s.strays)), index)
        if shadow is not None:
            shadow.strays.clear()

    @rule(index=ANY, way=st.sampled_from(["data", "half", "replace"]))
    def drift(self, index: int, way: str) -> None:
        shadow = self.pick(self.shadows_that(is_module, may_change, trains), index)
        if shadow is None:
            return
        net = shadow.object
        shadow.dicts.clear()  # what they show is not the object's any more
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

    @rule(index=ANY)
    def add_parameter(self, index: int) -> None:
        """As LoRA does, in every state."""
        shadow = self.pick(self.shadows_that(is_module, may_change), index)
        if shadow is None:
            return
        added = torch.nn.Parameter(torch.randn(3, 5))
        shadow.object.register_parameter(f"lora_{len(shadow.facts)}", added)
        for optimizer in self.owned_by(shadow):
            optimizer.object.add_param_group({"params": [added]})
            optimizer.learn()
        shadow.learn()

    # --- mistakes and faults

    @rule(index=ANY)
    def use_offloaded(self, index: int) -> None:
        shadow = self.pick(self.shadows_that(is_off), index)
        if shadow is None:
            return
        if is_optimizer(shadow):
            with pytest.raises(NotResidentError):
                shadow.object.step()
        elif is_module(shadow):
            with pytest.raises(NotResidentError):
                shadow.object(torch.zeros(4, 32))
            with pytest.raises(NotResidentError):
                shadow.object.load_state_dict({})

    @rule(index=ANY)
    def step_too_early(self, index: int) -> None:
        shadow = self.pick(self.shadows_that(is_optimizer, is_on, lambda s: not trains(s)), index)
        if shadow is not None:
            with pytest.raises((PhaseError, NotResidentError)):
                shadow.object.step()

    @rule(index=ANY)
    def write_offloaded(self, index: int) -> None:
        shadow = self.pick(self.shadows_that(is_off), index)
        if shadow is None:
            return
        for tensor in shadow.tensors().values():
            if tensor.numel() and shadow.handle.holding.over_host(tensor) is not None:
                tensor.data.fill_(1)
                self.was_written = True
                return

    @rule(operation=st.sampled_from(["host", "reserve", "create", "map", "copy", "sync"]), at=st.integers(1, 4))
    def arm(self, operation: str, at: int) -> None:
        """The next border meets a fault."""
        self.armed = operation, at

    @rule()
    def audit(self) -> None:
        audit = self.manager.audit()
        written = [finding for finding in audit.findings if finding.what == "wrong_write"]
        assert bool(written) is self.was_written
        self.was_written = False
        assert not [f for f in audit.findings if f.what in ("broken", "unaccounted")]
        if self.is_settled:
            assert not [f for f in audit.findings if f.what == "leak"], audit.report

    def teardown(self) -> None:
        """Leaving placement: ordinary tensors with the same values, and nothing left on the device."""
        if not hasattr(self, "manager"):
            return
        self.armed = None
        while self.levels:
            self.leave(None)
        shadows = list(self.shadows.values())
        self.manager.close()
        for shadow in shadows:
            if shadow.handle.is_built:
                shadow.check()
        assert self.device.memory().chunk_bytes == 0


class _Unregistered:
    """Stands for the handle of an object that has none."""

    holding = None


TestManager = ManagerMachine.TestCase
