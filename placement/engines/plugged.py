"""Engines in whose processes placement's plug-in (`vllm_plugin`, `sglang_backend`) may move the
bytes in place of the engine's own allocator."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from placement.core.errors import EngineError
from placement.engines.mirror import PLACEMENT
from placement.engines.tagged import TaggedEngine


class PluggedEngine(TaggedEngine):
    """Asks the engine whether the plug-in is there.

    Each worker of the engine gives an answer that it has anyway. The plug-in adds its report
    (`Mirror.report`) to it, so that an engine without the plug-in is asked nothing that it does not
    know.
    """

    own_mover: str
    """The name of the allocator that moves the bytes where the plug-in does not."""

    @abc.abstractmethod
    def answers(self) -> Sequence[Any]:
        """The answers of the workers, that of the worker on the manager's device first.

        Raises:
            EngineError: the engine does not give them.
        """

    def moved_by(self) -> str | None:
        return PLACEMENT if self._reports() else self.own_mover

    def mirror_bytes(self) -> int | None:
        """The bytes of the plug-in's mirror on the manager's device; None without the plug-in."""
        reports = self._later_reports()
        return reports[0]["host_bytes"] if reports else None

    def is_spoilt(self) -> bool:
        """Whether the plug-in says that weights came back with other bytes than those that left."""
        return any(report["is_spoilt"] for report in self._later_reports())

    def _later_reports(self) -> list[dict[str, Any]]:
        """The reports of an engine known to have the plug-in; none if it does not answer."""
        with suppress(EngineError):
            if self.residency.moved_by == PLACEMENT:
                return self._reports()
        return []

    def _reports(self) -> list[dict[str, Any]]:
        return [
            answer[PLACEMENT]
            for answer in self.answers()
            if isinstance(answer, dict) and PLACEMENT in answer
        ]
