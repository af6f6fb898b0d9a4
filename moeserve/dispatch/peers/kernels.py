"""Dispatch and combine over peer memory on a GPU: one kernel each, which reads no data on the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moeserve.device.arguments import Argument
from moeserve.device.nvrtc import Program
from moeserve.device.residency import resident_blocks
from moeserve.device.source import Part, source
from moeserve.device.waits import spoiled_word
from moeserve.dispatch.peers.arguments import COMBINE, DISPATCH, LANE_WORDS, LANES_A_WORD, PEER
from moeserve.dispatch.peers.layout import WORD, PeerLayout
from moeserve.dispatch.peers.liveness import PeerLiveness
from moeserve.dispatch.peers.order import in_order
from moeserve.dispatch.peers.sequence import NEVER, next_sequence, sequence_of
from moeserve.dispatch.peers.tables import PeerTables
from moeserve.dispatch.peers.wires import WireCode, wire_code
from moeserve.dispatch.routing import Routing
from moeserve.experts.batch import Grouping
from moeserve.quant.format import Packed

SHARED_PARTS = ("liveness", "numbers", "records", "step", "packets")
DISPATCH_PARTS = ("exchange", "send", "choices", "places", "deliver", "dispatch")
SOURCES: tuple[Part, ...] = (
    "memory.cu",
    PEER,
    *(f"{part}.cu" for part in SHARED_PARTS),
    DISPATCH,
    *(f"{part}.cu" for part in DISPATCH_PARTS),
    COMBINE,
    "combine.cu",
)
"""Both kernels' text, in order."""
THREADS = 512  # of a block of dispatch
COMBINE_THREADS = 768  # of a block of combine
TEAMS = 8
"""Teams of warps of a reading block that has many rows: each team has a stretch of them."""

CHOICE_SENDERS = 3
"""Most of the blocks of dispatch that send choices."""

COUNTED_BY_ALL = 512
"""Rows of all lanes up to which every reading block counts all choices by itself."""

COUNTS = 6
"""Counts in a checked word, 16 bits each: rows of a slot that a block has."""

TABLES = 8
"""Bytes of shared memory that a block of dispatch counts with, for each slot."""

LEAST_BLOCKS = 4
"""Blocks of dispatch: one sends choices, one rows, one places what arrives and one lays it out."""

SENDING = 0.485
"""The share of the blocks of dispatch that send, at most; the others place what arrives."""

GROUPS = 2
"""Rows that a sending block has under way, where there are more rows than sending blocks."""

HOME = 2.0
"""What a row of this lane's own costs in combine, in rows that go to another."""

MOST_LANE_ROWS = 0xFFFF
"""Rows of each lane go to a kernel as 16 bits."""

MOST_SHARED = 176 << 10
"""Bytes of shared memory that a block of dispatch can ask for, beside what it always takes."""

NANOSECONDS = 10**9


@dataclass(frozen=True, eq=False)
class PeerArrival:
    """What a dispatch leaves for the batch and for the way home."""

    tokens: Packed  # [e, C, H] or [Rmax, H]
    counts: Tensor  # [e] int32
    offsets: Tensor  # [e + 1] int32
    places: Tensor  # [N, K] int32 row of the batch of each arrived choice, -1: not here; N rows of all lanes,
    # and none where this member is no owner
    weights: Tensor  # [N, K] float32, meaningless where the place is -1
    sequence: Tensor  # [1] int32


@dataclass(frozen=True)
class Division:
    """How a dispatch is divided among blocks."""

    readers: int  # place what arrives
    choice_senders: int  # send choices
    senders: int  # send rows
    groups_log2: int  # of the rows that a sending block has under way
    run: int  # rows of each reader but the last, which writes the batch's counts and offsets
    stretch: int  # rows of each of its teams

    @property
    def blocks(self) -> int:
        """How many blocks there are in all."""
        return self.readers + self.choice_senders + self.senders


