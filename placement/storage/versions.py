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
        """These counters, and those of a later look for storages that are not among these."""
        storages = [*self.storages]
        versions = [*self.versions]
        earlier = {*storages}
        for storage, version in zip(*later, strict=True):
            if storage not in earlier:
                storages.append(storage)
                versions.append(version)
        return Versions(storages, versions)

    def written_since(self, before: Versions) -> set[int]:
        """The storages that were written since an earlier look: no write lowers a counter. A
        storage that has got or lost a tensor since is not compared."""
        if self == before:  # the common case, and fast for tens of thousands of tensors
            return set()
        written = set[int]()
        present_versions = self._by_storage()
        for storage, versions in before._by_storage().items():
            present = present_versions.get(storage, [])
            if len(present) == len(versions) and sum(present) > sum(versions):
                written.add(storage)
        return written

    def _by_storage(self) -> dict[int, list[int]]:
        by_storage: dict[int, list[int]] = {}
        for storage, version in zip(*self, strict=True):
            by_storage.setdefault(storage, []).append(version)
        return by_storage
