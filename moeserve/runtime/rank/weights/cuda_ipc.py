"""A tensor of another process on this host's GPUs, mapped into this one: `shared`, and `opened` there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def shared(tensor: Tensor) -> dict[str, Any]:
    """What another process needs to map `tensor` (CUDA, contiguous), plain; the tensor must outlive it."""
    whole = tensor.contiguous().view(-1).view(torch.uint8)
    fields = whole.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
    return {
        "offset": whole.storage_offset(),
        "size": whole.numel(),
        "storage": list(fields),
    }


def opened(message: dict[str, Any], device: int) -> Tensor:
    """The bytes of a shared tensor, uint8 `[size]`, mapped on this process's own `device`.

    On the owner's device a kernel that touches them would die with an illegal access.
    """
    _, *fields = message["storage"]
    storage = torch.UntypedStorage._new_shared_cuda(device, *fields)
    whole = torch.empty(0, dtype=torch.uint8, device=f"cuda:{device}")
    at, size = message["offset"], message["size"]
    return whole.set_(storage, at, (size,), (1,))
