"""A caller's words in host memory, written by hand, and the answers to them."""

from __future__ import annotations

import torch
from torch import Tensor

from moeserve.dispatch.mail.host_layout import HostMailLayout
from moeserve.dispatch.mail.kernels import Given
from moeserve.proto.passes import mailbox as m
from moeserve.proto.passes.mailbox import fence, tag_of

MARK = 0x55
"""Fills answers before anything writes them."""


class HostWords:
    """The mailbox and the answers of a lane whose rows lie in host memory, as its caller has them."""

    def __init__(self, layout: HostMailLayout, *, pinned: bool = False) -> None:
        self.layout, self.words, self.number = layout, layout.words, 0
        made = [
            torch.full((nbytes,), MARK, dtype=torch.uint8)
            for nbytes in (layout.mailbox_bytes, layout.answers_bytes)
        ]
        self._box, self._out = (one.pin_memory() for one in made) if pinned else made
        self.box, self.out = (memoryview(one.numpy()).cast("B").cast("Q") for one in (self._box, self._out))

    @property
    def addresses(self) -> tuple[int, int]:
        """Of both, in host memory."""
        return self._box.data_ptr(), self._out.data_ptr()

    def word(self, at: int) -> Tensor:
        """One of the mailbox's words, int64, for a device to write."""
        return self._box.view(torch.int64)[at]

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

    def raw_answer(self, stage: int, rows: int, buffer: int = 0) -> Tensor:
        """What lies where an answer of so many rows is."""
        at = self.words.answer(stage, buffer)
        found = self._out[at : at + rows * self.layout.row_bytes].clone()
        return found.view(torch.bfloat16).view(rows, self.layout.hidden)
