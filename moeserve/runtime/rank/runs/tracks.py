"""`RunTrack`: runs that follow one another on one stream of an owner's GPU, and what their kernels share.

Steps of few rows have a track of their own, SHORT, beside MAIN, which all other steps of the rank have. Both
run at the same time. A step of few rows reads weights, most of its time, and goes before: it waits for the
kernel of a large step that runs, and not for the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch

from moeserve.device.streams import MAIN, SHORT, CurrentStream, Track
from moeserve.dispatch.mail.kernels import Given, OwnerKernels, words
from moeserve.dispatch.mail.layout import MailLayout, Word
from moeserve.runtime.rank.graphs import padded_rows
from moeserve.runtime.rank.runs.rooms import Rooms
from moeserve.runtime.step import LaneInput, LaneLogits


class RunTrack:
    """One track. Its stream is the launching thread's; rooms and kernels are made under its owner's lock."""

    def __init__(self, number: int, device: torch.device, most_rows: int = 0) -> None:
        """most_rows: of a step; 0: as many as its lane has."""
        self.number, self._device, self._most_rows = number, device, most_rows
        self.now = words(device)  # the state of the lane whose run it is
        self.rooms = Rooms(device)
        self._track = Track(number)
        self._stream = CurrentStream()
        self._kernels: dict[MailLayout, OwnerKernels] = {}
        self.now[Word.ENDED].zero_()  # a kernel's first launch waits for whatever waits on the device
        self.now[Word.EPOCH].fill_(0)

    @property
    def stream(self) -> torch.cuda.Stream:
        """On which its runs are launched: of MAIN the current one."""
        return self._track.stream or self._stream.get()

    def current(self) -> AbstractContextManager[None]:
        """What the calling thread launches meanwhile is of this track."""
        return self._track.current()

    def prepare(self, layout: MailLayout) -> None:
        """Has kernels and memory for a lane: to make them may wait for what waits on the device."""
        self.kernels_of(layout)
        self.rooms.grow(layout, min(layout.rows, self._most_rows) if self._most_rows else layout.rows)

    def kernels_of(self, layout: MailLayout) -> OwnerKernels:
        """Those of lanes of this layout."""
        found = self._kernels.get(layout)
        if found is None:
            found = self._kernels[layout] = OwnerKernels(layout, self.now)
        return found

    def forget(self, layout: MailLayout) -> None:
        """No lane has this layout any more."""
        self._kernels.pop(layout, None)

    def room(
        self, layout: MailLayout, rows: int, kind: int, *, other: bool = False
    ) -> tuple[LaneInput | LaneLogits, Given]:
        """Where rows of a step come to, and the same as its kernels take it. other: than without."""
        room = self.rooms.of(layout, rows, kind, other=other)
        if isinstance(room, LaneInput):
            return room, Given(room.hidden, room.experts, room.weights)
        return room, Given(room.hidden, room.logits, None)


class Tracks:
    """The tracks of one rank's runs: MAIN, and where steps of few rows have one of their own, SHORT.

    One thread launches, and calls all methods. What it launches on MAIN and is no run of a pass follows all
    runs before it (`join`), and goes before all runs behind it.
    """

    def __init__(self, device: torch.device, short_rows: int) -> None:
        """short_rows: the most of a step that is on SHORT; 0: there is none."""
        self.main = RunTrack(MAIN, device)
        self.short_rows = short_rows
        self.short = RunTrack(SHORT, device, padded_rows(short_rows)) if short_rows else None
        self._joined = True  # whether nothing was launched on SHORT that MAIN has not been told to wait for
        self._others = True  # whether anything else was launched on MAIN since it was

    def __iter__(self) -> Iterator[RunTrack]:
        return iter((self.main,) if self.short is None else (self.main, self.short))

    def of(self, *, short: bool) -> RunTrack:
        """The one of runs that are short, or not."""
        return self.short if short and self.short is not None else self.main

    def join(self) -> bool:
        """What is launched on MAIN from here on, until the next run, waits for all runs before. Whether it
        waits for any of SHORT.
        """
        self._others = True
        if self.short is None or self._joined:
            return False
        self.main.stream.wait_stream(self.short.stream)
        self._joined = True
        return True

    def begins(self, track: RunTrack) -> None:
        """A run is about to be launched on this track."""
        if self.short is None:
            return
        if self._others:
            self.short.stream.wait_stream(self.main.stream)
            self._others = False
        self._joined = self._joined and track is not self.short
