"""The contract of adapters: an adapter knows which tensors an object owns now.

An adapter never moves a byte and never changes its object. It answers anew each time, because parameters are added, state is
created at the first step, and gradients come and go. What a framework knows of the object's modules callers ask of `frameworks`.
"""

from __future__ import annotations

import abc
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from placement.core.errors import RegistrationError
from placement.frameworks.base import Framework
from placement.tensors.plain import Owned, is_leaf

TRACK = "or register it with external=True to have it tracked and never moved"


def refusal(found: str, supported: str, advice: str) -> RegistrationError:
    """The error for an object that is not supported."""
    return RegistrationError(f"{found} is not supported now. Supported: {supported}. What to do: {advice}.")


class Seen(NamedTuple):
    """The owned tensors in the order of the walk, with facts about each."""

    tensors: list[torch.Tensor]
    versions: list[int]
    addresses: list[int]
    """The `data_ptr()` of each tensor."""


class Adapter(abc.ABC):
    """The contract of every adapter.

    `owned()` yields EVERY tensor object through which the object reaches a storage, including aliases (tied weights, views of one buffer,
    plain tensor attributes), because adoption by rebinding needs each of them. Its order is deterministic: two calls without a change in
    between yield the same tensors in the same order. The order follows the object's own registration, so all ranks agree. The call creates
    nothing (reading an optimizer's state must not create empty entries).
    """

    kind: str
    """The kind: "module", "optimizer" or "engine"."""
    hands_back: bool = False
    """Whether the object is being handed back. Then `owned()` leaves out what cannot be moved, and refuses nothing."""
    external: str | None = None
    """Why the framework itself places the bytes, which placement then tracks but never moves; None when placement moves them."""
    frameworks: Sequence[Framework] = ()
    """The frameworks that have a part in the object's modules. Each is asked what it does with them."""

    @abc.abstractmethod
    def owned(self) -> Iterator[Owned]:
        """Every tensor that moves with the object. Tensors that stay on the CPU on purpose are not included."""

    @abc.abstractmethod
    def key_objects(self) -> Sequence[Any]:
        """The objects whose identity identifies this registration: the module and what it wraps, the leaf optimizers, the engine."""

    def module_adapters(self) -> Sequence[Adapter]:
        """The adapters of the object's modules: a module's own, each of an engine's modules, none for an optimizer."""
        return ()

    def unchanged(self) -> Seen | None:
        """The tensors of the last `owned()`, in its order, if a quick check shows that they are the same and none is loose or wrapped.
        None proves nothing."""
        return None

    def standing(self) -> object | None:
        """An object that stands for the last `owned()`, if nothing that comes with a training has come since: no gradient, no new entry of
        an optimizer's state. None proves nothing. It is equal to that of an earlier call if there was no walk between the two.

        It is asked of an object that stays on the device, where it decides what is counted and no more: a few tensors are looked at, and
        all of them when the object leaves.
        """
        return None

    def other_names(self) -> Mapping[str, str]:
        """Further names of tensors that the last `owned()` yielded once (tied weights), by the yielded name."""
        return {}

    def with_gradients(self) -> Iterator[torch.Tensor]:
        """The tensors of the object that have a gradient now."""
        return (each.tensor for each in self.owned() if is_leaf(each.tensor) and each.tensor.grad is not None)

    def borrowed(self) -> Iterator[torch.Tensor]:
        """Tensors of the object in storages of other objects (a shard of a model's buffer). They are known here, but never move with it."""
        return iter(())

    def lent_gradients(self) -> set[int]:
        """Storages (`_cdata`) of modules' gradients that are also an optimizer's state, as of the last walk. State outlives gradients."""
        return set()

    def stepped(self) -> Iterator[torch.Tensor]:
        """The plain parts of the parameters that an optimizer steps: it holds them even when their module is gone."""
        return iter(())

    def sparse(self) -> Iterator[torch.Tensor]:
        """The sparse tensors of the last walk, which may use storages of other objects: see `own_storages`."""
        return iter(())

    def immovable(self) -> Iterator[tuple[str, str]]:
        """Name and problem of gradients that cannot be moved as bytes, as of the last walk. They stay where they are."""
        return iter(())

    @property
    def gathers(self) -> str | None:
        """Why the object's own `state_dict()` gathers its values on the device; None where the host copy can stand in for them."""
        return next(filter(None, (each.gathers for each in self.frameworks)), None)

    def away(self) -> str | None:
        """Why an external object cannot be used now (its framework has offloaded it) and what to do; None while it can be used."""
        return next(filter(None, (each.away() for each in self.frameworks)), None)

    def kept_by_framework(self) -> Iterator[tuple[str, int]]:
        """Name and bytes of device memory that a framework keeps for the object and that cannot be moved."""
        return itertools.chain.from_iterable(each.kept_by_framework() for each in self.frameworks)

    def ready(self) -> None:
        """Release what frameworks gathered for computing. Called before an offload, with the device synchronised. Idempotent."""
        for each in self.frameworks:
            each.ready()

    def drop_caches(self) -> None:
        """Drop caches that frameworks rebuild on demand. Called once the object is on the host."""
        for each in self.frameworks:
            each.drop_caches()

    def unmoved(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and tensor of what the object holds and `owned()` does not find. Looks everywhere, so it is for audits only."""
        return iter(())

    def expected_sizes(self) -> Sequence[int] | None:
        """Sizes in bytes of storages that will be created (optimizer state); None when they cannot be predicted. Asked once."""
        return ()

    def unborn_sizes(self) -> Sequence[int]:
        """The sizes of `expected_sizes` whose storages do not exist yet, as of the last `follow_groups`. May look at every parameter."""
        return ()

    def follow_groups(self) -> bool:
        """Whether an optimizer steps other parameters than at the last call. From now on `unborn_sizes` is about these."""
        return False

    def num_entries(self) -> int:
        """A number that changes when some of these storages are created. Costs nothing."""
        return 0
