"""SGLang: its server over HTTP, and its `Engine` in this process.

Checked against 0.5.23 (sglang/srt/entrypoints/http_server.py,
sglang/srt/managers/scheduler_components/weight_updater.py) and 0.5.9. The server needs
`--enable-memory-saver`.

A wrong call does not fail, it kills: a release while a request runs, or a resume of a tag that was
not released, takes the scheduler and its parent process down. SGLang cannot be asked what it has
released, so the record here is all there is.
"""

from __future__ import annotations

import abc
import contextlib
import importlib
import os
from collections.abc import Collection, Sequence
from typing import Any

import torch

from placement.core import interrupts
from placement.core.errors import EngineError, EngineLost
from placement.engines.http import Send, ServedEngine
from placement.engines.plugged import PluggedEngine
from placement.tensors.plain import PLAIN_TYPES

_POLL_SECONDS = 0.05
_SAVER = (
    "SGLang moves its memory only with --enable-memory-saver (enable_memory_saver=True), and "
    "reports success even without it."
)


class _Sglang(PluggedEngine):
    """The part that both kinds share. The server's settings decide whether weights survive; they
    are read at registration."""

    own_mover = "torch_memory_saver"
    why_nothing_moves = _SAVER
    mirror_stays = False

    def _take_settings(self, memory_saver: Any, weights_backup: Any) -> None:
        if not memory_saver:
            raise EngineError(f"{self!r} was started without the memory saver. {_SAVER}")
        self.residency.weights_are_kept(bool(weights_backup))

    def forget_cache(self) -> None:
        """Flush until SGLang has done it, which means that no request is in flight. A release
        before that would kill the server."""
        refusal: str | None = None
        for _ in interrupts.looks(self.deadline_seconds, _POLL_SECONDS, _POLL_SECONDS):
            refusal = self._flush()
            if refusal is None:
                return
        raise EngineError(
            f"{self!r} still has requests in flight after {self.deadline_seconds:g} s: {refusal}"
        )

    def answers(self) -> Sequence[Any]:
        return self._info().get("internal_states") or ()

    @abc.abstractmethod
    def _info(self) -> dict[str, Any]:
        """The settings and the state of SGLang, as it tells them."""

    @abc.abstractmethod
    def _flush(self) -> str | None:
        """Flush once. Returns None where that is done, else SGLang's reason."""


class SglangServer(ServedEngine, _Sglang):
    """An SGLang server.

    From the first release until every tag is back the server stays paused. New requests, including
    health checks, wait in it.

    Args:
        url: "http://127.0.0.1:30000".
        send: sends one bucket of weights to the server (`/update_weights_from_tensor`, a broadcast,
            ...); None: weights come another way, and you call `weights_filled`.
        in_flight: "wait": requests finish before anything is offloaded; "abort": they are cut off.
        api_key: the server's API key, if it needs one.
        options: options of `TaggedEngine`: tags (with "cuda_graph" where
            SGLANG_MEMORY_SAVER_CUDA_GRAPH=1), tag_bytes, verify, deadline_seconds, offloaded.
            `weights` follows from the server's `--enable-weights-cpu-backup`, which keeps them.

    Raises:
        ValueError: `url` is not an http address, or an option does not fit.

    Example:
        ::

            engine = SglangServer("http://127.0.0.1:30000", send=send_over_ipc)
            manager.register("rollout", engine)
    """

    def register(self) -> None:
        """Read the settings with which the server was started. EngineError: it runs without its
        memory saver, or was restarted since its tags were offloaded."""
        info, before = self._info(), self._started
        self._take_over()
        if before is not None and self.residency.offloaded_tags:
            self._expect_start(before)
        self._take_settings(info.get("enable_memory_saver"), info.get("enable_weights_cpu_backup"))

    def drain(self) -> None:
        """Let requests finish or cut them off, and keep new ones waiting. EngineError: some were in
        flight at the deadline, and go on."""
        if self._in_flight == "wait":
            self.forget_cache()
        self._order("/pause_generation", mode="abort")
        try:
            self.forget_cache()  # it was told to abort, and may need time
        except EngineError:
            self.admit()
            raise

    def offload(self, tags: Collection[str]) -> None:
        self._order("/release_memory_occupation", tags=[*tags])

    def load(self, tags: Collection[str]) -> None:
        """Resume these tags. EngineLost: no answer, or it was restarted meanwhile, has released
        none, and a resume would kill it."""
        self._expect_start(self._start())
        self._order("/resume_memory_occupation", tags=[*tags])

    def _expect_start(self, started: Any) -> None:
        if started != self._started:
            raise EngineLost(
                f"{self!r} was restarted since it was registered: "
                f"{', '.join(self.residency.offloaded_tags)} is back on the device"
            )

    def admit(self) -> None:
        self._order("/continue_generation")

    def _flush(self) -> str | None:
        answer = self._server.ask("POST", "/flush_cache")
        if answer.status not in (200, 400):
            raise EngineError(f"{answer}; expected 200 (flushed) or 400 (busy)")
        return None if answer.is_ok else str(answer)

    def _start(self, seconds: float | None = None) -> Any:
        return self._info(seconds).get("startup_time")

    def _info(self, seconds: float | None = None) -> dict[str, Any]:
        for path in ("/server_info", "/get_server_info"):  # 0.5.9 has only the second
            answer = self._server.ask("GET", path, seconds=seconds)
            if answer.status != 404:
                break
        if not answer.is_ok or not answer.fields:
            raise EngineError(
                f"{answer}: the settings of the server cannot be read. Check that this is an "
                "SGLang server."
            )
        return answer.fields

    def _order(self, path: str, **fields: Any) -> None:
        """Send an order with these fields. EngineError: the server refused it. EngineLost: it
        failed at it."""
        answer = self._server.ask("POST", path, body=fields)
        if answer.status >= 500:
            raise EngineLost(f"{answer}; it is not known what the server did")
        if not answer.is_ok:
            raise EngineError(f"{answer}; nothing was done")


