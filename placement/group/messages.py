"""What ranks tell each other: small JSON with a closed schema. Nothing here is executed, and nothing unknown is accepted."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

MAX_BYTES = 64 << 10
_MAX_TEXT = 2000
_MAX_ACTION = 400
_MAX_REASONS_BYTES = 48 << 10
"""Of all reasons together: the ranks that failed may be thousands."""


class Message(BaseModel):
    """Frozen, and closed: an unknown field is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def encode(self) -> bytes:
        return self.model_dump_json().encode()


class Proposal(Message):
    """What a rank is about to do, before it asks its policy."""

    action: str = Field(max_length=_MAX_ACTION)
    """"enter train only=actor", "leave train": the same on all ranks."""
    budget_bytes: int = Field(ge=0)


class Basis(Message):
    """What becomes of the proposals. Write-once."""

    budget_bytes: int | None = Field(ge=0)
    """The least of all ranks; None when the epoch has ended before: see its decision."""
    budget_rank: int = Field(default=0, ge=0)
    """Whose budget that is."""


class Vote(Message):
    """A rank has made the move, reversibly."""

    digest: str = Field(max_length=64)
    """Of the plan."""


class Decision(Message):
    """What happens with an epoch. Write-once."""

    verdict: Literal["commit", "abort"]
    failures: dict[int, str] = Field(default_factory=dict)
    """Why not, by rank."""
    unnamed: int = Field(default=0, ge=0)
    """Ranks that failed beside these."""
    is_silent: bool = False
    """Those that failed say nothing more: they are late, or were restarted."""
    missed: str | None = Field(default=None, max_length=_MAX_ACTION)
    """What the others were about to do when they gave up waiting for the proposals of those that failed; None: it ended otherwise."""


class Outcome(Message):
    """How an epoch that ended went for one rank."""

    reason: str | None = Field(default=None, max_length=_MAX_TEXT)
    """Why this rank failed; None when it did not."""


class Failures(Message):
    """Why an epoch ended, by every rank that failed in it. Write-once."""

    failures: dict[int, str]
    unnamed: int = Field(default=0, ge=0)
    """Ranks that failed beside these."""


_M = TypeVar("_M", bound=Message)


def decode(kind: type[_M], value: bytes, *, max_bytes: int = MAX_BYTES) -> _M:
    """A message of a known kind.

    Raises:
        ValueError: it is too long, no JSON, or has a field that the schema does not know.
    """
    if len(value) > max_bytes:
        raise ValueError(f"a message of {len(value):,} bytes; the limit is {max_bytes:,}")
    try:
        return kind.model_validate_json(value)
    except ValidationError as error:
        raise ValueError(f"no {kind.__name__}: {error.error_count()} mistakes in {value[:200]!r}") from error


def abort(failures: Mapping[int, str], *, is_silent: bool = False, missed: str | None = None) -> Decision:
    """The decision that an epoch ends, with as many of the reasons as a message takes."""
    kept = _fitting(failures)
    unnamed = len(failures) - len(kept)
    return Decision(verdict="abort", failures=kept, unnamed=unnamed, is_silent=is_silent, missed=missed)


def gathered(failures: Mapping[int, str]) -> Failures:
    """The reasons of all ranks, as many as a message takes."""
    kept = _fitting(failures)
    return Failures(failures=kept, unnamed=len(failures) - len(kept))


def _fitting(failures: Mapping[int, str]) -> dict[int, str]:
    """As many of the reasons as fit, the lowest ranks first."""
    kept: dict[int, str] = {}
    room_bytes = _MAX_REASONS_BYTES
    for rank, reason in sorted(failures.items()):
        text = shortened(reason)
        room_bytes -= 4 * len(text) + 16  # UTF-8, the number, and what JSON needs around them
        if kept and room_bytes < 0:
            break
        kept[rank] = text
    return kept


def shortened(text: str, limit: int = _MAX_TEXT) -> str:
    """A text that fits and can be sent: an exception's may be of any length, and hold what is no character (a file's odd name)."""
    clean = "".join(char if char.isprintable() or char == "\n" else "\ufffd" for char in text[:limit])
    return clean if len(text) <= limit else f"{clean[:-1]}…"


def named(action: str) -> str:
    """An action that fits: the same for equal actions, and different for different ones."""
    digest = hashlib.sha256(action.encode("utf-8", "surrogatepass")).hexdigest()
    text = shortened(action, _MAX_ACTION - len(digest) - 1)
    return text if text == action else f"{text} {digest}"
