"""Named places where a test can stop, kill or delay a process: `PLACEMENT_FAILPOINTS="group.after_vote=2:kill"`.

The names are the steps of the protocol. The variable is read at import. Without it a failpoint costs one look into an empty table.
The grammar is `NAME=N:ACTION`; several terms are separated by ";". The N-th passage (counted from 1) acts, once. Actions: `kill`
(SIGKILL), `stop` (SIGSTOP), `raise` (RuntimeError), `sleep(SECONDS)`.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections import Counter

NAMES = (
    "group.before_proposal",
    "group.after_proposal",
    "group.before_basis",
    "group.before_prepare",
    "group.after_prepare",
    "group.after_vote",
    "group.before_claim",
    "group.after_claim",
    "group.before_obey",
    "group.after_obey",
)
_TERM = re.compile(r"(?P<name>[a-z_.]+)=(?P<at>[0-9]+):(?P<action>kill|stop|raise|sleep\((?P<seconds>[0-9.]+)\))")


def parse(text: str) -> dict[str, tuple[int, str, float]]:
    """Parse failpoints. Returns for each name the passage that acts, the action, and its seconds.

    Raises:
        ValueError: a term does not fit the grammar, or names no step.
    """
    found = {}
    for term in filter(None, text.split(";")):
        match = _TERM.fullmatch(term.strip())
        if match is None or match["name"] not in NAMES:
            raise ValueError(f"PLACEMENT_FAILPOINTS: {term!r} is not NAME=N:ACTION with one of {', '.join(NAMES)}")
        found[match["name"]] = (int(match["at"]), match["action"].partition("(")[0], float(match["seconds"] or 0))
    return found


_armed: dict[str, tuple[int, str, float]] = {}
_passed: Counter[str] = Counter()


def arm(text: str) -> None:
    """Replace the failpoints by those in `text` and count passages anew. An empty text removes all.

    Raises:
        ValueError: see `parse`.
    """
    armed = parse(text)
    _passed.clear()
    _armed.clear()
    _armed.update(armed)


def failpoint(name: str) -> None:
    """Mark that the process passes the step `name`, and act if a failpoint says so."""
    if name not in _armed:
        return
    _passed[name] += 1
    at, action, seconds = _armed[name]
    if _passed[name] != at:
        return
    if action == "raise":
        raise RuntimeError(f"failpoint {name}")
    if action == "sleep":
        time.sleep(seconds)
    else:
        os.kill(os.getpid(), signal.SIGKILL if action == "kill" else signal.SIGSTOP)


arm(os.environ.get("PLACEMENT_FAILPOINTS", ""))
