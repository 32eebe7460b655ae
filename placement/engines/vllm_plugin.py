"""vLLM's plug-in (entry point group `vllm.general_plugins`): it makes `vllm_backend` known in every
process of vLLM.

From 0.33 on `--sleep-mode-backend placement` chooses it. Before, vLLM has no such option, and the
plug-in chooses it for each engine with sleep mode. That is done when a worker has warmed up: vLLM
captures its CUDA graphs in memory that can sleep only under the name of its own backend.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from placement.core.journal import logger

NAME = "placement"


def register() -> None:
    """Make the backend known, and have each worker tell when it has warmed up. Idempotent."""
    try:
        from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory as Factory
    except ImportError:
        logger.info("this vLLM takes no sleep-mode backend; 0.25 and later do")
        return
    try:
        Factory.register_backend(NAME, "placement.engines.vllm_backend", "PlacementBackend")
    except ValueError:  # registered already
        return
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    init_device = WorkerWrapperBase.init_device

    @functools.wraps(init_device)
    def init_and_follow(self: Any) -> None:
        init_device(self)
        worker = self.worker
        warm_up = worker.compile_or_warm_up_model
        worker.compile_or_warm_up_model = functools.partial(_warm_up_and_prepare, worker, warm_up)

    WorkerWrapperBase.init_device = init_and_follow


def _warm_up_and_prepare(worker: Any, warm_up: Callable[[], Any]) -> Any:
    times = warm_up()
    prepare(worker)
    return times


def prepare(worker: Any) -> None:
    """Choose the backend for a worker where vLLM has no option for it. The host memory for its
    first sleep is page-locked in the background."""
    from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory as Factory
    from vllm.engine.arg_utils import EngineArgs

    model_config = worker.vllm_config.model_config
    if not model_config.enable_sleep_mode or not Factory.get_backend_class(NAME).is_supported():
        return
    if not hasattr(EngineArgs, "sleep_mode_backend"):
        model_config.sleep_mode_backend = NAME
    if model_config.sleep_mode_backend != NAME:
        return
    logger.info("placement moves the memory of this vLLM worker in its sleep mode")
    get_backend = getattr(worker, "_get_sleep_mode_backend", None)  # until 0.29
    backend = worker.sleep_mode_backend if get_backend is None else get_backend()
    check_health = worker.check_health

    def check_and_report() -> Any:
        """Every worker of vLLM has this method, so that placement can ask any vLLM for it
        (`PluggedEngine`)."""
        check_health()
        return backend.mirror.report()

    worker.check_health = check_and_report
    backend.reserve()
