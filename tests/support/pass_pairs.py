"""A lane between two streams of one GPU, and what its steps have to answer."""

from __future__ import annotations

import torch
from houses import Alone
from torch import Tensor

from moeserve.dispatch.mail.kernels import CHOICE, MISFIT, CallerKernels, Given, words
from moeserve.dispatch.mail.layout import LINE_BYTES, STEPS, MailLayout, Word
from moeserve.runtime.launch.torchrun import HostedRank
from moeserve.runtime.rank.runs.runs import OwnerLane, PassRuns, Run, Told
from moeserve.runtime.step import LaneInput, LaneLogits

MOST = 40
"""Rows of a lane that says nothing else."""


def rows_taken(state: Tensor) -> int:
    """Rows of the last step of the run that has left this state."""
    return int(state[Word.TAKEN]) >> 32 * (int(state[Word.TOOK]) % 2) & 0xFFFFFFF


class Pair:
    """A lane between two streams of one GPU. patience: longer than kernels take to compile, by default."""

    def __init__(
        self,
        runs: PassRuns,
        alone: Alone,
        stages: int = 2,
        patience: float = 30.0,
        rows: int = MOST,
        wire: str = "",
    ) -> None:
        sizes = alone.checkpoint
        widths = sizes.hidden, sizes.num_experts, sizes.top_k
        self.layout = MailLayout(rows, stages, *widths, torch.bfloat16, wire)
        self.box, self.answers = (
            torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
            for nbytes in (self.layout.mailbox_bytes, self.layout.answers_bytes)
        )
        self.mirror = torch.zeros(64, dtype=torch.int64).pin_memory()
        self.table = words(torch.device("cuda"))
        addresses = self.box.data_ptr(), self.answers.data_ptr()
        self.table[Word.MAILBOX], self.table[Word.ANSWERS] = addresses
        self.table[Word.PATIENCE] = int(patience * 1e9)
        self.table[Word.MIRROR] = self.mirror.data_ptr()
        self.caller = CallerKernels(self.layout, self.table)
        self.owner: OwnerLane = runs.lane(self.layout, addresses, patience)
        self.here, self.there = torch.cuda.Stream(), torch.cuda.Stream()
        self.runs, self.number = runs, 0
        torch.cuda.synchronize()

    def begin(self, *, wait: bool = True) -> int:
        """A pass of another number, on the caller's side. wait: for the whole device; else nothing of this
        caller's is under way.
        """
        if wait:
            torch.cuda.synchronize()
        self.number += 1
        with torch.cuda.stream(self.here):
            self.table[Word.NUMBER], self.table[Word.ENDED] = self.number, 0
            self.table[STEPS:].zero_()
        self.here.synchronize()
        return self.number

    def launch(self, steps: tuple[tuple[int, int], ...], rows: int, **more: int | bool) -> object:
        with torch.cuda.stream(self.there):
            return self.runs.launch(Run(self.owner, steps, rows, more.pop("kind", CHOICE), **more), (7, 3))

    def bring(self, stage: int, layer: int, given: Given) -> None:
        with torch.cuda.stream(self.here):
            self.caller.bring(stage, layer, given)

    def fetch(self, stage: int, like: Tensor) -> Tensor:
        with torch.cuda.stream(self.here):
            out = torch.full_like(like, torch.nan)
            self.caller.fetch(stage, out)
        return out

    def exchange(self, stage: int, layer: int, given: Given, fetched: int, like: Tensor) -> Tensor:
        """Brings the rows of one stage, and fetches the answer of another."""
        with torch.cuda.stream(self.here):
            out = torch.full_like(like, torch.nan)
            self.caller.exchange(stage, layer, given, 0, (fetched, out))
        return out

    def told(self, flight: object) -> Told:
        """How far it came; what it has answered itself is compared with that."""
        flight.event.synchronize()
        before = 0 if flight.begins else self.owner.counted
        told = flight.read()
        assert told.answered == (sum(told.steps) - before if told.ended in (0, MISFIT) else 0)
        return told._replace(answered=0)

    @property
    def ended(self) -> int:
        torch.cuda.synchronize()
        return int(self.table[Word.ENDED])

    @property
    def lines(self) -> Tensor:
        """The lines of the first stage in the mailbox, int32 `[blocks, 8]`; two words of each are its tag."""
        at, blocks = self.layout.columns(0)[0], self.layout.blocks
        return self.box[at : at + blocks * LINE_BYTES].view(torch.int32).view(blocks, 8)

    @property
    def taken(self) -> int:
        """Rows of the last step, as the owner has agreed upon them."""
        torch.cuda.synchronize()
        return rows_taken(self.owner.state)

    @property
    def answer(self) -> Tensor:
        """The answer to these rows of the first stage, as it lies in the caller's memory."""
        (_, at), rows = self.layout.answer(0), self.taken
        found = self.answers[at : at + rows * self.layout.row_bytes].view(torch.bfloat16)
        return found.view(rows, self.layout.hidden).clone()

    def answered(self, batch: Given, padded: int) -> Tensor:
        """A pass of one step, at whose end its rows lie in the room of so many."""
        flight = self.launch(((0, 0),), padded, begins=self.begin())
        self.bring(0, 0, batch)
        found = self.fetch(0, batch.hidden)
        assert self.told(flight) == Told(0, (1,))
        return found


def given(alone: Alone, rows: int, seed: int) -> Given:
    hidden, ids, weights = alone.batch(rows, seed=seed)
    return Given(hidden.bfloat16().cuda(), ids.int().cuda(), weights.float().cuda())


def expected(rank: HostedRank, layer: int, of: Given) -> Tensor:
    """The same rows by a step of the rank, as a graph of as many padded rows."""
    valid = torch.ones(len(of.hidden), dtype=torch.bool, device="cuda")
    rows = (
        LaneLogits(of.hidden, of.route, valid)
        if of.weights is None
        else LaneInput(of.hidden, of.route, of.weights, valid)
    )
    for _ in range(3):
        answer, _ = rank.step(layer, rows, (len(of.hidden),))
    torch.cuda.synchronize()
    return answer
