"""What a framework did to a module, and what that means for moving it.

Once a module's storages have their place, a wrapper must not notice anything: addresses, tensor objects and aliases stay. So a
framework is asked for little: which tensors no walk of the module finds, and what has to be undone before a move.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch

from placement.tensors.owned import Owned

if TYPE_CHECKING:
    from placement.frameworks.weights import Weight


class Framework(abc.ABC):
    """One framework's hand in one module tree. Every method looks anew: a wrapper may change its tensors between two calls.

    It holds the module weakly, or holds nothing: once the module is gone it answers with nothing.
    """

    @classmethod
    @abc.abstractmethod
    def find(cls, root: torch.nn.Module) -> Framework | None:
        """This framework's view of a module tree; None where it has no part in it.

        Found by what the parts are (instances of its classes, which are not imported for it), never by how a name is spelt.
        """

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
