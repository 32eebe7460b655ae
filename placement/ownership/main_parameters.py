"""Main parameters: tensors that an optimizer steps in place of the model's parameters, such as float32 copies or shards of them."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping

import torch

from placement.tensors.owned import Owned
from placement.tensors.plain import is_leaf, parts_of

_GRADIENTS = ("grad", "decoupled_grad")


def main_parameters(stepped: Iterable[torch.Tensor], models: Mapping[int, torch.Tensor]) -> Iterator[Owned]:
    """The main parameters among the stepped tensors, named by their index, and their gradients.

    Args:
        stepped: the tensors that the optimizer steps.
        models: the model's parameter for each main parameter, by the identity of the latter.
    """
    if not models:
        return
    # A shard of a float32 parameter is a view, not a leaf of autograd; torch warns about reading its `.grad` before the first step.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        found = [
            (index, main, [(name, getattr(main, name, None)) for name in _GRADIENTS])
            for index, main in enumerate(stepped)
            if id(main) in models
        ]
    for index, main, gradients in found:
        yield from _parts(f"main.{index}", main, is_gradient=False)
        for name, gradient in gradients:
            if gradient is not None:
                yield from _parts(f"main.{index}.{name}", gradient, is_gradient=True)


def _parts(name: str, tensor: torch.Tensor, *, is_gradient: bool) -> Iterator[Owned]:
    return (Owned(path, part, is_gradient, None if part is tensor else tensor) for path, part in parts_of(tensor, name))


def gradients_of(parameters: Iterable[torch.Tensor]) -> dict[int, torch.Tensor]:
    """The gradients of modules' parameters (`grad` and `main_grad`), by identity."""
    found = ((each.grad if is_leaf(each) else None, getattr(each, "main_grad", None)) for each in parameters)
    return {id(gradient): gradient for pair in found for gradient in pair if isinstance(gradient, torch.Tensor)}
