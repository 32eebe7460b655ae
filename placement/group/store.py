"""A group over a torch.distributed store: what torchrun brings along, with no further dependency."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TypeVar

from torch._C._distributed_c10d import Store, TCPStore

from placement.core.errors import CoordinatorLost
from placement.group.agreement import DEADLINE_SECONDS, Group
from placement.group.base import Board, BoardLost
from placement.group.calls import BoundedCalls
from placement.group.membership import check_place

_ANSWER_SECONDS = 60.0
"""For one call. A store that is alive answers in a fraction of a millisecond, one that thousands of ranks ask at once in seconds."""
_FIRST_PAUSE_SECONDS = 0.0005
_LOOKS_PER_SECOND = 20_000.0
"""Of all ranks together, while they wait: a TCPStore answers a multiple of that."""
_T = TypeVar("_T")


class StoreBoard(Board):
    """A `torch.distributed.Store` as a board, over a connection of its own: others' calls on it do not wait for ours, nor ours for theirs.

    Args:
        store: TCPStore, FileStore, HashStore, or a PrefixStore over one. Its timeout is left alone.
        answer_seconds: what one call may take; one that takes longer is lost, and the board with it.
        looks_per_second: how often to look for a value that is waited for, after a while.

    Raises:
        BoardLost: the store does not answer.
    """

    def __init__(self, store: Store, *, answer_seconds: float = _ANSWER_SECONDS, looks_per_second: float = 100.0) -> None:
        self._calls = BoundedCalls("placement-store", answer_seconds)
        self._longest_pause = 1 / looks_per_second
        self._given = self._store = store
        """Kept, because a TCPStore that serves takes its server with it, which the connection of our own does not hold."""
        self._store = self._reach(lambda: _connected_anew(store))

    def put(self, key: str, value: bytes) -> None:
        self._reach(lambda: self._store.set(key, value.decode()))

    def claim(self, key: str, value: bytes) -> bytes:
        # Torch writes where nothing stands when nothing is expected, and returns what stands there afterwards.
        return self._reach(lambda: bytes(self._store.compare_set(key, "", value.decode())))

    def look(self, keys: Sequence[str]) -> list[bytes] | None:
        return self._reach(lambda: [bytes(value) for value in self._store.multi_get(list(keys))] if self._store.check(list(keys)) else None)

    def wait(self, key: str, seconds: float) -> bytes | None:
        # Not the store's own wait: a signal does not end it, it logs two lines whenever it ends without the value, and the store
        # has to answer before it may end.
        deadline = time.monotonic() + seconds
        pause = _FIRST_PAUSE_SECONDS
        while (found := self.look([key])) is None:
            if (left := deadline - time.monotonic()) <= 0:
                return None
            time.sleep(min(pause, left))
            pause = min(pause * 1.5, self._longest_pause)
        return found[0]

    def remove(self, keys: Sequence[str]) -> None:
        self._reach(lambda: [self._store.delete_key(key) for key in keys])

    def _reach(self, call: Callable[[], _T]) -> _T:
        try:
            return self._calls(call)
        except (RuntimeError, TimeoutError) as error:  # torch's DistNetworkError, DistStoreError and plain ones
            raise BoardLost(f"the store does not answer: {str(error).partition(chr(10))[0]}") from error


def _connected_anew(store: Store) -> Store:
    try:
        return store.clone()  # type: ignore[attr-defined, no-any-return]
    except RuntimeError as error:
        if "pure virtual" in str(error):  # a store written in Python, without it
            return store
        raise


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
        check_place(rank, world_size, deadline_seconds)
        looks_per_second = min(max(_LOOKS_PER_SECOND / world_size, 1.0), 200.0)
        try:
            board = StoreBoard(store, answer_seconds=min(_ANSWER_SECONDS, deadline_seconds), looks_per_second=looks_per_second)
        except BoardLost as error:
            raise CoordinatorLost(f"rank {rank} cannot reach the group (join): {error}") from error
        super().__init__(board, rank, world_size, deadline_seconds=deadline_seconds, generation=generation)


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
    # torchrun's agent serves the store on that port; where nobody does, rank 0 has to: or has done so, in init_process_group.
    is_server = rank == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        address = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
        store = TCPStore(*address, None, is_server, timeout, multi_tenant=True)
    except RuntimeError as error:
        raise ValueError(f"no store at {environment['MASTER_ADDR']}:{environment['MASTER_PORT']}: {error}") from error
    generation = int(environment.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return StoreGroup(store, rank, world_size, deadline_seconds, generation=generation)
