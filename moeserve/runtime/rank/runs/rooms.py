"""`Rooms`: where the rows of a step of a pass lie on an owner's GPU, and those of the next one."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moeserve.device.streams import stream_for
from moeserve.dispatch.mail.kernels import CHOICE
from moeserve.dispatch.mail.layout import MailLayout
from moeserve.runtime.planning.passes import ROOMS
from moeserve.runtime.rank.graphs import padded_rows
from moeserve.runtime.step import LaneInput, LaneLogits


class _Memory(NamedTuple):
    """The columns of so many rows."""

    hidden: Tensor
    ids: Tensor
    weights: Tensor
    logits: Tensor
    valid: Tensor

    @property
    def nbytes(self) -> int:
        return sum(column.nbytes for column in self)


class Rooms:
    """Rooms of one rank by padded rows, and by what comes with the rows: views of one memory, since steps run
    one after another. A lane of several stages has two of them, as rows of one stage are taken while the step
    of another ends. It is as large as the largest lane needs. A larger lane than all before has another made,
    and graphs that were recorded go on with the rooms that they know: of twice the rows at most.

    `grow` is called by any thread, under its caller's lock, all else by the one that launches.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: list[_Memory] = []  # the largest last
        self._rooms: dict[tuple[int, int, bool], LaneInput | LaneLogits] = {}  # by rows and kind

    def __len__(self) -> int:
        return len(self._rooms)

    @property
    def nbytes(self) -> int:
        """Of all memory that is held, by any thread."""
        return sum(one.nbytes for one in list(self._made))

    def grow(self, layout: MailLayout, rows: int) -> None:
        """Has memory for steps of so many rows, which are padded; it is zeros when this returns."""
        padded = padded_rows(rows) * (1 if layout.stages == 1 else ROOMS)
        if self._made and self._made[-1].valid.shape[0] >= padded:
            return
        if self._device.type == "cpu":
            self._made.append(_zeros(layout, padded, self._device))
            return
        stream = stream_for("rooms", self._device)  # others may wait for long
        with torch.cuda.stream(stream):
            made = _zeros(layout, padded, self._device)
        stream.synchronize()
        self._made.append(made)

    def of(self, layout: MailLayout, rows: int, kind: int, *, other: bool = False) -> LaneInput | LaneLogits:
        """The room of steps of `rows` rows: with choices, or with logits. The same one each time. other: the
        one beside it, of a lane of several stages.
        """
        room = self._rooms.get((rows, kind, other))
        if room is None:
            self.grow(layout, rows)
            whole = self._made[-1]
            first = whole.valid.shape[0] // ROOMS if other else 0
            part = _Memory(*(column[first : first + rows] for column in whole))
            if kind == CHOICE:
                room = LaneInput(part.hidden, part.ids, part.weights, part.valid)
            else:
                room = LaneLogits(part.hidden, part.logits, part.valid)
            self._rooms[rows, kind, other] = room
        return room

    def clear(self) -> None:
        """Frees all: no graph knows a room any more, and no step is under way."""
        self._rooms.clear()
        self._made.clear()


def _zeros(layout: MailLayout, rows: int, device: torch.device) -> _Memory:
    def column(width: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros((rows, width), dtype=dtype, device=device)

    return _Memory(
        column(layout.hidden, layout.dtype),
        column(layout.top_k, torch.int32),
        column(layout.top_k, torch.float32),
        column(layout.experts, torch.float32),
        torch.zeros(rows, dtype=torch.bool, device=device),
    )
