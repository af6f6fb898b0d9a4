"""`PeerDispatcher`: members of one host store rows straight into one another's memory, and no host waits.

A row goes once to each owner that needs it, quantized on the way out; its choices go to all owners ahead of
it. So each owner counts where everything will stand before it arrives, and places rows by slot as they come,
PADDED or RAGGED. To combine, an owner adds up its own experts' weighted outputs of a row in float32, and
stores that one partial sum into the memory of the row's lane. Each phase is one kernel, for a CUDA graph too;
two steps can be under way, of numbers of different parity.

A member that does not come within `spec.patience` seconds is given up: named by `late`, its rows count as
none, and the step goes on. A seat is taken with `seated` and `admit`, and left with `dismiss`: tables change
in place, and recorded graphs stay true. On a CPU the same protocol runs over shared memory, for tests.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moeserve.dispatch.checks import check_lane, check_spec
from moeserve.dispatch.dispatcher import Dispatched, Dispatcher, DispatchSpec, Living, Traffic
from moeserve.dispatch.exchange import check_group
from moeserve.dispatch.peers.kernels import (
    MOST_LANE_ROWS,
    MOST_SHARED,
    TABLES,
    PeerArrival,
    PeerKernels,
)
from moeserve.dispatch.peers.layout import NOWHERE, PeerLayout
from moeserve.dispatch.peers.liveness import MOST_LANES, MOST_OWNERS, PeerLiveness
from moeserve.dispatch.peers.memory import (
    MemoryRequest,
    PeerMemory,
    PeerOffer,
    disagreement,
    exchanges,
    join_memory,
    leave_over,
)
from moeserve.dispatch.peers.sequence import BUFFERS
from moeserve.dispatch.peers.tables import PeerTables
from moeserve.dispatch.peers.twin import PeerTwin
from moeserve.dispatch.peers.wires import RowRecord
from moeserve.dispatch.routing import Routing
from moeserve.experts.batch import ExpertBatch, Grouping

HIDDEN_MULTIPLE = 16
"""Columns that a thread quantizes at once; the hidden size is a multiple of it."""

MOST_CHOICES = 32
"""Choices of a row: each thread of a warp holds one."""


@dataclass(frozen=True, eq=False)
class _PeerTicket:
    half: int  # of the buffers, by the parity of the step's number
    serial: int  # of this dispatcher's dispatches
    arrived: PeerArrival
    routing: Routing


class PeerDispatcher(Dispatcher):
    """The dispatcher over the memory of members that share a host.

    `PeerDispatcher(spec, grouping, group)` is collective over a process group of the spec's members. All
    raise RuntimeError when one of them lacks room.
    """

    def __init__(self, spec: DispatchSpec, grouping: Grouping, group: ProcessGroup | None) -> None:
        check_spec(spec)
        group = check_group(spec, group)
        check_sizes(spec)
        layout = PeerLayout(spec, grouping)
        memory = join_memory(_request(layout), group)
        try:
            self._begin(layout, memory)
        except BaseException:
            leave_over(memory)
            raise

    @classmethod
    def seated(cls, spec: DispatchSpec, grouping: Grouping, offers: Sequence[PeerOffer]) -> PeerDispatcher:
        """The dispatcher of a member that takes a vacant seat of a group whose `offers` it was given.

        `spec.members` are those of the group and this one. Not collective: each of the others takes the
        seat's `offer` by `admit` before the first step in which this member takes part. Raises ValueError for
        an offer of another layout or of no member, and RuntimeError where memory cannot be had or mapped.
        """
        check_spec(spec)
        check_sizes(spec)
        layout = PeerLayout(spec, grouping)
        request = _request(layout)
        if request.refused:
            raise RuntimeError(f"seat {spec.seat} {request.refused}")
        missing = {m.seat for m in spec.members.present if exchanges(spec.member, m)}
        memory = PeerMemory(request.nbytes, request.device)
        try:
            for offer in offers:
                if spec.members.at(offer.member.seat) != offer.member:
                    raise ValueError(f"{offer.member} is not a member of {spec.members}")
                if text := disagreement(request.layout, offer):
                    raise ValueError(f"seat {offer.member.seat} {text}")
                if offer.member.seat in missing:
                    memory.map(offer)
                    missing.discard(offer.member.seat)
            if missing:
                raise ValueError(f"no offer of seats {sorted(missing)}, which rows travel from or to")
            made = cls.__new__(cls)
            made._begin(layout, memory)
        except BaseException:
            memory.close()
            raise
        return made

    def _begin(self, layout: PeerLayout, memory: PeerMemory) -> None:
        spec = self._spec = layout.spec
        self._layout, self._memory = layout, memory
        self._liveness = PeerLiveness(spec.members, spec.device)
        self._tables = PeerTables(layout, memory)
        own = (layout, self._tables, self._liveness)
        self._kernels = None if spec.device == "cpu" else PeerKernels(*own)
        self._twin = PeerTwin(layout, memory, self._liveness) if spec.device == "cpu" else None
        self.counts_on_device = self._kernels is not None
        self._number = self._recorded = 0  # the last step's, and dispatches that were recorded
        self._serial = 0
        self._under_way: dict[
            int, tuple[int, int]
        ] = {}  # by half of the buffers: serial and step that have it
        self._vacated: torch.cuda.Event | None = None  # when phases end that know a dismissed member

    def dispatch(self, hidden: Tensor, routing: Routing) -> Dispatched:
        """Sends each row once to every owner it needs, and places what arrives by slot.

        Raises ValueError for a number that is no later than the last.
        """
        check_lane(self._spec, hidden, routing)
        half = self._half(routing)
        if not self._spec.takes_part(routing.lane_rows):
            arrived = _nothing(self._layout)  # nobody waits for this member
        elif self._twin:
            arrived = self._twin.dispatch(hidden, routing)
        else:
            assert self._kernels is not None
            arrived = self._kernels.dispatch(hidden, routing)
        batch = ExpertBatch(arrived.tokens, self._layout.grouping, arrived.counts, arrived.offsets)
        self._serial += 1
        self._under_way[half] = self._serial, routing.number
        return Dispatched(batch, _PeerTicket(half, self._serial, arrived, routing))

    def combine(self, outputs: Tensor, ticket: _PeerTicket) -> Tensor:
        """Brings `outputs`, shaped as the batch, home as one partial sum a row and owner: `[T, H]`.

        Raises ValueError for outputs of another size or dtype, and for a step whose buffers a later one has.
        """
        spec, routing = self._spec, ticket.routing
        self._check(outputs, ticket)
        flat = outputs.reshape(-1, spec.hidden)
        if not spec.takes_part(routing.lane_rows):
            answer = flat.new_empty((0, spec.hidden))
        elif self._twin:
            answer = self._twin.combine(flat, ticket.arrived, routing)
        else:
            assert self._kernels is not None
            answer = self._kernels.combine(flat, ticket.arrived, routing)
        return answer

    def expect(self, number: int, absent: tuple[int, ...] = ()) -> None:
        """Says which step a recorded dispatch runs as when it is replayed next, and which lanes are absent.

        Raises ValueError for a number that is no later than the last, and for an absent lane of an owner:
        that member takes part in every step, and brings rows that choose nothing.
        """
        for lane in absent:
            seat = self._liveness.members.seat_of_lane[lane]
            if seat is not None and self._liveness.members.at(seat).owner is not None:
                raise ValueError(f"lane {lane} is of seat {seat}, an owner, which no step leaves out")
        self._rises(number)
        self._serial += 1  # nothing that was launched before has these buffers any more
        self._under_way[number % BUFFERS] = self._serial, number
        if self._kernels is not None:
            self._kernels.expect(number, sum(1 << lane for lane in absent))

    def offer(self) -> PeerOffer:
        """What others need to exchange rows with this member; picklable."""
        return _request(self._layout).offer(self._memory)

    def admit(self, offer: PeerOffer) -> None:
        """Lets the member of `offer` take part from the next step on; it has a seat, lane or place that is
        vacant.

        Nothing is compiled, allocated on the device or recorded again. It is called between two steps, by the
        thread that launches them, and the new member begins its first step only when all others have returned
        from it. Phases that were under way at the last `dismiss` are waited for: they have been told to wait
        no more for a member of this seat. For an owner all that is queued is waited for, since it may tell
        this member at once what it begins. Raises ValueError for a seat that is taken or another layout, and
        RuntimeError where its memory cannot be mapped.
        """
        members = self._liveness.members.plus(offer.member)
        if text := disagreement(_request(self._layout).layout, offer):
            raise ValueError(f"seat {offer.member.seat} {text}")
        if self._kernels is not None:
            self._kernels.follow()
        if self._vacated is not None:
            self._vacated.synchronize()
            self._vacated = None
        self._memory.sweep()
        if exchanges(self._spec.member, offer.member):
            self._tables.admit(offer.member, self._memory.map(offer))
        self._liveness.admit(offer.member)
        self._spec = replace(self._spec, members=members)
        if self._kernels is not None and offer.member.owner is not None:
            self._kernels.follow().synchronize()  # what its place's last owner told is forgotten by now

    def dismiss(self, seat: int) -> None:
        """Leaves `seat` vacant, so that another member may take it; nobody waits for its last one any more.

        It is for a member that has been seen dead, or has closed its dispatcher: what another one still
        stores would be taken for that of the next. Until then such a member is excluded, and keeps its seat.
        Raises ValueError for a vacant seat, and for this member's own.
        """
        if seat == self._spec.seat:
            raise ValueError(f"seat {seat} is this member's own; close the dispatcher to leave it")
        self._liveness.dismiss(seat)
        if self._kernels is not None:
            self._vacated = self._kernels.follow()
        self._memory.unmap(seat)
        self._spec = replace(self._spec, members=self._liveness.members)

    def exclude(self, seats: Collection[int]) -> None:
        """Stops waiting for the members of `seats` and storing to them, also in phases under way.

        Only this member does so. Raises ValueError for a vacant seat, and for this member's own.
        """
        if self._spec.seat in seats:
            raise ValueError(f"seat {self._spec.seat} is this member's own; close the dispatcher to leave it")
        self._liveness.exclude(seats)

    def interrupt(self) -> None:
        """Ends all waiting for peers, also in the phase under way."""
        self._liveness.interrupt()

    @property
    def living(self) -> Living | None:
        """As `Dispatcher.living`. Where a step goes on without those who are late, just this member's own
        places are looked at: they go when the host ends all waiting.
        """
        if self._kernels is None:
            return None
        seat = self._spec.seat if self._spec.on_late == "drop" else None
        return Living(self._liveness.live, self._liveness.mask(seat))

    def late(self) -> tuple[int, ...]:
        """The seats given up since the last call, as far as the device has come.

        Raises RuntimeError when a step's own blocks did not run together: its answer means nothing.
        """
        if sequence := self._liveness.stuck:
            raise RuntimeError(
                f"the blocks of step {sequence} (its sequence number) did not run on the GPU together within "
                f"{2 * self._spec.patience:g} s: other kernels hold its multiprocessors; raise "
                "members.held_multiprocessors to as many as they hold"
            )
        return self._liveness.late()

    @property
    def traffic(self) -> Traffic:
        """Bytes of rows and sums that went to other members; on a GPU a later step updates them."""
        counted = self._kernels or self._twin
        assert counted is not None
        copies, sums = counted.sent.tolist()
        answer = self._spec.hidden * self._spec.dtype.itemsize
        return Traffic(copies * self._layout.record.nbytes, sums * answer)

    def part(self) -> bool:
        """Unmaps the others' memory and keeps this member's own; on a GPU it waits for the device."""
        self._memory.part()
        return True

    def close(self) -> None:
        """Unmaps and frees the peer memory; on a GPU it waits for the device."""
        self._memory.close()

    def _check(self, outputs: Tensor, ticket: _PeerTicket) -> None:
        shape, dtype = ticket.arrived.tokens.shape, self._spec.dtype
        if outputs.numel() != math.prod(shape) or outputs.dtype != dtype:
            found = f"{outputs.dtype} {list(outputs.shape)}"
            raise ValueError(f"outputs must be {dtype} {list(shape)}; found {found}")
        serial, number = self._under_way[ticket.half]
        if serial != ticket.serial:
            raise ValueError(
                f"step {number} has the buffers of step {ticket.routing.number} now: {BUFFERS} steps can be "
                "under way, of numbers of different parity; combine a step sooner"
            )

    def _half(self, routing: Routing) -> int:
        """Which half of the buffers the dispatch uses; of recorded ones by turns, as they are replayed."""
        if self._kernels is not None and torch.cuda.is_current_stream_capturing():
            self._recorded += 1
            return self._recorded % BUFFERS
        self._rises(routing.number)
        return routing.number % BUFFERS

    def _rises(self, number: int) -> None:
        if number <= self._number:
            raise ValueError(f"step {number} comes after step {self._number}: numbers of steps rise, from 1")
        self._number = number


def _request(layout: PeerLayout) -> MemoryRequest:
    """The memory that the member of `layout` needs; its reason, where the device has no room."""
    spec = layout.spec
    alike = (
        layout.grouping.value,
        layout.lanes,
        layout.owners,
        spec.slots,
        spec.hidden,
        spec.top_k,
        spec.lane_rows,
        str(spec.dtype).removeprefix("torch."),
        spec.wire.name,
        spec.sliced,
    )
    return MemoryRequest(spec.member, layout.nbytes, spec.device, alike, lacks_room(layout))


def _nothing(layout: PeerLayout) -> PeerArrival:
    """What arrives at a member that takes no part in a step."""
    spec = layout.spec
    counts = torch.zeros(spec.slots_here + 1, dtype=torch.int32, device=spec.device)
    none = counts.new_empty((0, spec.top_k))
    tokens = spec.wire.empty(layout.batch_shape(0), spec.device)
    return PeerArrival(tokens, counts[:-1], counts, none, none.float(), counts[:1])


def bytes_needed(layout: PeerLayout) -> int:
    """Bytes of a member's device that the dispatcher takes: peer memory, and batches under way."""
    return layout.nbytes + BUFFERS * layout.batch_bytes


