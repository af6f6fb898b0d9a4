"""What the two kernels over peer memory take: `DISPATCH` and `COMBINE`."""

from __future__ import annotations

from moeserve.device.arguments import Arguments

PEERS = {
    "memory": "const u64*",  # [ranks] addresses of all ranks' peer memory, as mapped here
    "live": "u32*",  # as `PeerLiveness` has them
    "host_flags": "u32*",
    "patience": "u64",  # nanoseconds
    "rank": "int",
    "parity_bytes": "u64",  # from one parity's copy of peer memory to the other's
    "lane_rows": "int",  # most rows that a lane brings
    "lanes_low": "u64",  # rows that the lanes of ranks 0 .. 3 bring, 16 bits each
    "lanes_high": "u64",  # and those of ranks 4 .. 7
    "slots_here": "int",  # e
    "sliced": "int",  # whether every rank holds a slice of every slot
    "sent": "u64*",  # copies that dispatches sent to other ranks, and sums that combines did
}
"""What both take: who the ranks are, and what this step's lanes bring."""

DISPATCH = Arguments(
    "DispatchArguments",
    **PEERS,
    at_begun="u64",  # offsets in peer memory, see `PeerLayout`
    at_choices="u64",
    at_weights="u64",
    at_records="u64",
    first_slot="int",  # of this rank's
    capacity="int",  # rows of a slot in a PADDED batch
    row_align="int",  # rows in which segments of a RAGGED batch are aligned
    factor="float",  # see `WireCode`
    row_bytes="int",
    # how the step's work is divided among blocks, see `Division`
    choice_senders="int",
    senders="int",
    groups_log2="int",
    run="int",
    stretch="int",
    shares="int",  # whether reading blocks count a run of choices each, and share what they counted
    # what this rank's lane brings
    rows="const u8*",  # [T, row_bytes]
    slots="const int*",  # [T, K]
    weights="const float*",  # [T, K]
    # the batch, see `Arrived`
    part0="u8*",
    part1="u8*?",
    part2="u8*?",
    counts="int*",
    offsets="int*",
    places="int*",
    place_weights="float*",
    sequence="u32*",
    # what stays on this GPU
    state="u32*",  # the last dispatch's sequence number, and how many blocks have read it
    shared_counts="uint4*",  # [reading blocks, words] counts of each block in checked words
    host_sent="u64*",  # where the host reads `sent`
)

COMBINE = Arguments(
    "CombineArguments",
    **PEERS,
    at_partials="u64",  # offset in peer memory
    homes="int",  # blocks that work for this rank's own rows
    outputs="const uint4*",  # rows of the batch
    places="const int*",  # see `Arrived`
    place_weights="const float*",
    sequence="const u32*",
    slots="const int*",  # [T, K] of this rank's lane
    answer="uint4*",  # [T, H]
)
