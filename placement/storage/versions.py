"""Version counters: torch raises one at each write in place, so they tell which storages were
written between two looks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Versions(NamedTuple):
    """The version counters of an object's tensors at one look. Views share a counter, but a tensor
    bound by `.data =` has its own."""

    storages: Sequence[int] = ()  # the storage (`_cdata`) of each tensor
    versions: Sequence[int] = ()

    def with_new_of(self, later: Versions) -> Versions:
        """These counters, and those of a later look for the storages that it has found first."""
        known = {*self.storages}
        new = [pair for pair in zip(*later, strict=True) if pair[0] not in known]
        storages = [*self.storages, *(storage for storage, _ in new)]
        return Versions(storages, [*self.versions, *(version for _, version in new)])

    def written_since(self, before: Versions) -> set[int]:
        """The storages that were written since an earlier look: no write lowers a counter. A
        storage that has got or lost a tensor since is not compared."""
        if self == before:  # the common case, and fast for tens of thousands of tensors
            return set()
        now, written = self._by_storage(), set()
        for key, versions in before._by_storage().items():
            current = now.get(key, [])
            if len(current) == len(versions) and sum(current) > sum(versions):
                written.add(key)
        return written

    def _by_storage(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for key, version in zip(*self, strict=True):
            found.setdefault(key, []).append(version)
        return found
