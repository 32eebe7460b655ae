"""A group over a torch.distributed store, which torchrun provides without a further dependency."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from placement.core import interrupts
from placement.core.errors import CoordinatorLost
from placement.core.interrupts import BoundedCalls
from placement.group.protocol import DEADLINE_SECONDS, Board, BoardLost, Group, check_place

_ANSWER_SECONDS = 60.0
"""The limit for one call. A live store answers in a fraction of a millisecond, or in seconds when
thousands of ranks ask at once."""
_FIRST_PAUSE_SECONDS = 0.0005
# the rate of looks of all ranks together while they wait. A TCPStore can answer many times more.
_LOOKS_PER_SECOND = 20_000.0
_T = TypeVar("_T")


class StoreBoard(Board):
    """A `torch.distributed.Store` as a board. It uses a connection of its own, so its calls and
    those of others do not wait for each other.
    `answer_seconds`: the limit of one call; after a longer one the board counts as lost.
    `looks_per_second`: how often, in the long run, to look for an awaited value."""

    def __init__(
        self,
        store: Store,
        *,
        answer_seconds: float = _ANSWER_SECONDS,
        looks_per_second: float = 100.0,
    ) -> None:
        self._calls = BoundedCalls("placement-store", answer_seconds)
        self._longest_pause = 1 / looks_per_second
        self._server = self._store = store
        """A reference, because a serving TCPStore stops its server when it dies, and the new
        connection does not keep it alive."""
        self._store = self._reach(store.clone)  # type: ignore[attr-defined]

    def put(self, key: str, value: bytes) -> None:
        self._reach(lambda: self._store.set(key, value.decode()))

    def claim(self, key: str, value: bytes) -> bytes:
        # torch writes only if the key is missing when the expected value is empty, and returns the
        # key's value afterwards.
        text = value.decode()
        return self._reach(lambda: bytes(self._store.compare_set(key, "", text)))

    def look(self, keys: Sequence[str]) -> list[bytes] | None:
        def read() -> list[bytes] | None:
            if not self._store.check(list(keys)):
                return None
            return [bytes(value) for value in self._store.multi_get(list(keys))]

        return self._reach(read)

    def wait(self, key: str, seconds: float) -> bytes | None:
        # Not the store's own wait: a signal does not end it, each timeout logs two lines, and it
        # ends only when the store answers.
        for _ in interrupts.looks(seconds, _FIRST_PAUSE_SECONDS, self._longest_pause):
            values = self.look([key])
            if values is not None:
                return values[0]
        return None

    def remove(self, keys: Sequence[str]) -> None:
        self._reach(lambda: [self._store.delete_key(key) for key in keys])

    def _reach(self, call: Callable[[], _T]) -> _T:
        try:
            return self._calls(call)
        # torch's DistNetworkError, DistStoreError, DistTimeoutError and plain ones
        except (RuntimeError, TimeoutError) as error:
            raise BoardLost(
                f"the store does not answer: {str(error).partition(chr(10))[0]}"
            ) from error


class StoreGroup(Group):
    """A group of ranks over a torch.distributed store.

    Args:
        store: a store that all ranks see. `torch.distributed.distributed_c10d._get_default_store()`
            after init_process_group, or your own. No other library may write `placement/...` keys
            to it.
        rank, world_size, deadline_seconds, generation: see `Group`.

    Raises:
        GroupError, CoordinatorLost, ValueError: see `Group`.

    Example:
        ::

            group = StoreGroup(store, rank, world_size, deadline_seconds=300)
            manager = placement.Manager(group=group)
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        deadline_seconds: float = DEADLINE_SECONDS,
        *,
        generation: int = 0,
    ) -> None:
        check_place(rank, world_size, deadline_seconds)
        looks_per_second = min(max(_LOOKS_PER_SECOND / world_size, 1.0), 200.0)
        try:
            board = StoreBoard(
                store,
                answer_seconds=min(_ANSWER_SECONDS, deadline_seconds),
                looks_per_second=looks_per_second,
            )
        except BoardLost as error:
            raise CoordinatorLost(f"rank {rank} cannot reach the group (join): {error}") from error
        super().__init__(
            board, rank, world_size, deadline_seconds=deadline_seconds, generation=generation
        )


def from_environment(
    name: str = "",
    *,
    deadline_seconds: float = DEADLINE_SECONDS,
) -> StoreGroup:
    """The group of a torchrun job: its ranks and its store, with its restart count as generation.

    Args:
        name: tells several groups of the same ranks apart, where a process has several managers.
        deadline_seconds: see `Group`.

    Raises:
        ValueError: torchrun's variables are not set, or no store is at their address.
        CoordinatorLost: the store does not answer.

    Example:
        ::

            manager = placement.Manager(group=placement.group.from_environment())
    """
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [variable for variable in names if not os.environ.get(variable)]
    if missing:
        raise ValueError(
            f"{', '.join(missing)} not set: start with torchrun, or make a StoreGroup over a store "
            "of your own"
        )
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    timeout = timedelta(seconds=deadline_seconds)
    # torchrun's agent usually serves the store on that port. Else rank 0 serves it here, or already
    # does since init_process_group.
    is_server = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(*address, None, is_server, timeout, multi_tenant=True)
    except RuntimeError as error:
        raise ValueError(
            f"cannot reach a store at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}: "
            f"{error}"
        ) from error
    generation = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    named_store = PrefixStore(name, store) if name else store
    return StoreGroup(named_store, rank, world_size, deadline_seconds, generation=generation)
