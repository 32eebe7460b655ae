"""What does a phase cost that moves nothing, and is the cost linear in the number of handles?

Every handle is at its target already. The cost is asking the policy, checking the plan, comparing
the states and counting the metrics. After a training placement also looks whether the steps have
created or replaced tensors, which costs more the more tensors there are.

A call of a registered model costs a guard's look at its state. It is measured on a small model,
whose own computation hides little, by turns with the same model that nothing has registered.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch

import placement
from bench import _rig
from bench._results import Results
from bench._rig import Rig


def _worker(rig: Rig, num_handles: int) -> tuple[placement.Manager, list[torch.nn.Module]]:
    """A manager, and the modules that must stay alive."""
    manager = placement.Manager(device=rig.placement_device(), budget_bytes=1 << 40)
    modules: list[torch.nn.Module] = [torch.nn.Linear(16, 16) for _ in range(num_handles)]
    for index, module in enumerate(modules):
        manager.register(f"handle{index}", module, role="reward" if index else "actor")
    return manager, modules


def _stack(manager: placement.Manager, repetitions: int) -> tuple[float, float]:
    """Median microseconds of a nested phase and of a switch that move nothing."""
    nested, switched = [], []
    with manager.phase("eval") as phase:
        for _ in range(repetitions):
            began = time.perf_counter()
            with manager.phase("eval"):
                pass
            nested.append(time.perf_counter() - began)
            began = time.perf_counter()
            phase.switch("eval")
            switched.append(time.perf_counter() - began)
    return statistics.median(nested) * 1e6, statistics.median(switched) * 1e6


def _end_of_training(rig: Rig, num_parameters: int, repetitions: int) -> float:
    """Median microseconds of a switch out of the training of a model with its AdamW, neither of
    which ever leaves the device."""
    with rig.torch_device:
        module = torch.nn.Sequential(
            *(torch.nn.Linear(16, 16, bias=False) for _ in range(num_parameters))
        )
    adam = torch.optim.AdamW(module.parameters())
    manager = placement.Manager(device=rig.placement_device(), policy="resident")
    manager.register("actor", module, role="actor")
    manager.register("actor.optimizer", adam)
    seconds = []
    with manager.phase("log_prob") as phase:
        for _ in range(repetitions):
            phase.switch("train")
            for parameter in module.parameters():
                parameter.grad = torch.ones_like(parameter)
            adam.step()
            adam.zero_grad()
            rig.sync()
            began = time.perf_counter()
            phase.switch("log_prob")
            seconds.append(time.perf_counter() - began)
    manager.close()
    return statistics.median(seconds) * 1e6


def _calls(rig: Rig, rounds: int, times: int) -> list[float]:
    """Median microseconds of a call of a small model that nothing has registered, and of one that
    is registered and on the device."""
    with rig.torch_device:
        models = [
            torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4))) for _ in range(2)
        ]
        inputs = torch.randn(8, 64)
    manager = placement.Manager(device=rig.placement_device())
    manager.register("actor", models[1], role="actor")
    taken: list[list[float]] = [[], []]
    with manager.phase("log_prob"), torch.no_grad():
        for _ in range(rounds):
            for model, seconds in zip(models, taken, strict=True):
                seconds.append(
                    rig.seconds(lambda model=model: [model(inputs) for _ in range(times)]) / times
                )  # type: ignore[misc]
    manager.close()
    return [statistics.median(seconds) * 1e6 for seconds in taken]


def measure(rig: Rig, results: Results) -> None:
    for num_parameters in (2,) if rig.size == "tiny" else (8, 300, 3_000):
        scenario = f"{num_parameters:,} parameters and their AdamW"
        with results.system(scenario, "placement"):
            ended = _end_of_training(rig, num_parameters, 3 if rig.size == "tiny" else 20)
            results.add(
                scenario, "placement", "switch out of a training, nothing moves", ended, "us"
            )
    for num_handles in {"tiny": (2, 6), "quick": (6, 100)}.get(rig.size, (6, 100, 1_000)):
        scenario = f"{num_handles:,} handles"
        with results.system(scenario, "placement"):
            began = time.perf_counter()
            manager, modules = _worker(rig, num_handles)
            registered = (time.perf_counter() - began) / num_handles * 1e6
            nested, switched = _stack(
                manager, repetitions=max(20, 2_000 // num_handles) if rig.size != "tiny" else 3
            )
            results.add(scenario, "placement", "register one", registered, "us")
            results.add(scenario, "placement", "enter and leave, nothing moves", nested, "us")
            results.add(scenario, "placement", "switch, nothing moves", switched, "us")
            modules.clear()
            manager.close()
    scenario = "a model of four small layers"
    with results.system(scenario, "placement"):
        alone, registered = _calls(
            rig, 3 if rig.size == "tiny" else 200, 3 if rig.size == "tiny" else 100
        )
        results.add(scenario, "not registered", "call", alone, "us")
        results.add(scenario, "placement", "call", registered, "us")


def main(arguments: Sequence[str] | None = None) -> None:
    _rig.run("phase_overhead", __doc__, measure, arguments)


if __name__ == "__main__":
    main()
