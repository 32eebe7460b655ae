"""The names that Python blocks of the pages run with: `<!-- code: with NAME -->` takes those that
the function NAME gives.

Each function gives a dict in which the block runs. The lines after its `yield` check the result.
"""

from __future__ import annotations

import copy
import socket
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import placement
from placement.devices.base import Device
from placement.observe.discovery import as_json, targets_in
from placement.testing import SimulatedDevice, assert_nothing_resident
from tests.engines.standin import CAPACITY, CHUNK, Vllm033
from tests.support import huggingface

WIDTH = 32
Names = dict[str, Any]
MODULES: Names = {"placement": placement, "torch": torch}
CONTEXTS: dict[str, Callable[[Tools], Any]] = {}


class Tools:
    """The test that a context serves: its folder, its patches, and the texts to replace in its
    block."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.monkeypatch = monkeypatch
        self.folder = folder
        self.replaced: dict[str, str] = {}
        """Texts of the blocks that are other ones here: addresses, folders, what a machine without
        a GPU lacks."""
        self.training = {
            "output_dir": str(folder),
            "use_cpu": True,
            "report_to": "none",
            "save_strategy": "no",
            "disable_tqdm": True,
        }
        self.take_for_gpu(simulated())

    def take_for_gpu(self, device: Device) -> None:
        """This is the accelerator that "auto" and "cuda:0" mean in the blocks."""
        self.monkeypatch.setattr("placement.manager.select_device", lambda name, **_: device)

    def free_port(self) -> int:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            port: int = taken.getsockname()[1]
            return port


def simulated() -> SimulatedDevice:
    return SimulatedDevice(capacity_bytes=16 << 20)


def _linear() -> torch.nn.Linear:
    return torch.nn.Linear(WIDTH, WIDTH)


def _log_probs(model: torch.nn.Module, samples: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(samples).log_softmax(-1)


def _update(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    samples: torch.Tensor,
    *before: torch.Tensor,
) -> None:
    new = model(samples).log_softmax(-1)
    loss = sum(((new - old.detach()) ** 2).mean() for old in before) + new.square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def context(names: Callable[[Tools], Iterator[Names]]) -> None:
    CONTEXTS[names.__name__] = contextmanager(names)


@context
def worker(tools: Tools) -> Iterator[Names]:
    """A worker's models, its engine and what it computes; no manager."""
    model = _linear()
    ref_model = copy.deepcopy(model).requires_grad_(False)
    first = model.weight.detach().clone()
    names: Names = {
        **MODULES,
        "model": model,
        "ref_model": ref_model,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "engine": placement.TorchEngine(_linear()),
        "build_critic": _linear,
        "batches": [torch.ones(4, WIDTH), torch.zeros(4, WIDTH)],
        "generate": lambda engine, batch: engine.module(batch).detach(),
        "log_probs": _log_probs,
        "update": _update,
    }
    yield names
    assert_nothing_resident(names["manager"])
    assert not torch.equal(names["actor"].state_dict()["weight"], first), "nothing was trained"
    published = names["engine"].state_dict()["weight"]
    assert torch.equal(
        published,
        names["actor"]
        .state_dict()["weight"]
        .to(torch.bfloat16 if "state" in names else published.dtype),
    )


@context
def manager(tools: Tools) -> Iterator[Names]:
    """A manager with an actor and its optimizer, and a step of training."""
    made = placement.Manager(device=simulated())
    model = _linear()
    optimizer = torch.optim.AdamW(model.parameters())
    names: Names = {
        "placement": placement,
        "torch": torch,
        "manager": made,
        "model": model,
        "batch": torch.ones(4, WIDTH),
        "update": lambda batch: _update(model, optimizer, batch),
    }
    names["actor"] = made.register("actor", model, role="actor")
    made.register("actor.optimizer", optimizer)
    yield names
    made.check_integrity()
    assert_nothing_resident(made)


@context
def llmd(tools: Tools) -> Iterator[Names]:
    """A manager with an actor, in a job whose agent asks for the GPU."""
    made = placement.Manager(device=simulated(), policy="resident")
    model = _linear()
    made.register("actor", model, role="actor")
    told: Names = {}
    agent = types.ModuleType("timeslice.snapshot_agent")
    agent.register_workload = lambda _, **given: told.update(given)  # type: ignore[attr-defined]
    tools.monkeypatch.setitem(sys.modules, "timeslice", types.ModuleType("timeslice"))
    tools.monkeypatch.setitem(sys.modules, "timeslice.snapshot_agent", agent)
    yield {"manager": made}
    told["on_snapshot"](mode="offload", tags=[])
    assert_nothing_resident(made)
    assert made.snapshot().suspended
    told["on_restore"](tags=[])
    assert not made.snapshot().suspended
    made.close()


