"""Several modules registered as one object, such as the models of an engine."""

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
    """An adapter that asks the adapter of every module, and combines the answers. A subclass says which modules there are.

    It overrides every method of `Adapter`, because a default of the base class would hide the answer of a module's framework.

    Args:
        name: The handle's name, for errors.
        adapt: makes the adapter of one module.
        modules: the modules that the object has now.

    Raises:
        RegistrationError: a module is not supported, or a framework moves some of the modules but not the others.
    """

    def __init__(self, name: str, adapt: Callable[[torch.nn.Module], ModuleAdapter], modules: Sequence[torch.nn.Module]) -> None:
        self._name = name
        self._adapt = adapt
        self._adapters = [adapt(module) for module in modules]
        self._shares = False
        """Whether a tensor was found in more than one of the modules."""
        self._require_one_place()

    def current_modules(self) -> Sequence[torch.nn.Module] | None:
        """The modules that the object has now; None if they have not changed."""
        return None

    def _refresh(self) -> None:
        """Make adapters for modules that were added, and forget those of modules that the object no longer has."""
        modules = self.current_modules()
        if modules is None or self._is_of(modules):
            return
        was_external = self.external
        known = {id(key): adapter for adapter in self._adapters for key in adapter.key_objects()}
        self._adapters = [known.get(id(module)) or self._adapt(module) for module in modules]
        self._require_one_place()
        if self._adapters and (self.external is None) is not (was_external is None):
            raise RegistrationError(
                f"{self._name!r} has other modules than when it was registered, and only the old or only the new ones are external "
                f"({self.external or was_external}). What to do: unregister it, and register it again"
            )

    def _is_of(self, modules: Sequence[torch.nn.Module]) -> bool:
        keys = [{id(key) for key in adapter.key_objects()} for adapter in self._adapters]
        return len(keys) == len(modules) and all(id(module) in of for of, module in zip(keys, modules, strict=True))

    def _require_one_place(self) -> None:
        reasons = [adapter.external for adapter in self._adapters]
        if any(reasons) and not all(reasons):
            raise RegistrationError(
                f"{self._name!r}: a framework moves {sum(map(bool, reasons))} of its {len(reasons)} modules itself "
                f"({next(filter(None, reasons))}), but not the others. What to do: register these two kinds as separate engines, or with "
                "external=True, so that all of them are tracked and never moved"
            )

    # --- questions to every module

    def module_adapters(self) -> Sequence[ModuleAdapter]:
        return tuple(self._adapters)

    def owned(self) -> Iterator[Owned]:
        """The tensors of the modules that the object has now. The object may have replaced modules since it was registered.

        While the object is handed back, those of the modules that are known already: a new one may be refused, and has no place yet.

        Raises:
            RegistrationError: a module cannot be moved.
        """
        if not self.hands_back:
            self._refresh()
        for adapter in self._adapters:
            adapter.hands_back = self.hands_back
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

    def lent_gradients(self) -> set[int]:
        return set().union(*(adapter.lent_gradients() for adapter in self._adapters))

    def unmoved(self) -> Iterator[tuple[str, torch.Tensor]]:
        return (each for adapter in self._adapters for each in adapter.unmoved())

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
        """The reason for the first module that has one. To ask each module, use `module_adapters`."""
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

    def follow_groups(self) -> bool:
        return True in [adapter.follow_groups() for adapter in self._adapters]  # each is asked

    # --- calls passed on to every module

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
