"""The differences of verl's SGLang rollout from its vLLM rollout.

SGLang dies of a release of what is released already, and of a resume of what was not. So placement releases by name what is awake, and
no more: verl's own `release()` names all parts. Read from verl 0.9.1 (workers/rollout/sglang_rollout/sglang_rollout.py) and SGLang 0.5.12.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from placement.core.states import KV_CACHE
from placement.engines.tagged import Weights
from placement.integrations.verl.rollout import PlacedRollout

if TYPE_CHECKING:
    from placement.manager import Manager

_NEEDED = ("_init_server_adapter", "_engine", "sleep_level")
"""The attributes of verl's adapter that are used here and are not those of `BaseRollout`."""


class PlacedSglang(PlacedRollout):
    """Comes before verl's adapter of SGLang among the bases of a class."""

    _weights: Weights = "keep"  # verl starts a server that shares the worker's GPU with enable_weights_cpu_backup

    def _reason_to_leave_it(self, manager: Manager | None) -> str | None:
        missing = [name for name in _NEEDED if not hasattr(self, name)]
        if missing:
            return f"this verl's adapter of SGLang has no {', '.join(missing)}; that of verl 0.9.1 has"
        options = self.config.engine_kwargs.get("sglang") or {}
        if not options.get("enable_memory_saver", True):
            return "its memory does not move (rollout.engine_kwargs.sglang.enable_memory_saver=False)"
        return super()._reason_to_leave_it(manager)

    def _parts(self) -> tuple[str, ...]:
        """The KV cache alone where SGLang serves LoRA as an adapter: then the base weights stay on the device."""
        return (KV_CACHE,) if self.sleep_level == 1 else super()._parts()

    async def release_parts(self, tags: Collection[str]) -> None:
        await self._init_server_adapter()
        if self._engine is not None:  # else another rank leads the server
            await self._engine.release_memory_occupation(tags=[*tags])
