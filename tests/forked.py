"""Processes for tests, forked from one that has imported what they need: torch alone costs a fresh interpreter two seconds.

Not for what needs a GPU, nor for a test about a process's own beginning or end. A process gets the environment with which the first
one was started.
"""

from __future__ import annotations

import multiprocessing

processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["tests.warm", "tests.group.fault_worker"])