@context
def disk(tools: Tools) -> Iterator[Names]:
    """A folder on a disk."""
    tools.replaced["/mnt/nvme/placement"] = str(tools.folder)
    names: Names = {"placement": placement}
    yield names
    made = names["manager"]
    made.register("actor", _linear(), role="actor")
    made.check_integrity()
    assert_nothing_resident(made)
    made.close()
    assert [*tools.folder.iterdir()] == []


@context
def alone(tools: Tools) -> Iterator[Names]:
    """A manager without handles, and a model that generates."""
    names: Names = {
        "placement": placement,
        "manager": placement.Manager(device=simulated()),
        "model": _linear(),
    }
    yield names
    assert isinstance(names["engine"], placement.TorchEngine)
    assert names["engine"].module is names["model"]


@context
def ranks(tools: Tools) -> Iterator[Names]:
    """The one rank of a torchrun job of one, with a process group."""
    port = tools.free_port()
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }.items():
        tools.monkeypatch.setenv(name, value)
    store = dist.TCPStore("127.0.0.1", tools.free_port(), is_master=True, wait_for_workers=False)
    tools.replaced |= {'"cpu:gloo,cuda:nccl"': '"gloo"'}
    names: Names = {
        "placement": placement,
        "torch": torch,
        "dist": dist,
        "store": store,
        "rank": 0,
        "world_size": 1,
        "model": _linear(),
    }
    yield names
    try:
        with names["manager"].phase("train"):
            pass
        assert_nothing_resident(names["manager"])
    finally:
        names["manager"].close()
        if dist.is_initialized():
            dist.destroy_process_group()


@context
def targets(tools: Tools) -> Iterator[Names]:
    """A worker that announces itself in a folder."""
    place = tools.folder
    tools.replaced |= {'"/shared/targets"': repr(str(place)), '"0.0.0.0"': '"127.0.0.1"'}
    names: Names = {"placement": placement}
    yield names
    try:
        assert len(list(place.glob("*.json"))) == 1
        assert names["server"].target.labels["instance"] == "node0/rank0"
    finally:
        names["manager"].close()


@context
def listed(tools: Tools) -> Iterator[Names]:
    """One rank of a job, with a process group and a server of its metrics."""
    made = placement.Manager(device=simulated())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    place = tools.folder
    tools.replaced |= {'"/var/targets': f'"{place}'}
    names: Names = {
        "torch": torch,
        "Path": Path,
        "as_json": as_json,
        "rank": 0,
        "world_size": 1,
        "server": made.serve(),
    }
    try:
        yield names
        assert targets_in(place) == [names["server"].target]
    finally:
        dist.destroy_process_group()
        made.close()


@context
def vllm(tools: Tools) -> Iterator[Names]:
    """A worker beside a server that answers as vLLM does, with memory on the same device."""
    shared = tools.folder / "capacity"
    server = Vllm033(shared)
    tools.take_for_gpu(SimulatedDevice(CAPACITY, chunk_bytes=CHUNK, shared_with=shared))
    tools.replaced |= {"http://127.0.0.1:8000": server.url}
    model = _linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def send(bucket: Any) -> None:
        assert "weights" in server.memory.tags
        server.weights = "actor"

    said: list[str] = []
    names: Names = {
        "placement": placement,
        "model": model,
        "optimizer": optimizer,
        "send": send,
        "prompts": [],
        "generate": lambda prompts: said.append(server.generate()),
        "train": lambda samples: _update(
            model, optimizer, torch.ones(4, WIDTH), torch.zeros(4, WIDTH)
        ),
    }
    try:
        yield names
        # generated with the weights that were published, and all memory there
        assert said == ["actor"]
        assert server.memory.tags == set()
        assert server.accidents == []
        assert_nothing_resident(names["manager"])
    finally:
        server.close()


@context
def turns(tools: Tools) -> Iterator[Names]:
    """A GPU that processes share."""
    tools.take_for_gpu(SimulatedDevice(16 << 20, shared_with=tools.folder / "capacity"))
    folder = tools.folder / "turns"
    tools.replaced |= {"/dev/shm/placement-turns": str(folder)}
    names: Names = {"placement": placement, "...": None}
    yield names
    assert {file.suffix for file in folder.iterdir()} == {".turn", ".next"}
    names["manager"].close()


@context
def verl(tools: Tools) -> Iterator[Names]:
    """What verl's worker has: a model, an optimizer, a rollout engine, and what it computes."""

    def build_model_and_optimizer() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = _linear()
        return model, torch.optim.AdamW(model.parameters())

    names: Names = {
        "placement": placement,
        "build_model_and_optimizer": build_model_and_optimizer,
        "compute_log_prob": _log_probs,
        "update_policy": lambda model, optimizer, data: _update(
            model, optimizer, data, torch.zeros(4, WIDTH)
        ),
        "rollout": placement.TorchEngine(_linear()),
        "data": torch.ones(4, WIDTH),
    }
    yield names
    assert_nothing_resident(names["worker"].manager)
    assert (tools.folder / "step-1").is_dir()


