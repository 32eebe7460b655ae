"""A process of its own, in which functions run one after the other: vLLM can sleep in one instance
a process."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch


def _begin(environment: dict[str, str]) -> None:
    os.environ.update(environment)


class Apart:
    """A spawned process that lives until `close`. What a function raises there is raised here, with
    its traceback.

    Args:
        environment: variables that are set before anything is imported there.
    """

    def __init__(self, **environment: str) -> None:
        context = torch.multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(
            1, mp_context=context, initializer=_begin, initargs=(environment,)
        )

    def run(
        self, function: Callable[..., Any], *arguments: Any, deadline_seconds: float = 240.0
    ) -> Any:
        """Run a function of a module that can be imported; it, its arguments and its result are
        pickled.

        Raises:
            TimeoutError: it takes longer. The process is ended.
        """
        try:
            return self._pool.submit(function, *arguments).result(deadline_seconds)
        except TimeoutError:
            self.close()
            raise

    def close(self) -> None:
        processes = [*(self._pool._processes or {}).values()]
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.join(20)
            if process.is_alive():
                process.kill()
                process.join()
