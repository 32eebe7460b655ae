"""A group over a named Ray actor. Importing this module does not import ray."""

from __future__ import annotations

import contextlib
import re
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

from placement.core.errors import PlacementError
from placement.group.agreement import DEADLINE_SECONDS, Group
from placement.group.base import Board, BoardLost
from placement.group.membership import check_place
from placement.group.messages import decode
from placement.group.ray_board import MAX_MESSAGE_BYTES, WAIT_SECONDS, Answer, BoardActor, Operation, Request

_CALLERS = 100_000
"""The number of requests that may wait in the actor at once: one for each rank of each group."""
_PAUSE_SECONDS = (0.002, 0.05)
_SLICES = 10
_EPOCH = re.compile(r"/e(\d+)/")


def import_ray() -> Any:
    """Import ray and return the module.

    Raises:
        PlacementError: ray is not installed, or this process is not connected to a cluster.
    """
    try:
        import ray
    except ImportError as error:
        raise PlacementError("ray is not installed here: pip install ray") from error
    if not ray.is_initialized():
        raise PlacementError("this process is not connected to a Ray cluster: call ray.init() first")
    return ray


def start_board(name: str, *, namespace: str | None = None) -> Any:
    """Start the board, the actor over which the ranks of a job agree, or find it. Call it in the driver, before the ranks start.

    Ray restarts the actor when its process dies. The actor reserves no CPU, and ends with the driver or with its last handle.

    Returns:
        The actor's handle. Hold it as long as the ranks live.

    Raises:
        PlacementError: ray is not installed or not connected, or the actor cannot be started.
    """
    ray = import_ray()
    options = {"name": name, "namespace": namespace, "get_if_exists": True, "num_cpus": 0, "max_restarts": -1, "max_concurrency": _CALLERS}
    actor = ray.remote(BoardActor).options(**options).remote()
    try:
        ray.get(actor.__ray_ready__.remote())
    except ray.exceptions.RayError as error:
        raise PlacementError(f"the board {name!r} cannot be started: {error}") from error
    return actor


class RayBoard(Board):
    """A `BoardActor` as one rank sees it.

    It remembers what this rank has written and read, and tells it to an actor that was restarted; see `ray_board`.

    Args:
        ask: sends a message and returns the answer; None while the actor is being restarted. Raises BoardLost after the given seconds.
        book: the name of the membership.
        deadline_seconds: the limit of each call, including a restart of the actor.
    """

    def __init__(self, ask: Callable[[bytes, float], bytes | None], book: str, rank: int, world_size: int, deadline_seconds: float) -> None:
        self._ask_actor = ask
        self._rank, self._world_size = rank, world_size
        self._book = book
        self._deadline_seconds = deadline_seconds
        self._incarnation = ""
        self._token = secrets.token_hex(8)
        self._notes: dict[str, str] = {}
        self._removed: list[str] = []

    def put(self, key: str, value: bytes) -> None:
        # Remembered before it is sent: if the answer is lost, a restarted board must learn of it too.
        self._note(key, value.decode())
        self._ask("put", [key], value.decode())

    def claim(self, key: str, value: bytes) -> bytes:
        stands = self._ask("claim", [key], value.decode()).values[0]
        self._note(key, stands)
        return stands.encode()

    def look(self, keys: Sequence[str]) -> list[bytes] | None:
        answer = self._ask("look", keys)
        if answer.status == "missing":
            return None
        if len(keys) == 1:  # a decision, which this rank may obey. Each rank reports its own vote.
            self._note(keys[0], answer.values[0])
        return [value.encode() for value in answer.values]

    def wait(self, key: str, seconds: float) -> bytes | None:
        end = time.monotonic() + seconds
        while True:
            left = end - time.monotonic()
            answer = self._ask("wait", [key], seconds=min(max(left, 0.0), WAIT_SECONDS))
            if answer.status == "done":
                self._note(key, answer.values[0])
                return answer.values[0].encode()
            if left <= WAIT_SECONDS:
                return None

    def remove(self, keys: Sequence[str]) -> None:
        self._removed += keys  # sent with the next request, because nobody waits for it
        # Each rank removes its own keys once all ranks have left that epoch, and forgets what it read in it.
        over = max((epoch for epoch in map(_epoch_of, keys) if epoch is not None), default=-1)
        self._notes = {key: value for key, value in self._notes.items() if (its := _epoch_of(key)) is None or its > over}

    def _note(self, key: str, value: str) -> None:
        self._notes[key] = value

    def _ask(self, operation: Operation, keys: Sequence[str] = (), value: str = "", *, seconds: float = 0.0) -> Answer:
        """Ask until the board answers, through a restart of it if necessary.

        Raises:
            BoardLost: the board did not answer within the deadline, or says that it never will.
        """
        end = time.monotonic() + self._deadline_seconds + seconds
        pause = _PAUSE_SECONDS[0]
        why = ""
        while True:
            try:
                answer = self._send(self._request(operation, keys, value, seconds), end)
                if answer is not None and answer.status == "stranger":
                    answer = self._send(self._attendance(), end)
                    if answer is not None and answer.status == "done":
                        self._incarnation = answer.incarnation
                        continue
            except BoardLost as error:
                # The last attempt had almost no time; the reason that the board gave earlier says more.
                if why and time.monotonic() >= end:
                    raise BoardLost(why) from error
                raise
            if answer is not None and answer.status == "refused":
                raise BoardLost(answer.reason)
            if answer is not None and answer.status in ("done", "missing"):
                self._removed.clear()
                return answer
            why = why if answer is None else answer.reason
            if time.monotonic() >= end:
                raise BoardLost(why or "the board is being restarted")
            time.sleep(pause)
            pause = min(pause * 1.5, _PAUSE_SECONDS[1])

    def _send(self, request: Request, end: float) -> Answer | None:
        message = self._ask_actor(request.encode(), max(end - time.monotonic(), 0.001))
        return None if message is None else decode(Answer, message, max_bytes=MAX_MESSAGE_BYTES)

    def _request(self, operation: Operation, keys: Sequence[str], value: str, seconds: float) -> Request:
        about = Request(book=self._book, incarnation=self._incarnation, rank=self._rank, operation=operation)
        return about.model_copy(update={"keys": tuple(keys), "value": value, "seconds": seconds, "removed": tuple(self._removed)})

    def _attendance(self) -> Request:
        about = Request(book=self._book, incarnation="", rank=self._rank, operation="attend")
        return about.model_copy(update={"token": self._token, "world_size": self._world_size, "notes": self._notes})


