"""The rollout that shares the worker's GPU, as a handle of placement. `PlacedRollout` is vLLM's;
`PlacedSglang` has the differences for SGLang.

verl wakes the rollout in the worker, through an adapter (`resume`), and puts it to sleep in the
driver, past the worker. So placement makes the calls that wake it, in phases of its own, and
measures the bytes of each part. At the worker's next phase placement sees by the driver's free
bytes whether the rollout sleeps again. Where it does not, placement puts it to sleep itself. No
call is sent twice.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable, Collection, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from placement.core import interrupts
from placement.core.errors import EngineError, EngineLost
from placement.core.states import KV_CACHE, WEIGHTS
from placement.engines.plugged import PluggedEngine
from placement.engines.tagged import Weights
from placement.integrations.verl.placed import current_manager, cut_off_all, logger, noted, rollouts

if TYPE_CHECKING:
    from placement.manager import Manager
    from placement.phases.hold import Hold

    _Adapter = Any
else:
    _Adapter = object

# the share of its bytes that must be free again for the rollout to count as asleep
_ASLEEP_SHARE = 0.5
# the time for memory to show as free after the driver was told that the rollout sleeps
_PATIENCE_SECONDS = 1.0
_POLL_SECONDS = 0.01
_LAST_SECONDS = 10.0
"""The time for an answer to the call that puts the rollout to sleep after a sync has failed: its
server may wait for the rest of the weights, and then answers nothing."""
_bases: dict[str, tuple[type[PlacedRollout], str]] = {}
"""The class to put before verl's adapter, and the path of that adapter, by the names under which
this module has them placed."""


class ColocatedRollout(PluggedEngine):
    """The engine behind a rollout that verl's driver puts to sleep. `resume` is the method of
    verl's adapter that wakes parts."""

    frees_when_asked = False  # the driver has put it to sleep before
    own_mover = "torch_memory_saver"  # no other answers

    def __init__(
        self,
        rollout: PlacedRollout,
        resume: Callable[[list[str]], Coroutine[Any, Any, None]],
    ) -> None:
        tags = rollout._parts()
        super().__init__(tags=tags, weights=rollout._weights, offloaded=tags)
        self._rollout = rollout
        self._resume = resume
        self._free_when_awake = 0
        # whether verl has asked for it. A policy alone does not wake the rollout: verl's driver
        # would not know.
        self.may_wake = False

    def drain(self) -> None:
        """Nothing: verl's driver waits for the answers before it goes on."""

    def load(self, tags: Collection[str]) -> None:
        if not self.may_wake:
            raise EngineError(
                "verl alone decides when its rollout wakes, and the policy wants it on the device "
                "now: use a policy that offloads what a phase does not need, such as 'colocated'"
            )
        for tag in tags:
            _result_of(None, self._resume, [tag])
        self._free_when_awake = self.residency.free_bytes()

    def offload(self, tags: Collection[str]) -> None:
        """Nothing where the driver has done it; else put them to sleep. Parts that were never
        measured count as asleep."""
        wanted = self._free_when_awake + self.residency.resident_bytes * _ASLEEP_SHARE
        for _ in interrupts.looks(_PATIENCE_SECONDS, _POLL_SECONDS, _POLL_SECONDS):
            if not self.residency.resident_bytes or self.residency.free_bytes() >= wanted:
                return
        _result_of(self._rollout._seconds, self._rollout.release_parts, tags)

    def admit(self) -> None:
        """Nothing: verl's driver sends no prompt before `resume` returns."""

    def answers(self) -> Sequence[Any]:
        if not self.residency.resident_tags:
            raise EngineError("verl's driver may not have started the server yet")
        answers: Sequence[Any] = _result_of(None, self._rollout.answers)
        return answers

    def receive(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> None:
        raise EngineError(
            "verl sends the weights to its rollout itself, in ActorRolloutRefWorker.update_weights"
        )


class PlacedRollout(_Adapter):  # type: ignore[misc] # verl has no types
    """Comes before one of verl's adapters among the bases of a class. Its methods are those of
    `verl.workers.rollout.base.BaseRollout`."""

    _weights: Weights = "discard"  # whether the weights survive the sleep
    _manager: Manager | None = None
    _colocated: ColocatedRollout | None = None
    _open: Hold | None = None  # the phase in which the rollout is awake, or wakes
    # the time for verl's method to put the rollout to sleep. None: as long as it takes.
    _seconds: float | None = None

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        manager = current_manager()
        reason = self._reason_to_leave_it(manager)
        if manager is None or reason is not None:
            logger.info("the rollout is no handle of placement: %s", reason)
            return
        self._colocated = ColocatedRollout(self, super().resume)
        manager.register("rollout", self._colocated, role="rollout", replace=True)
        self._manager = manager
        rollouts.add(self)
        logger.info("placement knows the rollout as 'rollout' (%s)", type(self).__name__)

    def _reason_to_leave_it(self, manager: Manager | None) -> str | None:
        if manager is None:
            return "no engine of this worker is placed"
        if not self.config.free_cache_engine:
            return "it never sleeps (rollout.free_cache_engine=False)"
        if manager.policy.name != "colocated":
            return (
                f"the policy {manager.policy.name!r} may keep it on the device, where verl's "
                "driver puts it to sleep"
            )
        return None

    def _parts(self) -> tuple[str, ...]:
        """The parts that verl's driver puts to sleep, in the order in which verl wakes them."""
        return WEIGHTS, KV_CACHE

    async def release_parts(self, tags: Collection[str]) -> None:
        await super().release()

    async def answers(self) -> Sequence[Any]:
        raise EngineError("verl's server hands on no answers of vLLM's workers")

    async def resume(self, tags: list[str]) -> None:
        """Wake these parts, in the phase `weight_sync`, or `rollout` once the KV cache comes."""
        if self._manager is None or self._colocated is None:
            await super().resume(tags)
            return
        if self._colocated.residency.tags[0] in tags:
            self.ended()  # the driver has put it to sleep since it was awake
        self._colocated.may_wake = True
        phase = "rollout" if KV_CACHE in tags else "weight_sync"
        try:
            following = self._manager.hold(phase, only=["rollout"])
        except BaseException as error:
            self.ended(error)
            raise
        finally:
            self._colocated.may_wake = False
        before = self._open
        self._open = following
        if before is not None:
            before.release()

    async def release(self) -> None:
        if self._open is None:
            await super().release()
        else:
            self.ended()

    async def update_weights(self, weights: Any, *args: Any, **keywords: Any) -> Any:
        """verl's own, after which the weights are valid. After an error no code reads on: the
        actor's phases end, too."""
        engine = self._colocated
        if engine is not None and WEIGHTS not in engine.residency.resident_tags:
            engine = None
        if engine is not None:
            engine.residency.stale = "a sync has begun and was not finished"
        try:
            result = await super().update_weights(weights, *args, **keywords)
        except BaseException as error:
            cut_off_all(weights, error)
            self.ended(error)
            raise
        if engine is not None:
            engine.weights_filled()
        return result

    def ended(self, error: BaseException | None = None) -> None:
        """End the phase in which the rollout was awake: the worker begins another, or `error` has
        ended it and is not to be hidden."""
        hold = self._open
        self._open = None
        self._seconds = None if error is None else _LAST_SECONDS
        if hold is not None:
            with nullcontext() if error is None else noted(error):
                hold.release(error)


# what verl's adapter must have beside the attributes of `BaseRollout`
_NEEDED = ("_init_server_adapter", "_engine", "sleep_level")


class PlacedSglang(PlacedRollout):
    """Comes before verl's adapter of SGLang among the bases of a class.

    SGLang dies if a part is released twice, or resumed without having been released. So placement
    releases by name the parts that are awake, and no more: verl's own `release()` names all parts.
    Read from verl 0.9.1 (workers/rollout/sglang_rollout/sglang_rollout.py) and SGLang 0.5.12.
    """

    # verl starts a server that shares the worker's GPU with enable_weights_cpu_backup
    _weights: Weights = "keep"

    def _reason_to_leave_it(self, manager: Manager | None) -> str | None:
        missing = [name for name in _NEEDED if not hasattr(self, name)]
        if missing:
            return (
                f"this verl's adapter of SGLang has no {', '.join(missing)}; that of verl 0.9.1 has"
            )
        options = self.config.engine_kwargs.get("sglang") or {}
        if not options.get("enable_memory_saver", True):
            return (
                "its memory does not move (rollout.engine_kwargs.sglang.enable_memory_saver=False)"
            )
        return super()._reason_to_leave_it(manager)

    def _parts(self) -> tuple[str, ...]:
        """The KV cache alone where SGLang serves LoRA as an adapter: then the base weights stay on
        the device."""
        return (KV_CACHE,) if self.sleep_level == 1 else super()._parts()

    async def release_parts(self, tags: Collection[str]) -> None:
        await self._init_server_adapter()
        if self._engine is not None:  # else another rank leads the server
            await self._engine.release_memory_occupation(tags=[*tags])

    async def answers(self) -> Sequence[Any]:
        await self._init_server_adapter()
        if self._engine is None:
            raise EngineError("another rank leads the server")
        info = await self._engine._make_async_request("server_info", method="GET")
        answers: Sequence[Any] = info["internal_states"]
        return answers


def place(name: str, kind: type[PlacedRollout] = PlacedRollout) -> None:
    """Let verl use an adapter of this kind for the rollouts of this name, in this process. KeyError
    if it knows none of the name."""
    from verl.workers.rollout import base

    key = name, "async"
    attribute = f"Placed_{name}"
    if attribute not in _bases:
        _bases[attribute] = kind, base._ROLLOUT_REGISTRY[key]
        base._ROLLOUT_REGISTRY[key] = f"{__name__}.{attribute}"


def __getattr__(attribute: str) -> Any:
    """The placed adapter of a name. Made when verl asks for it, because verl's own needs the
    engine's package."""
    if attribute not in _bases:
        raise AttributeError(f"module {__name__!r} has no attribute {attribute!r}")
    kind, path = _bases[attribute]
    module, _, name = path.rpartition(".")
    adapter = getattr(importlib.import_module(module), name)
    placed = type(f"Placed{name}", (kind, adapter), {"__doc__": f"{name}, known to placement."})
    globals()[attribute] = placed
    return placed


def _result_of(
    seconds: float | None,
    method: Callable[..., Coroutine[Any, Any, Any]],
    *arguments: Any,
) -> Any:
    """The result of one of verl's methods, run on a thread of its own, because a loop is running on
    this one. EngineError: the server refused it by an HTTP status below 500, so that nothing was
    done. EngineLost: another failure, or `seconds` have passed."""
    try:
        with ThreadPoolExecutor(1) as thread:
            waiting = asyncio.wait_for(method(*arguments), seconds)
            return thread.submit(asyncio.run, waiting).result()
    except Exception as error:
        is_refused = 400 <= getattr(error, "status", 0) < 500
        kind = EngineError if is_refused else EngineLost
        reason = str(error)
        if isinstance(error, TimeoutError) and seconds is not None:
            reason = f"no answer within {seconds:g} s"
        raise kind(f"verl's rollout failed in {method.__name__}(): {reason}") from error
