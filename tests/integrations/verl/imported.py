"""Importing this module imports verl on the CPU, where it is installed: once, in the process from
which those of tests are forked."""

from __future__ import annotations

import contextlib

from tests.integrations.verl.worker import import_verl

with contextlib.suppress(ImportError):  # else its tests are skipped and say so
    import_verl()
