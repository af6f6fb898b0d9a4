"""The low-latency carrier's phases on the CPU, over shared memory: the kernels' protocol and layout.

Stores of one process are seen by another in the order they were made (x86; elsewhere each tensor operation
ends with a barrier of the interpreter's lock), so an epoch stored after what it speaks for is enough.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from moeserve.dispatch.dispatcher import DispatchSpec
from moeserve.dispatch.lane import local_slots
from moeserve.dispatch.peers.epochs import NEVER, next_epoch, parity
from moeserve.dispatch.peers.late import FAREWELL_BYTES, Attendance
from moeserve.dispatch.peers.ll_kernels import Arrived
from moeserve.dispatch.peers.ll_layout import NOWHERE, WORD, LowLatencyLayout
from moeserve.dispatch.peers.memory import PeerMemory
from moeserve.dispatch.permute import Homes, take_rows, weigh_rows
from moeserve.dispatch.routing import Routing
from moeserve.experts.placement import EMPTY

POLL_SECONDS = 20e-6
BITS_32 = 2**32


class LowLatencyTwin:
    """Both phases over `memory`."""

    def __init__(
        self, spec: DispatchSpec, layout: LowLatencyLayout, memory: PeerMemory, attendance: Attendance
    ) -> None:
        self._spec, self._layout, self._memory, self._attendance = spec, layout, memory, attendance
        self.epoch = NEVER

    def dispatch(self, hidden: Tensor, routing: Routing, reached: Tensor) -> Arrived:
        """Sends this lane's rows to the ranks of `reached [T, ranks]` bool and groups what arrives."""
        self.epoch = next_epoch(self.epoch)
        self._send(self._layout.record.pack(hidden), routing, reached)
        deadline = time.monotonic() + self._spec.patience
        slots, weights = self._choices(routing.lane_rows, deadline)
        local = local_slots(self._spec, slots)
        records = self._records(local, routing.lane_rows, deadline)
        return self._grouped(records, local, weights)

    def combine(
        self, outputs: Tensor, arrived: Arrived, lane_rows: tuple[int, ...], reached: Tensor
    ) -> Tensor:
        """Sends weighted partial sums of `outputs [e * C, H]` home, and adds up this lane's: `[T, H]`."""
        spec, here = self._spec, arrived.places >= 0
        taken = here.sum(dim=1)
        homes = Homes(
            arrived.places[here].long(),
            arrived.weights[here],
            taken.cumsum(0) - taken,
            here.shape[0],
            outputs.shape[0],
        )
        partials = weigh_rows(outputs, homes).to(spec.dtype)
        epoch, small = int(arrived.epoch) % BITS_32, max(lane_rows) <= self._layout.small_rows
        for to, (mine, wanted) in enumerate(
            zip(
                partials.split_with_sizes(lane_rows),
                here.any(dim=1).split_with_sizes(lane_rows),
                strict=True,
            )
        ):
            rows = wanted.nonzero()[:, 0]
            if self._live(to) and small:
                self._sealed(to, epoch)[spec.rank, rows] = sealed(mine[rows].view(torch.int32), epoch)
            elif to != spec.rank and self._live(to):
                self._partials(to, epoch)[spec.rank, rows] = mine[rows]
                self._returned(to, epoch)[spec.rank, rows] = _word(epoch)
        own = partials.split_with_sizes(lane_rows)[spec.rank]
        return self._add_up(epoch, reached, None if small else own)

    def _send(self, records: Tensor, routing: Routing, reached: Tensor) -> None:
        spec, own = self._spec, records.shape[0]
        words = self._packed(routing)
        for to in filter(self._live, range(spec.ranks)):
            self._greetings(to)[spec.rank] = _word(self.epoch)
            choices = self._words(to)[spec.rank, :own]
            choices.copy_(words)
            rows = reached[:, to].nonzero()[:, 0]
            self._rows(to)[spec.rank, rows] = records[rows]
            self._ready(to)[spec.rank, rows] = _word(self.epoch)

    def _packed(self, routing: Routing) -> Tensor:
        """Choices of this lane's rows in sealed words: `[T, words, 4]` int32."""
        (rows, top_k), words = routing.slots.shape, self._layout.words
        slots = routing.slots.new_full((rows, 2 * words), NOWHERE)
        slots[:, :top_k] = routing.slots & NOWHERE
        weights = routing.weights.new_zeros((rows, 2 * words))
        weights[:, :top_k] = routing.weights
        pairs = slots.view(rows, words, 2)
        ones, others = weights.view(torch.int32).view(rows, words, 2).unbind(-1)
        content = torch.stack((pairs[..., 0] | pairs[..., 1] << 16, ones, others), dim=-1)
        return sealed(content.view(rows, 3 * words), self.epoch)

    def _choices(self, lane_rows: tuple[int, ...], deadline: float) -> tuple[Tensor, Tensor]:
        """All lanes' slots and weights `[N, K]`; of a lane that does not come, none."""
        words, mine, wanted = [], self._words(self._spec.rank), _word(self.epoch)
        for source, rows in enumerate(lane_rows):
            lane = mine[source, :rows]
            greeting = self._greetings(self._spec.rank)[source]

            def here(lane: Tensor = lane, greeting: Tensor = greeting) -> bool:
                return bool(greeting == wanted) and bool((seals(lane) == wanted).all())

            came = self._await(source, here, deadline)
            words.append(lane.clone() if came else torch.full_like(lane, -1))
        found, top_k = torch.cat(words), self._spec.top_k
        pairs = found[..., 0]
        slots = torch.stack((pairs & NOWHERE, pairs >> 16 & NOWHERE), dim=-1).flatten(1)[:, :top_k]
        weights = found[..., 1:3].contiguous().view(torch.float32).flatten(1)[:, :top_k]
        return torch.where(slots == NOWHERE, EMPTY, slots), weights

    def _records(self, local: Tensor, lane_rows: tuple[int, ...], deadline: float) -> Tensor:
        """Records `[N, nbytes]` of all lanes' rows; those that are not for this rank hold anything."""
        spec, found, wanted = self._spec, [], _word(self.epoch)
        for source, chosen in enumerate(local.split_with_sizes(lane_rows)):
            rows = (chosen >= 0).any(dim=1).nonzero()[:, 0]
            flags = self._ready(spec.rank)[source]
            self._await(source, partial(_all_are, flags, rows, wanted), deadline)
            found.append(self._rows(spec.rank)[source, : chosen.shape[0]])
        return torch.cat(found)

    def _grouped(self, records: Tensor, local: Tensor, weights: Tensor) -> Arrived:
        """Rows of each slot in the order of lanes and of their rows."""
        spec, capacity = self._spec, self._layout.capacity
        flat = local.flatten().long()
        here = (flat >= 0).nonzero()[:, 0]
        keys, order = torch.sort(flat[here], stable=True)
        counts = torch.bincount(keys, minlength=spec.slots)
        position = torch.arange(keys.shape[0]) - (counts.cumsum(0) - counts)[keys]
        places = torch.full_like(flat, -1)
        places[here[order]] = keys * capacity + position
        tokens = spec.wire.empty((spec.slots, capacity, spec.hidden))
        source = here[order] // max(local.shape[1], 1)
        target = places[here[order]]
        for part, arrived in zip(tokens.parts, self._layout.record.parts(records), strict=True):
            part.view(torch.uint8).flatten(0, 1)[target] = take_rows(arrived, source).view(torch.uint8)
        epoch = torch.tensor([_word(self.epoch)], dtype=torch.int32)
        return Arrived(tokens, counts.int(), places.view(local.shape).int(), weights, epoch)

    def _add_up(self, epoch: int, reached: Tensor, own: Tensor | None) -> Tensor:
        """Partial sums of this lane's rows, in float32 and in rank order.

        `own` are this rank's in a larger step; in a small one they come over memory as others' do: None.
        """
        spec, deadline = self._spec, time.monotonic() + self._spec.patience
        words, flags = self._sealed(spec.rank, epoch), self._returned(spec.rank, epoch)
        total, wanted = torch.zeros((reached.shape[0], spec.hidden)), _word(epoch)
        for source in filter(self._live, range(spec.ranks)):
            rows, small = reached[:, source].nonzero()[:, 0], own is None
            if own is not None and source == spec.rank:
                total[rows] += own[rows].float()
                continue
            told = partial(
                _sealed_as if small else _all_are, (words if small else flags)[source], rows, wanted
            )
            if not self._await(source, told, deadline):
                continue
            if small:
                found = words[source, rows][..., :3].flatten(1)[:, : spec.hidden * spec.dtype.itemsize // 4]
                partials = found.contiguous().view(spec.dtype)
            else:
                partials = self._partials(spec.rank, epoch)[source, rows]
            total[rows] += partials.float()
        return total.to(spec.dtype)

    def _await(self, source: int, here: Callable[[], bool], deadline: float) -> bool:
        """Waits until `here`; False when `source` will not come."""
        while self._live(source):
            if here():
                return True
            farewell = self._farewells(self._spec.rank)[source]
            if time.monotonic() > deadline or bool(farewell):
                self._give_up(source)
            time.sleep(POLL_SECONDS)
        return False

    def _give_up(self, source: int) -> None:
        self._attendance.live[source] = 0
        self._attendance.board[source] = _word(self.epoch)
        self._farewells(source)[self._spec.rank] = _word(self.epoch)

    def _live(self, rank: int) -> bool:
        return bool(self._attendance.live[rank])

    def _farewells(self, rank: int) -> Tensor:
        return self._memory.views[rank][:FAREWELL_BYTES].view(torch.int32)

    def _greetings(self, rank: int) -> Tensor:
        return self._section(rank, self.epoch, self._layout.greetings, (self._spec.ranks,), torch.int32)

    def _words(self, rank: int) -> Tensor:
        shape = (self._spec.ranks, self._spec.lane_rows, self._layout.words, WORD // 4)
        return self._section(rank, self.epoch, self._layout.choices, shape, torch.int32)

    def _ready(self, rank: int) -> Tensor:
        shape = (self._spec.ranks, self._spec.lane_rows)
        return self._section(rank, self.epoch, self._layout.ready, shape, torch.int32)

    def _rows(self, rank: int) -> Tensor:
        shape = (self._spec.ranks, self._spec.lane_rows, self._layout.record.nbytes)
        return self._section(rank, self.epoch, self._layout.records, shape, torch.uint8)

    def _returned(self, rank: int, epoch: int) -> Tensor:
        shape = (self._spec.ranks, self._spec.lane_rows, self._layout.spans)
        return self._section(rank, epoch, self._layout.returned, shape, torch.int32)

    def _partials(self, rank: int, epoch: int) -> Tensor:
        shape = (self._spec.ranks, self._spec.lane_rows, self._spec.hidden)
        return self._section(rank, epoch, self._layout.partials, shape, self._spec.dtype)

    def _sealed(self, rank: int, epoch: int) -> Tensor:
        layout = self._layout
        shape = (self._spec.ranks, layout.small_rows, layout.sealed_bytes // WORD, WORD // 4)
        return self._section(rank, epoch, layout.sealed, shape, torch.int32)

    def _section(
        self, rank: int, epoch: int, offset: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor:
        """A view of rank `rank`'s memory."""
        start = offset + parity(epoch) * self._layout.parity_bytes
        size = torch.Size(shape).numel() * dtype.itemsize
        return self._memory.views[rank][start : start + size].view(dtype).view(shape)


def sealed(content: Tensor, epoch: int) -> Tensor:
    """Rows of `content [N, W]` int32 in words of an epoch: `[N, ceil(W / 3), 4]`."""
    rows, width = content.shape
    words = F.pad(content, (0, -width % 3)).view(rows, -(-width // 3), 3)
    seal = words[..., 0] ^ words[..., 1] ^ words[..., 2] ^ _word(epoch)
    return torch.cat((words, seal[..., None]), dim=-1)


def seals(words: Tensor) -> Tensor:
    """The epochs of sealed words `[..., 4]`, as int32."""
    x, y, z, seal = words.unbind(-1)
    return x ^ y ^ z ^ seal


def _sealed_as(words: Tensor, rows: Tensor, wanted: int) -> bool:
    return bool((seals(words[rows]) == wanted).all())


def _all_are(flags: Tensor, rows: Tensor, wanted: int) -> bool:
    return bool((flags[rows] == wanted).all())


def _word(epoch: int) -> int:
    """An epoch as the int32 of the same bits."""
    return epoch - BITS_32 if epoch >= BITS_32 // 2 else epoch
