"""Sparse tensors in coordinate layout: the gradients of `nn.Embedding(sparse=True)`, and momentum that is made of them.

Their bytes lie in two dense tensors, indices and values, whose storages move like any other. Torch gives both anew each time it is
asked, as aliases of what the sparse tensor holds: they share its storages, and what is rebound is not what it holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from placement.tensors.owned import Owned
from placement.tensors.plain import problem_of

_OF_ITS_OWN = 3
"""References to a storage that the sparse tensor alone uses: its own, that of the alias asked for, that of the storage's Python object."""


def is_sparse(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a plain one in coordinate layout."""
    return type(tensor) is torch.Tensor and tensor.layout is torch.sparse_coo


def sparse_parts(tensor: torch.Tensor, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Indices and values, as far as there are any."""
    parts = ((f"{name}.indices", tensor._indices()), (f"{name}.values", tensor._values()))
    return ((path, part) for path, part in parts if part.numel())


def own_storages(tensor: torch.Tensor) -> None:
    """Copy indices or values that lie in somebody else's storage; the tensor object stays.

    The backward pass of an embedding takes the user's tensor of tokens itself for the indices: moving its storage would take the tokens
    away. So nothing else uses the storages that are moved.
    """
    parts = (tensor._indices(), tensor._values())
    shared = [_is_shared(part) for part in parts]
    if any(shared):
        indices, values = (part.clone() if is_shared else part for part, is_shared in zip(parts, shared, strict=True))
        put_parts(tensor, indices, values)


def follow(owned: Iterable[Owned]) -> None:
    """Give sparse tensors the indices and values that were found in them and have been rebound to another device since."""
    found: dict[int, tuple[torch.Tensor, dict[str, torch.Tensor]]] = {}
    for each in owned:
        if each.wrapper is not None and is_sparse(each.wrapper):
            found.setdefault(id(each.wrapper), (each.wrapper, {}))[1][each.name.rpartition(".")[2]] = each.tensor
    for tensor, parts in found.values():
        if len(parts) == 2 and parts["values"].device != tensor.device:
            put_parts(tensor, parts["indices"], parts["values"])


def _is_shared(part: torch.Tensor) -> bool:
    uses: int = torch._C._storage_Use_Count(part.untyped_storage()._cdata)
    return uses > _OF_ITS_OWN


def put_parts(tensor: torch.Tensor, indices: torch.Tensor, values: torch.Tensor) -> None:
    """Let a sparse tensor have these indices and values; the tensor object stays."""
    with torch.no_grad():
        tensor.data = made_of(tensor, indices, values)


def made_of(tensor: torch.Tensor, indices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """A sparse tensor like another one, of these indices and values."""
    return torch.sparse_coo_tensor(indices, values, tensor.size(), is_coalesced=tensor.is_coalesced(), check_invariants=False)


def problem_of_sparse(part: torch.Tensor, compute_device: torch.device) -> str | None:
    """Why a sparse tensor cannot be moved, given one of its parts; None where it can."""
    if part.is_cpu and compute_device.type != "cpu":
        return (
            f"is sparse and on the CPU, from where it cannot follow what it belongs to to {compute_device}: move that there before "
            "registering, or drop it (a gradient: zero_grad first)"
        )
    return problem_of(part, compute_device)


def nbytes_of(tensor: torch.Tensor) -> int:
    """Bytes of a tensor of any layout; what it keeps beside its values is not counted where torch does not show it."""
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return sum(part.nbytes for part in (tensor.crow_indices(), tensor.col_indices(), tensor.values()))
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return sum(part.nbytes for part in (tensor.ccol_indices(), tensor.row_indices(), tensor.values()))
    return tensor.numel() * tensor.element_size()
