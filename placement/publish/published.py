"""The weights of a module under their published names, which are those that a rollout engine knows."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress

import torch

from placement.core.errors import RegistrationError
from placement.frameworks.known import has_own_export
from placement.frameworks.weights import Weight, weight_of
from placement.publish import lora
from placement.publish.lora import Adapters
from placement.publish.skeleton import Skeleton, key_of, named_places
from placement.tensors.plain import is_scaled


def published(root: torch.nn.Module, adapters: Adapters) -> list[tuple[str, Weight]]:
    """Name and weight of everything to publish: parameters, then persistent buffers. A tied weight appears once, under its first name;
    one of adapters alone under each name that PEFT saves.

    Reads no value, moves nothing and calls no collective. The order is the same on all ranks of a sharded module.

    Raises:
        ValueError: the module's adapters cannot be published in this way, or it has none.
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
    found = {name: place for name, place in places if adapters == "separate" or first[key_of(place)] == name}
    pairs = [(name, weights[key_of(place)]) for name, place in found.items()]
    buffers = {name for name, place in found.items() if not isinstance(place, torch.nn.Parameter)}
    _keep_dtypes(pairs, buffers | _pinned(root, found))
    return pairs


def _pinned(root: torch.nn.Module, names: Iterable[str]) -> set[str]:
    """The names of weights that transformers keeps in float32, matched as it matches them: anywhere in the name, with * as a wildcard."""
    kinds = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
    patterns = {each.replace("*", ".*") for part in root.modules() for kind in kinds for each in getattr(part, kind, None) or ()}
    return {name for name in names if any(re.search(pattern, name) for pattern in patterns)}


def _keep_dtypes(weights: Sequence[tuple[str, Weight]], names: set[str]) -> None:
    """Mark the weights that one dtype for all does not cast: those of these names, what is stored quantised, and the scales beside it."""
    packed = {name for name, weight in weights if weight.dtype in (torch.int8, torch.uint8, torch.int32) and len(weight.shape) > 1}
    quantized = {name.rpartition(".")[0] for name, weight in weights if name in packed or weight.is_wrapper or is_scaled(weight.dtype)}
    for name, weight in weights:
        path = name.split(".")
        # Scales may also be in a module of their own: `quantizer.scale`, `scales.0`.
        is_scale = ".".join(path[:-1]) in quantized or (quantized and "scale" in "".join(path[-2:]))
        weight.keeps_dtype = bool(is_scale or name in names)


def writable(root: torch.nn.Module) -> dict[str, Weight]:
    """The weights of a module by name, to write published values into. Includes the module's own names and all published names.

    Raises:
        ValueError: adapters are merged into the base weights; unmerging them later would change the values written there.
    """
    skeleton = Skeleton(root)
    places = dict(named_places(skeleton.root))
    if "peft" in sys.modules and any(lora.has_adapters(part) for part in root.modules()):
        with suppress(ValueError):  # with several active adapters there are no published names for adapters alone
            places.update(lora.separate(skeleton))
        base, _ = lora.without_adapters(skeleton, "base")
        places.update(named_places(base))
    found = {name: weight_of(buffer) for name, buffer in root.named_buffers(remove_duplicate=False)}
    return found | {name: skeleton.weights[key_of(place)] for name, place in places.items()}


def check_publishable(root: torch.nn.Module, name: str, weights: list[tuple[str, Weight]]) -> None:
    """Check that all weights can be published, before any is.

    Raises:
        RegistrationError: a weight cannot be published; the message says which, why, and what to do. All ranks raise it alike.
    """
    for part in root.modules():
        if has_own_export(part):
            cls = type(part).__name__
            raise RegistrationError(f"{name!r}: {cls} shards its parameters in its own way; publish them with its own export")
    for weight_name, weight in weights:
        if (problem := weight.problem) is not None:
            raise RegistrationError(f"{name!r}: {weight_name!r} {problem}.")
