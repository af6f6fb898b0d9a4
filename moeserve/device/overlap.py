"""Whether a kernel may begin before the launch before it is over (programmatic dependent launch).

Such a kernel waits by itself before it touches memory, so that only its launch is ahead of its time.
"""

from __future__ import annotations

from functools import cache

import torch

LEAST_CAPABILITY = (9, 0)


@cache
def overlaps(device: torch.device) -> bool:
    """Whether kernels of `device` can."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY
