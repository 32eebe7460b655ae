"""vLLM: its server over HTTP, and its `LLM` in this process.

What the versions differ in is read from their answers. Checked against 0.33.0 (vllm/entrypoints/serve/dev/sleep/api_router.py,
vllm/entrypoints/rl/online/api_router.py, vllm/v1/executor/abstract.py) and 0.11.0. The server needs `VLLM_SERVER_DEV_MODE=1`
for the routes and `--enable-sleep-mode` for memory to move.
"""

from __future__ import annotations

import abc
import inspect
import re
import time
from collections.abc import Collection, Sequence
from typing import Any

import torch

from placement.core.errors import EngineError, EngineLost
from placement.core.states import KV_CACHE, WEIGHTS
from placement.engines.http import Answer, Server
from placement.engines.tagged import InFlight, Send, TaggedEngine, Weights, checked_in_flight, send_by

_POLL_SECONDS = 0.05
_BUSY = re.compile(r"^vllm:num_requests_(?:running|waiting)(?:\{[^}]*\})?\s+(\S+)", re.MULTILINE)
_LEVELS: dict[Weights, int] = {"keep": 1, "discard": 2}
_ENABLE = "vLLM moves its memory only with --enable-sleep-mode (enable_sleep_mode=True), and says 'sleeping' without it all the same."


class _Vllm(TaggedEngine):
    """What both ways have in common: vLLM sleeps as a whole and wakes by tags."""

    why_nothing_moves = _ENABLE

    def offload(self, tags: Collection[str]) -> None:
        """Everything sleeps, and what is to stay is woken again; the KV cache alone is given up where the server can."""
        book, before = self.residency, self.residency.resident
        staying = [tag for tag in book.tags if tag in before - set(tags)]
        if WEIGHTS not in tags and self._gives_kv_cache_up():
            return
        if KV_CACHE not in before and not self._sleeps_from_part():
            # Older servers hold one flag for "asleep": with the KV cache away they take this for done and keep the weights.
            self._wake([KV_CACHE])
            book.resident |= {KV_CACHE}  # should the sleep be refused
        self._sleep()
        book.resident = before
        if not staying:
            return
        if not book.keeps_weights:
            book.stale = "only the KV cache was to go, but this vLLM can only discard the weights with it"
        try:
            self._wake(staying)
        except EngineError as error:
            if not isinstance(error, EngineLost):  # then all of it sleeps, although only a part was to go
                book.resident, book.stale = frozenset(), "waking them again failed half-way, when only the KV cache was to go"
            raise

    def load(self, tags: Collection[str]) -> None:
        """Wake these tags, which are asleep."""
        if not self._is_sleeping():
            raise EngineLost(f"{self!r} is awake, although it was put to sleep: it was restarted, or somebody else has woken it")
        is_last = self.residency.offloaded <= set(tags)
        self._wake([tag for tag in self.residency.tags if tag in tags])
        if self._is_sleeping_now() is is_last:  # the two have to differ
            raise EngineLost(f"{self!r} was to wake {', '.join(tags)}, and says that it is {'still' if is_last else 'not any more'} asleep")

    def _is_sleeping_now(self) -> bool:
        """Asked after a call that was to change it: without an answer, what the call did is not known."""
        try:
            return self._is_sleeping()
        except EngineError as error:
            raise EngineLost(f"{error}, so that what the call before it did is not known") from error

    @abc.abstractmethod
    def _sleep(self) -> None:
        """Everything to sleep, at the level of `weights`."""

    @abc.abstractmethod
    def _wake(self, tags: Sequence[str]) -> None:
        """Bring these tags back, in this order."""

    @abc.abstractmethod
    def _is_sleeping(self) -> bool:
        """Whether it says that anything of it is asleep."""

    @abc.abstractmethod
    def _gives_kv_cache_up(self) -> bool:
        """Give up the KV cache alone, where this vLLM can; False where it cannot."""

    @abc.abstractmethod
    def _sleeps_from_part(self) -> bool:
        """Whether this vLLM knows which tags are asleep, so that the rest can follow."""


