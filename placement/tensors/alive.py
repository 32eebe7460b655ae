"""Storages that placement refers to weakly, and what follows when they die.

Torch frees a tensor's memory with the last reference to it. In a range the memory is placement's to
give back once nothing lies in a page: gradients were dropped in the middle of a phase. So one
storage of each page is watched, by a weak reference to torch's own object of it, which lives as
long as the storage. When it dies, another one of the page is watched. Where there is none, the page
is unused.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

storage_use_count: Callable[[int], int] = torch._C._storage_Use_Count
"""The number of references to a storage (`_cdata`) from tensors, its Python object and C++
together; 0 if only weak references are left."""

_ALIVE: Any = weakref.ref.__call__


@dataclass(slots=True)
class PlacedStorage:
    """One adopted storage. It is referenced weakly, so that a range never keeps a tensor alive."""

    name: str
    ref: StorageWeakRef
    offset: int
    nbytes: int
    use_count: int = 0
    """References right after adoption, without those of tensors that adapters know (0: not counted
    yet). At an offload any more than these are stray references."""

    def storage(self) -> torch.UntypedStorage | None:
        return torch.UntypedStorage._new_with_weak_ptr(self.ref.cdata)

    def uses(self) -> int:
        """References to the storage now; 0 when it is dead. Its Python object counts; the call
        creates it if it did not exist."""
        return 0 if self.storage() is None else storage_use_count(self.ref.cdata)


class Unadopted:
    """Storages in torch's own memory. They are not kept alive."""

    def __init__(self, storages: Sequence[torch.UntypedStorage] = ()) -> None:
        self._sizes = [storage.nbytes() for storage in storages]
        self.dead: list[object] = []  # references to those that died since the last count
        # to torch's own objects of them, as below
        self._references = [weakref.ref(storage, self.dead.append) for storage in storages]
        self._nbytes = sum(self._sizes)

    def count_bytes(self) -> int:
        """Bytes of those that are still alive. A count looks at every one: 2 ms for the state of
        3,000 parameters, which are in no cache."""
        if self.dead:
            self.dead.clear()
            self._nbytes = sum(itertools.compress(self._sizes, map(_ALIVE, self._references)))
        return self._nbytes


class UnusedPages:
    """The unused pages of one range, in whose `count` pages of `page_bytes` these storages have
    their places. `tell`: called when more are found, in the thread that dropped the last
    reference."""

    def __init__(
        self,
        placed: Iterable[PlacedStorage],
        page_bytes: int,
        count: int,
        tell: Callable[[], object],
    ) -> None:
        self.found: set[int] = set()
        self._tell = tell
        self._lying: list[list[PlacedStorage]] = [[] for _ in range(count)]
        for entry in placed:
            last = (entry.offset + max(entry.nbytes, 1) - 1) // page_bytes
            for index in range(entry.offset // page_bytes, last + 1):
                self._lying[index].append(entry)
        # by storage (`_cdata`): the reference to it, and the pages for which it is watched
        self._watched: dict[int, tuple[weakref.ref[torch.UntypedStorage], list[int]]] = {}
        self._watch(range(count))
        if self.found:
            tell()

    def _watch(self, indices: Sequence[int]) -> None:
        for index in indices:
            # the last one first: most loops drop gradients in the order in which they lie
            lying = self._lying[index]
            storage = None
            while lying and (storage := lying[-1].storage()) is None:
                lying.pop()
            if storage is None:
                self.found.add(index)
                continue
            key = lying[-1].ref.cdata
            if key not in self._watched:
                died = functools.partial(_died, weakref.ref(self), key)
                self._watched[key] = weakref.ref(storage, died), []
            self._watched[key][1].append(index)

    def note_dead(self, key: int) -> None:
        _, indices = self._watched.pop(key)
        for index in indices:
            self._lying[index].pop()  # torch has still to free it
        before = len(self.found)
        self._watch(indices)
        if len(self.found) > before:
            self._tell()


def _died(unused: weakref.ref[UnusedPages], key: int, _: object) -> None:
    if (living := unused()) is not None:
        living.note_dead(key)
