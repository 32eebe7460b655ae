"""The list of known frameworks: those of placement itself, those of entry points, and those that a program has added."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from inspect import getattr_static
from operator import methodcaller
from typing import Any

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

GROUP = "placement.frameworks"  # the group of entry points. Each names a subclass of `Framework`.

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


def answering(*questions: str) -> list[type[Framework]]:
    """The frameworks in use that override any of these questions (names of class attributes and class methods of `Framework`).

    The others are not asked, which saves time: most questions are asked for every object at every phase transition, and most
    frameworks answer few of them.
    """
    found = []
    for each in _overriding(*questions):
        if not sys.modules.keys().isdisjoint(each.packages):
            found.append(each)
    return found


@functools.cache
def _overriding(*questions: str) -> tuple[type[Framework], ...]:
    defaults = [getattr_static(Framework, name) for name in questions]
    return tuple(each for each in frameworks() if [getattr_static(each, name) for name in questions] != defaults)


def asked(question: str, *about: Any) -> list[Any]:
    """The answers of the frameworks in use to a question (a class method of `Framework`)."""
    return [*map(methodcaller(question, *about), answering(question))]


def frameworks_of(root: torch.nn.Module) -> list[Framework]:
    """An instance for each framework that has a part in a module tree."""
    return [found for each in answering("find", "recognised_by") if (found := each.find(root)) is not None]


def wrappers() -> list[tuple[type, str]]:
    """The wrapper classes that are imported, and the attribute name of the wrapped submodule in each."""
    found = []
    for each in frameworks():
        for wrapper in each.wrappers:
            if (cls := loaded_class(*wrapper.cls)) is not None:
                found.append((cls, wrapper.inner))
    return found


def own_state(optimizer: object) -> OwnState | None:
    """See `Framework.own_state`."""
    for each in answering("own_state"):
        if (found := each.own_state(optimizer)) is not None:
            return found
    return None


def stepped_for(objects: Sequence[object]) -> dict[int, torch.Tensor]:
    """See `Framework.stepped_for`."""
    stepped: dict[int, torch.Tensor] = {}
    for each in answering("stepped_for"):
        stepped |= each.stepped_for(objects)
    return stepped
