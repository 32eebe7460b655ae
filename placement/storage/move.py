"""One move of an object's bytes: how far it has come, and its result."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from placement.core.errors import IntegrityError
from placement.storage.range import Range
from placement.storage.scan import Relocated


class Stage(enum.Enum):
    """How far the present move of an object has come. The comment of a stage begins with the value
    that `on_device`, the decision, may have then. It ends with where any thread reads the values
    meanwhile (`ManagedStorage.is_on_host`). `make_consistent` takes every stage to `SETTLED`, on
    the side that was decided on."""

    # Either. No move is under way, and every tensor is where `on_device` says.
    SETTLED = enum.auto()
    # Either. A load, an offload that has given up nothing yet, new state, a way back. Read where it
    # says.
    BEGUN = enum.auto()
    # False. A streamed step has the newest bytes of some pages on the device. Read in the host
    # copy.
    STEPPING = enum.auto()
    # True. An offload has put memory aside that it has not begun to save. Read in the host copy,
    # once it is there.
    HIDING = enum.auto()
    # True up to the commit, then False. An offload takes the memory away. Read in the host copy.
    VACATING = enum.auto()
    # True, then False. `unadopt` has begun to move tensors out, and must be called again before any
    # other step.
    HANDING_BACK = enum.auto()


@dataclass(slots=True)
class Offload:
    """An offload under way: its findings, and its remaining steps."""

    relocated: Sequence[Relocated] = ()  # storages found away from their places, which get new ones
    may_have_stray_references: bool = True
    # gradients that it drops at its commit; None: they are saved
    dropped: tuple[Range, ...] | None = None


@dataclass(frozen=True, slots=True)
class MoveResult:
    """The bytes that a move copied and skipped, the time it took, and its findings."""

    seconds: float = 0.0
    copied_bytes: int = 0
    skipped_bytes: int = 0
    prefetched_bytes: int = 0  # bytes of a load that had arrived before it
    rewritten_chunks: int = 0  # chunks of a readonly object whose bytes changed on the device
    stray_references: int = 0
    stray_names: str = ""
    brought_back: str = ""  # names of the relocated tensors, which the offload has given new places

    def complaints(self, name: str) -> Iterator[IntegrityError]:
        """Errors about the findings, to be raised once the handle's phase transition is
        complete."""
        if self.rewritten_chunks:
            yield IntegrityError(
                f"{name!r} is readonly, but {self.rewritten_chunks} of its chunks changed on the "
                "device; the registered values were kept. Register it without readonly=True if it "
                "is meant to be written."
            )
        if self.brought_back:
            yield IntegrityError(
                f"{self.brought_back} of {name!r} lay in other memory than theirs when it was "
                "offloaded: something moved them out of the handle's memory on the device "
                "(share_memory(), a torch.multiprocessing queue). They have new places there, with "
                "the values that they had; a process that received the shared memory no longer "
                "sees changes. Share memory before registering, or send copies (clone())."
            )
