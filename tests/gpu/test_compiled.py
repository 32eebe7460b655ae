"""Code that inductor made, and CUDA graphs of it: refused while offloaded, compiled once, and bit
for bit what it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import placement

pytestmark = [
    pytest.mark.gpu,
    # torch's compiler
    pytest.mark.filterwarnings(
        "ignore:.*torch.jit:DeprecationWarning", "ignore:TensorFloat32:UserWarning"
    ),
]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(512),
            nn.Linear(512, 1024),
            nn.Linear(1024, 512),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def in_place(model: Stack, options: dict[str, Any]) -> Callable[..., Any]:
    model.compile(**options)
    return model


def by_layers(model: Stack, options: dict[str, Any]) -> Callable[..., Any]:
    for layer in model.layers:
        layer.compile(**options)
    return model


FORMS: dict[str, Callable[[Stack, dict[str, Any]], Callable[..., Any]]] = {
    "wrapper": lambda model, options: torch.compile(model, **options),
    "function": lambda model, options: torch.compile(lambda x: model(x) * 1, **options),
    "in place": in_place,
    "layers": by_layers,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "inductor": {"fullgraph": True},
    "reduce-overhead": {"fullgraph": True, "mode": "reduce-overhead"},
}


@pytest.fixture(autouse=True)
def _dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# torch's own first one, with which it warms up
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@pytest.mark.parametrize("called_before", [False, True])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("options", OPTIONS)
def test_twenty_phases_of_a_compiled_model(
    manager: placement.Manager, options: str, form: str, called_before: bool
) -> None:
    torch.manual_seed(1)
    model = Stack().cuda()
    x = torch.randn(16, 512, device="cuda")
    call = FORMS[form](model, OPTIONS[options])
    wanted = None
    with torch.no_grad():
        if called_before:
            for _ in range(4):  # a CUDA graph is recorded at the second or third call
                torch.compiler.cudagraph_mark_step_begin()
                wanted = call(x).clone()
        manager.register("actor", model, role="actor")
        for turn in range(20):
            with manager.phase("log_prob"), torch._dynamo.config.patch(error_on_recompile=turn > 0):
                for _ in range(4 if turn == 0 else 1):
                    torch.compiler.cudagraph_mark_step_begin()
                    found = call(x).clone()
            wanted = found if wanted is None else wanted
            assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))
            for refused in (call, model.forward, model.layers[0]):
                with pytest.raises(placement.NotResidentError, match="'actor' is CPU_OFFLOADED"):
                    refused(x)


def test_training_by_inductor_is_refused_outside_and_as_before_inside(
    manager: placement.Manager,
) -> None:
    losses: list[list[float]] = []
    for is_managed in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(1)
        model = Stack().cuda()
        call = torch.compile(lambda x, model=model: model(x).square().mean(), fullgraph=True)
        adam = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        if is_managed:
            manager.register("actor", model, role="actor")
            manager.register("adam", adam)
        losses.append([])
        for seed in range(10):
            x = torch.randn(
                16, 512, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)
            )
            phase = manager.phase("train")
            if is_managed:
                phase.__enter__()
            adam.zero_grad()
            loss = call(x)
            loss.backward()
            adam.step()
            losses[-1].append(loss.item())
            del loss
            if is_managed:
                phase.__exit__(None, None, None)
                with pytest.raises(placement.NotResidentError, match="'actor' is CPU_OFFLOADED"):
                    call(x)
    assert losses[0] == losses[1]
