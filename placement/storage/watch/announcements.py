"""The announcements of a handle's moves, for the parts that have to follow them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

Listeners = list[Callable[[], object]]


@dataclass(slots=True)
class Announcements:
    """The functions that `ManagedStorage` calls when the bytes of its object move, in this order.
    They move no bytes. After a failure an announcement may come again, so each is idempotent."""

    leaving: Listeners = field(default_factory=list)
    """The bytes are about to leave the device. Nothing has changed, and the device may still have
    work to do."""
    left: Listeners = field(default_factory=list)
    """The bytes are in the host copy alone, and every tensor lies over poison. This holds after a
    load that failed, and after a streamed step, too."""
    coming: Listeners = field(default_factory=list)
    """The bytes are about to come to the device. Nothing has changed, and an error refuses the
    load."""
    came: Listeners = field(default_factory=list)
    """The bytes are on the device, or have never left it because an offload was undone."""
