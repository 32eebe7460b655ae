"""Raise an error to the caller of compiled code from within dynamo's trace of it.

This module is imported only while dynamo traces: it needs dynamo, which takes a second to import.
"""

from __future__ import annotations

from typing import Any

from torch import _dynamo
from torch._dynamo.exc import ShortenTraceback

from placement.core.call_guard import CHECKS
from placement.core.errors import NotResidentError


class RefusedTrace(NotResidentError, ShortenTraceback):
    """Ends a trace. Dynamo lets this error out because it is one of its own; others it wraps. The
    error keeps no part of the trace."""

    def __init__(self, message: str) -> None:
        ShortenTraceback.__init__(self, message, first_useful_frame=None)
        self._message = message

    def remove_dynamo_frames(self) -> Any:
        """The error for the caller: to this one dynamo has attached its tracer, and to its message
        the position in the trace."""
        return NotResidentError(self._message)

    def __reduce__(self) -> tuple[type[NotResidentError], tuple[str]]:
        return NotResidentError, (self._message,)


@_dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def refuse_while_compiling(key: str) -> None:
    """Run a check. Dynamo calls this function instead of tracing it, and takes `key` for a constant
    because it is a string."""
    try:
        CHECKS[key](None, ())
    except NotResidentError as error:
        raise RefusedTrace(str(error)) from None
