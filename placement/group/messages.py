"""What ranks tell each other: small JSON with a closed schema. Nothing here is executed, and nothing unknown is accepted."""

from __future__ import annotations

from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

MAX_BYTES = 64 << 10
_MAX_TEXT = 2000


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    def encode(self) -> bytes:
        return self.model_dump_json().encode()


class Proposal(_Message):
    """What a rank is about to do, before it asks its policy."""

    action: str = Field(max_length=400)
    """"enter train only=actor", "leave train": the same on all ranks."""
    budget_bytes: int = Field(ge=0)


class Basis(_Message):
    """What all ranks proposed."""

    budget_bytes: int = Field(ge=0)
    """The least of all."""


class Vote(_Message):
    """A rank has made the move, reversibly."""

    digest: str = Field(max_length=64)
    """Of the plan."""


class Decision(_Message):
    """What happens with an epoch. Write-once."""

    verdict: Literal["commit", "abort"]
    failures: dict[int, str] = Field(default_factory=dict)
    """Why not, by rank."""


_M = TypeVar("_M", bound=_Message)


def decode(kind: type[_M], value: bytes) -> _M:
    """A message of a known kind.

    Raises:
        ValueError: it is too long, no JSON, or has a field that the schema does not know.
    """
    if len(value) > MAX_BYTES:
        raise ValueError(f"a message of {len(value):,} bytes; the limit is {MAX_BYTES:,}")
    try:
        return kind.model_validate_json(value)
    except ValidationError as error:
        raise ValueError(f"no {kind.__name__}: {error.error_count()} mistakes in {value[:200]!r}") from error


def shortened(text: str) -> str:
    """A reason that fits: an exception's text may be of any length."""
    return text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 1]}…"
