"""vLLM: its server over HTTP, and its `LLM` in this process.

The differences between versions are read from the server's answers. Checked against 0.33.0
(vllm/entrypoints/serve/dev/sleep/api_router.py, vllm/entrypoints/rl/online/api_router.py,
vllm/v1/executor/abstract.py) and 0.24.0 (vllm/entrypoints/serve/dev, vllm/v1/engine/core.py,
vllm/device_allocator/cumem.py). The server needs `VLLM_SERVER_DEV_MODE=1` for the routes and
`--enable-sleep-mode` for memory to move.
"""

from __future__ import annotations

import abc
import inspect
import re
import sys
from collections.abc import Collection, Sequence
from typing import Any

import torch

from placement.core.errors import EngineError, EngineLost
from placement.core.states import KV_CACHE, WEIGHTS
from placement.engines.http import Answer, Send, ServedEngine
from placement.engines.mirror import PLACEMENT, WEIGHTS_DIFFER
from placement.engines.plugged import PluggedEngine
from placement.engines.tagged import Weights

_ENABLE = (
    "vLLM moves its memory only with --enable-sleep-mode (enable_sleep_mode=True), and answers "
    "'sleeping' even without it."
)
_STARTED = re.compile(r"^process_start_time_seconds ([\d.e+]+)$", re.MULTILINE)
_MAPPED_ALREADY = "CUDA Error: invalid argument"
"""The answer to a second wake of a tag of which a wake before has brought back a part. vLLM maps
every block of the tag anew."""


class _Vllm(PluggedEngine):
    """The part that both kinds share: vLLM sleeps as a whole and wakes by tags."""

    own_mover = "cumem"
    why_nothing_moves = _ENABLE
    can_discard = True
    knows_its_tags: bool
    """Whether this vLLM knows which tags are asleep, so that the KV cache can go alone. One change
    of vLLM brought both."""

    @property
    def _level(self) -> int:
        return 1 if self.residency.keeps_weights else 2

    def register(self) -> None:
        """Check that vLLM is awake or asleep as the record says. It does not report which tags
        are."""
        offloaded = sorted(self.residency.offloaded_tags)
        is_asleep = self._is_sleeping()
        if is_asleep is not bool(offloaded):
            raise EngineError(
                f"{self!r} is {'asleep' if is_asleep else 'awake'}, but was made with "
                f"offloaded={offloaded}: wake it first, or give offloaded= the tags that are asleep"
            )

    def offload(self, tags: Collection[str]) -> None:
        """Put everything to sleep and wake the tags that stay. Where the server can, the KV cache
        alone is given up instead."""
        residency = self.residency
        before = residency.resident_tags
        staying = [tag for tag in residency.tags if tag in before - set(tags)]
        if WEIGHTS not in tags and self.knows_its_tags:
            self._release_kv_cache()
            return
        if KV_CACHE not in before and not self.knows_its_tags:
            # vLLM 0.24 has one flag for "asleep". With the KV cache offloaded it takes a sleep for
            # done and keeps the weights.
            self._wake([KV_CACHE])
            residency.resident_tags |= {KV_CACHE}  # correct in case the sleep is refused
        self._sleep()
        residency.resident_tags = before
        if not staying:
            return
        if not residency.keeps_weights:
            residency.stale = "this vLLM cannot offload the KV cache without discarding the weights"
        try:
            self._wake(staying)
        except EngineError as error:
            # everything sleeps now, although only a part was to be offloaded
            if not isinstance(error, EngineLost):
                residency.resident_tags = frozenset()
                residency.stale = "waking them again failed after the KV cache was offloaded"
            raise

    def load(self, tags: Collection[str]) -> None:
        """Wake these tags, which are asleep."""
        if not self._is_sleeping():
            raise EngineLost(
                f"{self!r} is awake, although it was put to sleep: it was restarted, or another "
                "program woke it"
            )
        is_last = self.residency.offloaded_tags <= set(tags)
        self._wake([tag for tag in self.residency.tags if tag in tags])
        # with the last tag back it must be awake, before that asleep
        if self._is_sleeping_now() is is_last:
            raise EngineLost(
                f"{self!r} was told to wake {', '.join(tags)}, but reports to be "
                f"{'still' if is_last else 'no longer'} asleep"
            )
        if WEIGHTS in tags and self.is_spoilt():
            self.residency.stale = WEIGHTS_DIFFER

    def _failed_wake(self, message: str, tags: Sequence[str]) -> EngineError:
        """The error for a wake that failed with this message: an `EngineLost` where no later wake
        can succeed."""
        if WEIGHTS_DIFFER in message:
            self.residency.stale = WEIGHTS_DIFFER
        if _MAPPED_ALREADY in message:
            return EngineLost(
                f"{message}. A wake before this one has failed after a part of {', '.join(tags)} "
                "was back, and vLLM cannot bring back the rest"
            )
        return EngineError(
            f"{message}. vLLM still counts {', '.join(tags)} as asleep, although part of the "
            "memory may be in use; free memory on its device and enter the phase again"
        )

    def _is_sleeping_now(self) -> bool:
        """Ask after a call that should have changed the answer. Without an answer the call's effect
        is unknown."""
        try:
            return self._is_sleeping()
        except EngineError as error:
            raise EngineLost(f"{error}, so the effect of the call before it is unknown") from error

    @abc.abstractmethod
    def _sleep(self) -> None:
        """Put everything to sleep, at `_level`."""

    @abc.abstractmethod
    def _wake(self, tags: Sequence[str]) -> None:
        """Bring these tags back, in this order."""

    @abc.abstractmethod
    def _is_sleeping(self) -> bool:
        """Whether vLLM reports that any part is asleep."""

    @abc.abstractmethod
    def _release_kv_cache(self) -> None:
        """Offload the KV cache alone, where vLLM knows its tags."""


