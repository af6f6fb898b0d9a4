"""Answers on their way from a rank's device to its host memory."""

from __future__ import annotations

import torch
from torch import Tensor


def on_host(answer: Tensor) -> Tensor:
    """`answer` in host memory, complete; it is copied to pinned memory, of which torch keeps used blocks.

    A copy to pageable memory would hold up the copies of all other threads as long as it waits.
    """
    if answer.device.type == "cpu":
        return answer
    home = torch.empty(answer.shape, dtype=answer.dtype, pin_memory=True)
    home.copy_(answer, non_blocking=True)
    torch.cuda.current_stream(answer.device).synchronize()
    return home
