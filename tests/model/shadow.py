"""What the model believes: the bytes, the identity and the layout of every tensor of one registered
object."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from placement import Handle, Plan, Trigger, View
from placement.core.call_guard import GuardedForward
from placement.engines.base import TorchEngine
from tests.model.architectures import state_of, tensors_of
from tests.support.poison import poison_like


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor's elements in order."""
    return (
        tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        if tensor.numel()
        else b""
    )


def readable(handle: Handle, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor where its bytes are authoritative: on the device while resident, else over the
    host copy."""
    holding = handle.holding
    if holding is None or holding.on_device:
        return tensor
    host = holding.read_host(tensor)
    return tensor if host is None else host


@dataclass(frozen=True)
class Facts:
    """One tensor, as it must be found again."""

    data: bytes
    layout: tuple[Any, ...]
    identity: int


@dataclass
class Shadow:
    """One registered object and what is known of it."""

    handle: Handle
    object: Any
    optimizer_of: Shadow | None = None
    optimizers: list[Shadow] = field(default_factory=list)
    """Registered ones that step this object."""
    factory_object: list[Any] = field(default_factory=list)
    """What a Lazy's factory has made."""
    facts: dict[str, Facts] = field(default_factory=dict)
    partition: frozenset[frozenset[str]] = frozenset()
    strays: list[torch.Tensor] = field(default_factory=list)
    dicts: list[dict[str, torch.Tensor]] = field(default_factory=list)
    """State dicts that a user holds; they follow the handle."""
    full_dicts: list[dict[str, Any]] = field(default_factory=list)
    """The last state dict of an optimizer as it was given, to be loaded back."""
    is_tainted: bool = False
    """Readonly and written on the device; `facts` has the registered values, which come back with
    the next offload."""
    offloads: int = 0
    outside: set[str] = field(default_factory=set)
    """Tensors that came while the object was offloaded: they get their place at the next
    offload."""

    @property
    def module(self) -> nn.Module | None:
        target = self.object if self.object is not None else next(iter(self.factory_object), None)
        if isinstance(target, TorchEngine):
            return target.module
        return target if isinstance(target, nn.Module) else None

    def tensors(self) -> dict[str, torch.Tensor]:
        if isinstance(self.object, torch.optim.Optimizer):
            return state_of(self.object)
        return {} if self.module is None else tensors_of(self.module)

    def learn(self) -> None:
        """The object was changed by its user just now: believe what is there."""
        live = self.tensors()
        if self.facts and not self.handle.is_on_device:
            self.outside |= live.keys() - self.facts.keys()
        self.facts = {name: self._facts(name, tensor) for name, tensor in live.items()}
        self.partition = _partition(live)

    def learn_gradients(self) -> None:
        """The user changed the gradients and nothing else."""
        live = self.tensors()
        kept = {name: facts for name, facts in self.facts.items() if not name.endswith(".grad")}
        self.facts = kept | {
            name: self._facts(name, tensor)
            for name, tensor in live.items()
            if name.endswith(".grad")
        }
        self.partition = _partition(live)

    def _facts(self, name: str, tensor: torch.Tensor) -> Facts:
        layout = (
            tensor.dtype,
            tuple(tensor.shape),
            tensor.stride(),
            tensor.storage_offset(),
            tensor.requires_grad,
        )
        # A gradient's Python object may be made anew; what it wraps is compared by its bytes.
        return Facts(
            raw(readable(self.handle, tensor)), layout, 0 if name.endswith(".grad") else id(tensor)
        )

    def check(self) -> None:
        """Nothing but its user may have changed anything."""
        if self.object is None and not self.handle.is_built:
            # what a factory made for a phase transition that failed is nobody's
            self.factory_object.clear()
            return
        self._look_for_offload()
        live = self.tensors()
        if self.object is None and not self.facts:
            self.learn()
        assert live.keys() == self.facts.keys(), (
            f"{self.handle!r}: {sorted(live.keys() ^ self.facts.keys())}"
        )
        for name, tensor in live.items():
            now, was = self._facts(name, tensor), self.facts[name]
            assert now.layout == was.layout, (
                f"{self.handle!r} {name}: layout {now.layout}, was {was.layout}"
            )
            assert now.identity == was.identity, f"{self.handle!r} {name} is another object"
            assert self.is_tainted or now.data == was.data, f"{self.handle!r} {name}: bytes differ"
        assert _partition(live) == self.partition, (
            f"{self.handle!r}: what shares a storage has changed"
        )
        for held in self.dicts:
            for name, tensor in held.items():
                assert raw(tensor) == self.facts[name].data, (
                    f"{self.handle!r} {name}: a state dict taken earlier reads something else"
                )

    def check_place(self, poisoned: bool) -> None:
        """Offloaded, every tensor lies in the address range, with poison behind it; whoever uses it
        meets a guard."""
        handle = self.handle
        assert handle.owners == (() if self.optimizer_of is None else (self.optimizer_of.handle,))
        if isinstance(self.object, nn.Module):
            assert self.object._load_state_dict_pre_hooks, f"{handle!r} has lost its guards"
            is_refused = isinstance(vars(self.object).get("forward"), GuardedForward)
            assert handle.holding is None or is_refused is not handle.holding.on_device, (
                f"{handle!r} can be called: {not is_refused}"
            )
        if not handle.is_built or handle.is_on_device:
            return
        for name, tensor in self.tensors().items():
            is_counter = isinstance(self.object, torch.optim.Optimizer) and tensor.dim() == 0
            if not tensor.numel() or name in self.outside or is_counter:
                continue
            assert handle.holding is not None
            assert handle.holding.read_host(tensor) is not None, (
                f"{handle!r} {name} was left behind"
            )
            assert not poisoned or raw(tensor) == raw(poison_like(tensor)), (
                f"{handle!r} {name} has no poison behind it"
            )

    def _look_for_offload(self) -> None:
        if self.handle.holding is None:
            return
        offloads = self.handle.counters.transitions[Trigger.OFFLOAD]
        if offloads != self.offloads:
            self.offloads, self.is_tainted = offloads, False
            self.outside.clear()
            # a phase transition that failed has brought it back: nothing is stray while it is there
            if not self.handle.is_on_device:
                assert self.handle.stray_references == len(self.strays) + self._num_stale(), (
                    self.handle.stray_names
                )

    def _num_stale(self) -> int:
        """Parameters that were replaced and that an optimizer goes on stepping, and their
        gradients: it holds storages that have no other use."""
        holding = self.handle.holding
        if holding is None or not isinstance(self.object, nn.Module):
            return 0
        own = {id(parameter) for parameter in self.object.parameters()}
        stepped = {
            id(p): p
            for each in self.optimizers
            for group in each.object.param_groups
            for p in group["params"]
        }
        stale = [
            tensor
            for key, each in stepped.items()
            if key not in own
            for tensor in (each, each.grad)
            if tensor is not None
        ]
        return sum(holding.read_host(tensor) is not None for tensor in stale)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The tensors of the handle's state dict, by the names that `tensors` uses."""
        found = self.handle.state_dict()
        if isinstance(self.object, torch.optim.Optimizer):
            state = found["state"]
            return {
                f"{i}.{key}": v
                for i, entry in state.items()
                for key, v in entry.items()
                if isinstance(v, torch.Tensor)
            }
        return {name: v for name, v in found.items() if isinstance(v, torch.Tensor)}

    def check_state_dict(self) -> None:
        """Reading a state dict gives the values, wherever they are."""
        if (
            self.handle.object is None
            or (self.module is not None and not hasattr(self.handle.object, "state_dict"))
            or self.is_tainted
        ):
            return
        for name, tensor in self.state_dict().items():
            assert raw(tensor) == self.facts[name].data, (
                f"{self.handle!r} {name}: the state dict reads something else"
            )


def _partition(tensors: dict[str, torch.Tensor]) -> frozenset[frozenset[str]]:
    shared: dict[int, set[str]] = {}
    for name, tensor in tensors.items():
        if tensor.numel():
            shared.setdefault(tensor.untyped_storage().data_ptr(), set()).add(name)
    return frozenset(frozenset(names) for names in shared.values())


class Recording:
    """Another policy, and the last plan it gave for each phase; apart, those for a budget of
    nothing."""

    def __init__(self, policy: Any) -> None:
        self.policy = policy
        self.name = policy.name
        self.last: dict[str, Plan] = {}
        self.needed: dict[str, Plan] = {}
        self.views: dict[str, View] = {}

    def plan(self, view: View) -> Plan:
        plan: Plan = self.policy.plan(view)
        if view.budget_bytes:
            self.last[view.phase], self.views[view.phase] = plan, view
        else:
            self.needed[view.phase] = plan
        return plan
