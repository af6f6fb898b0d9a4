"""The high-throughput carrier without a GPU: `Twin`, the same layout, words and rules over shared memory.

It is what the law of carriers holds the protocol to where there is no GPU. A word is one aligned store after
the rows it tells of, and x86 keeps the order of stores.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from moeserve.dispatch.dispatcher import Dispatched, Dispatcher, DispatchSpec, Pending, Traffic
from moeserve.dispatch.exchange import check_group
from moeserve.dispatch.lane import check_lane, check_spec
from moeserve.dispatch.peers.epochs import NEVER, next_epoch
from moeserve.dispatch.peers.ht_layout import DONE, Cut, Layout, check_sizes, tail_ints
from moeserve.dispatch.peers.ht_words import Sections, Wait, holds, word_of
from moeserve.dispatch.peers.late import Attendance
from moeserve.dispatch.peers.memory import PeerMemory
from moeserve.dispatch.peers.wires import RowRecord
from moeserve.dispatch.permute import Homes, weigh_rows
from moeserve.dispatch.routing import Routing
from moeserve.experts.batch import ExpertBatch, Grouping

CUT = Cut(blocks=2, senders=1, receivers=1, ring=1, split=1)


@dataclass(frozen=True, eq=False)
class _Ticket:
    bound: Tensor  # [T, ranks] bool: where this lane's tokens went
    homes: Homes
    arrived: list[tuple[int, int, int]]  # source, channel, rows; in the order of the rows
    tokens: Tensor  # [R] int64: of each arrived row, in its channel


class Twin(Dispatcher):
    """The carrier over shared memory of processes of one host."""

    def __init__(self, spec: DispatchSpec) -> None:
        check_spec(spec)
        check_group(spec)
        check_sizes(spec)
        self._spec, self._record = spec, RowRecord(spec.wire, spec.hidden)
        self._layout = Layout.of(spec, CUT)
        self._memory = PeerMemory(self._layout.nbytes, spec.rank, spec.ranks, spec.device)
        self._all = [Sections(self._layout, view) for view in self._memory.views]
        self._mine = self._all[spec.rank]
        self._peers = Attendance(spec.ranks, spec.device)
        self._dispatched = self._combined = NEVER  # epochs
        self._traffic = Traffic()

    def dispatch(self, hidden: Tensor, routing: Routing) -> Pending[Dispatched]:
        """Sends each row once to every rank it needs, and expands what arrives in order of slots."""
        spec = self._spec
        check_lane(spec, hidden, routing)
        before, wait = self._dispatched, self._wait(self._dispatched)
        bound = destinations(spec, routing.slots)
        self._tell_counts(wait, before, routing.slots)
        self._send(wait, before, self._rows(hidden, routing), bound)
        counts = self._told_counts(wait)  # [ranks, e]; -1 from a rank that is late
        rows, arrived = self._receive(wait)
        self._dispatched = wait.epoch
        batch, homes, tokens = self._expand(counts, rows, arrived)
        return Pending(lambda: Dispatched(batch, _Ticket(bound, homes, arrived, tokens)))

    def combine(self, outputs: Tensor, ticket: _Ticket) -> Pending[Tensor]:
        """Sends every row's weighted sum home, and adds up each token's, in rank order: `[T, H]`."""
        spec = self._spec
        before, wait = self._combined, self._wait(self._combined)
        self._push(wait, before, weigh_rows(outputs, ticket.homes, spec.dtype), ticket)
        answer = self._add_up(wait, ticket.bound).to(spec.dtype)
        self._combined = wait.epoch
        return Pending(lambda: answer)

    def _wait(self, before: int) -> Wait:
        until = (next_epoch(before), time.monotonic() + self._spec.patience)
        return Wait(self._mine, self._all, self._peers, self._spec.rank, until)

    def _rows(self, hidden: Tensor, routing: Routing) -> Tensor:
        """What travels of each token: `[T, placed_bytes]` uint8, its place in the channel still open."""
        ints = torch.cat(
            (
                torch.zeros((hidden.shape[0], 1), dtype=torch.int32),
                routing.slots,
                routing.weights.contiguous().view(torch.int32),
            ),
            dim=1,
        )
        rows = torch.zeros((hidden.shape[0], self._layout.placed_bytes), dtype=torch.uint8)
        rows[:, : self._record.nbytes] = self._record.pack(hidden)
        rows[:, self._record.nbytes :][:, : 4 * ints.shape[1]] = ints.view(torch.uint8)
        placed = positions(routing.slots).view(torch.uint8)
        rows[:, self._layout.row_bytes :][:, : placed.shape[1]] = placed
        return rows

    def _tell_counts(self, wait: Wait, before: int, slots: Tensor) -> None:
        spec = self._spec
        total = spec.slots if spec.sliced else spec.ranks * spec.slots
        told = torch.bincount(slots[slots >= 0].flatten(), minlength=total).numpy()
        for peer, there in wait.present():
            if wait.until(peer, partial(holds, self._mine.counted_credit, peer, before)):
                first = 0 if spec.sliced else peer * spec.slots
                there.counts[spec.rank] = told[first : first + spec.slots]
                there.counted[spec.rank] = word_of(wait.epoch, 0)

    def _told_counts(self, wait: Wait) -> Tensor:
        spec, mine = self._spec, self._mine
        counts = np.full((spec.ranks, spec.slots), -1)
        for peer, there in wait.present():
            if wait.until(peer, partial(holds, mine.counted, peer, wait.epoch)):
                counts[peer] = mine.counts[peer]
                there.counted_credit[spec.rank] = word_of(wait.epoch, 0)
        return torch.from_numpy(counts)

    def _send(self, wait: Wait, before: int, rows: Tensor, bound: Tensor) -> None:
        spec, layout, tokens = self._spec, self._layout, rows.shape[0]
        place = rows[:, self._record.nbytes :][:, :4].view(torch.int32)[:, 0]
        for channel in range(layout.channels):
            first, last = (layout.first_token(c, tokens) for c in (channel, channel + 1))
            place[first:last] = torch.arange(last - first, dtype=torch.int32)
            for peer, there in wait.present():
                if not wait.until(peer, partial(holds, self._mine.credit, (peer, channel), before)):
                    continue
                sent = rows[first:last][bound[first:last, peer]]
                there.rows[spec.rank, channel, : len(sent), : layout.placed_bytes] = sent
                there.positioned[spec.rank, channel] = word_of(wait.epoch, 0)
                there.progress[spec.rank, channel] = word_of(wait.epoch, DONE | len(sent))
                if peer != spec.rank:
                    self._traffic = self._traffic.plus(dispatched=len(sent) * layout.row_bytes)

    def _receive(self, wait: Wait) -> tuple[Tensor, list[tuple[int, int, int]]]:
        """Rows of all ranks, by rank and channel, and how many came by each."""
        found, arrived = [], []
        for peer, there in wait.present():
            for channel in range(self._layout.channels):
                number = wait.number(peer, self._mine.progress, channel)
                told = partial(holds, self._mine.positioned, (peer, channel), wait.epoch)
                if number is None or (number and not wait.until(peer, told)):
                    break
                found.append(self._mine.rows[peer, channel, :number].clone())
                arrived.append((peer, channel, number))
                there.credit[self._spec.rank, channel] = word_of(wait.epoch, 0)
        empty = torch.empty((0, self._layout.row_stride), dtype=torch.uint8)
        return torch.cat((empty, *found)), arrived

    def _expand(
        self, counts: Tensor, rows: Tensor, arrived: list[tuple[int, int, int]]
    ) -> tuple[ExpertBatch, Homes, Tensor]:
        """The batch in slot order, where its rows' choices are in it, and their tokens."""
        spec, nbytes, k = self._spec, self._record.nbytes, self._spec.top_k
        present, counts = counts >= 0, counts.clamp_min(0)
        totals = counts.sum(dim=0)
        room = (totals + spec.row_align - 1) // spec.row_align * spec.row_align
        offsets = F.pad(room.cumsum(0), (1, 0))
        bases = torch.where(present, offsets[:-1] + counts.cumsum(0) - counts, -1)
        ints = rows[:, nbytes : nbytes + 4 * tail_ints(k)].contiguous().view(torch.int32)
        slots = ints[:, 1 : 1 + k] - (0 if spec.sliced else spec.rank * spec.slots)
        source = torch.repeat_interleave(
            torch.tensor([peer for peer, _, _ in arrived], dtype=torch.int64),
            torch.tensor([number for _, _, number in arrived], dtype=torch.int64),
        )
        here = (slots >= 0) & (slots < spec.slots) & (ints[:, 1 : 1 + k] >= 0)
        base = bases[source[:, None], torch.where(here, slots, 0)]
        here &= base >= 0
        placed = rows[:, self._layout.row_bytes :][:, : 4 * k].contiguous().view(torch.int32)
        places = (base + placed)[here]
        capacity = int(offsets[-1])
        row = here.nonzero()[:, 0]
        tokens = spec.wire.empty((capacity, spec.hidden))
        for out, part in zip(tokens.parts, self._record.parts(rows[:, :nbytes]), strict=True):
            out.view(torch.uint8)[places] = part.contiguous().view(torch.uint8)[row]
        taken = here.sum(dim=1)
        weights = ints[:, 1 + k :].contiguous().view(torch.float32)[here]
        homes = Homes(places, weights, taken.cumsum(0) - taken, rows.shape[0], capacity)
        batch = ExpertBatch(tokens, Grouping.RAGGED, totals.int(), offsets.int())
        return batch, homes, ints[:, 0].long()

    def _push(self, wait: Wait, before: int, partials: Tensor, ticket: _Ticket) -> None:
        spec, layout, at = self._spec, self._layout, 0
        came = {(peer, channel): number for peer, channel, number in ticket.arrived}
        for peer in range(spec.ranks):
            for channel in range(layout.channels):
                number = came.get((peer, channel), 0)
                rows, tokens = partials[at : at + number], ticket.tokens[at : at + number]
                at += number
                if not wait.until(peer, partial(holds, self._mine.back_credit, (peer, channel), before)):
                    continue
                there = self._all[peer]
                there.back[spec.rank, channel][tokens] = rows.view(torch.uint8)
                reached = int(tokens[-1]) + 1 if number else 0
                there.back_progress[spec.rank, channel] = word_of(wait.epoch, DONE | reached)
                if peer != spec.rank:
                    self._traffic = self._traffic.plus(combined=rows.nbytes)

    def _add_up(self, wait: Wait, bound: Tensor) -> Tensor:
        spec, layout, tokens = self._spec, self._layout, bound.shape[0]
        total = torch.zeros((tokens, spec.hidden))
        for channel in range(layout.channels):
            first, last = (layout.first_token(c, tokens) for c in (channel, channel + 1))
            for peer, there in wait.present():
                reached = wait.number(peer, self._mine.back_progress, channel)
                if reached is None:
                    continue
                sums = self._mine.back[peer, channel, : last - first].view(spec.dtype).float()
                come = bound[first:last, peer] & (torch.arange(last - first) < reached)
                total[first:last] += torch.where(come[:, None], sums, 0.0)
                there.back_credit[spec.rank, channel] = word_of(wait.epoch, 0)
        return total

    def exclude(self, ranks: Iterable[int]) -> None:
        """Gives `ranks` up before the next phase: they are neither waited for nor sent to."""
        self._peers.exclude(ranks)

    def interrupt(self) -> None:
        """Waits for nobody any more, in the phase under way neither."""
        self._peers.interrupt()

    def late(self) -> tuple[int, ...]:
        """Ranks given up since this was last asked."""
        return self._peers.late()

    @property
    def traffic(self) -> Traffic:
        """Bytes of rows sent to other ranks."""
        return self._traffic

    def close(self) -> None:
        """Frees this rank's memory and unmaps the others'."""
        del self._all, self._mine
        self._memory.close()


def positions(slots: Tensor) -> Tensor:
    """Of each choice, how many rows of the lane before it chose the same slot: int32, as `slots [T, K]`."""
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
