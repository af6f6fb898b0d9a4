"""Dispatch and combine over peer memory on the CPU, over shared memory: the kernels' protocol and
layout.

Stores of one process are seen by another in the order they were made (x86; elsewhere each tensor operation
ends with a barrier of the interpreter's lock). So it is enough to store a sequence number after the content
that it stands for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from moeserve.dispatch.checks import local_slots
from moeserve.dispatch.dispatcher import DispatchSpec
from moeserve.dispatch.peers.kernels import PeerArrival
from moeserve.dispatch.peers.layout import CHOICES, NOWHERE, WORD, PeerLayout
from moeserve.dispatch.peers.liveness import GIVEN_UP_BYTES, HEADER_BYTES, PeerLiveness
from moeserve.dispatch.peers.memory import PeerMemory
from moeserve.dispatch.peers.packets import WARP_THREADS, from_packets, tags, to_packets
from moeserve.dispatch.peers.sequence import NEVER, parity, sequence_of
from moeserve.dispatch.permute import Homes, take_rows, weigh_rows
from moeserve.dispatch.routing import Routing
from moeserve.dispatch.wire import row_bytes
from moeserve.experts.batch import Grouping
from moeserve.experts.placement import EMPTY
from moeserve.quant.format import Packed

POLL_SECONDS = 20e-6
BITS_32 = 2**32


class PeerTwin:
    """The two phases over `memory`, which is shared memory of the host."""

    def __init__(self, layout: PeerLayout, memory: PeerMemory, liveness: PeerLiveness) -> None:
        self._layout, self._memory, self._liveness = layout, memory, liveness
        self._spec = layout.spec
        self._lane, self._owner = layout.spec.member.lane, layout.spec.member.owner
        self.sequence = self._last = (
            NEVER  # of the step under way; of the last in which this lane brought rows
        )
        self.sent = torch.zeros(2, dtype=torch.int64)
        """Copies that dispatches have sent to other members, and sums that combines did."""

    def dispatch(self, hidden: Tensor, routing: Routing) -> PeerArrival:
        """Sends this lane's rows and groups what arrives."""
        self.sequence = sequence_of(routing.number)
        lane_rows, deadline = routing.lane_rows, time.monotonic() + self._spec.patience
        self._tell()
        own = self._spec.own_rows(lane_rows)
        if own:
            self._wait_until_read(time.monotonic() + self._spec.patience / 2)
            self._send(self._layout.record.pack(hidden), routing)
        arrived = self._arrived(lane_rows if self._owner is not None else (0,) * len(lane_rows), deadline)
        if own:
            for owner in self._other_owners():
                self._await(self._place(owner), partial(self._has_begun, owner, self.sequence), deadline)
            self._last = self.sequence
        return arrived

    def combine(self, outputs: Tensor, arrived: PeerArrival, routing: Routing) -> Tensor:
        """Sends weighted partial sums of `outputs [rows, H]` home, and adds up this lane's: `[T, H]`."""
        spec, lane_rows, here = self._spec, routing.lane_rows, arrived.places >= 0
        sequence = int(arrived.sequence) % BITS_32
        if self._owner is None:
            own = outputs.new_empty((spec.own_rows(lane_rows), spec.hidden))
            return self._add_up(sequence, destinations(spec, routing.slots), own)
        taken = here.sum(dim=1)
        homes = Homes(
            arrived.places[here].long(),
            arrived.weights[here],
            taken.cumsum(0) - taken,
            here.shape[0],
            outputs.shape[0],
        )
        partials = weigh_rows(outputs, homes).to(spec.dtype).split_with_sizes(lane_rows)
        for to, wanted in enumerate(here.any(dim=1).split_with_sizes(lane_rows)):
            if to != self._lane and self._live(to):
                rows = wanted.nonzero()[:, 0]
                _store(
                    self._partials(to, sequence)[self._owner], rows, row_bytes(partials[to][rows]), sequence
                )
                self.sent[1] += rows.shape[0]
        own = partials[0][:0] if self._lane is None else partials[self._lane]
        return self._add_up(sequence, destinations(spec, routing.slots), own)

    def _tell(self) -> None:
        """Tells every other live lane, also those that are absent, that this owner begins the step."""
        if self._owner is None:
            return
        for lane in range(self._layout.lanes):
            if lane != self._lane and self._live(lane):
                header = self._header(lane)
                header[GIVEN_UP_BYTES // 4 + self._owner] = _word(self.sequence)

    def _wait_until_read(self, deadline: float) -> None:
        """Waits until the owners have read what the lane's next stores overwrite; layout.py says why.

        For half the patience: so that nobody gives up this lane for the rows that it holds back meanwhile.
        """
        if self._last != NEVER and parity(self._last) != parity(self.sequence):
            return
        for owner in self._other_owners():
            self._await(self._place(owner), partial(self._left_behind, owner), deadline)

    def _left_behind(self, owner: int) -> bool:
        return self._begun(owner) != self._last

    def _has_begun(self, owner: int, sequence: int) -> bool:
        begun = self._begun(owner)
        return begun != NEVER and (begun - sequence) % BITS_32 < BITS_32 // 2

    def _begun(self, owner: int) -> int:
        """The sequence number that an owner has told this lane it has begun."""
        return int(self._memory.mine[GIVEN_UP_BYTES:HEADER_BYTES].view(torch.int32)[owner]) % BITS_32

    def _other_owners(self) -> list[int]:
        """Live owners but this member."""
        owners = range(self._layout.owners)
        return [owner for owner in owners if owner != self._owner and self._live(self._place(owner))]

    def _arrived(self, lane_rows: tuple[int, ...], deadline: float) -> PeerArrival:
        """The batch of the rows of all lanes that come."""
        slots = self._choices(lane_rows, deadline)
        counts = torch.bincount(slots[slots >= 0], minlength=self._spec.slots_here)
        offsets = self._offsets(counts)
        places = torch.where(slots >= 0, offsets[slots.clamp(min=0)] + positions(slots), -1)
        weights = self._weights(lane_rows, deadline)
        records = self._records(places >= 0, lane_rows, deadline)
        tokens = self._grouped(records, places)
        sequence = torch.tensor([_word(self.sequence)], dtype=torch.int32)
        return PeerArrival(tokens, counts.int(), offsets.int(), places.int(), weights, sequence)

    def _send(self, records: Tensor, routing: Routing) -> None:
        own, lane = records.shape[0], self._lane
        choices, weights = self._packed(routing.slots), checked(_bits(routing.weights), self.sequence)
        reached = destinations(self._spec, routing.slots)
        for to in range(self._layout.owners):
            if not self._live(self._place(to)):
                continue
            self._choice_words(to)[lane, : choices.shape[0]] = choices
            self._weight_words(to)[lane, :own] = weights
            rows = reached[:, to].nonzero()[:, 0]
            _store(self._rows(to)[lane], rows, records[rows], self.sequence)
            self.sent[0] += rows.shape[0] if to != self._owner else 0

    def _packed(self, slots: Tensor) -> Tensor:
        """Choices `[T, K]` in checked words: `[choice_words, 4]` int32."""
        chosen = F.pad(slots.flatten(), (0, -slots.numel() % CHOICES), value=EMPTY) & NOWHERE
        return checked((chosen[::2] | chosen[1::2] << 16)[None], self.sequence)[0]

    def _choices(self, lane_rows: tuple[int, ...], deadline: float) -> Tensor:
        """Slots here of all lanes' choices, `[N, K]` int64: -1 for none, and of a lane that does not come."""
        spec, found = self._spec, [torch.empty((0, self._spec.top_k), dtype=torch.int32)]
        for source, rows in enumerate(lane_rows):
            if not rows:
                continue
            words = self._choice_words(self._owner)[source, : self._layout.choice_words(rows)]
            came = self._await(source, partial(_all_checked, words, self.sequence), deadline)
            pairs = words[:, :3].flatten()
            slots = torch.stack((pairs & NOWHERE, pairs >> 16 & NOWHERE), dim=1).flatten()[
                : rows * spec.top_k
            ]
            slots = torch.where((slots == NOWHERE) | (not came), EMPTY, slots)
            found.append(local_slots(spec, slots.view(rows, spec.top_k)))
        return torch.cat(found).long()

    def _weights(self, lane_rows: tuple[int, ...], deadline: float) -> Tensor:
        """The weights of all lanes' choices, `[N, K]` float32; undefined for a lane that does not come."""
        found = [torch.empty((0, self._spec.top_k), dtype=torch.int32)]
        for source, rows in enumerate(lane_rows):
            if not rows:
                continue
            lane = self._weight_words(self._owner)[source, :rows]
            self._await(source, partial(_all_checked, lane, self.sequence), deadline)
            found.append(lane[..., :3].flatten(1)[:, : self._spec.top_k])
        return torch.cat(found).contiguous().view(torch.float32)

    def _records(self, here: Tensor, lane_rows: tuple[int, ...], deadline: float) -> Tensor:
        """Records `[N, nbytes]` of all lanes' rows; those with no choice `here [N, K]` are undefined."""
        nbytes = self._layout.record.nbytes
        found = [torch.empty((0, nbytes), dtype=torch.uint8)]
        for source, chosen in enumerate(here.split_with_sizes(lane_rows)):
            if not chosen.shape[0]:
                continue
            rows = chosen.any(dim=1).nonzero()[:, 0]
            packets = self._rows(self._owner)[source]
            self._await(source, partial(_all_arrived, packets, rows, self.sequence), deadline)
            found.append(from_packets(packets[: chosen.shape[0]], nbytes))
        return torch.cat(found)

    def _offsets(self, counts: Tensor) -> Tensor:
        """Returns where each slot's segment of the batch begins: `[e + 1]` int64."""
        align = self._spec.row_align
        rooms = -(-counts // align) * align
        if self._layout.grouping is Grouping.PADDED:
            rooms = torch.full_like(counts, self._layout.capacity)
        return F.pad(rooms.cumsum(0), (1, 0))

    def _grouped(self, records: Tensor, places: Tensor) -> Packed:
        """The batch: rows of each slot in the order of lanes and of their rows."""
        spec, flat = self._spec, places.flatten()
        here = flat >= 0
        source, target = here.nonzero()[:, 0] // spec.top_k, flat[here]
        tokens = spec.wire.empty(self._layout.batch_shape(places.shape[0]))
        for part, arrived in zip(tokens.parts, self._layout.record.parts(records), strict=True):
            rows = part.view(torch.uint8).flatten(0, -2)
            rows[target] = row_bytes(take_rows(arrived, source))
        return tokens

    def _add_up(self, sequence: int, reached: Tensor, own: Tensor) -> Tensor:
        """Partial sums of this lane's rows, in float32 and in owners' order; `own` are this owner's."""
        spec, deadline = self._spec, time.monotonic() + self._spec.patience
        total = torch.zeros((reached.shape[0], spec.hidden))
        for source in range(self._layout.owners if total.shape[0] else 0):
            rows = reached[:, source].nonzero()[:, 0]
            if source == self._owner:
                total[rows] += own[rows].float()
                continue
            packets = self._partials(self._lane, sequence)[source]
            if self._await(self._place(source), partial(_all_arrived, packets, rows, sequence), deadline):
                partials = from_packets(packets[rows], spec.hidden * spec.dtype.itemsize)
                total[rows] += partials.contiguous().view(spec.dtype).float()
        return total.to(spec.dtype)

    def _await(self, place: int, here: Callable[[], bool], deadline: float) -> bool:
        """Waits until `here`; False when the member of `place` will not come."""
        while self._live(place):
            if here():
                return True
            seat = int(self._liveness.partners[1, place])
            given_up = self._memory.mine[:GIVEN_UP_BYTES].view(torch.int32)[seat]
            if time.monotonic() > deadline or bool(given_up):
                self._give_up(place, seat)
            time.sleep(POLL_SECONDS)
        return False

    def _give_up(self, place: int, seat: int) -> None:
        self._liveness.live[place] = self._liveness.live[int(self._liveness.partners[0, place])] = 0
        self._liveness.host_flags[place] = _word(self.sequence)
        self._memory.views[seat][:GIVEN_UP_BYTES].view(torch.int32)[self._spec.seat] = _word(self.sequence)

    def _live(self, place: int) -> bool:
        return bool(self._liveness.live[place])

    def _place(self, owner: int) -> int:
        return self._layout.lanes + owner

    def _memory_of(self, place: int) -> Tensor:
        """The memory of the member of `place`."""
        seat = int(self._liveness.partners[1, place])
        return self._memory.mine if seat == self._spec.seat else self._memory.views[seat]

    def _header(self, place: int) -> Tensor:
        """The words of a member's header, int32."""
        return self._memory_of(place)[:HEADER_BYTES].view(torch.int32)

    def _choice_words(self, owner: int | None) -> Tensor:
        shape = (self._layout.lanes, self._layout.choice_words(self._spec.lane_rows), WORD // 4)
        return self._section(owner, self._layout.choices, shape)

    def _weight_words(self, owner: int | None) -> Tensor:
        shape = (self._layout.lanes, self._spec.lane_rows, self._layout.weight_words, WORD // 4)
        return self._section(owner, self._layout.weights, shape)

    def _rows(self, owner: int | None) -> Tensor:
        shape = (self._layout.lanes, self._spec.lane_rows, self._layout.record_packets, WARP_THREADS, 4)
        return self._section(owner, self._layout.records, shape)

    def _section(self, owner: int | None, offset: int, shape: tuple[int, ...]) -> Tensor:
        """A view of an owner's arrivals of this step."""
        assert owner is not None, "a member that is no owner has no arrivals"
        start = self._layout.arrivals + parity(self.sequence) * self._layout.arrivals_bytes + offset
        return _view(self._memory_of(self._place(owner)), start, shape)

    def _partials(self, lane: int | None, sequence: int) -> Tensor:
        """A view of a lane's sums of the step of `sequence`."""
        assert lane is not None, "a member without a lane has no sums"
        shape = (self._layout.owners, self._spec.lane_rows, self._layout.partial_packets, WARP_THREADS, 4)
        member = self._liveness.members.at(int(self._liveness.partners[1, lane]))
        start = self._layout.sums(member) + parity(sequence) * self._layout.sums_bytes
        return _view(self._memory_of(lane), start, shape)


def _view(memory: Tensor, start: int, shape: tuple[int, ...]) -> Tensor:
    """int32 words of `memory` from the byte `start` on, in `shape`."""
    size = torch.Size(shape).numel() * torch.int32.itemsize
    return memory[start : start + size].view(torch.int32).view(shape)


def _bits(weights: Tensor) -> Tensor:
    return weights.contiguous().view(torch.int32)


def checked(content: Tensor, sequence: int) -> Tensor:
    """Rows of `content [N, W]` int32 in checked words of `sequence`: `[N, ceil(W / 3), 4]`."""
    rows, width = content.shape
    words = F.pad(content, (0, -width % 3)).view(rows, -(-width // 3), 3)
    check = words[..., 0] ^ words[..., 1] ^ words[..., 2] ^ _word(sequence)
    return torch.cat((words, check[..., None]), dim=-1)


def sequences(words: Tensor) -> Tensor:
    """The sequence numbers of checked words `[..., 4]`, as int32."""
    x, y, z, check = words.unbind(-1)
    return x ^ y ^ z ^ check


def _store(there: Tensor, at: Tensor, rows: Tensor, sequence: int) -> None:
    """Stores `rows [n, bytes]` uint8 as packets in rows `at` of `there`, then their sequence numbers."""
    there[at] = to_packets(rows)
    there[at, :, 7::8, 3] = _word(sequence)


def _all_checked(words: Tensor, sequence: int) -> bool:
    return bool((sequences(words) == _word(sequence)).all())


def _all_arrived(packets: Tensor, rows: Tensor, sequence: int) -> bool:
    return bool((tags(packets)[rows] == _word(sequence)).all())


def _word(sequence: int) -> int:
    """A sequence number as the int32 of the same bits."""
    return sequence - BITS_32 if sequence >= BITS_32 // 2 else sequence


def positions(slots: Tensor) -> Tensor:
    """Returns how many rows before each choice chose the same slot: int32, as `slots [T, K]`."""
    flat = slots.flatten()
    ordered, order = torch.sort(flat, stable=True)
    first = torch.searchsorted(ordered, ordered)
    ranked = torch.arange(flat.shape[0]) - first
    return torch.empty_like(ranked).scatter_(0, order, ranked).int().view(slots.shape)


def destinations(spec: DispatchSpec, slots: Tensor) -> Tensor:
    """Which owners each row of `slots [T, K]` needs: `[T, owners]` bool."""
    here, owners = slots >= 0, spec.members.max_owners
    if spec.sliced:
        return here.any(dim=1, keepdim=True).expand(-1, owners)
    owner = torch.where(here, slots // spec.slots, -1)
    return (owner[:, :, None] == torch.arange(owners)).any(dim=1)