@context
def verl_engines(tools: Tools) -> Iterator[Names]:
    """A process in which an engine of verl has registered its model."""
    from placement.integrations import verl as integration

    made = placement.Manager(device=simulated())
    integration.use_manager(made)
    model = _linear()
    made.register("actor", model, role="actor")
    names: Names = {}
    try:
        yield names
        assert names["manager"] is made
    finally:
        integration.close_manager()


@context
def saver(tools: Tools) -> Iterator[Names]:
    """A model that trains and one that generates, as torch_memory_saver's example has them."""
    generator = _linear()
    names: Names = {
        **MODULES,
        "build_model": _linear,
        "engine": placement.TorchEngine(generator),
        "prompts": torch.ones(4, WIDTH),
        "batch": torch.ones(4, WIDTH),
        "generate": lambda prompts: generator(prompts).detach(),
        "train": lambda model, optimizer, batch: _update(
            model, optimizer, batch, torch.zeros(4, WIDTH)
        ),
    }
    yield names
    assert_nothing_resident(names["manager"])


@context
def trl(tools: Tools) -> Iterator[Names]:
    """What a script that trains with TRL has: a model, a tokenizer, prompts and a reward
    function."""
    pytest.importorskip("trl", reason="TRL is not installed")
    from trl import GRPOConfig

    warnings.simplefilter("ignore")  # pytest sets the filters anew for each test
    tools.monkeypatch.setenv("CI", "1")  # TRL sends telemetry otherwise
    sizes = {
        "per_device_train_batch_size": 2,
        "num_generations": 2,
        "max_completion_length": 4,
        "max_steps": 1,
        "learning_rate": 1e-2,
    }
    names: Names = {
        "model": huggingface.model_from(huggingface.saved_model(tools.folder / "model")),
        "tokenizer": huggingface.tokenizer(),
        "prompts": huggingface.prompts(),
        "reward": lambda completions, **_: [sum(map(ord, text)) / 100 for text in completions],
        "config": GRPOConfig(**tools.training, **sizes, beta=0.1),
        "question": {"input_ids": torch.tensor([[3, 4, 5]])},
    }
    first = huggingface.weights_of(names["model"])
    yield names
    if names["trainer"].manager.handles:  # it is not closed
        assert_nothing_resident(names["trainer"].manager)
    assert any(
        not torch.equal(value, first[name])
        for name, value in huggingface.weights_of(names["model"]).items()
    ), "nothing was trained"


@context
def trainer(tools: Tools) -> Iterator[Names]:
    """A trainer of transformers whose loss uses a reward model."""
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    from transformers import Qwen2ForSequenceClassification, Trainer, TrainingArguments

    class RewardedTrainer(Trainer):
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any
        ) -> Any:
            outputs = model(**inputs)
            loss = outputs.loss * names["reward_model"](inputs["input_ids"]).logits.mean()
            return (loss, outputs) if return_outputs else loss

    ids = huggingface.tokenizer()(["1+1=2"])["input_ids"][0]
    names: Names = {
        "RewardedTrainer": RewardedTrainer,
        "model": huggingface.model_from(huggingface.saved_model(tools.folder / "model")),
        "reward_model": Qwen2ForSequenceClassification(
            huggingface.config(num_labels=1)
        ).requires_grad_(False),
        "args": TrainingArguments(
            **tools.training,
            per_device_train_batch_size=1,
            max_steps=1,
            eval_strategy="steps",
            eval_steps=1,
        ),
        "examples": [{"input_ids": ids, "labels": ids}],
    }
    yield names
    assert names["trainer"].state.global_step == 1
    assert not names["callback"].manager.handles


@context
def accelerate_loop(tools: Tools) -> Iterator[Names]:
    """A loop that accelerate prepares, with a reward model."""
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    model = torch.nn.Linear(WIDTH, WIDTH)
    names: Names = {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "reward_model": torch.nn.Linear(WIDTH, WIDTH),
        "batches": [torch.ones(4, WIDTH)],
        "judge": lambda reward_model, batch: reward_model(batch).detach(),
        "loss_of": lambda model, batch, rewards: ((model(batch) - rewards) ** 2).mean(),
    }
    first = model.weight.detach().clone()
    yield names
    assert_nothing_resident(names["manager"])
    assert not torch.equal(names["manager"].handles["actor"].state_dict()["weight"], first)
