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
from moeserve.dispatch.peers.liveness import GIVEN_UP_BYTES, PeerLiveness
from moeserve.dispatch.peers.memory import PeerMemory
from moeserve.dispatch.peers.packets import WARP_THREADS, from_packets, tags, to_packets
from moeserve.dispatch.peers.sequence import NEVER, next_sequence, parity
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
        self._spec, self.sequence = layout.spec, NEVER
        self.sent = torch.zeros(2, dtype=torch.int64)
        """Copies that dispatches have sent to other ranks, and sums that combines did."""

    def dispatch(self, hidden: Tensor, routing: Routing) -> PeerArrival:
        """Sends this lane's rows and groups what arrives."""
        self.sequence = next_sequence(self.sequence)
        self._send(self._layout.record.pack(hidden), routing)
        deadline = time.monotonic() + self._spec.patience
        slots = self._choices(routing.lane_rows, deadline)
        counts = torch.bincount(slots[slots >= 0], minlength=self._spec.slots)
        offsets = self._offsets(counts)
        places = torch.where(slots >= 0, offsets[slots.clamp(min=0)] + positions(slots), -1)
        weights = self._weights(routing.lane_rows, deadline)
        records = self._records(places >= 0, routing.lane_rows, deadline)
        tokens = self._grouped(records, places)
        sequence = torch.tensor([_word(self.sequence)], dtype=torch.int32)
        return PeerArrival(tokens, counts.int(), offsets.int(), places.int(), weights, sequence)

    def combine(self, outputs: Tensor, arrived: PeerArrival, routing: Routing) -> Tensor:
        """Sends weighted partial sums of `outputs [rows, H]` home, and adds up this lane's: `[T, H]`."""
        spec, lane_rows, here = self._spec, routing.lane_rows, arrived.places >= 0
        taken = here.sum(dim=1)
        homes = Homes(
            arrived.places[here].long(),
            arrived.weights[here],
            taken.cumsum(0) - taken,
            here.shape[0],
            outputs.shape[0],
        )
        partials = weigh_rows(outputs, homes).to(spec.dtype)
        sequence = int(arrived.sequence) % BITS_32
        for to, (mine, wanted) in enumerate(
            zip(
                partials.split_with_sizes(lane_rows),
                here.any(dim=1).split_with_sizes(lane_rows),
                strict=True,
            )
        ):
            if to != spec.rank and self._live(to):
                rows = wanted.nonzero()[:, 0]
                _store(self._partials(to, sequence)[spec.rank], rows, row_bytes(mine[rows]), sequence)
                self.sent[1] += rows.shape[0]
        reached = destinations(spec, routing.slots)
        return self._add_up(sequence, reached, partials.split_with_sizes(lane_rows)[spec.rank])

    def _send(self, records: Tensor, routing: Routing) -> None:
        spec, own = self._spec, records.shape[0]
        choices, weights = self._packed(routing.slots), checked(_bits(routing.weights), self.sequence)
        reached = destinations(spec, routing.slots)
        for to in filter(self._live, range(spec.ranks)):
            self._begun(to)[spec.rank] = _word(self.sequence)
            self._choice_words(to)[spec.rank, : choices.shape[0]] = choices
            self._weight_words(to)[spec.rank, :own] = weights
            rows = reached[:, to].nonzero()[:, 0]
            _store(self._rows(to)[spec.rank], rows, records[rows], self.sequence)
            self.sent[0] += rows.shape[0] if to != spec.rank else 0

    def _packed(self, slots: Tensor) -> Tensor:
        """Choices `[T, K]` in checked words: `[choice_words, 4]` int32."""
        chosen = F.pad(slots.flatten(), (0, -slots.numel() % CHOICES), value=EMPTY) & NOWHERE
        return checked((chosen[::2] | chosen[1::2] << 16)[None], self.sequence)[0]

    def _choices(self, lane_rows: tuple[int, ...], deadline: float) -> Tensor:
        """Slots here of all lanes' choices, `[N, K]` int64: -1 for none, and of a lane that does not come."""
        spec, found = self._spec, []
        for source, rows in enumerate(lane_rows):
            words = self._choice_words(spec.rank)[source, : self._layout.choice_words(rows)]
            flag = self._begun(spec.rank)[source]
            begun = partial(torch.equal, flag, torch.tensor(_word(self.sequence), dtype=torch.int32))
            arrived = partial(_all_checked, words, self.sequence)
            came = self._await(source, begun, deadline) and self._await(source, arrived, deadline)
            pairs = words[:, :3].flatten()
            slots = torch.stack((pairs & NOWHERE, pairs >> 16 & NOWHERE), dim=1).flatten()[
                : rows * spec.top_k
            ]
            slots = torch.where((slots == NOWHERE) | (not came), EMPTY, slots)
            found.append(local_slots(spec, slots.view(rows, spec.top_k)))
        return torch.cat(found).long()

    def _weights(self, lane_rows: tuple[int, ...], deadline: float) -> Tensor:
        """The weights of all lanes' choices, `[N, K]` float32; undefined for a lane that does not come."""
        found = []
        for source, rows in enumerate(lane_rows):
            lane = self._weight_words(self._spec.rank)[source, :rows]
            self._await(source, partial(_all_checked, lane, self.sequence), deadline)
            found.append(lane[..., :3].flatten(1)[:, : self._spec.top_k])
        return torch.cat(found).contiguous().view(torch.float32)

    def _records(self, here: Tensor, lane_rows: tuple[int, ...], deadline: float) -> Tensor:
        """Records `[N, nbytes]` of all lanes' rows; those with no choice `here [N, K]` are undefined."""
        spec, found, nbytes = self._spec, [], self._layout.record.nbytes
        for source, chosen in enumerate(here.split_with_sizes(lane_rows)):
            rows = chosen.any(dim=1).nonzero()[:, 0]
            packets = self._rows(spec.rank)[source]
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
        """Partial sums of this lane's rows, in float32 and in rank order; `own` are this rank's."""
        spec, deadline = self._spec, time.monotonic() + self._spec.patience
        total = torch.zeros((reached.shape[0], spec.hidden))
        for source in filter(self._live, range(spec.ranks)):
            rows = reached[:, source].nonzero()[:, 0]
            if source == spec.rank:
                total[rows] += own[rows].float()
                continue
            packets = self._partials(spec.rank, sequence)[source]
            if self._await(source, partial(_all_arrived, packets, rows, sequence), deadline):
                partials = from_packets(packets[rows], spec.hidden * spec.dtype.itemsize)
                total[rows] += partials.contiguous().view(spec.dtype).float()
        return total.to(spec.dtype)

    def _await(self, source: int, here: Callable[[], bool], deadline: float) -> bool:
        """Waits until `here`; False when `source` will not come."""
        while self._live(source):
            if here():
                return True
            given_up = self._given_up(self._spec.rank)[source]
            if time.monotonic() > deadline or bool(given_up):
                self._give_up(source)
            time.sleep(POLL_SECONDS)
        return False

    def _give_up(self, source: int) -> None:
        self._liveness.live[source] = 0
        self._liveness.host_flags[source] = _word(self.sequence)
        self._given_up(source)[self._spec.rank] = _word(self.sequence)

    def _live(self, rank: int) -> bool:
        return bool(self._liveness.live[rank])

    def _given_up(self, rank: int) -> Tensor:
        """Which ranks have given rank `rank` up: the words at the head of its memory."""
        return self._memory.views[rank][:GIVEN_UP_BYTES].view(torch.int32)

    def _begun(self, rank: int) -> Tensor:
        return self._section(rank, self.sequence, self._layout.begun, (self._spec.ranks,), torch.int32)

    def _choice_words(self, rank: int) -> Tensor:
        shape = (self._spec.ranks, self._layout.choice_words(self._spec.lane_rows), WORD // 4)
        return self._section(rank, self.sequence, self._layout.choices, shape, torch.int32)

    def _weight_words(self, rank: int) -> Tensor:
        shape = (self._spec.ranks, self._spec.lane_rows, self._layout.weight_words, WORD // 4)
        return self._section(rank, self.sequence, self._layout.weights, shape, torch.int32)

    def _rows(self, rank: int) -> Tensor:
        shape = (self._spec.ranks, self._spec.lane_rows, self._layout.record_packets, WARP_THREADS, 4)
        return self._section(rank, self.sequence, self._layout.records, shape, torch.int32)

    def _partials(self, rank: int, sequence: int) -> Tensor:
        shape = (self._spec.ranks, self._spec.lane_rows, self._layout.partial_packets, WARP_THREADS, 4)
        return self._section(rank, sequence, self._layout.partials, shape, torch.int32)

    def _section(
        self, rank: int, sequence: int, offset: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor:
        """A view of rank `rank`'s memory."""
        start = offset + parity(sequence) * self._layout.parity_bytes
        size = torch.Size(shape).numel() * dtype.itemsize
        return self._memory.views[rank][start : start + size].view(dtype).view(shape)


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
    """Which ranks each row of `slots [T, K]` needs: `[T, ranks]` bool."""
    here = slots >= 0
    if spec.sliced:
        return here.any(dim=1, keepdim=True).expand(-1, spec.ranks)
    rank = torch.where(here, slots // spec.slots, -1)
    return (rank[:, :, None] == torch.arange(spec.ranks)).any(dim=1)
