"""Sequence numbers: how members that share memory know the words of this step from those of earlier ones.

A step's number comes with the step, from whoever orders steps, so that members that were absent from some
agree on it with the others. As a sequence number of 32 bits it stands beside everything that travels. Words
are compared with it for equality, so that a count that has gone round is no special case. The kernels' own
copy of these rules is `next_sequence` in liveness.cu.
"""

from __future__ import annotations

NEVER = 0
"""The number in memory that nobody wrote."""

LAST = 2**32 - 2
"""Sequence numbers go from 1 to this and start over. 2^32 - 1 is left out, so that parity alternates also
where they start over.
"""

BUFFERS = 2
"""Copies of each section that peers write. A step uses the copy of its sequence number's parity, so that two
steps can be under way.
"""


def sequence_of(number: int) -> int:
    """The sequence number of the step of `number`, counted from 1; both have the same parity."""
    return (number - 1) % LAST + 1


def next_sequence(sequence: int) -> int:
    """The sequence number after `sequence`."""
    return 1 if sequence == LAST else sequence + 1


def parity(sequence: int) -> int:
    """Which of the `BUFFERS` a sequence number uses."""
    return sequence % BUFFERS
