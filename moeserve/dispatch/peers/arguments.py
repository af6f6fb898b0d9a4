"""What the two kernels over peer memory take: `DISPATCH` and `COMBINE`."""

from __future__ import annotations

from moeserve.device.arguments import Arguments
from moeserve.dispatch.peers.liveness import MOST_LANES

LANES_A_WORD = 4
"""Lanes whose rows stand in one word of the arguments, 16 bits each."""

LANE_WORDS = MOST_LANES // LANES_A_WORD

PEERS = {
    # [lanes + owners] addresses of the header of each place's member, as mapped here
    "headers": "const u64*",
    "live": "u32*",  # as `PeerLiveness` has them
    "partners": "const u32*",
    "host_flags": "u32*",
    "host_word": "const u64*",
    "patience": "u64",  # nanoseconds
    "seat": "int",  # of this member
    "lane": "int",  # its lane, -1 without one
    "owner": "int",  # its owner's place, -1 without one
    "header": "u32*",  # of this member's memory
    "lane_rows": "int",  # most rows that a lane brings
    **{f"rows_{at}": "u64" for at in range(LANE_WORDS)},  # that lanes 4 at .. 4 at + 3 bring, 16 bits each
    "stride": "int",  # slot numbers of each owner's place
    "slots_here": "int",  # e
    "sliced": "int",  # whether every owner holds a slice of every slot
    "sent": "u64*",  # copies that dispatches sent to other members, and sums that combines did
}
"""What both take first: who the members are, and what this step's lanes bring."""

PEER = Arguments("PeerArguments", **PEERS)
"""The struct of these alone, as the kernels' common text reads them."""

DISPATCH = Arguments(
    "DispatchArguments",
    **PEERS,
    arrivals="const u64*",  # [owners] addresses of each owner's arrivals
    arrivals_here="u8*?",  # this owner's
    parity_bytes="u64",  # from one parity's arrivals to the other's
    at_choices="u64",  # offsets in arrivals, see `PeerLayout`
    at_weights="u64",
    at_records="u64",
    number="u32",  # the step's sequence number; 0: the device's next one, while a graph is replayed
    first_slot="int",  # of this member's
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
    # what this member's lane brings
    rows="const u8*",  # [T, row_bytes]
    slots="const int*",  # [T, K]
    weights="const float*",  # [T, K]
    # the batch, see `PeerArrival`
    part0="u8*",
    part1="u8*?",
    part2="u8*?",
    counts="int*",
    offsets="int*",
    places="int*",
    place_weights="float*",
    sequence="u32*",
    # what stays on this GPU
    state="u32*",  # see `State` in dispatch.cu
    shared_counts="uint4*",  # [reading blocks, words] counts of each block in checked words
    host_sent="u64*",  # where the host reads `sent`
)

COMBINE = Arguments(
    "CombineArguments",
    **PEERS,
    sums="const u64*",  # [lanes] addresses of each lane's sums
    sums_here="u8*?",  # this lane's
    parity_bytes="u64",  # from one parity's sums to the other's
    spoiled="const u32*",  # not 0 when `outputs` mean nothing: then nothing is sent
    homes="int",  # blocks that work for this member's own rows
    outputs="const uint4*",  # rows of the batch
    places="const int*?",  # see `PeerArrival`; null without an owner's place
    place_weights="const float*?",
    sequence="const u32*",
    slots="const int*",  # [T, K] of this member's lane
    answer="uint4*",  # [T, H]
)