class VllmServer(ServedEngine, _Vllm):
    """A vLLM server.

    Args:
        url: "http://127.0.0.1:8000".
        send: sends one bucket of weights to the server, by any means of your framework (CUDA IPC,
            NCCL, its RL routes); None: weights come another way, and you call `weights_filled`.
        in_flight: "wait": requests finish before anything is offloaded; "abort": they are cut off.
        api_key: the server's API key, if it needs one.
        options: options of `TaggedEngine`: weights ("keep": level 1, a copy on the host; "discard":
            level 2, lost until the next sync), tag_bytes, verify, deadline_seconds, offloaded.

    Raises:
        ValueError: `url` is not an http address, or an option does not fit.

    Example:
        ::

            engine = VllmServer("http://127.0.0.1:8000", send=send_over_ipc)
            manager.register("rollout", engine)
    """

    def register(self) -> None:
        """Check that the server has the routes, and is awake or asleep as the record says. Raises
        EngineError: it is not."""
        if not self._has("/sleep"):
            raise EngineError(
                f"{self._server.url} has no route /sleep: start vLLM with VLLM_SERVER_DEV_MODE=1 "
                "and --enable-sleep-mode"
            )
        if not self._has("/pause"):
            raise EngineError(
                f"{self._server.url} has no route /pause, so this vLLM is too old: vLLM 0.24 or "
                "later is needed"
            )
        self.knows_its_tags = self._has("/release_kv_cache_memory")
        super().register()
        self._take_over()

    def drain(self) -> None:
        """Pause the server, which also keeps new requests out. EngineError: some were still in
        flight at the deadline, and go on."""
        try:
            answer = self._server.ask("POST", "/pause", query={"mode": self._in_flight})
            self._expect("paused", answer)
        except EngineLost as lost:
            self._expect("resumed", self._server.ask("POST", "/resume"))
            raise EngineError(
                f"{lost}: requests were still in flight. The server was told to resume"
            ) from lost

    def admit(self) -> None:
        """Resume the server, unless the last wake has done it."""
        if self._server.ask("GET", "/is_paused").fields.get("is_paused"):
            self._expect("resumed", self._server.ask("POST", "/resume"))

    def answers(self) -> Sequence[Any]:
        answer = self._server.ask("POST", "/collective_rpc", body={"method": "check_health"})
        if not answer.is_ok:
            raise EngineError(f"{answer}; expected the answers of the workers")
        return answer.fields.get("results") or ()

    def forget_cache(self) -> None:
        answer = self._server.ask("POST", "/reset_prefix_cache")
        if not answer.is_ok or answer.fields.get("success") is False:
            raise EngineError(
                f"{answer}. The prefix cache belongs to the old weights: generate nothing until it "
                "is reset"
            )

    def _start(self, seconds: float | None = None) -> Any:
        """Reported by its metrics. Several API servers in one do not report it."""
        answer = self._server.ask("GET", "/metrics", seconds=seconds)
        match = _STARTED.search(answer.body.decode(errors="replace"))
        return None if match is None else float(match[1])

    def _tags_asleep(self) -> Collection[str]:
        return self.residency.tags if self._is_sleeping() else ()  # vLLM sleeps as a whole

    def _sleep(self) -> None:
        query = {"level": str(self._level), "mode": self._in_flight}
        answer = self._server.ask("POST", "/sleep", query=query)
        if answer.status in (400, 404, 405):
            raise EngineError(f"{answer}; nothing was done")
        if not answer.is_ok:
            raise EngineLost(
                f"{answer}: a sleep that failed half-way has freed part of the memory, but vLLM "
                "reports to be awake"
            )
        status = answer.fields.get("status", "sleeping")
        if status not in ("sleeping", None) or not self._is_sleeping_now():
            raise EngineLost(f"{answer}, but the server is not asleep")

    def _wake(self, tags: Sequence[str]) -> None:
        answer = self._server.ask("POST", "/wake_up", query={"tags": tags})
        if not answer.is_ok:
            raise self._failed_wake(str(answer), tags)

    def _is_sleeping(self) -> bool:
        answer = self._server.ask("GET", "/is_sleeping")
        is_sleeping = answer.fields.get("is_sleeping")
        if not answer.is_ok or not isinstance(is_sleeping, bool):
            raise EngineError(f"{answer}: expected a JSON object with is_sleeping")
        return is_sleeping

    def _release_kv_cache(self) -> None:
        answer = self._server.ask("POST", "/release_kv_cache_memory")
        if not answer.is_ok:
            raise EngineLost(
                f"{answer}: vLLM counts the KV cache as asleep now, whether it is or not"
            )

    def _has(self, route: str) -> bool:
        """Whether the server has a POST route. A GET of such a route is refused because of its
        method, and does nothing."""
        answer = self._server.ask("GET", route)
        if answer.status not in (404, 405):
            raise EngineError(
                f"{answer}; expected 405 (the route exists) or 404 (it does not). Check that this "
                "is a vLLM server."
            )
        return answer.status == 405

    def _expect(self, status: str, answer: Answer) -> None:
        if not answer.is_ok or answer.fields.get("status") != status:
            raise EngineError(f"{answer}; expected a JSON object with status {status!r}")


