"""The board behind `RayGroup`: an actor that keeps the few values of each membership in memory, and what it is told and answers.

A restarted actor has forgotten everything, decisions that ranks have obeyed among it. So it answers nobody of a membership until EVERY
rank of it has told what that rank has written and read: whatever any of them obeyed stands again before anybody can claim anything else.
Where one rank's knowledge is gone as well, nobody gets an answer, and the ranks keep what they prepared (`CoordinatorLost`).
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
"""Rank 0 of a thousand ranks asks for, and reports, a value of each of them."""
WAIT_SECONDS = 5.0
"""The longest that one request waits in the actor."""


Operation = Literal["attend", "put", "claim", "look", "wait"]
Status = Literal["done", "missing", "stranger", "recovering", "refused"]


class Request(Message):
    """What a rank asks of the board."""

    book: str = Field(max_length=200)
    """The membership: a group's name and generation."""
    incarnation: str = Field(max_length=32)
    """Of the actor, as this rank knows it; a message to an earlier one must not count."""
    rank: int = Field(ge=0)
    operation: Operation
    keys: tuple[str, ...] = ()
    value: str = Field(default="", max_length=MAX_BYTES)
    removed: tuple[str, ...] = ()
    """Keys that nobody asks for any more."""
    seconds: float = Field(default=0.0, ge=0.0, le=WAIT_SECONDS)
    token: str = Field(default="", max_length=32)
    """Attend: of the process that speaks for the rank."""
    world_size: int = Field(default=1, ge=1)
    notes: dict[str, str] = Field(default_factory=dict)
    """Attend: what that process has written and read."""


class Answer(Message):
    """What the board says."""

    status: Status
    incarnation: str
    values: tuple[str, ...] = ()
    reason: str = ""


class Book:
    """The values of one membership.

    Args:
        unheard: the ranks that have to tell what they know before anything is answered; none for a membership that begins here.
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
        """A process says that it is `rank`, and what it knows: nothing, when it has just begun. Idempotent.

        Raises:
            ValueError: it knows of a membership that this one has taken the place of.
        """
        if (rank, token) in self._attended:
            return
        if not self.unheard and notes:
            raise ValueError(f"rank {rank} is left over from an earlier membership of the same name")
        self._attended.add((rank, token))
        if not self.unheard:
            return
        if rank not in self._told or notes:  # a process that began after a death does not speak for the one that died
            self._told[rank] = notes
        self.unheard.discard(rank)
        if not self.unheard:
            self._restore()

    def _restore(self) -> None:
        knowing = {rank for rank, notes in self._told.items() if notes}
        if knowing and len(knowing) < self.world_size:
            gone = ", ".join(str(rank) for rank in sorted(self._told.keys() - knowing))
            self.refusal = f"the board was restarted, and what it knew of rank {gone} is gone with that rank's process"
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
    """Every membership of one actor, and the answers to what their ranks ask.

    Args:
        was_restarted: whether an earlier incarnation may have answered somebody.
    """

    def __init__(self, *, was_restarted: bool) -> None:
        self._was_restarted = was_restarted
        self._incarnation = secrets.token_hex(8)
        self._books: dict[str, Book] = {}

    async def answer(self, request: Request) -> Answer:
        """Everything but a wait happens without a pause: one request after the other."""
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
            return self._say("recovering", reason=f"the board was restarted, and rank {unheard} has not told what it knows")
        return await self._carry_out(book, request)

    def _attend(self, request: Request) -> Book:
        book = self._books.get(request.book)
        if book is None:
            unheard = range(request.world_size) if self._was_restarted else ()
            book = Book(request.world_size, unheard)
        if request.world_size != book.world_size or request.rank >= book.world_size:
            raise ValueError(f"{request.book} has {book.world_size} ranks: rank {request.rank} of {request.world_size} is none of them")
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
    """The actor's class. One method, bytes in and bytes out, so that nothing of ours is ever pickled."""

    def __init__(self) -> None:
        import ray

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Ray's own, about its own code
            was_restarted = ray.get_runtime_context().was_current_actor_reconstructed
        self._books = Books(was_restarted=was_restarted)

    async def ask(self, message: bytes) -> bytes:
        """Answer a `Request` with an `Answer`.

        Raises:
            ValueError: it is no request.
        """
        return (await self._books.answer(decode(Request, message, max_bytes=MAX_MESSAGE_BYTES))).encode()
