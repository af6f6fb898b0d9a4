"""Packets: how rows travel, so that a reader sees by their own bytes that they have arrived.

A packet is what one store of a GPU's warp carries: four lines of 128 bytes. A line is written whole and read
whole, and its last four bytes are the sequence number. A reader that finds the sequence number has the line,
without a fence or a flag. (NCCL calls such lines LL128.) 31 words of 16 bytes travel in a packet: words 7, 15
and 23 give their last four bytes, where their lines' sequence numbers stand, to the last word.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moeserve.dispatch.peers.sequence import NEVER

WARP_THREADS = 32
"""Threads of a warp; each stores one word of a packet."""

WORDS = WARP_THREADS - 1
"""Words of 16 bytes that travel in a packet."""

PACKET = 16 * WARP_THREADS
"""Bytes of a packet."""

LENDING = [7, 15, 23]
"""Words whose last four bytes stand in the last word."""


def packets_of(nbytes: int) -> int:
    """How many packets a row of `nbytes`, a multiple of 16, takes."""
    return -(-nbytes // (16 * WORDS))


def to_packets(rows: Tensor) -> Tensor:
    """Rows uint8 `[N, bytes]` as packets `[N, packets, 32, 4]` int32, without a sequence number yet."""
    count, nbytes = rows.shape
    packets = packets_of(nbytes)
    words = F.pad(rows, (0, 16 * WORDS * packets - nbytes)).view(torch.int32).view(count, packets, WORDS, 4)
    last = F.pad(words[:, :, LENDING, 3], (0, 1))
    made = torch.cat((words, last[:, :, None]), dim=2)
    tags(made).fill_(NEVER)
    return made


def from_packets(packets: Tensor, nbytes: int) -> Tensor:
    """The rows `[N, nbytes]` uint8 that stand in `packets [N, packets, 32, 4]`."""
    words = packets[:, :, :WORDS].clone()
    words[:, :, LENDING, 3] = packets[:, :, WORDS, :3]
    return words.flatten(1).view(torch.uint8)[:, :nbytes]


def tags(packets: Tensor) -> Tensor:
    """The sequence numbers of all lines of `packets [N, packets, 32, 4]`: a view `[N, packets, 4]`."""
    return packets[:, :, 7::8, 3]