class SglangInProcess(_Sglang):
    """An `sglang.Engine` whose tokenizer lives in this process. Its calls take no deadline: they
    run until SGLang returns.

    Args:
        engine: the `sglang.Engine`, made with `enable_memory_saver=True`.
        send: as in `SglangServer`; None: `engine.update_weights_from_tensor`, with one flattened
            tensor a bucket and dtype (`load_format="flattened_bucket"`) where this SGLang has
            `FlattenedTensorBucket`. It takes the memory of one more bucket.
        options: options of `TaggedEngine`.

    Raises:
        ValueError: `engine` lacks a method of `sglang.Engine`, or an option does not fit.

    Example:
        ::

            llm = sglang.Engine(model_path=path, enable_memory_saver=True)
            manager.register("rollout", SglangInProcess(llm))
    """

    def __init__(
        self,
        engine: Any,
        *,
        send: Send | None = None,
        **options: Any,
    ) -> None:
        names = (
            "release_memory_occupation",
            "resume_memory_occupation",
            "flush_cache",
            "update_weights_from_tensor",
            "server_args",
        )
        missing = [name for name in names if not hasattr(engine, name)]
        if missing:
            raise ValueError(
                f"{type(engine).__name__} is not an sglang.Engine: it has no {', '.join(missing)}"
            )
        super().__init__(**options)
        self._engine = engine
        self._send = send
        # else a resume frees it
        self.mirror_stays = os.environ.get("TMS_RETAIN_CPU_BACKUP", "").lower() in (
            "1",
            "true",
            "yes",
        )

    def register(self) -> None:
        """Read the settings with which the engine was started. EngineError: it runs without its
        memory saver."""
        arguments = self._engine.server_args
        self._take_settings(
            getattr(arguments, "enable_memory_saver", False),
            getattr(arguments, "enable_weights_cpu_backup", False),
        )

    def drain(self) -> None:
        """Wait until no request is in flight, which others must have stopped to make. EngineError:
        some were at the deadline."""
        self.forget_cache()

    def offload(self, tags: Collection[str]) -> None:
        self._call("release_memory_occupation", tags=[*tags])

    def load(self, tags: Collection[str]) -> None:
        self._call("resume_memory_occupation", tags=[*tags])

    def admit(self) -> None:
        """Nothing to do: the engine always takes requests."""

    def receive(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> object:
        if self._send is not None:
            return self._send(bucket)
        flattened: Any = None
        if all(type(tensor) in PLAIN_TYPES for _, tensor in bucket):
            with contextlib.suppress(ImportError):  # this SGLang has no such format
                buckets = importlib.import_module("sglang.srt.weight_sync.tensor_bucket")
                flattened = buckets.FlattenedTensorBucket
        if flattened is None:
            self._update(len(bucket), named_tensors=[*bucket])
        else:
            self._receive_flattened(bucket, flattened)
        return None

    def _receive_flattened(
        self, bucket: Sequence[tuple[str, torch.Tensor]], flattened: Any
    ) -> None:
        """Write the weights as one flat tensor a dtype: in a tensor of several, a value of a wider
        dtype might begin where it cannot be read."""
        utils = importlib.import_module("sglang.srt.utils")
        serialize = utils.MultiprocessingSerializer.serialize
        by_dtype: dict[torch.dtype, list[tuple[str, torch.Tensor]]] = {}
        for name, tensor in bucket:
            by_dtype.setdefault(tensor.dtype, []).append((name, tensor))
        ranks = getattr(self._engine.server_args, "tp_size", 1)
        for pairs in by_dtype.values():
            flat = flattened(named_tensors=pairs)
            content = {
                "flattened_tensor": flat.get_flattened_tensor(),
                "metadata": flat.get_metadata(),
            }
            payloads = [serialize(content) for _ in range(ranks)]
            self._update(len(pairs), named_tensors=payloads, load_format="flattened_bucket")

    def _update(self, count: int, **keywords: Any) -> None:
        success, message = self._call("update_weights_from_tensor", **keywords, flush_cache=False)
        if not success:
            raise EngineError(f"SGLang refused a bucket of {count} weights: {message}")

    def _info(self) -> dict[str, Any]:
        info: dict[str, Any] = self._call("get_server_info")
        return info

    def _flush(self) -> str | None:
        answer = self._call("flush_cache")
        if getattr(answer, "success", True):
            return None
        return getattr(answer, "message", None) or "the cache was not flushed"

    def _call(self, name: str, **keywords: Any) -> Any:
        try:
            return getattr(self._engine, name)(**keywords)
        except Exception as error:
            raise EngineLost(
                f"{name}({', '.join(keywords)}) of SGLang failed: {error!r}; it is not known what "
                "it did"
            ) from error
