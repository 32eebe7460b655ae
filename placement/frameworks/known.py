"""The list of known frameworks: those of placement itself, those of entry points, and those that a program has added."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import entry_points
from inspect import getattr_static

import torch

from placement.core import loaded_class
from placement.core.errors import RegistrationError
from placement.frameworks.base import Framework, OwnState
from placement.frameworks.deepspeed import DeepSpeed
from placement.frameworks.fsdp1 import FSDP1
from placement.frameworks.fsdp2 import FSDP2, VeOmni
from placement.frameworks.low_precision import Bitsandbytes, TorchAO, TransformerEngine
from placement.frameworks.megatron import Megatron, MegatronFSDPShards
from placement.frameworks.pytorch import DDP, Accelerate, TorchWrappers
from placement.tensors import plain

GROUP = "placement.frameworks"
"""The group of entry points. Each names a subclass of `Framework`."""

_SHIPPED: tuple[type[Framework], ...] = (
    FSDP2,
    Megatron,
    MegatronFSDPShards,
    DDP,
    FSDP1,
    DeepSpeed,
    Bitsandbytes,
    VeOmni,
    TransformerEngine,
    TorchAO,
    Accelerate,
    TorchWrappers,
)
_added: list[type[Framework]] = []


def add(framework: type[Framework]) -> None:
    """Make a framework known to this process, for objects that are registered from now on.

    Raises:
        TypeError: `framework` is not a subclass of `Framework`.
    """
    given: object = framework
    if not isinstance(given, type) or not issubclass(given, Framework):
        raise TypeError(f"a framework is a subclass of placement.frameworks.base.Framework, not {framework!r}")
    if framework not in _added:
        _added.append(framework)
        _forget()


def remove(framework: type[Framework]) -> None:
    """Undo `add`. Nothing changes for objects that are registered already."""
    _added.remove(framework)
    _forget()


def _forget() -> None:
    for cached in (frameworks, _overriding):
        cached.cache_clear()
    frameworks()


@functools.cache
def frameworks() -> tuple[type[Framework], ...]:
    """All known frameworks. If several answer a question that takes one answer, the first is used.

    Raises:
        RegistrationError: an entry point cannot be imported, or does not name a subclass of `Framework`.
    """
    found = [*_SHIPPED, *_added]
    for point in entry_points(group=GROUP):
        try:
            framework = point.load()
            if not issubclass(framework, Framework):
                raise TypeError(f"{framework!r} is no subclass of placement.frameworks.base.Framework")
        except Exception as error:
            raise RegistrationError(f"entry point {point.name!r} of the group {GROUP!r} ({point.value}) cannot be used: {error}") from error
        found.append(framework)
    plain.set_carriers((named.module, named.name) for each in found for named in each.carriers)
    return tuple(dict.fromkeys(found))


def answering(question: str) -> list[type[Framework]]:
    """The frameworks in use that override a question (the name of a class attribute or class method of `Framework`).

    The others are not asked, which saves time: most questions are asked for every object at every phase transition, and most
    frameworks answer few of them.
    """
    return [each for each in _overriding(question) if not sys.modules.keys().isdisjoint(each.packages)]


@functools.cache
def _overriding(question: str) -> tuple[type[Framework], ...]:
    default = getattr_static(Framework, question)
    return tuple(each for each in frameworks() if getattr_static(each, question) is not default)


def frameworks_of(root: torch.nn.Module) -> list[Framework]:
    """An instance for each framework that has a part in a module tree."""
    instances = []
    for framework in answering("find"):
        if (found := framework.find(root)) is not None:
            instances.append(found)
    return instances


def wrappers() -> list[tuple[type, str]]:
    """The wrapper classes that are imported, and the attribute name of the wrapped submodule in each."""
    found = [wrapper for each in frameworks() for wrapper in each.wrappers]
    return [(cls, wrapper.inner) for wrapper in found if (cls := loaded_class(*wrapper.cls)) is not None]


def has_own_export(part: torch.nn.Module) -> bool:
    """Whether a module's weights can be published only with its framework's own export."""
    return any(named.is_of(part) for each in answering("with_own_export") for named in each.with_own_export)


def own_state(optimizer: object) -> OwnState | None:
    """See `Framework.own_state`."""
    for each in answering("own_state"):
        if (found := each.own_state(optimizer)) is not None:
            return found
    return None


def holds_optimizers(obj: object) -> bool:
    """See `Framework.holds_optimizers`."""
    return any(each.holds_optimizers(obj) for each in answering("holds_optimizers"))


def stepped_for(objects: Sequence[object]) -> dict[int, torch.Tensor]:
    """See `Framework.stepped_for`."""
    return {key: own for each in answering("stepped_for") for key, own in each.stepped_for(objects).items()}


def optimizer_tables(optimizer: object) -> Iterator[tuple[str, torch.Tensor]]:
    """See `Framework.optimizer_tables`."""
    return (found for each in answering("optimizer_tables") for found in each.optimizer_tables(optimizer))


def optimizer_scalars(objects: Sequence[object]) -> Iterator[tuple[str, torch.Tensor]]:
    """See `Framework.optimizer_scalars`."""
    return (found for each in answering("optimizer_scalars") for found in each.optimizer_scalars(objects))


def reading_methods(obj: object) -> list[str]:
    """See `Framework.reading_methods`."""
    return [name for each in answering("reading_methods") for name in each.reading_methods(obj)]
