"""Everything that users do, in any order, on a real manager: no byte is lost, and everything is
where the plan says.

`HYPOTHESIS_PROFILE=nightly` runs for long. A failing example becomes a small test of its own in
`test_manager_machine_regressions.py`.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from placement import Lazy, PhaseError, State, TorchEngine
from placement.policies import Colocated, Cyclic, Resident
from tests.model.architectures import ARCHITECTURES, OPTIMIZERS, backward
from tests.model.phase_rules import FAULTS, Fault, Phases, drawn_policies
from tests.model.shadow import Shadow
from tests.model.values import about, is_engine, is_module, is_not_stepped, may_change
from tests.support.seeds import seed

pytestmark = pytest.mark.timeout(400)  # a minute, where nothing else runs

POLICIES = (
    Colocated(),
    Colocated("optimizer_step", stream_sync=True),
    Colocated("streamed"),
    Resident(),
    Cyclic(idle="empty"),
    Cyclic(optimizer_in="streamed", idle="empty"),
)
ROLES = st.sampled_from(["actor", "actor", "ref", "critic", None])


class ManagerMachine(Phases):
    """See `World` for what holds after every rule."""

    @initialize(
        policy=st.sampled_from(POLICIES) | drawn_policies(),
        budget=st.sampled_from([40_000, 80_000, 160_000]),
    )
    def begin(self, policy: Any, budget: int) -> None:
        seed(0)
        self.start(policy, budget if isinstance(policy, Resident | Cyclic) else None)

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "manager"):
            self.check_everything()

    # --- registration

    def register(self, name: str, target: Any, shadow: Shadow, **keywords: Any) -> None:
        """Register; when a fault or the budget forbids it, the object is as before."""
        shadow.learn()
        handles: list[Any] = []
        if self.transition(
            lambda: handles.append(self.manager.register(name, target, **keywords)),
            checks_writes=False,
        ):
            shadow.handle = handles[0]
            shadow.learn() if not shadow.facts else None
            self.join(shadow)
        else:
            assert name not in self.manager.handles
            shadow.handle = _Unregistered()
            shadow.check()

    @precondition(lambda self: len(self.shadows) < 6)
    @rule(
        architecture=st.sampled_from(ARCHITECTURES),
        role=ROLES,
        readonly=st.booleans(),
        with_gradients=st.booleans(),
        fault=FAULTS,
    )
    def register_module(
        self,
        architecture: Any,
        role: str | None,
        readonly: bool,
        with_gradients: bool,
        fault: Fault,
    ) -> None:
        self.armed = fault
        net = architecture()
        if with_gradients:
            backward(net, 0)
        readonly = readonly and role == "ref"
        net.train(not readonly)
        self.register(
            self.new_name(), net, Shadow(_Unregistered(), net), role=role, readonly=readonly
        )

    @precondition(lambda self: len(self.shadows) < 6)
    @rule(architecture=st.sampled_from(ARCHITECTURES), fault=FAULTS)
    def register_engine(self, architecture: Any, fault: Fault) -> None:
        self.armed = fault
        engine = TorchEngine(architecture())
        self.register(self.new_name(), engine, Shadow(_Unregistered(), engine), role="rollout")

    @precondition(lambda self: len(self.shadows) < 6)
    @rule(architecture=st.sampled_from(ARCHITECTURES), role=ROLES, fault=FAULTS)
    def register_lazy(self, architecture: Any, role: str | None, fault: Fault) -> None:
        self.armed = fault
        made: list[Any] = []

        def build() -> Any:
            made[:] = [architecture()]
            return made[0]

        self.register(
            self.new_name(),
            Lazy(build),
            Shadow(_Unregistered(), None, factory_object=made),
            role=role,
        )

    @about(
        is_module,
        may_change,
        is_not_stepped,
        kind=st.sampled_from(sorted(OPTIMIZERS)),
        fault=FAULTS,
    )
    def register_optimizer(self, owner: Shadow, kind: str, fault: Fault) -> None:
        self.armed = fault
        optimizer = OPTIMIZERS[kind]([p for p in owner.object.parameters() if p.requires_grad])
        self.register(
            self.new_name(), optimizer, Shadow(_Unregistered(), optimizer, optimizer_of=owner)
        )

    @about(is_not_stepped, fault=FAULTS)
    def unregister(self, shadow: Shadow, fault: Fault) -> None:
        self.armed = fault
        if shadow.is_tainted:
            self.armed = None
            return
        if self.transition(
            lambda: self.manager.unregister(shadow.handle), checks_writes=False, moves=False
        ):
            self.forget(shadow)
            if shadow.handle.is_built:
                shadow.check()

    @about(lambda each: bool(each.optimizers))
    def unregister_owner(self, shadow: Shadow) -> None:
        with pytest.raises(PhaseError, match="is stepped by"):
            self.manager.unregister(shadow.handle)

    @about(is_engine)
    def let_go_of_an_engine(self, shadow: Shadow) -> None:
        """The manager holds an engine, and with it the model, until it is unregistered."""
        engine = weakref.ref(shadow.object)
        shadow.object = None
        gc.collect()
        shadow.object = engine()
        assert shadow.object is not None

    @about(lambda each: each.object is not None and not is_engine(each), fault=FAULTS)
    def collect(self, shadow: Shadow, fault: Fault) -> None:
        """Drop the last reference to a registered object; what steps its parameters may live on."""
        self.armed = fault
        shadow.strays.clear()
        self.forget(shadow)
        gone = weakref.ref(shadow.object)
        shadow.object = None
        if gone() is not None:
            gc.collect()
        assert gone() is None
        # the fault hits the sweep; what follows it must still find the handle gone
        if self.armed is not None:
            self.transition(self.manager.check_integrity, checks_writes=False, moves=False)

    def teardown(self) -> None:
        """Leaving placement: ordinary tensors with the same values, and nothing left on the
        device."""
        if not hasattr(self, "manager"):
            return
        self.armed = None
        while self.levels:
            self.leave_innermost("return", None)
        shadows = list(self.shadows.values())
        self.manager.close()
        for shadow in shadows:
            if shadow.handle.is_built:
                shadow.check()
                self.orphans += [
                    (tensor, shadow.facts[name].data)
                    for held in shadow.dicts
                    for name, tensor in held.items()
                ]
        self.check_orphans()
        assert self.device.memory().chunk_bytes == 0


class _Unregistered:
    """Stands for the handle of an object that has none."""

    holding = None
    node = (State.CPU_OFFLOADED, True)
    """Its tensors are ordinary ones."""
    is_built = False


class FurtherMachine(ManagerMachine):
    """With another name hypothesis draws other programs."""


TestManager = ManagerMachine.TestCase
TestManager.settings = settings(max_examples=max(1, settings().max_examples // 6))
TestFurther = pytest.mark.sweep(FurtherMachine.TestCase)
TestFurther.settings = settings(max_examples=settings().max_examples * 7 // 6)