class VllmServer(_Vllm):
    """A vLLM server.

    Args:
        url: "http://127.0.0.1:8000".
        send: brings one bucket of weights into the server, by whatever means your framework has (CUDA IPC, NCCL, its RL routes);
            None: weights come another way, and you call `weights_filled`.
        weights: "keep": level 1, a copy on the host; "discard": level 2, gone until the next sync.
        in_flight: "wait": requests finish before anything is offloaded; "abort": they are cut off.
        api_key: where the server wants one.
        options: of `TaggedEngine`: tag_bytes, verify, deadline_seconds, offloaded.

    Raises:
        ValueError: no http address, or an option that does not fit.
    """

    def __init__(
        self,
        url: str,
        *,
        send: Send | None = None,
        weights: Weights = "keep",
        in_flight: InFlight = "wait",
        api_key: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(weights=weights, **options)
        self._server = Server(url, deadline_seconds=self.deadline_seconds, api_key=api_key)
        self._send = send
        self._in_flight = checked_in_flight(in_flight)
        self._level = _LEVELS[weights]
        self._routes: dict[str, bool] = {}

    def register(self) -> None:
        """See that the routes are there, and that the server is awake where the book says so.

        Raises:
            EngineError: it is not in development mode, or asleep without our knowing which tags.
        """
        if not self._has("/sleep"):
            raise EngineError(f"{self._server.url} has no route /sleep: start vLLM with VLLM_SERVER_DEV_MODE=1 and --enable-sleep-mode")
        is_asleep = self._is_sleeping()
        if is_asleep and not self.residency.offloaded:
            raise EngineError(
                f"{self._server.url} is asleep, and it does not say which tags. Wake it (POST /wake_up) before registering it, or make "
                "the engine with offloaded=['weights', 'kv_cache']"
            )
        if self.residency.offloaded and not is_asleep:
            raise EngineError(f"{self._server.url} is awake, but {', '.join(sorted(self.residency.offloaded))} was said to be offloaded")

    def drain(self) -> None:
        """Pause where the server can, which keeps new requests out as well; else wait until nothing is running or waiting.

        Raises:
            EngineError: requests were still in flight at the deadline; the server goes on with them.
        """
        if self._has("/pause"):
            try:
                self._expect("paused", self._server.ask("POST", "/pause", query={"mode": self._in_flight}))
            except EngineLost as lost:
                self._expect("resumed", self._server.ask("POST", "/resume"))
                raise EngineError(f"{lost}: requests were still in flight. The server was told to go on") from lost
            return
        until = time.monotonic() + self.deadline_seconds
        while self._in_flight == "wait" and (busy := self._busy_requests()):
            if time.monotonic() >= until:
                raise EngineError(f"{self._server.url} still has {busy:g} requests in flight after {self.deadline_seconds:g} s")
            time.sleep(_POLL_SECONDS)

    def admit(self) -> None:
        """Resume, where the last wake has not done it."""
        if self._has("/pause") and self._server.ask("GET", "/is_paused").field("is_paused"):
            self._expect("resumed", self._server.ask("POST", "/resume"))

    def receive(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> None:
        send_by(self._send, bucket, self)

    def forget_cache(self) -> None:
        answer = self._server.ask("POST", "/reset_prefix_cache")
        if not answer.is_ok or answer.field("success") is False:
            raise EngineError(f"{answer}. Its prefix cache belongs to the old weights, and nothing must be generated with it")

    def _sleep(self) -> None:
        answer = self._server.ask("POST", "/sleep", query={"level": str(self._level), "mode": self._in_flight})
        if answer.status in (400, 404, 405):
            raise EngineError(f"{answer}; nothing was done")
        if not answer.is_ok:
            raise EngineLost(f"{answer}: a sleep that failed half-way has freed part of the memory, and vLLM takes itself for awake")
        said = answer.field("status")
        if (said is not None and said != "sleeping") or not self._is_sleeping_now():
            raise EngineLost(f"{answer}, and yet it is not asleep")

    def _wake(self, tags: Sequence[str]) -> None:
        answer = self._server.ask("POST", "/wake_up", query={"tags": tags})
        if not answer.is_ok:
            raise EngineError(
                f"{answer}. The server counts {', '.join(tags)} as asleep still, although part of the memory may be taken; free memory on "
                "its device and enter the phase again"
            )

    def _is_sleeping(self) -> bool:
        answer = self._server.ask("GET", "/is_sleeping")
        found = answer.field("is_sleeping")
        if not answer.is_ok or not isinstance(found, bool):
            raise EngineError(f"{answer}: it cannot be asked whether it sleeps")
        return found

    def _gives_kv_cache_up(self) -> bool:
        if not self._has("/release_kv_cache_memory"):
            return False
        answer = self._server.ask("POST", "/release_kv_cache_memory")
        if not answer.is_ok:
            raise EngineLost(f"{answer}: the KV cache counts as asleep from here on, whether it is or not")
        return True

    def _sleeps_from_part(self) -> bool:
        return self._has("/release_kv_cache_memory")  # the same change gave the executor its set of tags

    def _busy_requests(self) -> float:
        answer = self._server.ask("GET", "/metrics")
        found = _BUSY.findall(answer.body.decode(errors="replace"))
        if not answer.is_ok or not found:
            raise EngineError(
                f"{answer}: it can neither be paused nor asked what is in flight. Start it without --disable-log-stats, or make the engine "
                "with in_flight='abort' and let no request be sent while a phase changes"
            )
        return sum(map(float, found))

    def _has(self, route: str) -> bool:
        """Whether the server has a POST route: a GET of one is refused by its method and does nothing."""
        if route not in self._routes:
            answer = self._server.ask("GET", route)
            if answer.status not in (404, 405):
                raise EngineError(f"{answer}, where 405 (there is such a route) or 404 (there is none) was expected: is this vLLM?")
            self._routes[route] = answer.status == 405
        return self._routes[route]

    def _expect(self, status: str, answer: Answer) -> None:
        if not answer.is_ok or answer.field("status") != status:
            raise EngineError(f"{answer}, where the status {status!r} was expected")

    def __repr__(self) -> str:
        return f"<VllmServer {self._server.url}>"


class VllmInProcess(_Vllm):
    """A `vllm.LLM` in this process, made with `enable_sleep_mode=True`.

    Its calls cannot be given a deadline: they run in this thread until vLLM returns.

    Args:
        llm: the `vllm.LLM`. Of an asynchronous engine take `VllmServer`.
        send: as in `VllmServer`; None: `llm.apply_model` calls `load_weights` of the model, which takes names as the checkpoint has.
        weights: "keep": level 1; "discard": level 2.
        options: of `TaggedEngine`.

    Raises:
        ValueError: `llm` is not of that shape, or an option does not fit.
    """

    def __init__(self, llm: Any, *, send: Send | None = None, weights: Weights = "keep", **options: Any) -> None:
        missing = [name for name in ("sleep", "wake_up", "apply_model", "llm_engine") if not hasattr(llm, name)]
        if missing or inspect.iscoroutinefunction(llm.sleep):
            raise ValueError(f"{type(llm).__name__} is no vllm.LLM ({', '.join(missing) or 'its sleep is asynchronous'}): use VllmServer")
        super().__init__(weights=weights, **options)
        self._llm = llm
        self._send = send
        self._level = _LEVELS[weights]

    def register(self) -> None:
        """See that it is awake where the book says so.

        Raises:
            EngineError: it is not.
        """
        if self._is_sleeping() is not bool(self.residency.offloaded):
            raise EngineError(
                f"{self!r} is {'asleep' if self._is_sleeping() else 'awake'}, and the engine was made with "
                f"offloaded={sorted(self.residency.offloaded)}: wake it before, or say what is asleep"
            )

    def drain(self) -> None:
        """Nothing to wait for: generate() returns when it is done.

        Raises:
            EngineError: somebody added requests and has not stepped them to their end.
        """
        if self._llm.llm_engine.has_unfinished_requests():
            raise EngineError(f"{self!r} has requests that are not finished: step the engine until they are, or abort them")

    def admit(self) -> None:
        """vLLM schedules again as soon as it is awake."""

    def receive(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> None:
        if self._send is not None:
            self._send(bucket)
            return
        pairs = [*bucket]
        self._call("apply_model", lambda model: model.load_weights(pairs) and None)

    def forget_cache(self) -> None:
        if self._call("reset_prefix_cache") is False:
            raise EngineError(f"{self!r} did not reset its prefix cache, which belongs to the old weights: requests are in flight")

    def _sleep(self) -> None:
        try:
            self._llm.sleep(level=self._level)
        except Exception as error:
            raise EngineLost(f"sleep(level={self._level}) failed: {error!r}. Part of the memory may be free, and vLLM awake") from error
        if not self._is_sleeping_now():
            raise EngineLost(f"sleep(level={self._level}) returned, and yet vLLM is not asleep. {_ENABLE}")

    def _wake(self, tags: Sequence[str]) -> None:
        self._call("wake_up", tags=[*tags])

    def _is_sleeping(self) -> bool:
        return bool(self._llm.llm_engine.is_sleeping())

    def _gives_kv_cache_up(self) -> bool:
        if not hasattr(self._llm, "release_kv_cache_memory"):
            return False
        self._call("sleep", level=0)  # the call wants the scheduler paused
        try:
            self._call("release_kv_cache_memory")
        except EngineError as error:
            raise EngineLost(f"{error}. It is paused, and whether its KV cache is there is not known") from error
        return True

    def _sleeps_from_part(self) -> bool:
        return hasattr(self._llm, "release_kv_cache_memory")

    def _call(self, name: str, *args: Any, **keywords: Any) -> Any:
        try:
            return getattr(self._llm, name)(*args, **keywords)
        except Exception as error:
            raise EngineError(f"{name}({', '.join(f'{k}={v!r}' for k, v in keywords.items())}) of vLLM failed: {error!r}") from error

    def __repr__(self) -> str:
        return "<VllmInProcess>"
