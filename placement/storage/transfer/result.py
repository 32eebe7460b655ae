"""What a move did."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MoveResult:
    """What a move did, in bytes, and how long it took."""

    seconds: float = 0.0
    copied_bytes: int = 0
    skipped_bytes: int = 0
    rewritten_chunks: int = 0
    """Chunks of a readonly object whose bytes changed on the device."""
    stray_references: int = 0
    stray_names: str = ""
    """The tensors that somebody else holds, by name."""
    brought_back: str = ""
    """The tensors that were found in other memory than theirs on the device, by name."""
