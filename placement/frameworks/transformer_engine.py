"""TransformerEngine: caches that its modules keep between forward passes (workspaces with weights in fp8, dummy gradients)."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator

import torch

from placement.core.lazy_names import is_a
from placement.frameworks.base import Framework
from placement.tensors.plain import nested_tensors

_MODULE = "transformer_engine.pytorch.module.base"


class TransformerEngine(Framework):
    """The caches of TransformerEngine's modules in one module tree. The modules make them again if they are dropped."""

    packages = (_MODULE,)

    def __init__(self, root: torch.nn.Module) -> None:
        self._root = weakref.ref(root)

    @classmethod
    def find(cls, root: torch.nn.Module) -> TransformerEngine | None:
        found = cls(root)
        return found if any(found._modules()) else None

    def caches(self) -> Iterator[torch.Tensor]:
        for module in self._modules():
            yield from (tensor for _, tensor in nested_tensors(module.__dict__.get("_fp8_workspaces"), ""))

    def drop_caches(self) -> None:
        for module in self._modules():
            if isinstance(workspaces := module.__dict__.get("_fp8_workspaces"), dict):
                workspaces.clear()
        for name in (_MODULE, "transformer_engine.pytorch.module._common"):
            if isinstance(gradients := getattr(sys.modules.get(name), "_dummy_wgrads", None), dict):
                gradients.clear()

    def _modules(self) -> Iterator[torch.nn.Module]:
        root = self._root()
        if root is not None and _MODULE in sys.modules:
            yield from (part for part in root.modules() if is_a(part, _MODULE, "TransformerEngineBaseModule"))
