"""Copy published weights into a module of this process."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from placement.core.errors import EngineError
from placement.frameworks.known import frameworks_of
from placement.publish.published import writable
from placement.storage.address_map import RANGES
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
            EngineError: the module does not have a name or shape, or a weight cannot be written. Weights before that one in the bucket
                have been written.
        """
        self._require_resident()
        with torch.inference_mode(False), torch.no_grad():
            for name, tensor in bucket:
                weight = self._weights.get(name)
                if weight is None:
                    raise EngineError(f"published weight {name!r} is not a weight of the engine's module")
                if weight.shape != tensor.shape:
                    raise EngineError(f"published weight {name!r} has shape {tuple(tensor.shape)}, the engine's has {tuple(weight.shape)}")
                try:
                    weight.write(tensor)
                except (ValueError, RuntimeError, TypeError) as error:
                    raise EngineError(f"published weight {name!r} cannot be written into the engine's weight: it {error}") from error

    def _require_resident(self) -> None:
        parts = itertools.chain.from_iterable(plain_parts(parameter, "") for parameter in self.module.parameters())
        owners = (RANGES.owner_of(part.untyped_storage().data_ptr()) for _, part in parts)
        holding = next((owner for owner in owners if isinstance(owner, ManagedStorage)), None)
        if holding is not None and not holding.on_device:
            raise EngineError(f"the weights of {holding.name!r} are offloaded: update them inside manager.phase('weight_sync')")
