"""What compiled graphs see of remote experts: operators without a body to look into.

`experts` is one call. `start` and `finish` are its two halves, between which an engine computes shared
experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moeserve.proto.integrations.remote_layers import RemoteLayers, share_of

VERIFIED = ("cpu",)
"""Devices on which the operators were run, eager and compiled."""

LAYERS: list[RemoteLayers] = []
"""The layers of this process, one entry, once the plug-in is installed."""

_SKIPPED = -1


def install(layers: RemoteLayers) -> None:
    """Gives the operators of this process its layers."""
    LAYERS[:] = [layers]


def _is_trial() -> bool:
    """Whether vLLM only tries a pass: to measure memory, to compile, or since other ranks have rows."""
    from vllm.forward_context import get_forward_context, is_forward_context_available

    return is_forward_context_available() and get_forward_context().attn_metadata is None


@torch.library.custom_op("moeserve::experts", mutates_args=())
def experts(hidden: Tensor, ids: Tensor, weights: Tensor, layer: int, rank: int, ranks: int) -> Tensor:
    """This rank's part of mixed rows [T, H] like `hidden`, zero in other ranks' rows. ids [T, K], weights [T,
    K].
    """
    part = share_of(len(hidden), rank, ranks)
    if _is_trial():
        return torch.zeros_like(hidden)
    if ranks == 1:
        return LAYERS[0].ask(layer, hidden, ids, weights)
    answer = torch.zeros_like(hidden)
    answer[part] = LAYERS[0].ask(layer, hidden[part], ids[part], weights[part])
    return answer


@experts.register_fake
def _(hidden: Tensor, ids: Tensor, weights: Tensor, layer: int, rank: int, ranks: int) -> Tensor:
    return torch.empty_like(hidden)


@torch.library.custom_op("moeserve::start", mutates_args=())
def start(hidden: Tensor, ids: Tensor, weights: Tensor, layer: int, rank: int, ranks: int) -> Tensor:
    """Begins what `experts` does; returns the ticket, [1] int64 on the CPU."""
    part = share_of(len(hidden), rank, ranks)
    if _is_trial():
        ticket = _SKIPPED
    else:
        ticket = LAYERS[0].start(layer, hidden[part].clone(), ids[part].clone(), weights[part].clone())
    return torch.tensor([ticket], dtype=torch.int64)


@start.register_fake
def _(hidden: Tensor, ids: Tensor, weights: Tensor, layer: int, rank: int, ranks: int) -> Tensor:
    return torch.empty(1, dtype=torch.int64)


@torch.library.custom_op("moeserve::finish", mutates_args=())
def finish(ticket: Tensor, hidden: Tensor, rank: int, ranks: int) -> Tensor:
    """Waits for what `start` began with the same hidden states; returns as `experts` does."""
    number = int(ticket.item())
    answer = torch.zeros_like(hidden)
    if number != _SKIPPED:
        answer[share_of(len(hidden), rank, ranks)] = LAYERS[0].finish(number)
    return answer


@finish.register_fake
def _(ticket: Tensor, hidden: Tensor, rank: int, ranks: int) -> Tensor:
    return torch.empty_like(hidden)
