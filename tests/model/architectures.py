"""Small models, each with one thing that is easy to lose when bytes move. All take float32 of shape
(4, 32)."""

from __future__ import annotations

import torch
from torch import nn


class Plain(nn.Module):
    """Two layers over several chunks, the first frozen on request of nobody: a frozen tower beside
    a trained one."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Linear(32, 64).requires_grad_(False)
        self.head = nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.tower(x).relu())


class Tied(nn.Module):
    """One weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(32, 48, bias=False)
        self.unembed = nn.Linear(48, 32)
        self.again = nn.Linear(32, 48, bias=False)
        self.again.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.again(self.unembed(self.embed(x)))


class Views(nn.Module):
    """Parameters that are pieces of one storage, and a buffer that overlaps them."""

    def __init__(self) -> None:
        super().__init__()
        flat = torch.randn(32 * 16 + 16 + 7)
        self.weight = nn.Parameter(flat[: 32 * 16].view(32, 16).t())
        self.bias = nn.Parameter(flat[32 * 16 : 32 * 16 + 16])
        self.register_buffer("flat", flat)
        self.register_buffer("none", None)
        self.register_buffer("empty", torch.empty(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


class Normed(nn.Module):
    """BatchNorm: buffers of two types that a forward pass writes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 24)
        self.norm = nn.BatchNorm1d(24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x))


class Averaged(nn.Module):
    """An EMA copy in plain attributes, a buffer that is not saved, and bytes that no comparison of
    values gets right."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 40)
        self.ema = {name: p.detach().clone() for name, p in self.linear.named_parameters()}
        self.scale = torch.full((5,), 0.5)
        self.register_buffer(
            "odd",
            torch.tensor([float("nan"), -0.0, 0.0, float("inf")], dtype=torch.bfloat16),
            persistent=False,
        )
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale[0]


ARCHITECTURES: tuple[type[nn.Module], ...] = (Plain, Tied, Views, Normed, Averaged)

OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=False),
    "adamw-foreach": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=True, amsgrad=True),
    "adamw-fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2),
}


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Every tensor of a model by name, aliases included."""
    found: dict[str, torch.Tensor] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        found[name] = parameter
        if parameter.grad is not None:
            found[f"{name}.grad"] = parameter.grad
    found.update(module.named_buffers(remove_duplicate=False))
    for name, value in vars(module).items():
        if isinstance(value, torch.Tensor):
            found[name] = value
        elif name == "ema":
            found.update({f"ema.{key}": tensor for key, tensor in value.items()})
    return found


def state_of(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Every state tensor of an optimizer by name. Creates no entry."""
    found: dict[str, torch.Tensor] = {}
    index = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    found[f"{index}.{key}"] = value
            index += 1
    return found


def backward(module: nn.Module, seed: int) -> None:
    """Real gradients; they add up to what is there."""
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(seed))
    module(x).square().mean().backward()
