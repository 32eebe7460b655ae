# ruff: noqa: ARG003 (a default answer does not look at what it is asked about)
"""The contract of a training framework: everything that placement knows of one framework is said by one class.

A new framework is a subclass of `Framework` in a file of its own. It is known once it stands in the list of `placement.frameworks.known`,
in an entry point of the group `placement.frameworks`, or once `known.add` was called with it.

Once a module's storages have their place, a wrapper must not notice anything: addresses, tensor objects and aliases stay. So a
framework is asked for little: which tensors no walk of the module finds, and what has to be undone before a move. Class attributes
and class methods say what the framework's classes mean wherever they occur; an instance stands for one module tree.

Classes are named, never imported: `Named` finds a class only once its package was imported by somebody else.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from placement.core.loaded_classes import is_a
from placement.tensors.owned import Owned

if TYPE_CHECKING:
    from placement.frameworks.weights import Weight


class Named(NamedTuple):
    """A class of a framework, by where it can be had once the framework is imported."""

    module: str
    name: str

    def is_of(self, obj: object) -> bool:
        """Whether an object is an instance of it; False while the framework is not imported."""
        return is_a(obj, self.module, self.name)


class Wrapper(NamedTuple):
    """A module class that adds nothing but a level of names around another module."""

    cls: Named
    inner: str
    """The name of the submodule that it wraps."""


class Advised(NamedTuple):
    """A class, and what is to be said of its instances."""

    cls: Named
    advice: str


class OwnState(abc.ABC):
    """The state of an optimizer that its framework hides from `optimizer.state`, taken out for a checkpoint and put back."""

    @abc.abstractmethod
    def tensors(self, path: str) -> Iterator[Owned]:
        """The tensors that the optimizer holds beside its `state`, under names that begin with `path`."""

    @abc.abstractmethod
    def exported(self) -> Mapping[Any, Mapping[str, Any]]:
        """The state by parameter, in an order that is the same on every rank; values alias what the optimizer holds."""

    @abc.abstractmethod
    def settings(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """The entries of a parameter group that belong into a checkpoint."""

    @abc.abstractmethod
    def problems(self, given: Mapping[Any, Mapping[str, Any]]) -> Iterator[tuple[torch.Tensor, str]]:
        """Parameters whose given state does not fit, and why."""

    @abc.abstractmethod
    def restore(self, given: Mapping[Any, Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]) -> None:
        """Put state back as `exported` gave it, and the settings of each group."""


class Framework:
    """One framework. An instance is its hand in one module tree; it holds the module weakly, or holds nothing.

    Every method looks anew: a wrapper may change its tensors between two calls. Once the module is gone it answers with nothing.
    """

    # --- what its classes mean, wherever they occur

    wrappers: ClassVar[Sequence[Wrapper]] = ()
    """Modules that published names leave out."""
    refused_modules: ClassVar[Sequence[Advised]] = ()
    """Modules that cannot be registered, and what to do instead."""
    external_optimizers: ClassVar[Sequence[Advised]] = ()
    """Optimizers whose state the framework places, and the reason to give: they are tracked and never moved."""
    with_own_export: ClassVar[Sequence[Named]] = ()
    """Modules that shard in a way that torch cannot gather: only the framework's own export publishes them."""
    carriers: ClassVar[Sequence[Named]] = ()
    """Tensor classes whose bytes lie in the tensor's own storage, as a plain tensor's do."""

    @classmethod
    def refuse_part(cls, part: torch.nn.Module) -> tuple[str, str] | None:
        """Why a module of a tree cannot be moved: what was found, and what to do. None where it can."""
        return None

    @classmethod
    def refuse_optimizer(cls, optimizer: Any) -> tuple[str, str] | None:
        """Why an optimizer's state cannot be moved: what to add to its class name, and what to do. None where it can."""
        return None

    @classmethod
    def places_state_of(cls, parameters: Sequence[torch.Tensor], compute_device: torch.device) -> str | None:
        """Why the framework places the state of whatever optimizer steps these parameters; None where it does not."""
        return None

    @classmethod
    def holds_optimizers(cls, obj: object) -> bool:
        """Whether an object is a wrapper for optimizers although it may hold none (a rank with nothing to step)."""
        return False

    @classmethod
    def own_state(cls, optimizer: object) -> OwnState | None:
        """The state that an optimizer hides; None where all of it is in `optimizer.state`. What it holds is not looked into."""
        return None

    @classmethod
    def stepped_for(cls, objects: Sequence[object]) -> Mapping[int, torch.Tensor]:
        """By the identity of a tensor that an optimizer steps in a parameter's place (a shard, a master copy), the model's parameter.

        Args:
            objects: the registered optimizer and every object found in it.
        """
        return {}

    @classmethod
    def flattened_parameters(cls, objects: Sequence[object]) -> Sequence[torch.Tensor]:
        """The model's parameters where these optimizers step flat copies of them; nothing where they do not."""
        return ()

    @classmethod
    def further_parameters(cls, objects: Sequence[object]) -> Iterator[torch.Tensor]:
        """The model's parameters that these optimizers are for although other ranks step them."""
        return iter(())

    @classmethod
    def optimizer_tables(cls, optimizer: object) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and tensor of what an optimizer gives to the state of every parameter and keeps outside `optimizer.state`."""
        return iter(())

    @classmethod
    def optimizer_scalars(cls, objects: Sequence[object]) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and tensor of what these optimizers keep on the device for good (a few bytes: loss scales, overflow flags)."""
        return iter(())

    @classmethod
    def optimizer_away(cls, optimizer: object) -> str | None:
        """Why an optimizer cannot step now and what to do: the framework has offloaded its state by its own means. None while it can."""
        return None

    @classmethod
    def reading_methods(cls, obj: object) -> Sequence[str]:
        """Names of methods of a module or optimizer that read or write its tensors past every hook of torch."""
        return ()

    # --- its hand in one module tree

    @classmethod
    def find(cls, root: torch.nn.Module) -> Framework | None:
        """This framework's view of a module tree; None where it has no part in it.

        Found by what the parts are (instances of its classes, which are not imported for it), never by how a name is spelt.
        """
        return None

    def refusal(self, compute_device: torch.device) -> str | None:
        """Why the module cannot be moved as the framework has it, and what to do; None where it can."""
        return None

    @property
    def external(self) -> str | None:
        """Why the framework itself places the bytes; None when it leaves them to us."""
        return None

    @property
    def external_state(self) -> str | None:
        """Why the state of optimizers that step the module lies where the framework wants, too; None where it does not."""
        return None

    def ready(self) -> None:
        """Before tensors are enumerated for a move off the device: what was gathered for computing is given up again (reshard).

        Called with the device synchronised, outside inference mode, without gradients. Idempotent. It calls no collective.
        """

    def own_tensors(self) -> Mapping[int, torch.Tensor]:
        """By the identity of a tensor that the module shows only for now (an unsharded parameter), the one that it has for life."""
        return {}

    def tensors(self) -> Iterator[Owned]:
        """Tensors of the module that a walk of its parameters, buffers and attributes does not find."""
        return iter(())

    def replaced(self) -> Iterator[tuple[str, int]]:
        """Name and bytes of what the framework computes with although the module has other tensors in their place by now.

        Somebody replaced them without telling the framework. `ready()` heals what can be healed.
        """
        return iter(())

    def unreduced_gradients(self) -> Iterator[torch.Tensor]:
        """Those of `tensors()` that are gradients in no `.grad` of a parameter, because no reduction has brought them there yet."""
        return iter(())

    def drop_unreduced(self) -> None:
        """Forget these gradients."""

    def gradient_buffers(self) -> Iterator[torch.Tensor]:
        """Tensors for the module's life with nothing but gradients in them (loose in `tensors()`): dropped, they become zero and stay."""
        return iter(())

    @property
    def gathers(self) -> str | None:
        """Why the module's own `state_dict()` gathers values on the device, so that no host copy can stand in; None where it does not."""
        return None

    def caches(self) -> Iterator[torch.Tensor]:
        """Tensors that the framework rebuilds when it needs them (workspaces): found in a walk, they are not the module's to move."""
        return iter(())

    def before_step(self) -> None:
        """An optimizer is about to step the module's parameters: all gradients are there, and may be gone at the next phase transition."""

    def away(self) -> str | None:
        """Why the module cannot be called now and what to do: the framework has offloaded it by its own means. None while it can."""
        return None

    def kept_by_framework(self) -> Iterator[tuple[str, int]]:
        """Name and bytes of device memory that the framework keeps for the module and that nobody can move (a reducer's buckets)."""
        return iter(())

    def weights(self) -> Mapping[int, Mapping[str, Weight | None]]:
        """By the identity of a module and the name there, weights that the module does not show; None for a parameter that is no weight."""
        return {}

    def follow_parameters(self) -> None:
        """The module's tensors were given back their places and forms: what the framework keeps of them elsewhere follows."""

    @property
    def lost_by_conversion(self) -> str | None:
        """What nobody can bring back once parameters have been of another dtype or on another device, and what to do."""
        return None

    def drop_caches(self) -> None:
        """Drop what the framework rebuilds when it needs it (workspaces); called once the module is on the host."""
