"""One Ray cluster for all tests of this folder."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def ray() -> Iterator[Any]:
    """Ray on this machine, with this process connected to it."""
    ray = pytest.importorskip("ray", reason="ray is not installed here")
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "OMP_NUM_THREADS": "1"}
    # Ray's workers are nice to others by default: beside other tests they would get a thirtieth of
    # a core, and miss every deadline.
    os.environ |= {"RAY_worker_niceness": "0", "RAY_prestart_worker_first_driver": "0"}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ray.init(
                num_cpus=16,
                namespace="tests",
                include_dashboard=False,
                log_to_driver=False,
                logging_level="error",
            )
        yield ray
    finally:
        ray.shutdown()
