"""`PeerTables`: the addresses of members' memory, in tables that kernels read from this member's device.

Graphs that were recorded hold the addresses of the tables only, so that they stay true when a seat changes
hands.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moeserve.dispatch.members import Member
from moeserve.dispatch.peers.layout import PeerLayout
from moeserve.dispatch.peers.liveness import GIVEN_UP_BYTES, HEADER_BYTES
from moeserve.dispatch.peers.memory import PeerMemory


class PeerTables:
    """`headers [lanes + owners]`, `arrivals [owners]` and `sums [lanes]`: int64 addresses, 0 where none is.

    They are changed on the current stream, after what it was given before. Views of this member's own memory,
    uint8 or int32, stand beside them; None where it has no such part.
    """

    def __init__(self, layout: PeerLayout, memory: PeerMemory) -> None:
        self._layout, self._memory = layout, memory
        spec, mine = layout.spec, memory.mine
        self.headers, self.arrivals, self.sums = (
            torch.zeros(places, dtype=torch.int64, device=spec.device)
            for places in (layout.lanes + layout.owners, layout.owners, layout.lanes)
        )
        self.header = mine[:HEADER_BYTES].view(torch.int32)
        owner, lane = spec.member.owner, spec.member.lane
        self.arrivals_here = None if owner is None else mine[layout.arrivals :]
        self.sums_here = None if lane is None else mine[layout.sums(spec.member) :]
        self._enter(spec.member, mine)
        for seat, view in memory.views.items():
            self._enter(spec.members.at(seat), view)

    def admit(self, member: Member, view: Tensor) -> None:
        """Enters the memory of `member`, mapped here as `view`; what the seat's last holder told is
        forgotten.

        Only for a member that comes later: one that was there from the start may have told this one something
        already.
        """
        self.header[member.seat].zero_()
        if member.owner is not None:
            self.header[GIVEN_UP_BYTES // 4 + member.owner].zero_()
        self._enter(member, view)

    def _enter(self, member: Member, view: Tensor) -> None:
        base, layout = view.data_ptr(), self._layout
        if member.lane is not None:
            self.headers[member.lane].fill_(base)
            self.sums[member.lane].fill_(base + layout.sums(member))
        if member.owner is not None:
            self.headers[layout.lanes + member.owner].fill_(base)
            self.arrivals[member.owner].fill_(base + layout.arrivals)
