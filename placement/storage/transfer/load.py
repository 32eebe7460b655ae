"""The links over which the bytes of a load come: this process's own, or those of all ranks that share a host copy.

A phase transition chooses one strategy for all its loads. `ALONE` is for a process without a group and for handles that go back after
a failure. `TOGETHER` is for a phase transition on which the ranks of a group vote: each rank starts its share, and the rest is
gathered once the vote has passed (see `ReplicatedStorage`). A storage that is not shared loads alone under both.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from placement.storage.range import Range

if TYPE_CHECKING:
    from placement.storage.managed import ManagedStorage

_GATHERED = 2
"""The number of chunks that are mapped together where ranks gather: see `LoadTogether.burst`."""


class Load(abc.ABC):
    """A strategy of loading. Holds no state."""

    @abc.abstractmethod
    def start(self, storage: ManagedStorage, r: Range, indices: Sequence[int]) -> int:
        """Start the copies of these chunks (ascending), which were mapped just now. Returns the bytes that this process copies."""

    @abc.abstractmethod
    def finish(self, storage: ManagedStorage) -> None:
        """Start the missing transfers of an incomplete load.

        Raises:
            RuntimeError: the device failed. The host copy is complete.
        """

    def burst(self, ranges: Iterable[Range]) -> int | None:
        """How many chunks of these ranges to map together. None: as many as can be mapped while the earlier copies run."""
        return None


class LoadAlone(Load):
    """All bytes come over this process's own link."""

    def start(self, storage: ManagedStorage, r: Range, indices: Sequence[int]) -> int:
        return storage.bring(r, indices)

    def finish(self, storage: ManagedStorage) -> None:
        storage.complete_alone()


class LoadTogether(Load):
    """Each rank copies its own part of a shared storage over its link; the other parts come from the other ranks."""

    def start(self, storage: ManagedStorage, r: Range, indices: Sequence[int]) -> int:
        return storage.bring_share(r, indices)

    def finish(self, storage: ManagedStorage) -> None:
        storage.complete_together()

    def burst(self, ranges: Iterable[Range]) -> int | None:
        """A small fixed number where ranks gather.

        With N ranks, each copies 1/N of a chunk, which takes hardly longer than mapping that chunk: on a host of four busy H200s 1.7 ms of
        copying, 1.3 ms of creating and mapping. So the link has work from the first chunk on only if no burst is long: four ranks load
        8.6 GB in 63 ms, and in 67 to 70 ms where half of it is mapped first.
        """
        is_gathered = any(r.is_shared for r in ranges)
        return _GATHERED if is_gathered else None


ALONE, TOGETHER = LoadAlone(), LoadTogether()
