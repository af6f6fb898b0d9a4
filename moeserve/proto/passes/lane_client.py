"""`LaneClient`: a `MoeClient` whose calls of few rows go over device lanes of this host.

with LaneClient("127.0.0.1:7171") as client:
    mixed = client.forward(3, hidden, experts, weights)  # [T, H], like hidden

Such a call is a step of a pass: the rank reads its layer and rows where the caller writes them, and no
message is made of it. Where a caller's calls go round over the same layers, as those of a decoder do, they
are one standing pass, whose steps a rank with a GPU launches before their rows are there (`Rounds`). Any
other call, and any that a lane does not answer, is made as `MoeClient` makes it: a step changes nothing, and
may be made again.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
import uuid
from collections import deque
from contextlib import suppress
from dataclasses import replace
from typing import Unpack

import numpy as np

from moeserve.proto.client.batch import CallOptions, Choice, Logits, Reply, check_options
from moeserve.proto.client.patience import Clock, Patience
from moeserve.proto.client.sync import MoeClient
from moeserve.proto.credentials import Credentials
from moeserve.proto.errors import DeadlineExceeded, InvalidArgument, MoeError
from moeserve.proto.passes.attached import AttachedLane, Wanted
from moeserve.proto.passes.mailbox import MOST_LAYERS
from moeserve.proto.passes.running import Pass, PassLate
from moeserve.proto.tensors import Array, Plain, TensorError, copy_into, plain, restore
from moeserve.proto.transports.shared_memory import SharedTensor

FEWEST_ROWS, MOST_ROWS = 16, 1024
"""Rows of a lane: enough for the call it is made for. To copy more takes longer than a message."""

REFUSED_SECONDS = 5.0
"""After a rank has refused a lane, until one is asked for again."""

ATTACH_SECONDS = 10.0
"""For a rank to attach a lane."""

AGREEING_ROUNDS, MOST_AGREEING, FEWEST_CALLS = 2, 16, 8
"""Rounds over the same layers, and calls in them, after which a standing pass is begun; twice as many rounds
after each pass that ended before it had gone round.
"""

TRIES = 2
"""Passes in which a call is tried: its caller may have rested for too long in the first."""

SHORTEST_SECONDS = 1e-3
"""The least timeout of what is asked for at the end of a call's time."""

log = logging.getLogger(__name__)

_NUMBERS = itertools.count()


class Rounds:
    """Over which layers one caller's calls go round."""

    def __init__(self) -> None:
        self._seen: deque[int] = deque(maxlen=2 * MOST_LAYERS)
        self._agreeing = AGREEING_ROUNDS

    def called(self, layer: int) -> None:
        """Notes a call."""
        self._seen.append(layer)

    def held(self, calls: int, layers: int) -> None:
        """A standing pass over so many layers has ended after so many calls."""
        kept = calls > layers
        self._agreeing = AGREEING_ROUNDS if kept else min(MOST_AGREEING, 2 * self._agreeing)

    def of(self, layer: int) -> tuple[int, ...]:
        """The layers of the round that a call of `layer` begins; () where the last calls were no rounds."""
        seen = list(self._seen)
        with suppress(ValueError):
            length = seen[::-1].index(layer) + 1
            needed = max(self._agreeing * length, FEWEST_CALLS)
            if length <= MOST_LAYERS and len(seen) >= needed:
                last, found = seen[-needed:], tuple(seen[-length:])
                if all(one == found[(at - needed) % length] for at, one in enumerate(last)):
                    return found
        return ()


