"""Ranks that change phase together, and processes that share a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from placement.core import on_demand as _on_demand
from placement.group.protocol import Board, BoardLost, Group

if TYPE_CHECKING:
    from placement.group.store import StoreGroup, from_environment

__all__ = ["Board", "BoardLost", "Group", "StoreGroup", "from_environment"]

__getattr__ = _on_demand(__name__, dict.fromkeys(("StoreGroup", "from_environment"), "store"))
