"""Several modules as one object: what an engine is made of."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch

from placement.core.errors import RegistrationError
from placement.ownership.module import ModuleAdapter
from placement.tensors.owned import Adapter, Owned, Seen

T = TypeVar("T")


class CompositeAdapter(Adapter):
    """Asks the adapter of every module, and answers for all of them. A subclass says which modules there are now.

    Every method of `Adapter` is answered here: a default of the base class would hide what a module's framework says.

    Args:
        name: How errors name the registration.
        adapt: makes the adapter of one module.
        modules: the modules of the moment.

    Raises:
        RegistrationError: a module is not supported, or frameworks place some of the modules and not the others.
    """

    def __init__(self, name: str, adapt: Callable[[torch.nn.Module], ModuleAdapter], modules: Sequence[torch.nn.Module]) -> None:
        self._name = name
        self._adapt = adapt
        self._adapters = [adapt(module) for module in modules]
        self._shares = False
        """Whether a tensor was found in more than one of the modules."""
        self._require_one_place()

    def current_modules(self) -> Sequence[torch.nn.Module] | None:
        """The modules that the object has now; None where they are the ones of before."""
        return None

    def _refresh(self) -> None:
        """Make adapters for modules that were added, and forget those that the object has no more."""
        modules = self.current_modules()
        if modules is None or self._is_of(modules):
            return
        was_external = self.external
        known = {id(key): adapter for adapter in self._adapters for key in adapter.key_objects()}
        self._adapters = [known.get(id(module)) or self._adapt(module) for module in modules]
        self._require_one_place()
        if self._adapters and (self.external is None) is not (was_external is None):
            raise RegistrationError(
                f"{self._name!r} has other modules than when it was registered: {self.external or was_external}, which holds for only "
                "one of both. What to do: unregister it, and register it anew"
            )

    def _is_of(self, modules: Sequence[torch.nn.Module]) -> bool:
        keys = [{id(key) for key in adapter.key_objects()} for adapter in self._adapters]
        return len(keys) == len(modules) and all(id(module) in of for of, module in zip(keys, modules, strict=True))

    def _require_one_place(self) -> None:
        reasons = [adapter.external for adapter in self._adapters]
        if any(reasons) and not all(reasons):
            raise RegistrationError(
                f"{self._name!r}: of its {len(reasons)} modules a framework places {sum(map(bool, reasons))} "
                f"({next(filter(None, reasons))}), and the others are moved. What to do: an engine for each of both, or external=True to "
                "have all of them tracked and never moved"
            )

    # --- what every module is asked

    def module_adapters(self) -> Sequence[ModuleAdapter]:
        return tuple(self._adapters)

    def owned(self) -> Iterator[Owned]:
        """Of the modules that the object has now: it may have made itself another model since.

        Raises:
            RegistrationError: one of them cannot be moved.
        """
        self._refresh()
        found = [owned for adapter in self._adapters for owned in adapter.owned()]
        distinct = {id(owned.tensor): owned for owned in reversed(found)}
        self._shares = len(distinct) < len(found)
        return reversed(distinct.values()) if self._shares else iter(found)

    def unchanged(self) -> Seen | None:
        modules = self.current_modules()
        if self._shares or (modules is not None and not self._is_of(modules)):
            return None
        seen = [adapter.unchanged() for adapter in self._adapters]
        known = [each for each in seen if each is not None]
        if not known or len(known) < len(seen):
            return None
        return Seen(*(list(itertools.chain.from_iterable(column)) for column in zip(*known, strict=True)))

    def key_objects(self) -> Sequence[Any]:
        return [key for adapter in self._adapters for key in adapter.key_objects()]

    def with_gradients(self) -> Iterator[torch.Tensor]:
        return _distinct(tensor for adapter in self._adapters for tensor in adapter.with_gradients())

    def unreduced_gradients(self) -> Iterator[torch.Tensor]:
        return _distinct(tensor for adapter in self._adapters for tensor in adapter.unreduced_gradients())

    def gradient_buffers(self) -> Iterator[torch.Tensor]:
        return _distinct(tensor for adapter in self._adapters for tensor in adapter.gradient_buffers())

    def stepped(self) -> Iterator[torch.Tensor]:
        return _distinct(tensor for adapter in self._adapters for tensor in adapter.stepped())

    def borrowed(self) -> Iterator[torch.Tensor]:
        return _distinct(tensor for adapter in self._adapters for tensor in adapter.borrowed())

    def replaced(self) -> Iterator[tuple[str, int]]:
        return (each for adapter in self._adapters for each in adapter.replaced())

    def kept_by_framework(self) -> Iterator[tuple[str, int]]:
        return (each for adapter in self._adapters for each in adapter.kept_by_framework())

    def sparse(self) -> Iterator[torch.Tensor]:
        return _distinct(tensor for adapter in self._adapters for tensor in adapter.sparse())

    def immovable(self) -> Iterator[tuple[str, str]]:
        return (each for adapter in self._adapters for each in adapter.immovable())

    @property
    def external(self) -> str | None:
        return _first(adapter.external for adapter in self._adapters)

    @property
    def external_state(self) -> str | None:
        """Of any of the modules: whoever needs to know of each asks `module_adapters`."""
        return _first(adapter.external_state for adapter in self._adapters)

    @property
    def gathers(self) -> str | None:
        return _first(adapter.gathers for adapter in self._adapters)

    def away(self) -> str | None:
        return _first(adapter.away() for adapter in self._adapters)

    def expected_sizes(self) -> Sequence[int] | None:
        sizes: list[int] = []
        for adapter in self._adapters:
            if (expected := adapter.expected_sizes()) is None:
                return None
            sizes.extend(expected)
        return sizes

    def other_names(self) -> Mapping[str, str]:
        return {other: name for adapter in self._adapters for other, name in adapter.other_names().items()}

    @property
    def lost_by_conversion(self) -> str | None:
        return _first(adapter.lost_by_conversion for adapter in self._adapters)

    def unborn_sizes(self) -> Sequence[int]:
        return [size for adapter in self._adapters for size in adapter.unborn_sizes()]

    def num_entries(self) -> int:
        return sum(adapter.num_entries() for adapter in self._adapters)

    # --- what every module is told

    def ready(self) -> None:
        for adapter in self._adapters:
            adapter.ready()

    def follow_parameters(self) -> None:
        for adapter in self._adapters:
            adapter.follow_parameters()

    def drop_unreduced(self) -> None:
        for adapter in self._adapters:
            adapter.drop_unreduced()

    def before_step(self) -> None:
        for adapter in self._adapters:
            adapter.before_step()

    def drop_caches(self) -> None:
        for adapter in self._adapters:
            adapter.drop_caches()


def _distinct(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Each tensor object once: modules may share some."""
    return iter({id(tensor): tensor for tensor in tensors}.values())


def _first(reasons: Iterable[T | None]) -> T | None:
    return next((reason for reason in reasons if reason is not None), None)
