"""One phase transition while it is carried out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from placement.registration.handle import Handle
from placement.storage.managed import ManagedStorage
from placement.storage.transfer.chunk_pool import ChunkPool
from placement.storage.transfer.exchange import nothing
from placement.storage.transfer.load import ALONE, Load
from placement.storage.transfer.result import MoveResult


@dataclass(eq=False, slots=True)
class Transition:
    """What one phase transition may use, and what it has done so far. Made at its beginning and dropped at its end."""

    chunk_pool: ChunkPool
    """Chunks that storages have given up, and how many bytes more the driver may be asked for."""
    load: Load = ALONE
    """Over which links the bytes come that this transition loads."""
    dropping: tuple[ManagedStorage, ...] = ()
    """The storages whose gradients die as they leave TRAINING."""
    while_copying: Callable[[], None] = nothing
    """Called once, while bytes are on their way to the host."""
    moved: dict[Handle, MoveResult] = field(default_factory=dict)
    """What the exchange has moved, until the state transition of each handle takes its part over."""
    complaints: list[Exception] = field(default_factory=list)
    """Errors to raise once the transition is complete: raised at once they would leave a handle half-way."""

    def take_complaints(self) -> list[Exception]:
        """The complaints, which are the caller's from now on."""
        complaints, self.complaints = self.complaints, []
        return complaints
