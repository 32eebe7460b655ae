"""References to adopted storages that others hold: what they point to reads poison after the offload."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Collection, Iterable

import torch

from placement.storage.range import PlacedStorage, Range, storage_use_count
from placement.storage.scanner import alias_tables, known_aliases

_WAITS_SECONDS = (0.0, 0.001, 0.003, 0.01, 0.03)
"""How long stray references are waited for before somebody complains of them, where there is a process group."""


def uncounted(ranges: Iterable[Range]) -> list[PlacedStorage]:
    """The storages of which it is not known yet how many references they have by right."""
    return [entry for r in ranges if r.counted is None for entry in r.placed if entry.use_count == 0]


def count(ranges: Iterable[Range]) -> None:
    """Take the references of now, those of known tensors apart, as what a storage has by right. Once for each."""
    entries = uncounted(ranges)
    for entry, known in zip(entries, known_aliases([entry.ref.cdata for entry in entries]), strict=True):
        entry.use_count = entry.uses() - known
    for r in ranges:
        if r.counted is None:
            r.counted = [entry.ref.cdata for entry in r.placed], [entry.use_count for entry in r.placed]


def find(ranges: Iterable[Range], lasting: Collection[int]) -> dict[str, int]:
    """By name, the references beyond those, where they have been counted.

    An offload asks for tens of thousands of storages at a time, so functions of C do the work, and little of it where all counts are
    those of the last time.

    Args:
        lasting: storages (`_cdata`) that a framework holds, as often as it likes.
    """
    found: dict[str, int] = {}
    tables = alias_tables()
    for r in ranges:
        if r.counted is None:
            continue
        storages, uses = r.counted
        counts = list(map(storage_use_count, storages))
        seen = (r.counted, tables, counts)
        if seen == r.without_stray_references:
            continue
        surplus = list(map(operator.sub, counts, map(operator.add, known_aliases(storages), uses)))
        r.without_stray_references = seen if max(surplus, default=0) <= 0 else None
        if r.without_stray_references is None:
            found |= {each.name: n for each, n in zip(r.placed, surplus, strict=True) if n > 0 and each.ref.cdata not in lasting}
    return found


def that_last(look: Callable[[], dict[str, int]]) -> dict[str, int]:
    """What `look` finds, but for what goes by itself: a process group's thread lets go of what it sent a moment after its collective."""
    for seconds in _WAITS_SECONDS:
        if not (found := look()) or not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return found
        time.sleep(seconds)
    return look()
