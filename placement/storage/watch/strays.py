"""Stray references: references to adopted storages from outside the object, which read poison after
the offload."""

from __future__ import annotations

import itertools
import operator
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch

from placement.storage.range import Range
from placement.storage.scan import alias_tables
from placement.tensors.alive import storage_use_count

# for stray references to go away before they are reported, with a process group
_WAITS_SECONDS = (0.0, 0.001, 0.003, 0.01, 0.03)


def known_aliases(
    storages: Sequence[int], tables: Iterable[Mapping[int, int]] | None = None
) -> list[int]:
    """How many tensors of all registered objects use each of these storages (`_cdata`), as of the
    last look at each object."""
    total = [0] * len(storages)
    for table in alias_tables() if tables is None else tables:
        counts = map(table.get, storages, itertools.repeat(0))
        total = list(map(operator.add, total, counts))
    return total


def uncounted(ranges: Iterable[Range]) -> list[Range]:
    """The ranges with storages whose rightful references are not counted yet."""
    return [r for r in ranges if r.counted is None]


def count_uses(ranges: Iterable[Range]) -> None:
    """Count, once for each storage, its references of now without those of known tensors. So many
    it has by right."""
    for r in ranges:
        storages = [entry.ref.cdata for entry in r.placed]
        for entry, num_known in zip(r.placed, known_aliases(storages), strict=True):
            if entry.use_count == 0:
                entry.use_count = entry.uses() - num_known
        r.counted = storages, [entry.use_count for entry in r.placed]


def stray_references(ranges: Iterable[Range], lasting: Collection[int]) -> dict[str, int]:
    """The number of references beyond the rightful ones, by the storage's name, for storages that
    have been counted.
    `lasting`: storages (`_cdata`) that a framework may hold as often as it likes."""
    strays: dict[str, int] = {}
    tables = alias_tables()
    for r in ranges:  # of tens of thousands of storages, so functions implemented in C do the work
        if r.counted is None:
            continue
        storages, uses = r.counted
        counts = list(map(storage_use_count, storages))
        facts = (r.counted, tables, counts)
        if facts == r.without_stray_references:
            continue
        by_right = map(operator.add, known_aliases(storages, tables), uses)
        surplus = list(map(operator.sub, counts, by_right))
        if max(surplus, default=0) <= 0:
            r.without_stray_references = facts
            continue
        r.without_stray_references = None
        for entry, num_strays in zip(r.placed, surplus, strict=True):
            if num_strays > 0 and entry.ref.cdata not in lasting:
                strays[entry.name] = num_strays
    return strays


def lasting_stray_references(
    look: Callable[[], dict[str, int]],
) -> dict[str, int]:
    """The stray references that `look` still finds after a wait for a process group's thread, which
    drops its references to sent tensors."""
    strays = look()
    has_group = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not has_group:
        return strays
    for seconds in _WAITS_SECONDS:
        if not strays:
            break
        time.sleep(seconds)
        strays = look()
    return strays
