"""Sparse tensors in coordinate layout: the gradients of `nn.Embedding(sparse=True)`, and momentum made of them.

Their bytes lie in two dense tensors, indices and values, whose storages move like any other. Each time they are asked for, torch
returns new tensor objects that share the storages. So rebinding such an object does not change the sparse tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from placement.tensors.plain import Owned, problem_of

_OF_ITS_OWN = 3
"""The references to a storage that only the sparse tensor uses: its own, the requested alias, and the storage's Python object."""


def is_sparse(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a plain tensor in coordinate layout."""
    return type(tensor) is torch.Tensor and tensor.layout is torch.sparse_coo


def sparse_parts(tensor: torch.Tensor, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The indices and values that have elements."""
    parts = ((f"{name}.indices", tensor._indices()), (f"{name}.values", tensor._values()))
    return ((path, part) for path, part in parts if part.numel())


def own_storages(tensor: torch.Tensor) -> None:
    """Copy indices or values that lie in another object's storage. The tensor object stays the same.

    The backward pass of an embedding uses the user's tensor of tokens itself as indices. Moving its storage would take the tokens away.
    After this call nothing else uses the storages, so they can be moved.
    """
    parts = (tensor._indices(), tensor._values())
    shared = [_is_shared(part) for part in parts]
    if any(shared):
        indices, values = (part.clone() if is_shared else part for part, is_shared in zip(parts, shared, strict=True))
        put_parts(tensor, indices, values)


def follow(owned: Iterable[Owned]) -> None:
    """Give sparse tensors the indices and values that were found in them and have since been rebound to other storages."""
    found: dict[int, tuple[torch.Tensor, dict[str, torch.Tensor]]] = {}
    for each in owned:
        if each.wrapper is not None and is_sparse(each.wrapper):
            found.setdefault(id(each.wrapper), (each.wrapper, {}))[1][each.name.rpartition(".")[2]] = each.tensor
    for tensor, parts in found.values():
        if len(parts) == 2 and parts["values"].untyped_storage()._cdata != tensor._values().untyped_storage()._cdata:
            put_parts(tensor, parts["indices"], parts["values"])


def _is_shared(part: torch.Tensor) -> bool:
    uses: int = torch._C._storage_Use_Count(part.untyped_storage()._cdata)
    return uses > _OF_ITS_OWN


def put_parts(tensor: torch.Tensor, indices: torch.Tensor, values: torch.Tensor) -> None:
    """Replace the indices and values of a sparse tensor. The tensor object stays the same."""
    with torch.no_grad():
        tensor.data = made_of(tensor, indices, values)


def made_of(tensor: torch.Tensor, indices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """A sparse tensor like another one, with these indices and values."""
    # Not torch.sparse_coo_tensor: before torch 2.13 it warns of checks that are left out, even if it was told to leave them out.
    made: torch.Tensor = torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors(
        tensor.sparse_dim(),
        tensor.dense_dim(),
        tensor.size(),
        indices,
        values,
        dtype=tensor.dtype,
        layout=torch.sparse_coo,
        device=values.device,
        is_coalesced=tensor.is_coalesced(),
    )
    return made


def problem_of_sparse(part: torch.Tensor, compute_device: torch.device) -> str | None:
    """Why a sparse tensor with this part cannot be moved; None where it can."""
    if part.is_cpu and compute_device.type != "cpu":
        return (
            f"is sparse and on the CPU, so it cannot follow its object to {compute_device}: move the object there before "
            "registering, or drop it (a gradient: zero_grad first)"
        )
    return problem_of(part, compute_device)


def nbytes_of(tensor: torch.Tensor) -> int:
    """Bytes of a tensor of any layout. Bytes beside its values are not counted where torch does not show them."""
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return sum(part.nbytes for part in (tensor.crow_indices(), tensor.col_indices(), tensor.values()))
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return sum(part.nbytes for part in (tensor.ccol_indices(), tensor.row_indices(), tensor.values()))
    return tensor.numel() * tensor.element_size()
