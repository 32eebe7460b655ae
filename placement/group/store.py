"""A group over a torch.distributed store: what torchrun brings along, with no further dependency."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TypeVar

from torch._C._distributed_c10d import Store, TCPStore

from placement.group.agreement import Group
from placement.group.base import Board, BoardLost

DEADLINE_SECONDS = 600.0
"""As torch's collectives wait for NCCL."""
_T = TypeVar("_T")


class StoreBoard(Board):
    """A `torch.distributed.Store` as a board.

    Args:
        store: TCPStore, FileStore, HashStore, or a PrefixStore over one. Its timeout is what each call may take; see `StoreGroup`.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def put(self, key: str, value: bytes) -> None:
        _reach(lambda: self._store.set(key, value.decode()))

    def claim(self, key: str, value: bytes) -> bytes:
        # Torch writes where nothing stands when nothing is expected, and returns what stands there afterwards.
        return _reach(lambda: bytes(self._store.compare_set(key, "", value.decode())))

    def look(self, keys: Sequence[str]) -> list[bytes] | None:
        if not _reach(lambda: self._store.check(list(keys))):
            return None
        return _reach(lambda: [bytes(value) for value in self._store.multi_get(list(keys))])

    def wait(self, key: str, seconds: float) -> bytes | None:
        if (found := self.look([key])) is not None:
            return found[0]
        began = time.monotonic()
        try:
            self._store.wait([key], timedelta(seconds=max(seconds, 0.001)))
        except RuntimeError as error:  # a timeout, or a store that is gone: torch does not always say which
            found = self.look([key])  # raises when it is gone
            if found is None and time.monotonic() - began < seconds / 2:
                raise BoardLost(f"the store does not wait: {error}") from error
            return None if found is None else found[0]
        found = self.look([key])
        return None if found is None else found[0]

    def remove(self, keys: Sequence[str]) -> None:
        for key in keys:
            _reach(lambda key=key: self._store.delete_key(key))  # type: ignore[misc]


def _reach(call: Callable[[], _T]) -> _T:
    try:
        return call()
    except RuntimeError as error:  # torch's DistNetworkError, DistStoreError and plain ones
        raise BoardLost(str(error).partition("\n")[0]) from error


class StoreGroup(Group):
    """Ranks over a torch.distributed store.

    Args:
        store: seen by all ranks. `torch.distributed.distributed_c10d._get_default_store()` after init_process_group, or your own.
            It must not be the one that other libraries write `placement/...` keys to.
        rank, world_size, deadline_seconds, generation: see `Group`.
    """

    def __init__(
        self, store: Store, rank: int, world_size: int, deadline_seconds: float = DEADLINE_SECONDS, *, generation: int = 0
    ) -> None:
        store.set_timeout(timedelta(seconds=deadline_seconds))
        super().__init__(StoreBoard(store), rank, world_size, deadline_seconds=deadline_seconds, generation=generation)


def from_environment(*, deadline_seconds: float = DEADLINE_SECONDS, environment: Mapping[str, str] = os.environ) -> StoreGroup:
    """The group of a torchrun job: its ranks, its store, and its restart count as generation.

    Raises:
        ValueError: torchrun's variables are not set.
        CoordinatorLost: the store does not answer.
    """
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if not environment.get(name)]
    if missing:
        raise ValueError(f"{', '.join(missing)} not set: start with torchrun, or make a StoreGroup of your own store")
    rank, world_size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    timeout = timedelta(seconds=deadline_seconds)
    # torchrun's agent serves the store on that port; where nobody does, rank 0 has to.
    is_server = rank == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        store = TCPStore(environment["MASTER_ADDR"], int(environment["MASTER_PORT"]), None, is_server, timeout)
    except RuntimeError as error:
        raise ValueError(f"no store at {environment['MASTER_ADDR']}:{environment['MASTER_PORT']}: {error}") from error
    generation = int(environment.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return StoreGroup(store, rank, world_size, deadline_seconds, generation=generation)
