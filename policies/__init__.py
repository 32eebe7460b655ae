"""Policies decide where every handle belongs in each phase.

A policy is pure. It reads a `View` and returns a total `Plan`. It moves nothing, asks no device,
keeps no history and reads no clock. The modules here import only public names of `placement`, so a
user's own policy can do all that these do.
"""

from placement import Policy

from .async_rollout import AsyncRollout
from .colocated import Colocated
from .cyclic import Cyclic
from .resident import Resident

__all__ = ["AsyncRollout", "Colocated", "Cyclic", "Policy", "Resident"]
