"""An error for the caller of compiled code, out of the middle of dynamo's trace of it.

Imported only while dynamo traces: it needs dynamo, which takes a second to import.
"""

from __future__ import annotations

from typing import Any

from torch import _dynamo
from torch._dynamo.exc import ShortenTraceback

from placement.core.call_guard import CHECKS
from placement.core.errors import NotResidentError


class RefusedTrace(NotResidentError, ShortenTraceback):
    """Ends a trace. Dynamo makes another error of every error that is not its own, keeps nothing of the trace, and lets this one out."""

    def __init__(self, message: str) -> None:
        ShortenTraceback.__init__(self, message, first_useful_frame=None)
        self._message = message

    def remove_dynamo_frames(self) -> Any:
        """What dynamo raises instead on the way to the caller: on this one it has hung its tracer, and to the message where
        it was."""
        return NotResidentError(self._message)

    def __reduce__(self) -> tuple[type[NotResidentError], tuple[str]]:
        return NotResidentError, (self._message,)


@_dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def refuse_while_compiling(key: str) -> None:
    """Run a check; dynamo calls this as it is instead of tracing it.

    Args:
        key: of the check in `CHECKS`. A string: every version of dynamo takes one for a constant.

    Raises:
        RefusedTrace: with what the check raised.
    """
    try:
        CHECKS[key](None, ())
    except NotResidentError as error:
        raise RefusedTrace(str(error)) from None