class _Line:
    """A lane that is attached, and the pass that runs on it. One thread at a time uses it."""

    def __init__(self, lane: AttachedLane) -> None:
        self.lane = lane
        self.user = threading.get_ident()  # who called last
        self._rounds = Rounds()
        self._run: Pass | None = None
        self._goes_on = False  # it has further steps
        self._calls, self._demanded = 0, 0

    def fits(self, rows: Plain, rank: int | None) -> bool:
        """Whether such rows may go over it; rank: whose lane it has to be, None for any."""
        wanted = self.lane.wanted
        there = rows.dtype.name == wanted.dtype and len(rows.storage) <= wanted.rows
        return there and rank == wanted.rank

    def run_of(self, layer: int, version: int, clock: Clock) -> Pass:
        """The pass whose next step is of this layer, with weights of this version, 0 for any. Raises
        MoeError; DeadlineExceeded where the one before it does not end.
        """
        run = self._run
        wanted = run is not None and self._goes_on and (run.layer(0), self._demanded) == (layer, version)
        if run is not None and wanted and run.status is None:
            return run
        if run is not None:
            if self._goes_on:
                self._rounds.held(self._calls, len(run.layers))
            run.leave(clock.remaining)
        layers = self._rounds.of(layer)
        self._goes_on, self._calls, self._demanded = bool(layers), 0, version
        run = self._run = self.lane.begin(
            layers or (layer,), standing=self._goes_on, any_weights=True, weights_version=version
        )
        return run

    def called(self, layer: int) -> None:
        """Notes a call that was answered."""
        self._rounds.called(layer)
        self._calls += 1

    def drop(self) -> None:
        """Ends the pass that runs: its caller waits no longer."""
        self._goes_on = False
        if self._run is not None and self._run.status is None:
            self._run.give_up()

    @property
    def alive(self) -> bool:
        """Whether the rank keeps the lane."""
        return self.lane.alive

    def close(self) -> None:
        """Detaches the lane."""
        self.drop()
        self.lane.close()


