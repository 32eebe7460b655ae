"""The weights of a module by the names that a rollout engine knows them by."""

from __future__ import annotations

import sys
from contextlib import suppress

import torch

from placement.core.errors import RegistrationError
from placement.frameworks.known import has_own_export
from placement.frameworks.weights import Weight, weight_of
from placement.publish import lora
from placement.publish.lora import Adapters
from placement.publish.skeleton import Skeleton, key_of, named_places


def published(root: torch.nn.Module, adapters: Adapters) -> list[tuple[str, Weight]]:
    """Name and weight of everything that is published, each once under its first name: parameters, then persistent buffers.

    Reads no value, moves nothing, calls no collective; on all ranks of a sharded module in the same order.

    Raises:
        ValueError: the module has no adapters to publish apart, or what it has cannot be published so.
    """
    skeleton = Skeleton(root)
    weights = skeleton.weights
    if adapters == "separate":
        places = lora.separate(skeleton)
    else:
        skeleton.root, merged = lora.without_adapters(skeleton, adapters)
        weights = {**weights, **merged}
        places = list(named_places(skeleton.root))
    first: dict[int, str] = {}
    for name, place in places:
        first.setdefault(key_of(place), name)
    return [(name, weights[key]) for key, name in first.items()]


def writable(root: torch.nn.Module) -> dict[str, Weight]:
    """The weights of a module by every name that one may be published under, by this module or its like, and by the module's own.

    Raises:
        ValueError: adapters are merged into the base weights, so that what is written there would be unmerged from.
    """
    skeleton = Skeleton(root)
    places = dict(named_places(skeleton.root))
    if "peft" in sys.modules and any(lora.has_adapters(part) for part in root.modules()):
        with suppress(ValueError):  # several active adapters have no names of their own
            places.update(lora.separate(skeleton))
        base, _ = lora.without_adapters(skeleton, "base")
        places.update(named_places(base))
    found = {name: weight_of(buffer) for name, buffer in root.named_buffers(remove_duplicate=False)}
    return found | {name: skeleton.weights[key_of(place)] for name, place in places.items()}


def check_publishable(root: torch.nn.Module, name: str, weights: list[tuple[str, Weight]]) -> None:
    """Find what cannot be published, before anything is.

    Raises:
        RegistrationError: which weight, why, and what to do; on all ranks alike.
    """
    for part in root.modules():
        if has_own_export(part):
            cls = type(part).__name__
            raise RegistrationError(f"{name!r}: {cls} cuts its parameters at places of its own; publish them with its own export")
    for weight_name, weight in weights:
        if (problem := weight.problem) is not None:
            raise RegistrationError(f"{name!r}: {weight_name!r} {problem}.")
