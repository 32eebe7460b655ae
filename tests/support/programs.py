"""Programs whose own end is what a test looks at, in interpreters that are forked from one that has
imported torch and done nothing else.

A fresh interpreter takes seconds for its imports. Each program has the names of `__main__` to
itself, and ends as interpreters do.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

SECONDS = 60.0
ROOT = Path(__file__).parents[2]

_FORKING = """
import gc, json, os, signal, sys
gc.disable()  # what is imported stays
import torch._dynamo, placement.testing  # an optimizer imports the first
gc.enable()
gc.collect()
gc.freeze()  # else each end takes a second, to collect what torch is made of
for line in sys.stdin:
    pid = os.fork()
    if not pid:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
else:
    sys.exit()
code, output, errors, seconds = json.loads(line)
signal.alarm(seconds)
for number, place in enumerate((output, errors), 1):
    os.dup2(os.open(place, os.O_WRONLY), number)
del gc, json, os, signal, line, pid, output, errors, seconds, number, place
exec(compile(code, "program", "exec"))
"""


class Ended(NamedTuple):
    """How a program came to its end."""

    status: int
    """Its exit code; the negative number of the signal that killed it (SIGALRM: it took too
    long)."""
    output: str
    errors: str


class Programs:
    """Runs them, one after the other. Warnings are errors in them."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", _FORKING],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )

    def run(self, code: str) -> Ended:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with tempfile.NamedTemporaryFile("r") as output, tempfile.NamedTemporaryFile("r") as errors:
            self._process.stdin.write(
                json.dumps([code, output.name, errors.name, int(SECONDS)]) + "\n"
            )
            self._process.stdin.flush()
            status = int(self._process.stdout.readline())
            return Ended(status, output.read(), errors.read())

    def close(self) -> None:
        self._process.communicate("")
