"""Stray references: references to adopted storages that others hold. After the offload they read poison."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Collection, Iterable

import torch

from placement.storage.range import PlacedStorage, Range, storage_use_count
from placement.storage.scanning.scanner import alias_tables, known_aliases

_WAITS_SECONDS = (0.0, 0.001, 0.003, 0.01, 0.03)
"""The waits for stray references to go away before they are reported, in processes with a process group."""


def uncounted(ranges: Iterable[Range]) -> list[PlacedStorage]:
    """The storages whose rightful references are not counted yet."""
    return [entry for r in ranges if r.counted is None for entry in r.placed if entry.use_count == 0]


def count(ranges: Iterable[Range]) -> None:
    """Count, once for each storage, its references of now without those of known tensors. So many it has by right."""
    entries = uncounted(ranges)
    for entry, known in zip(entries, known_aliases([entry.ref.cdata for entry in entries]), strict=True):
        entry.use_count = entry.uses() - known
    for r in ranges:
        if r.counted is None:
            r.counted = [entry.ref.cdata for entry in r.placed], [entry.use_count for entry in r.placed]


def find(ranges: Iterable[Range], lasting: Collection[int]) -> dict[str, int]:
    """The number of references beyond the rightful ones, by the storage's name, for storages that have been counted.

    An offload asks for tens of thousands of storages at a time, so functions implemented in C do the work. Little is left of it where all
    counts are those of the last time.

    Args:
        lasting: storages (`_cdata`) that a framework may hold as often as it likes.
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
    """The stray references that `look` still finds after a short wait.

    A process group's thread drops its references to what it sent a moment after the collective, so without one there is no wait.
    """
    for seconds in _WAITS_SECONDS:
        if not (found := look()) or not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return found
        time.sleep(seconds)
    return look()