def check_sizes(spec: DispatchSpec) -> None:
    """Raises ValueError, alike on every member, for what the words on the way have no room for."""
    members = spec.members
    if members.max_lanes > MOST_LANES or members.max_owners > MOST_OWNERS:
        raise ValueError(
            f"peer memory joins at most {MOST_LANES} lanes and {MOST_OWNERS} owners, "
            f"not {members.max_lanes} and {members.max_owners}"
        )
    if spec.hidden % HIDDEN_MULTIPLE:
        raise ValueError(f"H={spec.hidden} must be a multiple of {HIDDEN_MULTIPLE}")
    if not 0 < spec.lane_rows <= MOST_LANE_ROWS:
        raise ValueError(f"lane_rows={spec.lane_rows} must lie between 1 and {MOST_LANE_ROWS}")
    if not 0 < spec.top_k <= MOST_CHOICES:
        raise ValueError(f"top_k={spec.top_k} must lie between 1 and {MOST_CHOICES}")
    slots = spec.slots * (1 if spec.sliced else members.max_owners)
    if slots >= NOWHERE:
        raise ValueError(f"{slots} slots do not fit in 16 bits; peer memory numbers at most {NOWHERE - 1}")
    room = max(RowRecord(spec.wire, spec.hidden).nbytes, TABLES * spec.slots)
    if room > MOST_SHARED:
        raise ValueError(
            f"a row of H={spec.hidden} and {spec.slots} slots need {room} bytes of a block's "
            f"shared memory, and {MOST_SHARED} are there"
        )


def lacks_room(layout: PeerLayout) -> str:
    """Why this member's device has no room for a dispatcher of `layout`; empty where it has."""
    spec = layout.spec
    if spec.device == "cpu":
        return ""
    needed, (free, _) = bytes_needed(layout), torch.cuda.mem_get_info(spec.device)
    if needed <= free:
        return ""
    return (
        f"needs {needed} bytes for {spec.lane_rows} rows a lane, {layout.lanes} lanes and "
        f"{spec.slots} slots; {free} are free: lower lane_rows, or use another dispatcher for so many rows"
    )
