"""Sequence numbers: how ranks that share memory tell this step's words from an earlier one's.

A dispatcher over peer memory counts its dispatches; the count, the sequence number, stands beside everything
that travels. Words are compared with it for equality only, so that a count that has gone round is no special
case. The kernels' own copy of these rules is `next_sequence` in common.cu.
"""

from __future__ import annotations

NEVER = 0
"""What memory holds that nobody wrote."""

LAST = 2**32 - 2
"""Sequence numbers go from 1 to this and start over: 2^32 - 1 is left out, so that parity alternates over the
turn.
"""

BUFFERS = 2
"""Copies of what peers write: a sequence number uses the copy of its parity, so that two steps can be under
way.
"""


def next_sequence(sequence: int) -> int:
    """The sequence number after `sequence`."""
    return 1 if sequence == LAST else sequence + 1


def parity(sequence: int) -> int:
    """Which of the `BUFFERS` a sequence number uses."""
    return sequence % BUFFERS
