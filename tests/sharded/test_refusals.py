"""What is refused before anything moves, and says why: real objects wherever a CPU has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from placement import RegistrationError
from placement.testing import SimulatedDevice, assert_nothing_resident
from tests.support.frameworks import new_accelerator
from tests.support.worker import batch, learn, make_manager, net

CPU = torch.device("cpu")


def refused(target: Any, message: str) -> None:
    manager = make_manager()
    with pytest.raises(RegistrationError, match=message):
        manager.register("actor", target)
    assert not manager.handles
    assert manager.device.memory().chunk_bytes == 0
    manager.close()


def test_memory_that_something_else_owns_is_taken_over_without_writing_there() -> None:
    """The object gets a place of its own; whoever owns the memory keeps it with the values of
    then."""
    numpy = pytest.importorskip("numpy")
    memory = numpy.arange(16, dtype=numpy.float32).reshape(4, 4)
    kept = memory.copy()
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(torch.from_numpy(memory))
    manager = make_manager(device=SimulatedDevice(1 << 20, chunk_bytes=4096))
    manager.register("actor", model, role="actor")
    optimizer = torch.optim.SGD(model.parameters())  # held: a handle goes with its object
    manager.register("actor.optimizer", optimizer)
    assert_nothing_resident(manager)
    with manager.phase("train"), torch.no_grad():
        assert model.weight.numpy().tobytes() == kept.tobytes()
        model.weight.mul_(2)
    assert_nothing_resident(manager)
    manager.close()
    assert model.weight.detach().numpy().tobytes() == (2 * kept).tobytes()
    assert memory.tobytes() == kept.tobytes()
    del model
    assert memory.tobytes() == kept.tobytes()


def test_modules_that_accelerate_moves_are_refused_and_those_that_it_leaves_in_place_are_not() -> (
    None
):
    hooks = pytest.importorskip("accelerate.hooks", reason="accelerate is not installed here")
    moved = nn.Sequential(nn.Linear(2, 2))
    hooks.add_hook_to_module(moved[0], hooks.AlignDevicesHook(execution_device=CPU, offload=True))
    refused(
        moved,
        r"\(submodule '0'\): a module that accelerate moves "
        r"at "
        r"every "
        r"forward "
        r"\(AlignDevicesHook\).*without device_map",
    )
    # What from_pretrained(device_map={"": 0}) leaves on a quantised model: inputs are moved,
    # weights are not.
    inputs = nn.Sequential(nn.Linear(64, 64))
    hooks.add_hook_to_module(
        inputs[0], hooks.AlignDevicesHook(execution_device=CPU, io_same_device=True)
    )
    hooks.add_hook_to_module(inputs[0], hooks.AlignDevicesHook(execution_device=CPU), append=True)
    manager = make_manager()
    manager.register("actor", inputs, role="actor")
    wanted = inputs[0].bias.numel()
    with manager.phase("log_prob"):
        assert inputs(batch()).shape == (4, wanted)
    assert_nothing_resident(manager)


def test_an_optimizer_that_accelerate_wraps_is_guarded_and_moved() -> None:
    """It is a torch optimizer whose constructor never ran: it has no hooks of its own."""
    model = net()
    adam = new_accelerator().prepare_optimizer(torch.optim.AdamW(model.parameters()))
    manager = make_manager()
    manager.register("actor", model, role="actor")
    handle = manager.register("actor.optimizer", adam)
    with manager.phase("train"):
        learn(model, adam)
    assert handle.host_bytes > 0
    assert handle.counters.offloaded_bytes > 0
    assert_nothing_resident(manager)
    with pytest.raises(Exception, match=r"'actor\.optimizer' is CPU_OFFLOADED.*cannot be stepped"):
        adam.step()
    manager.close()
    assert "step" not in vars(adam)


def test_collectives_in_cuda_graphs_are_warned_of_once_where_nccl_is_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """There is no NCCL on a CPU: what torch says of its process group is put in its place, the rest
    is as it runs."""
    monkeypatch.delenv("NCCL_GRAPH_REGISTER", raising=False)
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    try:
        make_manager().register("actor", net())
        assert "NCCL" not in caplog.text
        monkeypatch.setattr(dist, "get_backend_config", lambda group=None: "cpu:gloo,cuda:nccl")
        manager = make_manager()
        for name in ("actor", "ref"):
            manager.register(name, net())
        assert caplog.text.count("set NCCL_GRAPH_REGISTER=0 before NCCL starts") == 1
        caplog.clear()
        monkeypatch.setenv("NCCL_GRAPH_REGISTER", "0")
        make_manager().register("actor", net())
        assert "NCCL" not in caplog.text
    finally:
        dist.destroy_process_group()
