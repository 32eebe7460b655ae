"""The actor behind `RayGroup`, its requests and its answers. It keeps the few values of each membership in memory.

A restarted actor has forgotten everything, also decisions that ranks have obeyed. So it answers no rank of a membership until EVERY
rank of it has reported what that rank wrote and read. Then every obeyed decision is restored before any rank can claim another. If the
knowledge of one rank is gone too, no rank gets an answer, and all keep what they prepared (`CoordinatorLost`).
"""

from __future__ import annotations

import asyncio
import secrets
import warnings
from collections.abc import Iterable, Mapping
from typing import Literal

from pydantic import Field

from placement.group.messages import MAX_BYTES, Message, decode

MAX_MESSAGE_BYTES = 256 * MAX_BYTES
"""The limit of a message. Among a thousand ranks, rank 0 asks for and reports one value of each."""
WAIT_SECONDS = 5.0
"""The longest that one request waits in the actor."""


Operation = Literal["attend", "put", "claim", "look", "wait"]
Status = Literal["done", "missing", "stranger", "recovering", "refused"]


class Request(Message):
    """A request of a rank to the board."""

    book: str = Field(max_length=200)
    """The membership: a group's name and generation."""
    incarnation: str = Field(max_length=32)
    """The incarnation of the actor that this rank knows; a request to an earlier incarnation must not count."""
    rank: int = Field(ge=0)
    operation: Operation
    keys: tuple[str, ...] = ()
    value: str = Field(default="", max_length=MAX_BYTES)
    removed: tuple[str, ...] = ()
    """Keys to delete, because nobody reads them any more."""
    seconds: float = Field(default=0.0, ge=0.0, le=WAIT_SECONDS)
    token: str = Field(default="", max_length=32)
    """For "attend": identifies the process that speaks for the rank."""
    world_size: int = Field(default=1, ge=1)
    notes: dict[str, str] = Field(default_factory=dict)
    """For "attend": what that process has written and read."""


class Answer(Message):
    """An answer of the board."""

    status: Status
    incarnation: str
    values: tuple[str, ...] = ()
    reason: str = ""


class Book:
    """The values of one membership.

    Args:
        unheard: the ranks that must report what they know before any request is answered; empty for a new membership.
    """

    def __init__(self, world_size: int, unheard: Iterable[int]) -> None:
        self.world_size = world_size
        self.values: dict[str, str] = {}
        self.unheard = set(unheard)
        self.refusal = ""
        self._told: dict[int, Mapping[str, str]] = {}
        self._attended: set[tuple[int, str]] = set()
        self._awaited: dict[str, asyncio.Event] = {}

    def attend(self, rank: int, token: str, notes: Mapping[str, str]) -> None:
        """Register a process as `rank`, with what it knows (nothing, when it has just begun). Idempotent.

        Raises:
            ValueError: the process knows of an earlier membership, which this one has replaced.
        """
        if (rank, token) in self._attended:
            return
        if not self.unheard and notes:
            raise ValueError(f"rank {rank} belongs to an earlier membership of the same name; use a new generation")
        self._attended.add((rank, token))
        if not self.unheard:
            return
        if rank not in self._told or notes:  # a process that began after a death does not speak for the dead one
            self._told[rank] = notes
        self.unheard.discard(rank)
        if not self.unheard:
            self._restore()

    def _restore(self) -> None:
        knowing = {rank for rank, notes in self._told.items() if notes}
        if knowing and len(knowing) < self.world_size:
            gone = ", ".join(str(rank) for rank in sorted(self._told.keys() - knowing))
            self.refusal = f"the board and the process of rank {gone} were both restarted, so that rank's values are lost"
            return
        for notes in self._told.values():
            for key, value in notes.items():
                if self.values.setdefault(key, value) != value:
                    self.refusal = f"the board was restarted, and ranks remember different values of {key}"
                    return

    def set(self, key: str, value: str) -> None:
        self.values[key] = value
        if (event := self._awaited.pop(key, None)) is not None:
            event.set()

    def remove(self, keys: Iterable[str]) -> None:
        for key in keys:
            self.values.pop(key, None)
            self._awaited.pop(key, None)

    async def wait(self, key: str, seconds: float) -> str | None:
        if key not in self.values and seconds > 0:
            event = self._awaited.setdefault(key, asyncio.Event())
            try:
                await asyncio.wait_for(event.wait(), seconds)
            except TimeoutError:
                return None
        return self.values.get(key)


class Books:
    """Every membership of one actor; answers the requests of their ranks.

    Args:
        was_restarted: whether an earlier incarnation of the actor may have answered requests.
    """

    def __init__(self, *, was_restarted: bool) -> None:
        self._was_restarted = was_restarted
        self._incarnation = secrets.token_hex(8)
        self._books: dict[str, Book] = {}

    async def answer(self, request: Request) -> Answer:
        """Answer a request. Everything but a wait happens without a pause, so requests are carried out one after the other."""
        book = self._books.get(request.book)
        if request.operation == "attend":
            try:
                book = self._attend(request)
            except ValueError as error:
                return self._say("refused", reason=str(error))
        elif book is None or request.incarnation != self._incarnation:
            return self._say("stranger")
        if book.refusal:
            return self._say("refused", reason=book.refusal)
        if book.unheard:
            unheard = ", ".join(str(rank) for rank in sorted(book.unheard))
            return self._say("recovering", reason=f"the board was restarted, and rank {unheard} has not reported its values yet")
        return await self._carry_out(book, request)

    def _attend(self, request: Request) -> Book:
        book = self._books.get(request.book)
        if book is None:
            unheard = range(request.world_size) if self._was_restarted else ()
            book = Book(request.world_size, unheard)
        if request.world_size != book.world_size or request.rank >= book.world_size:
            raise ValueError(f"{request.book} has {book.world_size} ranks: rank {request.rank} of {request.world_size} is not one of them")
        book.attend(request.rank, request.token, request.notes)
        self._books[request.book] = book
        return book

    async def _carry_out(self, book: Book, request: Request) -> Answer:
        key = request.keys[0] if request.keys else ""
        book.remove(request.removed)
        if request.operation == "put":
            book.set(key, request.value)
        elif request.operation == "claim":
            if key not in book.values:
                book.set(key, request.value)
            return self._say("done", book.values[key])
        elif request.operation == "look":
            found = [book.values[each] for each in request.keys if each in book.values]
            return self._say("done", *found) if len(found) == len(request.keys) else self._say("missing")
        elif request.operation == "wait":
            value = await book.wait(key, request.seconds)
            return self._say("missing") if value is None else self._say("done", value)
        return self._say("done")

    def _say(self, status: Status, *values: str, reason: str = "") -> Answer:
        return Answer(status=status, incarnation=self._incarnation, values=values, reason=reason)


class BoardActor:
    """The actor's class. It has one method, with bytes in and out, so that none of placement's objects is ever pickled."""

    def __init__(self) -> None:
        import ray

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Ray warns about its own code
            was_restarted = ray.get_runtime_context().was_current_actor_reconstructed
        self._books = Books(was_restarted=was_restarted)

    async def ask(self, message: bytes) -> bytes:
        """Answer an encoded `Request` with an encoded `Answer`.

        Raises:
            ValueError: the message is not a valid request.
        """
        return (await self._books.answer(decode(Request, message, max_bytes=MAX_MESSAGE_BYTES))).encode()
