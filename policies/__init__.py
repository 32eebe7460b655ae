"""Policies: where everything belongs in each phase.

A policy is pure. It reads a `View` and returns a total `Plan`; it moves nothing, asks no device, keeps no history, reads no clock.
Modules here import only what `placement` exports, so a user's own policy can do whatever these do.
"""

from placement import Policy

from .async_rollout import AsyncRollout
from .colocated import Colocated
from .resident import Resident

__all__ = ["AsyncRollout", "Colocated", "Policy", "Resident"]