def asking(actor: Any) -> Callable[[bytes, float], bytes | None]:
    """Return the function with which a `RayBoard` sends messages to a `BoardActor`."""
    ray = import_ray()

    def ask(message: bytes, seconds: float) -> bytes | None:
        answer = actor.ask.remote(message)
        try:
            for _ in range(_SLICES):  # a process that was stopped meanwhile waits a part of it again, since the board was not late
                with contextlib.suppress(ray.exceptions.GetTimeoutError):
                    found: bytes = ray.get(answer, timeout=seconds / _SLICES)
                    return found
        except ray.exceptions.ActorUnavailableError:
            return None
        except ray.exceptions.RayError as error:
            raise BoardLost(f"the board's actor is gone: {str(error).strip().partition(chr(10))[0]}") from error
        raise BoardLost(f"the board does not answer within {seconds:.3g} s")

    return ask


def _epoch_of(key: str) -> int | None:
    found = _EPOCH.search(key)
    return None if found is None else int(found[1])


class RayGroup(Group):
    """A group of ranks of a Ray job, over the actor that `start_board` starts.

    Args:
        board: the actor's name or handle.
        rank: see `Group`.
        world_size: see `Group`.
        deadline_seconds: see `Group`.
        generation: see `Group`.
        name: the group's name, where several groups use one board.
        namespace: the Ray namespace of the actor's name; None: this job's.

    Raises:
        PlacementError: ray is not installed or not connected, or there is no such actor.
        GroupError, CoordinatorLost, ValueError: see `Group`.
    """

    def __init__(
        self,
        board: Any,
        rank: int,
        world_size: int,
        deadline_seconds: float = DEADLINE_SECONDS,
        *,
        generation: int = 0,
        name: str = "ranks",
        namespace: str | None = None,
    ) -> None:
        check_place(rank, world_size, deadline_seconds)
        actor = _find(board, namespace) if isinstance(board, str) else board
        side = RayBoard(asking(actor), f"{name}/g{generation}", rank, world_size, deadline_seconds)
        super().__init__(side, rank, world_size, deadline_seconds=deadline_seconds, generation=generation)


def _find(name: str, namespace: str | None) -> Any:
    ray = import_ray()
    try:
        return ray.get_actor(name, namespace)
    except ValueError as error:
        where = "this job's namespace" if namespace is None else f"namespace {namespace!r}"
        raise PlacementError(f"no board {name!r} in {where}: start it in the driver with placement.group.start_board({name!r})") from error
