"""An SGLang server in processes of its own, and what a client asks of it."""

from __future__ import annotations

import base64
import io
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from tests.gpu.vllm import models
from tests.gpu.vllm.job import BATCHED_TOKENS, KV_CACHE_BYTES
from tests.gpu.vllm.server import ask, free_port, started


def options() -> dict[str, Any]:
    """The options of every engine here, by the names of `sglang.Engine`: no kernels that are
    compiled for minutes, a small KV cache."""
    config = models.config()
    head_size = config.hidden_size // config.num_attention_heads
    bytes_per_token = 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * head_size
    return {
        "context_length": models.CONTEXT,
        "mem_fraction_static": 0.2,
        "max_total_tokens": KV_CACHE_BYTES // bytes_per_token,
        "max_running_requests": 16,
        "chunked_prefill_size": BATCHED_TOKENS,
        "attention_backend": "triton",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
    }


@contextmanager
def running(folder: str, log: Path, *, keeps_weights: bool = True) -> Iterator[tuple[str, int]]:
    """A server of the model. Gives its address and the number of its process group.

    Args:
        keeps_weights: whether the weights go to the host with the memory. Otherwise they are
            discarded.
    """
    port = free_port()
    flags = [
        "skip-tokenizer-init",
        "disable-cuda-graph",
        "skip-server-warmup",
        "enable-memory-saver",
    ]
    flags += ["enable-weights-cpu-backup"] if keeps_weights else []
    given = {"model-path": folder, "dtype": "bfloat16", "host": "127.0.0.1", "port": port}
    given |= {name.replace("_", "-"): value for name, value in options().items()}
    command = [sys.executable, "-m", "sglang.launch_server", *(f"--{flag}" for flag in flags)]
    command += [word for name, value in given.items() for word in (f"--{name}", str(value))]
    with started(command, {}, f"http://127.0.0.1:{port}", log) as found:
        yield found


def complete(
    url: str, prompts: models.Tokens, num_tokens: int = models.NEW_TOKENS
) -> list[tuple[list[int], str]]:
    wanted = {"temperature": 0.0, "max_new_tokens": num_tokens, "ignore_eos": True}
    answers = ask(url, "/generate", {"input_ids": prompts, "sampling_params": wanted})
    return [
        ([*answer["output_ids"]], answer["meta_info"]["finish_reason"]["type"])
        for answer in answers
    ]


def generate(url: str, prompts: models.Tokens) -> models.Tokens:
    return [tokens for tokens, _ in complete(url, prompts)]


def complete_one(
    url: str, prompt: list[int], num_tokens: int, begun: threading.Event
) -> tuple[list[int], str]:
    """Like `complete`, for one prompt. Sets `begun` when the first tokens are there."""
    wanted = {"temperature": 0.0, "max_new_tokens": num_tokens, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": wanted, "stream": True}
    request = Request(
        f"{url}/generate",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    last: Any = None
    with urlopen(request, timeout=120) as answer:
        for line in answer:
            said = line.decode().removeprefix("data:").strip()
            if said and said != "[DONE]":
                last = json.loads(said)
                begun.set()
    assert last is not None, "nothing was streamed"
    assert "output_ids" in last, last
    return [*last["output_ids"]], last["meta_info"]["finish_reason"]["type"]


class Sender:
    """The `send` of an `SglangServer`: SGLang's own endpoint, the bytes by CUDA IPC."""

    def __init__(self, url: str) -> None:
        self._url = url

    def __call__(self, bucket: Any) -> None:
        import torch

        torch.cuda.synchronize()  # the other process does not see this one's streams
        written = io.BytesIO()
        ForkingPickler(written).dump([*bucket])
        tensors = base64.b64encode(written.getvalue()).decode()
        said = ask(
            self._url,
            "/update_weights_from_tensor",
            {"serialized_named_tensors": [tensors], "flush_cache": False},
        )
        assert said["success"], said
        torch.cuda.ipc_collect()


def resume(url: str, tags: list[str]) -> None:
    """Bring these tags back without placement, weights first. A resume of what was not released
    kills the server."""
    for tag in tags:
        ask(url, "/resume_memory_occupation", {"tags": [tag]})
    ask(url, "/continue_generation", {})