class PeerKernels:
    """Runs dispatch and combine over peer memory. Buffers a caller gets are new, and belong to the caller."""

    def __init__(self, layout: PeerLayout, tables: PeerTables, liveness: PeerLiveness) -> None:
        self._layout, self._tables, self._liveness = layout, tables, liveness
        spec = self._spec = layout.spec
        self._brings, self._owns = spec.member.lane is not None, spec.member.owner is not None
        self._device = liveness.live.device  # with its index
        self._wire = wire_code(spec)
        program = program_for(layout, self._wire)
        self._blocks = resident_blocks(self._device)
        if self._blocks < LEAST_BLOCKS:
            raise ValueError(
                f"{self._blocks} multiprocessors of {self._device} are left to dispatchers over peer memory, "
                f"which need {LEAST_BLOCKS}; lower members.held_multiprocessors"
            )
        if not self._wire.fused:  # what a format keeps on the device is brought there now
            layout.record.pack(torch.zeros((1, spec.hidden), dtype=spec.dtype, device=spec.device))
        self._state = torch.zeros(4, dtype=torch.int32, device=spec.device)  # `State` in dispatch.cu
        self._next, self._absent = NEVER, 0  # as the state has them once what is queued is done
        counts = (self._blocks, -(-spec.slots_here // COUNTS), WORD // 4)
        self._counts = torch.zeros(counts, dtype=torch.int32, device=spec.device)
        self._sent = torch.zeros(2, dtype=torch.int64, device=spec.device)
        self.sent = torch.zeros(2, dtype=torch.int64, pin_memory=True)
        """Copies that dispatches have sent to other members, and sums that combines did, as far as is known.
        """
        peers = self._peers()
        self._dispatch = program.function("peer_dispatch", DISPATCH).bound(peers | self._fixed())
        self._combine = program.function("peer_combine", COMBINE).bound(
            peers
            | {
                "sums": tables.sums,
                "sums_here": tables.sums_here,
                "parity_bytes": layout.sums_bytes,
                "spoiled": spoiled_word(self._device),
            }
        )

    def follow(self) -> torch.cuda.Event:
        """Has the current stream follow the kernels of other streams; the event of when they have ended."""
        in_order(self._device)
        ended: torch.cuda.Event = torch.cuda.current_stream(self._device).record_event()
        return ended

    def expect(self, number: int, absent: int) -> None:
        """The dispatch replayed next runs as step `number`, without the lanes of the bits `absent`."""
        in_order(self._device)
        sequence = sequence_of(number)
        if self._next != sequence:
            self._state[0].fill_(_signed(sequence))
        if self._absent != absent:
            self._state[3].fill_(_signed(absent))
        self._next, self._absent = next_sequence(sequence), absent

    def dispatch(self, hidden: Tensor, routing: Routing) -> PeerArrival:
        """Sends this lane's rows and groups what arrives; recorded, as the step that `expect` names."""
        spec, layout = self._spec, self._layout
        own, rows = spec.own_rows(routing.lane_rows), sum(routing.lane_rows)
        number = 0
        if not torch.cuda.is_current_stream_capturing():
            in_order(self._device)
            number = sequence_of(routing.number)
            self._next = next_sequence(number)
        arrived = self._arrival(rows)
        if self._wire.fused:
            sent, row_bytes = hidden.contiguous(), spec.hidden * spec.dtype.itemsize
        else:
            sent, row_bytes = layout.record.pack(hidden), layout.record.nbytes
        d = self._division(own, rows)
        parts = (*arrived.tokens.parts, None, None)
        given: dict[str, Argument] = {
            **_lanes(routing.lane_rows),
            "number": number,
            "choice_senders": d.choice_senders,
            "senders": d.senders,
            "groups_log2": d.groups_log2,
            "run": d.run,
            "stretch": d.stretch,
            "shares": int(rows > COUNTED_BY_ALL),
            "rows": sent,
            "row_bytes": row_bytes,
            "slots": routing.slots.contiguous(),
            "weights": routing.weights.contiguous(),
            "part0": parts[0],
            "part1": parts[1],
            "part2": parts[2],
            "counts": arrived.counts,
            "offsets": arrived.offsets,
            "places": arrived.places,
            "place_weights": arrived.weights,
            "sequence": arrived.sequence,
        }
        shared = max((1 << d.groups_log2) * layout.record.nbytes, TABLES * spec.slots_here)
        self._dispatch.launch(d.blocks, THREADS, given, shared=shared)
        return arrived

    def combine(self, outputs: Tensor, arrived: PeerArrival, routing: Routing) -> Tensor:
        """Sends weighted partial sums of `outputs` home, and adds up this lane's: `[T, H]`."""
        spec, layout = self._spec, self._layout
        own = spec.own_rows(routing.lane_rows)
        rows = sum(routing.lane_rows) if self._owns else own
        if not torch.cuda.is_current_stream_capturing():
            in_order(self._device)
        answer = outputs.new_empty((own, spec.hidden))
        blocks = min(self._blocks, max(1, rows * layout.partial_packets))
        share = HOME * own
        homes = round(blocks * share / (share + rows - own)) if rows else blocks
        homes = min(max(homes, int(own > 0)), blocks - int(rows > own))
        given: dict[str, Argument] = {
            **_lanes(routing.lane_rows),
            "homes": homes,
            "outputs": outputs.contiguous(),
            "places": arrived.places if self._owns else None,
            "place_weights": arrived.weights if self._owns else None,
            "sequence": arrived.sequence,
            "slots": routing.slots.contiguous(),
            "answer": answer,
        }
        self._combine.launch(blocks, COMBINE_THREADS, given)
        return answer

    def _peers(self) -> dict[str, Argument]:
        """The arguments of both kernels that no step changes."""
        spec = self._spec
        liveness, member = self._liveness, spec.member
        return {
            "headers": self._tables.headers,
            "live": liveness.live,
            "partners": liveness.partners,
            "host_flags": liveness.host_flags,
            "host_word": liveness.host_word,
            "patience": int(spec.patience * NANOSECONDS),
            "seat": spec.seat,
            "lane": -1 if member.lane is None else member.lane,
            "owner": -1 if member.owner is None else member.owner,
            "header": self._tables.header,
            "lane_rows": spec.lane_rows,
            "stride": spec.slots,
            "slots_here": spec.slots_here,
            "sliced": int(spec.sliced),
            "sent": self._sent,
        }

    def _fixed(self) -> dict[str, Argument]:
        """The other arguments of dispatch that no step changes."""
        spec, layout = self._spec, self._layout
        return {
            "arrivals": self._tables.arrivals,
            "arrivals_here": self._tables.arrivals_here,
            "parity_bytes": layout.arrivals_bytes,
            "at_choices": layout.choices,
            "at_weights": layout.weights,
            "at_records": layout.records,
            "first_slot": spec.first_slot,
            "capacity": layout.capacity,
            "row_align": spec.row_align,
            "factor": self._wire.factor,
            "state": self._state,
            "shared_counts": self._counts,
            "host_sent": self.sent,
        }

    def _division(self, own: int, rows: int) -> Division:
        """How `own` rows go out and `rows` of all lanes' come in."""
        layout = self._layout
        most = int(self._blocks * SENDING)
        together = min(GROUPS, MOST_SHARED // layout.record.nbytes).bit_length() - 1
        senders, groups_log2 = (own, 0) if own <= most else (most, together)
        words = layout.choice_words(own) + own * layout.weight_words
        choice_senders = min(CHOICE_SENDERS, max(1, -(-words // THREADS)), self._blocks - senders - 2)
        fair = max(1, -(-rows // (self._blocks - senders - choice_senders - 1)))
        stretch = -(-fair // TEAMS)
        run = stretch * TEAMS if fair > TEAMS else fair
        readers = -(-rows // run) + 1 if self._owns else 0
        return Division(readers, choice_senders, senders, groups_log2, run, stretch)

    def _arrival(self, rows: int) -> PeerArrival:
        spec, device = self._spec, self._spec.device
        here, placed = spec.slots_here, rows if self._owns else 0
        offsets = (
            torch.empty if self._owns else torch.zeros
        )  # nobody writes those of a member that is no owner
        return PeerArrival(
            spec.wire.empty(self._layout.batch_shape(placed), device),
            torch.empty(here, dtype=torch.int32, device=device),
            offsets(here + 1, dtype=torch.int32, device=device),
            torch.empty((placed, spec.top_k), dtype=torch.int32, device=device),
            torch.empty((placed, spec.top_k), dtype=torch.float32, device=device),
            torch.empty(1, dtype=torch.int32, device=device),
        )


def program_for(layout: PeerLayout, wire: WireCode) -> Program:
    """Returns both kernels' text and options for steps of `layout`, whose rows `wire` encodes."""
    spec, ragged = layout.spec, int(layout.grouping is Grouping.RAGGED)
    lane, owner = int(spec.member.lane is not None), int(spec.member.owner is not None)
    places = (f"-DLANES={layout.lanes}", f"-DOWNERS={layout.owners}")
    roles = (f"-DHAS_LANE={lane}", f"-DHAS_OWNER={owner}")
    options = (*wire.options, *places, *roles, f"-DTOP_K={spec.top_k}", f"-DRAGGED={ragged}")
    return Program(source(__package__, *SOURCES), options)


def _lanes(lane_rows: tuple[int, ...]) -> dict[str, Argument]:
    """The arguments that say how many rows each lane brings, 16 bits a lane."""
    words = [0] * LANE_WORDS
    for lane, rows in enumerate(lane_rows):
        words[lane // LANES_A_WORD] |= rows << 16 * (lane % LANES_A_WORD)
    return {f"rows_{at}": word for at, word in enumerate(words)}


def _signed(word: int) -> int:
    """The int32 of the same 32 bits."""
    return word - 2**32 if word >= 2**31 else word
