"""Forecasts of steps that stream their state: the bytes of the real manager, and the seconds that the link's rates give."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import placement
from placement.cli import main
from placement.core.states import IDLE
from placement.forecasting import Link, Model
from placement.testing import SimulatedDevice

CHUNK_BYTES = 16 << 10
WIDTH, LAYERS = 64, 12
POLICY = "colocated('streamed')"


def net() -> torch.nn.Module:
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def forecast(**keywords: Any) -> placement.forecasting.Forecast:
    given = {"policy": POLICY, "cycle": ["log_prob", "train"], "device": SimulatedDevice(1 << 30, chunk_bytes=CHUNK_BYTES)}
    return placement.forecast({"actor": Model(net(), optimizer="adamw")}, **{**given, **keywords})


STATE_BYTES = forecast().phase("train").streamed_bytes // 2


@pytest.mark.parametrize(("steps", "bucket_bytes"), [(1, "512MiB"), (3, "48KiB")])
def test_bytes_are_those_of_the_real_steps(steps: int, bucket_bytes: str) -> None:
    device = SimulatedDevice(1 << 30, chunk_bytes=CHUNK_BYTES)
    manager = placement.Manager(device=device, policy=POLICY, streamed_bucket_bytes=bucket_bytes)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    manager.register("actor", model, role="actor")
    manager.register("actor.optimizer", optimizer)
    told = forecast(steps={"train": steps})
    for phases in (told.first_phases, told.phases):
        for phase in phases:
            before = manager.snapshot()
            if phase.phase == IDLE:
                manager.leave()
            else:
                (manager.switch if manager.phase_name != IDLE else manager.enter)(phase.phase)
            for _ in range(steps if phase.phase == "train" else 0):
                model(torch.ones(2, WIDTH)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            moved = manager.snapshot().since(before)
            # With small buckets, each bucket of new state begins at a granule of its own.
            tolerance = 0.02 if bucket_bytes == "48KiB" else 0
            assert phase.loaded_bytes == pytest.approx(moved["placement/loaded_bytes"], rel=tolerance)
            assert phase.offloaded_bytes == pytest.approx(moved["placement/offloaded_bytes"], rel=tolerance)
    manager.close()


def test_a_first_step_only_sends_and_later_ones_go_both_ways() -> None:
    told = forecast(steps={"train": 3})
    assert told.phase("train").streamed_bytes == 6 * STATE_BYTES
    assert sum(phase.streamed_bytes for phase in told.first_phases) == 5 * STATE_BYTES
    assert forecast(steps={"train": 0}).phase("train").streamed_bytes == 0
    told = forecast(cycle=["log_prob", "train", "optimizer_step"])  # in the phase that is nested, where there is one
    assert [told.phase(name).streamed_bytes for name in ("train", "optimizer_step")] == [0, 2 * STATE_BYTES]


def stall(link: Link, work_seconds: float = 0.0) -> float:
    """The seconds in which two streamed steps of 12 GiB of state wait for the link."""
    with torch.device("meta"):
        large = torch.nn.Sequential(*(torch.nn.Linear(8192, 8192, bias=False, dtype=torch.bfloat16) for _ in range(48)))
    seconds = []
    for count in (2, 0):
        told = placement.forecast(
            {"actor": Model(large, optimizer="adamw")},
            policy=POLICY,
            cycle=["log_prob", "train"],
            link=link,
            steps={"train": count},
            work_seconds={"train": work_seconds},
        )
        seconds.append(told.phase("train").stall_seconds or 0.0)
    return seconds[0] - seconds[1]


def test_the_slower_direction_gives_the_seconds() -> None:
    link = Link(to_device_bytes_per_second=40e9, to_host_bytes_per_second=20e9)
    slow = (12 << 30) / link.to_host_bytes_per_second
    assert stall(link) == pytest.approx(2 * slow, rel=0.1)
    both = Link(to_device_bytes_per_second=40e9, to_host_bytes_per_second=40e9, both_bytes_per_second=50e9)
    assert stall(both) == pytest.approx(2 * (24 << 30) / 50e9, rel=0.1)


def test_the_command_tells_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.json"
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 256}
    config.write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"], **sizes}))
    command = ["plan", str(config), "--policy", POLICY, "--rate", "50GB", "--cycle", "log_prob,train"]
    assert main([*command, "--steps", "train=4"]) == 0
    assert "is streamed by optimizers" in capsys.readouterr().out
    assert main([*command, "--steps", "train=many"]) == 2
    assert "no number of steps" in capsys.readouterr().err
