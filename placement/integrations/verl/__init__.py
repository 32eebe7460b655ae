"""verl's training engines under placement, switched on by `VERL_ENGINE_VENDOR=placement`. No recipe
and no line of verl changes.

verl finds this package by the entry point `placement` in the group `verl.plugins`.
docs/integrations/verl.md says what it does.
"""

from __future__ import annotations

from placement.integrations.verl.placed import close_manager, manager, use_manager

__all__ = ["close_manager", "manager", "use_manager"]