class VllmInProcess(_Vllm):
    """A `vllm.LLM` in this process, made with `enable_sleep_mode=True`.

    Its calls take no deadline: they run in this thread until vLLM returns.

    Args:
        llm: the `vllm.LLM`. For an asynchronous engine use `VllmServer`.
        send: as in `VllmServer`; None: `llm.apply_model` calls the model's `load_weights`, which
            takes the checkpoint's names. vLLM runs the model in a process of its own unless it was
            started with `VLLM_ENABLE_V1_MULTIPROCESSING=0`. That process takes functions only with
            `VLLM_ALLOW_INSECURE_SERIALIZATION=1`, and the weights then go through the host.
        weights: "keep": level 1; "discard": level 2.
        options: options of `TaggedEngine`.

    Raises:
        ValueError: `llm` lacks a method of `vllm.LLM`, or an option does not fit.

    Example:
        ::

            llm = vllm.LLM(path, enable_sleep_mode=True)
            manager.register("rollout", VllmInProcess(llm, weights="discard"))
    """

    def __init__(
        self,
        llm: Any,
        *,
        send: Send | None = None,
        weights: Weights = "keep",
        **options: Any,
    ) -> None:
        names = ("sleep", "wake_up", "apply_model", "llm_engine")
        missing = [name for name in names if not hasattr(llm, name)]
        if missing or inspect.iscoroutinefunction(llm.sleep):
            raise ValueError(
                f"{type(llm).__name__} is no vllm.LLM "
                f"({', '.join(missing) or 'its sleep is asynchronous'}): use VllmServer"
            )
        super().__init__(weights=weights, **options)
        self._llm = llm
        self._send = send
        self.knows_its_tags = hasattr(llm, "release_kv_cache_memory")

    def register(self) -> None:
        """Check that the engine moves its memory, and is awake or asleep as the record says. Raises
        EngineError: it does not, or is not."""
        config = getattr(self._llm.llm_engine, "model_config", None)
        if not getattr(config, "enable_sleep_mode", True) and not getattr(
            config, "enable_cumem_allocator", False
        ):
            raise EngineError(f"{self!r} was made without sleep mode. {_ENABLE}")
        super().register()

    def mirror_bytes(self) -> int | None:
        """Host bytes of placement's backend; else of vLLM's own allocator, if the model is in this
        process. torch rounds page-locked memory up to powers of two."""
        if self.residency.moved_by == PLACEMENT:
            return super().mirror_bytes()
        if not hasattr(self._llm.llm_engine, "model_executor"):
            return None
        cumem = sys.modules.get("vllm.device_allocator.cumem")
        allocator = getattr(getattr(cumem, "CuMemAllocator", None), "instance", None)
        if allocator is None:
            return None
        host_bytes = 0
        for data in allocator.pointer_to_data.values():
            backup: torch.Tensor | None = data.cpu_backup_tensor
            if backup is None:
                continue
            is_rounded = backup.is_pinned()
            host_bytes += 1 << (backup.nbytes - 1).bit_length() if is_rounded else backup.nbytes
        return host_bytes

    def load(self, tags: Collection[str]) -> None:
        """Wake these tags, which are asleep, and see whether the mirror stays."""
        super().load(tags)
        if WEIGHTS in tags and hasattr(self._llm.llm_engine, "model_executor"):
            # vLLM's own allocator has given it to torch, which may keep it
            self.mirror_stays = _cached_host_bytes() >= self.residency.mirror_bytes

    def drain(self) -> None:
        """Check that no request is in flight: generate() returns when it is done. EngineError: some
        have not been stepped to their end."""
        if self._llm.llm_engine.has_unfinished_requests():
            raise EngineError(
                f"{self!r} has unfinished requests: step the engine until they are done, or abort "
                "them"
            )

    def admit(self) -> None:
        """Nothing: vLLM takes requests as soon as it is awake."""

    def answers(self) -> Sequence[Any]:
        answers: Sequence[Any] = self._call("collective_rpc", "check_health")
        return answers

    def receive(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> object:
        if self._send is not None:
            return self._send(bucket)
        # Sent to another process, a tensor takes the whole storage along, which the tensors of a
        # bucket share.
        is_apart = not hasattr(self._llm.llm_engine, "model_executor")
        pairs = [(name, tensor.cpu() if is_apart else tensor) for name, tensor in bucket]
        self._call("apply_model", lambda model: model.load_weights(pairs) and None)
        return None

    def forget_cache(self) -> None:
        if self._call("reset_prefix_cache") is False:
            raise EngineError(
                f"{self!r} did not reset its prefix cache, which belongs to the old weights: "
                "finish or abort its requests"
            )

    def _sleep(self) -> None:
        try:
            self._llm.sleep(level=self._level)
        except Exception as error:
            raise EngineLost(
                f"sleep(level={self._level}) failed: {error!r}. Part of the memory may be free, "
                "and vLLM awake"
            ) from error
        if not self._is_sleeping_now():
            raise EngineLost(
                f"sleep(level={self._level}) returned, but vLLM is not asleep. {_ENABLE}"
            )

    def _wake(self, tags: Sequence[str]) -> None:
        try:
            self._call("wake_up", tags=[*tags])
        except EngineError as error:
            raise self._failed_wake(str(error), tags) from error

    def _is_sleeping(self) -> bool:
        return bool(self._llm.llm_engine.is_sleeping())

    def _release_kv_cache(self) -> None:
        self._call("sleep", level=0)  # the next call needs a paused scheduler
        try:
            self._call("release_kv_cache_memory")
        except EngineError as error:
            raise EngineLost(
                f"{error}. vLLM is paused, and it is unknown whether its KV cache is on the device"
            ) from error

    def _call(self, name: str, *args: Any, **keywords: Any) -> Any:
        try:
            return getattr(self._llm, name)(*args, **keywords)
        except Exception as error:
            arguments = ", ".join(f"{keyword}={value!r}" for keyword, value in keywords.items())
            raise EngineError(f"{name}({arguments}) of vLLM failed: {error!r}") from error


def _cached_host_bytes() -> int:
    """Page-locked bytes that torch keeps although no tensor uses them."""
    stats = torch.cuda.host_memory_stats()
    return int(stats.get("allocated_bytes.current", 0) - stats.get("active_bytes.current", 0))
