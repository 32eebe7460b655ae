"""A vLLM server in processes of its own, and what a client asks of it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from tests.gpu.vllm import models
from tests.gpu.vllm.job import BATCHED_TOKENS, KV_CACHE_BYTES
from tests.gpu.vllm.worker import pickled_handles

ROOT = Path(__file__).parents[3]
START_SECONDS = 240.0
_SHOWN = 6000


class ServerError(RuntimeError):
    """A server has answered with an error."""


def ask(url: str, path: str, body: Any = None, *, timeout: float = 120.0) -> Any:
    """POST a JSON object, or GET where there is none. Returns the answer as JSON, or as text where
    it is none."""
    payload = None if body is None else json.dumps(body).encode()
    request = Request(f"{url}{path}", data=payload, headers={"Content-Type": "application/json"})
    try:
        with urlopen(request, timeout=timeout) as answer:
            said = answer.read().decode()
    except HTTPError as error:  # it cannot be pickled, and a case raises in another process
        raise ServerError(
            f"{path} was answered with {error.code}: "
            f"{error.read().decode(errors='replace')[:_SHOWN]}"
        ) from None
    try:
        return json.loads(said)
    except ValueError:
        return said


def complete(
    url: str, prompts: models.Tokens, num_tokens: int = models.NEW_TOKENS
) -> list[tuple[list[int], str]]:
    wanted = {
        "max_tokens": num_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    said = ask(url, "/v1/completions", {"model": "model", "prompt": prompts, **wanted})
    choices = sorted(said["choices"], key=lambda choice: choice["index"])
    return [(choice["token_ids"] or [], choice["finish_reason"]) for choice in choices]


def generate(url: str, prompts: models.Tokens) -> models.Tokens:
    return [tokens for tokens, _ in complete(url, prompts)]


class Sender:
    """The `send` of a `VllmServer`: one call of every worker a bucket, the bytes by CUDA IPC."""

    def __init__(self, url: str) -> None:
        self._url = url

    def __call__(self, bucket: Any) -> None:
        import torch

        torch.cuda.synchronize()  # the other process does not see this one's streams
        said = ask(
            self._url,
            "/collective_rpc",
            {"method": "take_bucket", "args": [pickled_handles(bucket)]},
        )
        assert {*said["results"]} == {"taken"}
        torch.cuda.ipc_collect()


def wake(url: str, tags: list[str]) -> None:
    for tag in tags:
        ask(url, f"/wake_up?tags={tag}", {})


def _visible(gpus: Sequence[int]) -> str:
    """The driver's names of GPUs that this process knows by number."""
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return ",".join(named[gpu] if named else str(gpu) for gpu in gpus)


@contextmanager
def running(
    folder: str, log: Path, *, gpus: Sequence[int] = (0,), sleeps: bool = True
) -> Iterator[tuple[str, int]]:
    """A server of the model. Gives its address and the number of its process group.

    Args:
        gpus: the numbers of its GPUs. Over several it is tensor parallel.
        sleeps: with sleep mode.
    """
    port = free_port()
    environment = {
        "VLLM_SERVER_DEV_MODE": "1",
        "CUDA_VISIBLE_DEVICES": _visible(gpus),
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    options = {
        "model": folder,
        "served-model-name": "model",
        "host": "127.0.0.1",
        "port": port,
        "dtype": "bfloat16",
    }
    options |= {
        "max-model-len": models.CONTEXT,
        "max-num-seqs": 16,
        "max-num-batched-tokens": BATCHED_TOKENS,
        "gpu-memory-utilization": 0.2,
        "generation-config": "vllm",
    }
    options |= {
        "kv-cache-memory-bytes": KV_CACHE_BYTES,
        "worker-extension-cls": "tests.gpu.vllm.worker.TakesWeights",
    }
    options |= {"tensor-parallel-size": len(gpus)}
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--enforce-eager",
        "--skip-tokenizer-init",
    ]
    command += ["--enable-sleep-mode"] if sleeps else []
    command += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    with started(
        command,
        {**environment, "PYTHONPATH": os.pathsep.join(paths)},
        f"http://127.0.0.1:{port}",
        log,
    ) as found:
        yield found


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@contextmanager
def started(
    command: Sequence[str], environment: Mapping[str, str], url: str, log: Path
) -> Iterator[tuple[str, int]]:
    """A server's process, from when the server answers. Gives its address and the number of its
    process group."""
    with log.open("wb") as written:
        process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdout=written,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _await(process, url, log)
        yield url, process.pid
    finally:
        end(process.pid)
        process.wait(30)


def _await(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until and process.poll() is None:
        try:
            ask(url, "/health", timeout=5)
            return
        except (URLError, ServerError, OSError):
            time.sleep(0.2)
    raise AssertionError(f"the server did not start:\n{log.read_text(errors='replace')[-_SHOWN:]}")


def end(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
