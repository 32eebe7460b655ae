"""What an adapter knows: the tensors that an object owns now.

An adapter never moves a byte and never changes its object. It answers, each time anew, which tensors belong to the
object at this moment, because parameters are added, state is born at the first step, gradients come and go.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch


@dataclass(frozen=True, slots=True)
class Owned:
    """One tensor of an object."""

    name: str
    """As the user would write it: "layers.0.weight", "layers.0.weight.grad", "state.0.exp_avg"."""
    tensor: torch.Tensor
    transient: bool = False
    """Comes and goes between phases (a gradient): gets addresses of its own for one offload at a time."""
    wrapper: torch.Tensor | None = None
    """What users write through where that is another object (a DTensor): its operations do not count in the version of what it wraps."""

    @property
    def version(self) -> int:
        """Counts writes. Some do not count (fused and foreach steps, collectives), so it proves a write and never its absence."""
        return self.tensor._version + (0 if self.wrapper is None else self.wrapper._version)


class Seen(NamedTuple):
    """The owned tensors in the order of the walk, and what was asked of each."""

    tensors: list[torch.Tensor]
    versions: list[int]
    addresses: list[int]
    """`data_ptr()`."""


class Adapter(abc.ABC):
    """The contract of every adapter.

    `owned()` yields EVERY tensor object through which the object reaches a storage, aliases included (tied weights, views of
    one buffer, plain tensor attributes): the rebinding way of adoption needs each of them. Order is deterministic: two calls
    with nothing changed in between yield the same tensors in the same order, and the order is that of the object's own
    registration, so that all ranks agree. It creates nothing (reading an optimizer's state must not create empty entries).
    """

    kind: str
    """"module", "optimizer" or "engine"."""

    @abc.abstractmethod
    def owned(self) -> Iterator[Owned]:
        """Every tensor that has to move with the object; what stays on the CPU by right is not among them."""

    def unchanged(self) -> Seen | None:
        """The tensors of the last `owned()`, in its order, where it is quickly seen that they are the same and that none is loose or
        wrapped; None where it is not, which proves nothing."""
        return None

    def other_names(self) -> Mapping[str, str]:
        """Further names of tensors that the last `owned()` named once (tied weights), by the name that it gave."""
        return {}

    def with_gradients(self) -> Iterator[torch.Tensor]:
        """The tensors of the object that have a gradient now."""
        return (each.tensor for each in self.owned() if each.tensor.is_leaf and each.tensor.grad is not None)

    def replaced(self) -> Iterator[tuple[str, int]]:
        """Name and bytes of tensors that a framework computes with although the object has others in their place by now."""
        return iter(())

    def unreduced_gradients(self) -> Iterator[torch.Tensor]:
        """Loose tensors with gradients that are in no `.grad` of the object's tensors, because no reduction has brought them there yet."""
        return iter(())

    def drop_unreduced(self) -> None:
        """Forget these gradients."""

    def borrowed(self) -> Iterator[torch.Tensor]:
        """Tensors of the object in storages of other objects (a shard of a model's buffer): known here, never moved with it."""
        return iter(())

    def gradient_buffers(self) -> Iterator[torch.Tensor]:
        """Loose tensors that are there for the object's life with nothing but gradients in them: dropped, they become zero and stay."""
        return iter(())

    @abc.abstractmethod
    def key_objects(self) -> Sequence[Any]:
        """The objects whose identity names this registration: the module and what it wraps, the leaf optimizers, the engine."""

    def module_adapters(self) -> Sequence[Adapter]:
        """The adapters of the modules that the object consists of: a module's own, each of an engine's, none of an optimizer."""
        return ()

    def sparse(self) -> Iterator[torch.Tensor]:
        """The sparse tensors of the last walk, which may lie in storages of others: see `sparse.own_storages`."""
        return iter(())

    def immovable(self) -> Iterator[tuple[str, str]]:
        """Name and problem of the gradients that cannot be moved as bytes, as of the last walk. They stay where they are."""
        return iter(())

    @property
    def external(self) -> str | None:
        """Why the framework itself places the bytes (then they are tracked, never moved); None when we move them."""
        return None

    @property
    def external_state(self) -> str | None:
        """Why a framework also places the state of whatever optimizer steps the object; None when it does not."""
        return None

    def ready(self) -> None:
        """Before a move off the device, with the device synchronised: give up what was gathered for computing. Idempotent."""

    @property
    def gathers(self) -> str | None:
        """Why the object's own `state_dict()` gathers its values on the device; None where the host copy can stand in for them."""
        return None

    def before_step(self) -> None:
        """An optimizer is about to step the object's parameters: all gradients are there, and may be gone at the next phase transition."""

    def away(self) -> str | None:
        """Why an external object cannot be used now and what to do: its framework has offloaded it. None while it can."""
        return None

    def kept_by_framework(self) -> Iterator[tuple[str, int]]:
        """Name and bytes of device memory that a framework keeps for the object and that nobody can move."""
        return iter(())

    def follow_parameters(self) -> None:
        """The object's tensors were given back their places and forms: take over what a framework keeps of them beside the object."""

    @property
    def lost_by_conversion(self) -> str | None:
        """What nobody can bring back once parameters have been of another dtype or on another device, and what to do."""
        return None

    def drop_caches(self) -> None:
        """Drop what a framework rebuilds when it needs it; called once the object is on the host."""

    def expected_sizes(self) -> Sequence[int] | None:
        """Sizes in bytes of storages that are not born yet but will be (optimizer state); None when it cannot be told. Asked once."""
        return ()

    def unborn_sizes(self) -> Sequence[int]:
        """Of what `expected_sizes` has told, the storages that are not there yet. May look at every parameter."""
        return ()

    def num_entries(self) -> int:
        """Changes when some of them are born. Costs nothing."""
        return 0
