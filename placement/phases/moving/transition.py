"""One phase transition while it is carried out."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from placement.registration.handle import Handle
from placement.storage.managed import ManagedStorage, MoveResult
from placement.storage.transfer.chunk_pool import ChunkPool
from placement.storage.transfer.exchange import nothing
from placement.storage.transfer.load import ALONE, Load


@dataclass(eq=False, slots=True)
class Transition:
    """The resources and results of one phase transition. Made at its beginning and dropped at its end."""

    chunk_pool: ChunkPool
    """Chunks that storages have freed, and how many more bytes the driver may be asked for."""
    load: Load = ALONE
    """The way in which bytes are loaded: by this rank alone, or by all ranks that share a handle together."""
    dropping: tuple[ManagedStorage, ...] = ()
    """The storages whose gradients the plan drops when they leave TRAINING."""
    staying: Mapping[ManagedStorage, int] = field(default_factory=dict)
    """Device bytes of storages that leave which stay as early chunks."""
    while_copying: Callable[[], None] = nothing
    """Called once, while bytes are being copied to the host."""
    began_seconds: float = field(default_factory=time.monotonic)
    """When it began, on the monotonic clock."""
    moved: dict[Handle, MoveResult] = field(default_factory=dict)
    """Results of the exchange, by handle. The state transition of a handle takes its result out."""
    complaints: list[Exception] = field(default_factory=list)
    """Errors to raise once the phase transition is complete. Raised at once, they would leave a handle in the middle of a change."""

    def take_complaints(self) -> list[Exception]:
        """Return the complaints and forget them here."""
        complaints, self.complaints = self.complaints, []
        return complaints
