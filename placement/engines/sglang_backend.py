"""SGLang's plug-in (entry point group `sglang.srt.plugins`, from 0.5.11 on): a host copy of the
weights in place of torch_memory_saver's.

torch_memory_saver goes on mapping and unmapping all of SGLang's memory. It only makes no backup of
the weights any more: where SGLang asks for one, their bytes are copied here, through a `Mirror`.

Read from sglang/srt/utils/torch_memory_saver_adapter.py and sglang/srt/plugins of SGLang 0.5.11 to
0.5.23.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from placement.core.errors import HostMemoryError, IntegrityError, PlacementError
from placement.core.journal import logger
from placement.core.states import WEIGHTS
from placement.devices.select import select_device
from placement.engines.mirror import WEIGHTS_DIFFER, Block, Mirror, log_move

_TARGET = "sglang.srt.utils.torch_memory_saver_adapter.TorchMemorySaverAdapter.create"
_SCHEDULER = "sglang.srt.managers.scheduler"
_savers: list[MirroredSaver] = []  # one: SGLang asks for its adapter about twenty times


def register() -> None:
    """Put the hook on SGLang's adapter, and check that it is on: SGLang itself only logs a hook
    that it could not apply.

    Raises:
        PlacementError: the hook is not on.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_TARGET, _create, HookType.AROUND)
    if _SCHEDULER in sys.modules:  # else this process has no weights
        state = f"{_SCHEDULER}.Scheduler.get_internal_state"
        HookRegistry.register(state, _report, HookType.AFTER)
    HookRegistry.apply_hooks()
    if _TARGET not in HookRegistry._patched:
        raise PlacementError(
            f"placement cannot move the weights of this SGLang: no hook on {_TARGET}. SGLang's own "
            "log says why"
        )


def _create(create: Callable[..., Any], enable: bool) -> Any:
    adapter = create(enable=enable)
    if not enable or torch.version.cuda is None or importlib.util.find_spec("cuda") is None:
        return adapter
    if not _savers:
        logger.info("placement moves the weights of this SGLang process where they have a backup")
        _savers.append(MirroredSaver(adapter))
    return _savers[0]


def _report(answer: Any, *_: Any, **__: Any) -> Any:
    """Add the mirror's report to that of SGLang's scheduler (`/server_info`)."""
    if _savers and _savers[0].mirror is not None:
        answer.internal_state.update(_savers[0].mirror.report())
    return answer


class MirroredSaver:
    """SGLang's adapter of torch_memory_saver, with a host copy of its own for the weights."""

    def __init__(self, adapter: Any) -> None:
        self._adapter = adapter
        self._pools: set[Any] = set()
        self._asleep: list[Block] = []
        self.mirror: Mirror | None = None  # until SGLang asks for a backup of the weights

    def __getattr__(self, name: str) -> Any:
        return getattr(self._adapter, name)

    @contextmanager
    def region(self, tag: str, enable_cpu_backup: bool = False) -> Iterator[None]:
        """A context in which torch allocates memory that `pause(tag)` unmaps."""
        if tag != WEIGHTS or not enable_cpu_backup:
            with self._adapter.region(tag, enable_cpu_backup=enable_cpu_backup):
                yield
            return
        before = {segment["address"] for segment in torch.cuda.memory_snapshot()}
        with self._adapter.region(tag, enable_cpu_backup=False):
            yield
        self._pools |= {
            segment["segment_pool_id"]
            for segment in torch.cuda.memory_snapshot()
            if segment["address"] not in before
        } - {(0, 0)}  # torch's own pool, from which other threads may have allocated
        self.mirror = self.mirror or Mirror(select_device(f"cuda:{torch.cuda.current_device()}"))
        try:
            self.mirror.reserve(self._blocks())
        except HostMemoryError as error:
            logger.warning("no host memory was reserved for SGLang's weights: %s", error)

    def _blocks(self) -> list[Block]:
        return [
            Block(segment["address"], segment["total_size"])
            for segment in torch.cuda.memory_snapshot()
            if segment["segment_pool_id"] in self._pools
        ]

    def pause(self, tag: str) -> None:
        """Unmap the memory of a tag; that of weights with a backup once its bytes are on the host.

        Raises:
            HostMemoryError: there is not enough host memory. Nothing was unmapped.
            RuntimeError: the device failed to copy. Nothing was unmapped.
        """
        if tag == WEIGHTS and self.mirror is not None and not self._asleep:
            began, blocks = time.monotonic(), self._blocks()
            copied = self.mirror.begin_save(blocks)
            for block in blocks:
                self.mirror.end_save(block)
            self._asleep = blocks
            log_move("SGLang's weights leave", copied, began)
        self._adapter.pause(tag)

    def resume(self, tag: str) -> None:
        """Map the memory of a tag again, with the bytes of weights that had a backup.

        Raises:
            IntegrityError: the bytes that came back are not those that left.
            RuntimeError: the device failed to copy.
        """
        began = time.monotonic()
        self._adapter.resume(tag)
        if tag != WEIGHTS or self.mirror is None or not self._asleep:
            return
        sources = {block: self.mirror.host(block) for block in self._asleep}
        for block, source in sources.items():
            self.mirror.fetch(block, source)
        self.mirror.end_fetch()
        if wrong := self.mirror.differing(sources):
            raise IntegrityError(f"{WEIGHTS_DIFFER} ({len(wrong)} blocks). Restart SGLang")
        log_move("SGLang's weights are back", sum(block.nbytes for block in sources), began)
        self._asleep = []
