"""Kernels that wait for other GPUs run one after another on each GPU.

Each such kernel needs its blocks on the GPU at once. Were two of one GPU launched on streams of their own,
each could hold a part of the multiprocessors and wait for the rest, or two members could run them in two
orders and wait for each other.
"""

from __future__ import annotations

import torch

_LAST: dict[torch.device, torch.cuda.Stream] = {}
"""The stream on which the last collective kernel of each GPU was launched."""


def in_order(device: torch.device) -> None:
    """Makes the current stream wait for the collective kernels that other streams of `device` were given.

    While a graph is recorded nothing is done: who replays it calls this before.
    """
    if torch.cuda.is_current_stream_capturing():
        return
    now, last = torch.cuda.current_stream(device), _LAST.get(device)
    if last is not None and last != now:
        now.wait_stream(last)
    _LAST[device] = now
