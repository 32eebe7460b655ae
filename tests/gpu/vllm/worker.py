"""The part of these tests that runs in the workers of a vLLM server: it takes weights by CUDA
IPC."""

from __future__ import annotations

import base64
import pickle
from typing import Any

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

STORAGE_DEVICE = 6
"""The place of the device's number among the arguments of `rebuild_cuda_tensor`; each process
numbers its devices for itself."""


def pickled_handles(bucket: Any) -> str:
    """The IPC handles of a bucket's tensors, as text. The tensors must live until the receiver has
    answered."""
    from torch.multiprocessing.reductions import reduce_tensor

    return base64.b64encode(
        pickle.dumps([(name, reduce_tensor(tensor)[1]) for name, tensor in bucket])
    ).decode()


class TakesWeights:
    """For `--worker-extension-cls`: a method that `/collective_rpc` can name."""

    def take_bucket(self, handles: str) -> str:
        """Copy a bucket into the model. Returns after the last byte has been copied."""
        here = torch.cuda.current_device()
        pairs = []
        for name, arguments in pickle.loads(base64.b64decode(handles)):
            own = [*arguments]
            own[STORAGE_DEVICE] = here
            pairs.append((name, rebuild_cuda_tensor(*own)))
        self.get_model().load_weights(pairs)  # type: ignore[attr-defined] # a method of the worker that this class is mixed into
        torch.cuda.synchronize()
        return "taken"
