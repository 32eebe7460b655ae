"""The result of one storage's move, and what `nan_check` found before it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class MoveResult:
    """The bytes that a move copied and skipped, the time it took, and what it found wrong."""

    seconds: float = 0.0
    copied_bytes: int = 0
    skipped_bytes: int = 0
    prefetched_bytes: int = 0
    """Bytes of a load that had arrived before it."""
    rewritten_chunks: int = 0
    """Chunks of a readonly object whose bytes changed on the device."""
    stray_references: int = 0
    stray_names: str = ""
    """Names of the tensors to which there are stray references."""
    brought_back: str = ""
    """Names of the relocated tensors, which the offload has given new places."""
    nan: str = ""
    """Words for tensors that were numbers before and were found to be NaN."""


@dataclass(slots=True)
class NanFound:
    """The tensors of one object that were found to be NaN throughout, until the offload that is committed next tells them."""

    is_on: bool = True
    """Whether anything is looked at (`Settings.nan_check`)."""
    put_right: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    """Tensors without earlier values."""
    known: frozenset[str] = frozenset()
    """Tensors in place that were left at the last look. They are told once."""
