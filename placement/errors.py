"""The exceptions that placement raises, by their short name; `placement.core.errors` says when each
is raised."""

from __future__ import annotations

from placement.core.errors import *  # noqa: F403
from placement.core.errors import PlacementError

__all__ = [
    name
    for name, value in globals().items()
    if isinstance(value, type) and issubclass(value, PlacementError)
]
