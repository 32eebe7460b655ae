"""Main parameters: what an optimizer steps in place of a model's parameters, such as float32 copies and shards of them."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping

import torch

from placement.tensors.owned import Owned

_GRADIENTS = ("grad", "decoupled_grad")


def main_parameters(stepped: Iterable[torch.Tensor], models: Mapping[int, torch.Tensor]) -> Iterator[Owned]:
    """The main parameters among the tensors that are stepped, by index, and their gradients.

    Args:
        models: by the identity of a main parameter, the model's parameter.
    """
    if not models:
        return
    with warnings.catch_warnings():  # a shard of a float32 parameter is a view inside a graph, whose `.grad` is None until the first step
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        found = [
            (index, main, [(name, getattr(main, name, None)) for name in _GRADIENTS])
            for index, main in enumerate(stepped)
            if id(main) in models
        ]
    for index, main, gradients in found:
        yield Owned(f"main.{index}", main)
        yield from (Owned(f"main.{index}.{name}", each, True) for name, each in gradients if each is not None)


def storages_of(parameters: Iterable[torch.Tensor]) -> set[int]:
    """The storages (`_cdata`) of modules' parameters and of their gradients, wherever a framework keeps them."""
    tensors = (getattr(each, name, None) for each in parameters for name in ("data", "grad", "main_grad"))
    return {tensor.untyped_storage()._cdata for tensor in tensors if tensor is not None}
