"""A lane whose rows lie in pinned host memory, and a caller that writes its words by hand."""

from __future__ import annotations

import time
from typing import Any

import torch
from houses import Alone
from pass_pairs import rows_taken
from torch import Tensor

from moeserve.dispatch.mail.host_layout import HostMailLayout
from moeserve.dispatch.mail.kernels import CHOICE, Given
from moeserve.proto.passes import mailbox as m
from moeserve.proto.passes.mailbox import fence, tag_of
from moeserve.runtime.rank.runs.runs import OwnerLane, PassRuns, Run, Told

SECONDS = 10.0
MARK = 0x55
"""Fills answers before anything writes them."""


class HostPair:
    """A caller's words in host memory, and an owner's stream."""

    def __init__(
        self,
        runs: PassRuns,
        alone: Alone,
        stages: int = 1,
        rows: int = 40,
        patience: float = 5.0,
        buffers: int = 1,
    ) -> None:
        sizes = alone.checkpoint
        widths = sizes.hidden, sizes.num_experts, sizes.top_k
        self.layout = HostMailLayout(rows, stages, *widths, torch.bfloat16, buffers=buffers)
        self.words = self.layout.words
        made = [
            torch.full((nbytes,), MARK, dtype=torch.uint8).pin_memory()
            for nbytes in (self.layout.mailbox_bytes, self.layout.answers_bytes)
        ]
        self._box, self._out = made
        self.box, self.out = (memoryview(one.numpy()).cast("B").cast("Q") for one in made)
        self.owner: OwnerLane = runs.lane(self.layout, (made[0].data_ptr(), made[1].data_ptr()), patience)
        self.there, self.runs, self.number = torch.cuda.Stream(), runs, 0
        torch.cuda.synchronize()

    def begin(self) -> int:
        """A pass of another number, of which no answer is there."""
        torch.cuda.synchronize()
        self.number += 1
        return self.number

    def word(self, at: int) -> Tensor:
        """One of the mailbox's words, int64, for a device to write."""
        return self._box.view(torch.int64)[at]

    def launch(self, steps: tuple[tuple[int, int], ...], rows: int, **more: Any) -> object:
        """Has a run queued."""
        with torch.cuda.stream(self.there):
            return self.runs.launch(Run(self.owner, steps, rows, CHOICE, **more), (7, 3))

    def write(
        self, stage: int, step: int, layer: int, given: Given, /, *, filled: int | None = None, **header: int
    ) -> None:
        """Brings rows as a caller does. filled: so many of the hidden states, others follow by `fill`;
        header: words of it that are others than the rows'.
        """
        self.box[self.words.header(stage) + m.FILLED] = 0 if filled is None else filled + 1
        places = self.words.columns(stage)[1:3]
        for place, column in zip(places, (given.route, given.weights), strict=True):
            if column is not None:
                self._put(place, column)
        self._put(self.words.columns(stage)[0], given.hidden[:filled])
        said = {"layer": layer, "stage": stage, "count": len(given.hidden), "kind": m.CHOICE, "buffer": 0}
        places = {"layer": m.LAYER, "stage": m.STAGE, "count": m.COUNT, "kind": m.KIND, "buffer": m.BUFFER}
        head = self.words.header(stage)
        for name, value in (said | header).items():
            self.box[head + places[name]] = value
        fence()
        self.box[head + m.TAG] = tag_of(self.number, step)

    def fill(self, stage: int, given: Given, rows: int) -> None:
        """So many of the hidden states are there from now on."""
        self._put(self.words.columns(stage)[0], given.hidden[:rows])
        fence()
        self.box[self.words.header(stage) + m.FILLED] = rows + 1

    def _put(self, place: int, column: Tensor) -> None:
        raw = column.cpu().contiguous().view(torch.uint8).reshape(-1)
        self._box[place : place + raw.numel()] = raw

    def rows_told(self, stage: int, step: int) -> int:
        """How many rows of a step's answer are said to be there."""
        word = self.out[self.words.answer_header(stage) + m.ANSWERED]
        return m.rows_answered(word, tag_of(self.number, step))

    def answered(self, stage: int, step: int) -> bool:
        """Whether the step's answer is said to be there."""
        return bool(self.out[self.words.answer_header(stage) + m.TAG] == tag_of(self.number, step))

    def answer(self, stage: int, step: int, rows: int, buffer: int = 0) -> Tensor:
        """Waits for an answer; it is on the GPU. Raises TimeoutError."""
        until = time.monotonic() + SECONDS
        while not self.answered(stage, step):
            if time.monotonic() > until:
                raise TimeoutError(f"step {step} of stage {stage} has no answer")
        head = self.words.answer_header(stage)
        assert (self.out[head + m.EPOCH], self.out[head + m.VERSION]) == (7, 3)
        return self.raw_answer(stage, rows, buffer).cuda()

    def raw_answer(self, stage: int, rows: int, buffer: int = 0) -> Tensor:
        """What lies where an answer of so many rows is."""
        at = self.words.answer(stage, buffer)
        found = self._out[at : at + rows * self.layout.row_bytes].clone()
        return found.view(torch.bfloat16).view(rows, self.layout.hidden)

    def told(self, flight: object) -> Told:
        """How far it came."""
        flight.event.synchronize()  # type: ignore[attr-defined]
        told: Told = flight.read()  # type: ignore[attr-defined]
        return told

    @property
    def taken(self) -> int:
        """Rows of the last step, as the owner has agreed upon them."""
        torch.cuda.synchronize()
        return rows_taken(self.owner.state)
