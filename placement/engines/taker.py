"""Copy published weights into a module of this process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch

from placement.core.errors import EngineError
from placement.frameworks.known import frameworks_of
from placement.frameworks.weights import Weight
from placement.publish.buckets import WeightInfo
from placement.publish.published import writable
from placement.storage.layout import RANGES
from placement.storage.managed import ManagedStorage
from placement.tensors.plain import plain_parts


class WeightTaker:
    """Copies the buckets of one sync into a module.

    Args:
        module: The module. Weights that its frameworks have gathered for computing are released first: values written there would be lost.

    Raises:
        EngineError: the module is offloaded, or adapters are merged into its weights.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self._is_checked = False
        self._require_resident()
        frameworks = frameworks_of(module)
        if frameworks and torch.accelerator.is_available():
            torch.accelerator.synchronize()
        with torch.inference_mode(False), torch.no_grad():
            for framework in frameworks:
                framework.ready()
        try:
            self._weights = writable(module)
        except ValueError as error:
            raise EngineError(f"weights cannot be published to {type(module).__qualname__}: {error}") from error

    def take(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Write one bucket.

        Raises:
            EngineError: the module does not have a name, a shape or such a dtype, or a weight cannot be written. Nothing of the bucket has
                been written; nothing at all where the weight is among those that the first bucket announces.
        """
        self._require_resident()
        for info in () if self._is_checked else getattr(bucket, "announced", ()):
            self._weight(info.name, info)
        self._is_checked = True
        writes: list[tuple[str, Callable[[], object]]] = []
        name = ""
        try:
            with torch.inference_mode(False), torch.no_grad():
                for name, value in bucket:
                    writes.append((name, self._weight(name, value).writer(value)))
                for name, write in writes:  # noqa: B007  # the name is for the error below
                    write()
        except (ValueError, RuntimeError, TypeError) as error:
            raise EngineError(f"published weight {name!r} cannot be written into the engine's weight: it {error}") from error

    def _weight(self, name: str, value: torch.Tensor | WeightInfo) -> Weight:
        """The weight of this name, which can take a value of such a shape and dtype."""
        weight, dtype = self._weights.get(name), value.dtype
        if weight is None:
            raise EngineError(f"published weight {name!r} is not a weight of the engine's module")
        if weight.shape != value.shape:
            raise EngineError(f"published weight {name!r} has shape {tuple(value.shape)}, the engine's has {tuple(weight.shape)}")
        if weight.problem is not None:
            raise EngineError(f"published weight {name!r} cannot be written into the engine's weight: it {weight.problem}")
        if len({(each.is_floating_point, each.is_complex, each.itemsize == 1 and each) for each in (dtype, weight.dtype)}) > 1:
            what = f"published weight {name!r} has dtype {dtype}, the engine's has {weight.dtype}"
            raise EngineError(f"{what}: a cast would change what the values mean; publish from a module that is quantised in the same way")
        return weight

    def _require_resident(self) -> None:
        parts = itertools.chain.from_iterable(plain_parts(parameter, "") for parameter in self.module.parameters())
        owners = (RANGES.owner_of(part.untyped_storage().data_ptr()) for _, part in parts)
        holding = next((owner for owner in owners if isinstance(owner, ManagedStorage)), None)
        if holding is not None and not holding.on_device:
            raise EngineError(f"the weights of {holding.name!r} are offloaded: update them inside manager.phase('weight_sync')")
