"""Tensors of an optimizer that are attributes of objects in its state."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from placement.tensors.plain import nested_tensors


@dataclass
class Factor:
    """A plain object with a tensor."""

    matrix: Any


@dataclass(slots=True)
class Slotted:
    """The same, without a `__dict__`."""

    matrix: Any


def test_the_walk_looks_so_many_objects_deep_as_it_is_told_and_only_into_plain_ones() -> None:
    a, b, c = torch.ones(1), torch.ones(2), torch.ones(3)
    loop = Factor([a])
    loop.matrix.append(loop)
    held = [loop, {"k": Slotted(deque([b]))}, Factor(Slotted(c)), nn.Linear(2, 2), torch.optim.SGD([a], lr=1.0), Factor, Factor(None)]
    assert list(nested_tensors(held, "s")) == []
    one = [("s.0.matrix.0", a), ("s.1.k.matrix.0", b)]
    assert list(nested_tensors(held, "s", levels=1)) == one
    assert list(nested_tensors(held, "s", levels=2)) == [*one, ("s.2.matrix.matrix", c)]