class LaneClient(MoeClient):
    """Calls as MoeClient does, over device lanes where it can. Safe to use from any thread.

    lanes: of this host's ranks, attached by the first calls; each takes one call at a time, and a rank has
    `passes.lanes` of them for all callers. The other arguments, and what calls raise, are MoeClient's. Calls
    over lanes have up to 1024 rows, with weights or logits of float32; the answer is copied to `output`, or
    to memory of its own.
    """

    def __init__(
        self,
        address: str,
        *,
        lanes: int = 1,
        model: str = "",
        timeout: float | Patience = 60.0,
        lane: int | None = None,
        transport: str = "auto",
        credentials: Credentials | None = None,
    ) -> None:
        super().__init__(
            address, model=model, timeout=timeout, lane=lane, transport=transport, credentials=credentials
        )
        if lanes < 1:
            raise ValueError(f"lanes={lanes} must be 1 or more; without lanes use MoeClient")
        self._model, self._bound, self._credentials = model, lane, credentials
        self._most = lanes
        self._idle: list[_Line] = []
        self._there = 0  # lines that are attached, or are about to be
        self._refused_until = 0.0
        self._most_rows = MOST_ROWS  # that a rank was not seen to refuse
        self._closed = False
        self._lock = threading.Lock()

    def call(
        self, layer: int, hidden: Array | SharedTensor, route: Choice | Logits, **options: Unpack[CallOptions]
    ) -> Reply:
        """The answer with the epoch and the version of the weights that made it."""
        check_options(options)
        clock = self._core.clock(options.get("timeout"))
        try:
            reply = self._over_a_lane(layer, hidden, route, options, clock)
        except TensorError:  # said by the call itself, in its words
            reply = None
        if reply is not None:
            return reply
        left = replace(clock.patience, timeout=max(clock.remaining, SHORTEST_SECONDS))
        return super().call(layer, hidden, route, **(options | {"timeout": left}))

    def close(self) -> None:
        """Detaches all lanes, closes all connections and gives all regions back."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for line in idle:
            line.close()
        super().close()

    def _over_a_lane(
        self,
        layer: int,
        hidden: Array | SharedTensor,
        route: Choice | Logits,
        options: CallOptions,
        clock: Clock,
    ) -> Reply | None:
        """The answer; None where no lane takes the call, or gives an answer. Raises TensorError for arrays
        that lanes do not take.
        """
        dtype, output = options.get("dtype", ""), options.get("output")
        rows = hidden.plain if isinstance(hidden, SharedTensor) else plain(hidden, "hidden", dtype=dtype)
        count = len(rows.storage) if rows.storage.ndim == 2 else 0
        if not 0 < count <= self._most_rows or (output is not None and output.spec != rows.spec):
            return None
        asked = options.get("lane")
        line = self._line(rows, self._bound if asked is None else asked, clock)
        if line is None:
            return None
        good = False
        try:
            if layer not in line.lane.layers:
                good = True
                return None
            reply = self._asked(line, (layer, hidden, route), rows, options, clock)
            good = reply is not None
            return reply
        except TensorError:
            good = True
            raise
        finally:
            if not good:
                line.drop()
            self._give(line)

    def _asked(
        self,
        line: _Line,
        batch: tuple[int, Array | SharedTensor, Choice | Logits],
        rows: Plain,
        options: CallOptions,
        clock: Clock,
    ) -> Reply | None:
        """The answer of a lane; None where it gives none. Raises DeadlineExceeded."""
        layer, hidden, route = batch
        for _ in range(TRIES):
            try:
                run = line.run_of(layer, options.get("weights_version", 0), clock)
                run.post_plain(0, rows, route)
                found = run.arrived(0, clock.remaining)
            except DeadlineExceeded as late:
                if not clock.remaining:
                    raise
                log.debug("a lane of %s: %s", self.address, late)
                return None
            except MoeError as failed:
                log.debug("a lane of %s gives no answer: %s", self.address, failed)
                if not isinstance(failed, PassLate):  # its caller was late, and may begin another pass
                    return None
                line.drop()
                continue
            line.called(layer)
            return _reply(run, found, hidden, options.get("output"))
        return None

    def _line(self, rows: Plain, rank: int | None, clock: Clock) -> _Line | None:
        """A lane for such rows that nobody else uses now: the one that the calling thread had last, if it may
        be. None where there is none, and no other can be had.
        """
        me, small = threading.get_ident(), None
        with self._lock:
            fitting = [line for line in self._idle if line.fits(rows, rank)]
            if fitting:
                line = next((one for one in fitting if one.user == me), fitting[-1])
                self._idle.remove(line)
                line.user = me
                return line
            if self._closed or time.monotonic() < self._refused_until:
                return None
            if self._there >= self._most:
                if not self._idle:
                    return None
                small = self._idle.pop(0)  # of other rows, or another rank's
            else:
                self._there += 1
        if small is not None:
            small.close()
        return self._attached(rows, rank, clock)

    def _attached(self, rows: Plain, rank: int | None, clock: Clock) -> _Line | None:
        """A new lane, which is counted already; None where no rank gives one now."""
        count = len(rows.storage)
        room = min(self._most_rows, max(FEWEST_ROWS, 1 << (count - 1).bit_length()))
        wanted = Wanted(
            f"calls-{uuid.uuid4().hex[:12]}-{os.getpid()}-{next(_NUMBERS)}",
            rows=room,
            dtype=rows.dtype.name,
            model=self._model,
            rank=rank,
            any_rank=True,
            timeout=max(SHORTEST_SECONDS, min(ATTACH_SECONDS, clock.remaining)),
            credentials=self._credentials,
        )
        made: AttachedLane | None = None
        try:
            try:
                made = AttachedLane.attach(self.address, wanted)
            except InvalidArgument:  # a rank may not take as many rows as that
                if room == count:
                    raise
                made = AttachedLane.attach(self.address, replace(wanted, rows=count))
            return _Line(made)
        except InvalidArgument as refused:
            log.info("calls of %d rows to %s go without a device lane: %s", count, self.address, refused)
            self._most_rows = min(self._most_rows, count - 1)
        except MoeError as refused:
            log.info("calls to %s go without a device lane for now: %s", self.address, refused)
            self._refused_until = time.monotonic() + REFUSED_SECONDS
        finally:
            if made is None:
                with self._lock:
                    self._there -= 1
        return None

    def _give(self, line: _Line) -> None:
        """Keeps a lane for the next call, unless it is gone."""
        keeps = line.alive
        with self._lock:
            keeps = keeps and not self._closed
            if keeps:
                self._idle.append(line)
            else:
                self._there -= 1
        if not keeps:
            line.close()


def _reply(run: Pass, found: Plain, hidden: Array | SharedTensor, output: SharedTensor | None) -> Reply:
    """The answer that was found in a lane's memory, where its caller wants it."""
    into = Plain(found.dtype, np.empty_like(found.storage)) if output is None else output.plain
    copy_into(into.storage, found.storage)
    like = hidden.array if isinstance(hidden, SharedTensor) else hidden
    array = restore(into, like) if output is None else output.array
    return Reply(array, run.epoch(0), run.version(0))
