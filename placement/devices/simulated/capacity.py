"""The capacity that simulated devices of several processes share, through a ledger."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from placement.devices.ledger import Ledger, Note


class SharedCapacity:
    """This device's claim on the capacity, and the sum of the other claims. `path`: the same for all processes; the ledger is beside it."""

    def __init__(self, path: Path, capacity_bytes: int) -> None:
        self.path = Path(os.path.realpath(path))
        self.capacity_bytes = capacity_bytes
        self._ledger = Ledger.of(self.path.parent, self.path.name)
        self._note = Note(token=secrets.token_hex(8), pid=os.getpid(), name="simulated")
        self.claim(0, 0)

    def leave(self) -> None:
        """Hold nothing from now on. Waits for nobody: a device may die in the middle of another one's claim."""
        self._ledger.leave(self._note.token)

    def claim(self, held_bytes: int, more_bytes: int) -> int:
        """Record that this device holds `held_bytes`, and `more_bytes` in addition if the others leave that much. Returns the bytes that
        the others hold: the claim for more was granted if the total is within the capacity."""
        with self._ledger.turn():
            slot = self._ledger.join(self._note, held_bytes)
            others = sum(each.held_bytes for each in self._ledger.claims() if each.slot != slot)
            if more_bytes and held_bytes + more_bytes + others <= self.capacity_bytes:
                self._ledger.hold(self._note.token, held_bytes + more_bytes)
            return others
