"""A handle's weights for the trainer side of vLLM's weight transfer.

Read from vllm/distributed/weight_transfer/base.py. In 0.33.0 a source has `metadata` as a cached
property, and `iter_full()`; from 0.26 to 0.32 it has `metadata()`, and is iterated over.
"""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Iterator
from typing import Any, Self

import torch

from placement.core.errors import PhaseError
from placement.publish import buckets
from placement.publish.buckets import Convert, Dtype, Publisher
from placement.publish.checkpoint_names import Names
from placement.publish.lora import Adapters


class VllmWeightSource:
    """A `vllm.distributed.weight_transfer.WeightSource`, from which vLLM's trainer-side engines
    (`nccl`, `ipc`) send.

    Give it to `trainer_init(source=...)`, in any state. Call `send_weights()` inside
    `manager.phase("weight_sync")`, on every rank. Every rank gathers and holds every weight:
    `owned_names()` has all, and before 0.33 `held_names()` is None. Each weight is in memory of
    torch, and stays valid as long as vLLM keeps it.

    Args:
        handle: the handle of the module to publish.
        dtype, adapters, convert: as in `Handle.weights`.
        names: as in `Handle.weights`. vLLM's loaders expect the names of a checkpoint; "module" is
            for a module that is not of transformers 5, and has those names.
        bucket_bytes: as in `Handle.weights`: the device bytes beside the buffers of vLLM.

    Raises:
        ImportError: there is no vLLM here, or one without weight sources.
        PhaseError: on reading metadata, the object is not built; on reading values, the handle is
            not SYNCING.

    Example:
        ::

            engine.trainer_init(source=VllmWeightSource(actor))
            with manager.phase("weight_sync"):
                engine.send_weights()
    """

    def __new__(cls, *_: Any, **__: Any) -> Self:
        try:
            base = importlib.import_module("vllm.distributed.weight_transfer").WeightSource
        except (ImportError, AttributeError) as error:
            raise ImportError(
                "VllmWeightSource needs vLLM 0.26 or later in the trainer's environment"
            ) from error
        if hasattr(base, "iter_full"):
            members = {
                "metadata": functools.cached_property(cls._described),
                "iter_full": cls._pairs,
            }
        else:
            members = {"metadata": cls._described, "__iter__": cls._pairs}
        kind = type(cls.__name__, (cls, base), {"__doc__": cls.__doc__, **members})
        source: Self = object.__new__(kind)
        return source

    def __init__(
        self,
        handle: Publisher,
        *,
        dtype: Dtype = None,
        adapters: Adapters = "merged",
        names: Names = "checkpoint",
        convert: Convert | None = None,
        bucket_bytes: int | str = 64 << 20,
    ) -> None:
        self._handle = handle
        self._bucket_bytes = bucket_bytes
        self._options: dict[str, Any] = {
            "dtype": dtype,
            "adapters": adapters,
            "names": names,
            "convert": convert,
        }

    def _described(self) -> list[Any]:
        """vLLM's description of each weight, in the order of the values."""
        infos = buckets.weights_info(self._handle, **self._options)
        if not infos:
            raise PhaseError(
                f"{self._handle.name!r} publishes no weights: it is not built yet, or it is gone. "
                "Load it in a phase first"
            )
        describe = importlib.import_module("vllm.distributed.weight_transfer").ParamMeta
        return [describe(info.name, info.dtype, info.shape) for info in infos]

    def _pairs(self) -> Iterator[tuple[str, torch.Tensor]]:
        published = buckets.weights(self._handle, **self._options, bucket_bytes=self._bucket_bytes)
        pairs = itertools.chain.from_iterable(published)
        if not torch.accelerator.is_available():
            return pairs
        # vLLM's streams wait for no load, and for no optimizer step
        torch.accelerator.synchronize()
        return _handed_over(pairs)


def _handed_over(
    pairs: Iterator[tuple[str, torch.Tensor]],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Pairs that are all made on one stream, each for the stream on which it is asked for: vLLM
    packs its buffers on streams by turns."""
    making = torch.accelerator.current_stream()
    while True:
        asking = torch.accelerator.current_stream()
        with making:
            pair = next(pairs, None)
        if pair is None:
            return
        asking.wait_stream(making)
        pair[1].record_stream(asking)
        yield pair
