"""Stray references: references to adopted storages that others hold, which read poison after the
offload."""

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
        total = list(map(operator.add, total, map(table.get, storages, itertools.repeat(0))))
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
    found: dict[str, int] = {}
    tables = alias_tables()
    for r in ranges:  # of tens of thousands of storages, so functions implemented in C do the work
        if r.counted is None:
            continue
        storages, uses = r.counted
        counts = list(map(storage_use_count, storages))
        seen = (r.counted, tables, counts)
        if seen == r.without_stray_references:
            continue
        by_right = map(operator.add, known_aliases(storages, tables), uses)
        surplus = list(map(operator.sub, counts, by_right))
        r.without_stray_references = seen if max(surplus, default=0) <= 0 else None
        if r.without_stray_references is None:
            found |= {
                each.name: n
                for each, n in zip(r.placed, surplus, strict=True)
                if n > 0 and each.ref.cdata not in lasting
            }
    return found


def lasting_stray_references(look: Callable[[], dict[str, int]]) -> dict[str, int]:
    """The stray references that `look` still finds after a process group's thread has had time to
    drop its own to what it sent."""
    for seconds in _WAITS_SECONDS:
        if not (found := look()) or not (
            torch.distributed.is_available() and torch.distributed.is_initialized()
        ):
            return found
        time.sleep(seconds)
    return look()
