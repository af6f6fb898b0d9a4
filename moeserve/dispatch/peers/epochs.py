"""Epochs: how ranks that share memory tell this step's words from an earlier one's.

A carrier over peer memory counts its dispatches; the count, the epoch, stands beside everything that
travels. Words are compared with it for equality only, so that a count that has gone round is no special
case. The kernels' own copy of these rules is `next_epoch` in common.cu.
"""

from __future__ import annotations

NEVER = 0
"""What memory holds that nobody wrote."""

LAST = 2**32 - 2
"""Epochs go from 1 to this and start over: 2^32 - 1 is left out, so that parity alternates over the turn."""

BUFFERS = 2
"""Copies of what peers write: an epoch uses the copy of its parity, so that two steps can be under way."""


def next_epoch(epoch: int) -> int:
    """The epoch after `epoch`."""
    return 1 if epoch == LAST else epoch + 1


def parity(epoch: int) -> int:
    """Which of the `BUFFERS` an epoch uses."""
    return epoch % BUFFERS
