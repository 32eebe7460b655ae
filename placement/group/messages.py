"""The messages between ranks: small JSON with a closed schema. Nothing received is executed, and unknown fields are rejected."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

MAX_BYTES = 64 << 10
_MAX_TEXT = 2000
_MAX_ACTION = 400
_MAX_REASONS_BYTES = 48 << 10
"""The limit for all reasons in one message together: thousands of ranks may fail at once."""

Stage = Literal["engines left", "moved", "engines loaded"]
"""How far a phase transition has come. Only ranks whose engines move have a first and a last stage."""
STAGES: tuple[Stage, ...] = get_args(Stage)


class Message(BaseModel):
    """A frozen message with a closed schema: an unknown field is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def encode(self) -> bytes:
        return self.model_dump_json().encode()


class Proposal(Message):
    """The action that a rank is about to take. It is written before the rank asks its policy."""

    action: str = Field(max_length=_MAX_ACTION)
    """For example "enter train only=actor" or "leave train"; must be the same on all ranks."""
    budget_bytes: int = Field(ge=0)
    plans_may_differ: bool = False
    """Whether the rank knows that the ranks may make different plans."""
    placing: str = Field(default="", max_length=64)
    """A digest of the sizes of the rank's handles and of where they are, on which policies may base their plans."""


class Basis(Message):
    """The result of comparing all proposals. Write-once."""

    budget_bytes: int | None = Field(ge=0)
    """The least budget of all ranks; None when the epoch has ended before: then see its decision."""
    budget_rank: int = Field(default=0, ge=0)
    """The rank with the least budget."""
    compares_plans: bool = False
    """Whether the ranks tell each other what stays on their devices: one of them asked for it, or their handles differ in size or place."""


class Vote(Message):
    """A rank's vote: it has made its move, reversibly."""

    digest: str = Field(max_length=64)
    """The digest of the rank's plan."""
    stage: Stage = "moved"
    lacks_engines: bool = False
    """Whether the rank has engines to load once all have moved."""


class Decision(Message):
    """The decision about an epoch. Write-once."""

    verdict: Literal["commit", "abort"]
    stage: Stage = "moved"
    """COMMIT: the stage that all ranks have reached. A rank that voted for a later one votes for it again, in the next epoch."""
    lacks_engines: bool = False
    """COMMIT: whether a rank has engines to load. Then one more epoch follows, on all ranks."""
    failures: dict[int, str] = Field(default_factory=dict)
    """The failed ranks with their reasons."""
    unnamed: int = Field(default=0, ge=0)
    """The number of further failed ranks, for which the message had no room."""
    is_silent: bool = False
    """Whether the failed ranks will say nothing more, because they are late or were restarted."""
    missed: str | None = Field(default=None, max_length=_MAX_ACTION)
    """The action that the others gave up because the failed ranks did not propose it in time; None when the epoch ended otherwise."""


class Outcome(Message):
    """One rank's outcome of an epoch that has ended."""

    reason: str | None = Field(default=None, max_length=_MAX_TEXT)
    """The reason why this rank failed; None when it did not fail."""


class Failures(Message):
    """All ranks that failed in an epoch, with their reasons. Write-once."""

    failures: dict[int, str]
    unnamed: int = Field(default=0, ge=0)
    """The number of further failed ranks, for which the message had no room."""


_M = TypeVar("_M", bound=Message)


def decode(kind: type[_M], value: bytes, *, max_bytes: int = MAX_BYTES) -> _M:
    """Decode a message of the given kind.

    Raises:
        ValueError: the value is too long, is not JSON, or does not fit the schema.
    """
    if len(value) > max_bytes:
        raise ValueError(f"a message has {len(value):,} bytes; the limit is {max_bytes:,}")
    try:
        return kind.model_validate_json(value)
    except ValidationError as error:
        raise ValueError(f"not a valid {kind.__name__}: {error.error_count()} errors in {value[:200]!r}") from error


def abort(failures: Mapping[int, str], *, is_silent: bool = False, missed: str | None = None) -> Decision:
    """A decision that ends an epoch, with as many of the reasons as fit into a message."""
    kept = _fitting(failures)
    unnamed = len(failures) - len(kept)
    return Decision(verdict="abort", failures=kept, unnamed=unnamed, is_silent=is_silent, missed=missed)


def gathered(failures: Mapping[int, str]) -> Failures:
    """A message with the reasons of all ranks, as many as fit."""
    kept = _fitting(failures)
    return Failures(failures=kept, unnamed=len(failures) - len(kept))


def _fitting(failures: Mapping[int, str]) -> dict[int, str]:
    """As many of the reasons as fit into a message, lowest ranks first."""
    kept: dict[int, str] = {}
    room_bytes = _MAX_REASONS_BYTES
    for rank, reason in sorted(failures.items()):
        text = shortened(reason)
        room_bytes -= 4 * len(text) + 16  # the worst case of UTF-8, plus the rank's number and JSON's punctuation
        if kept and room_bytes < 0:
            break
        kept[rank] = text
    return kept


def shortened(text: str, limit: int = _MAX_TEXT) -> str:
    """Cut a text to the limit and replace unprintable characters. Exception texts may be long, or hold a file name that is not Unicode."""
    clean = "".join(char if char.isprintable() or char == "\n" else "\ufffd" for char in text[:limit])
    return clean if len(text) <= limit else f"{clean[:-1]}…"


def named(action: str) -> str:
    """Cut an action to the limit. Different actions stay different, by a digest at the end."""
    digest = hashlib.sha256(action.encode("utf-8", "surrogatepass")).hexdigest()
    text = shortened(action, _MAX_ACTION - len(digest) - 1)
    return text if text == action else f"{text} {digest}"
