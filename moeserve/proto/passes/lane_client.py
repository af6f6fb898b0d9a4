"""`LaneClient`: a `MoeClient` whose calls of few rows go over device lanes of this host.

with LaneClient("127.0.0.1:50051") as client:
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
import weakref
from dataclasses import replace
from typing import Unpack

from moeserve.proto.client.batch import CallOptions, Choice, Logits, Reply, check_options
from moeserve.proto.client.patience import Clock, Patience, check_process, is_whole
from moeserve.proto.client.sync import MoeClient
from moeserve.proto.credentials import Credentials
from moeserve.proto.errors import DeadlineExceeded, InvalidArgument, MoeError, client_closed
from moeserve.proto.passes.answers import SMALLEST_BYTES, Answers
from moeserve.proto.passes.attached import DETACH_SECONDS, SHORTEST_SECONDS, AttachedLane, Wanted
from moeserve.proto.passes.buffers import BUFFERS
from moeserve.proto.passes.called_lane import CalledLane, divided, no_answer, power_of_two, room_for
from moeserve.proto.passes.refusals import REFUSED_SECONDS, Refusals
from moeserve.proto.passes.running import Pass, columns_of
from moeserve.proto.tensors import Array, Plain, TensorError, plain, restore
from moeserve.proto.transports.shared_memory import SharedTensor

MOST_ROWS, MOST_STEPS = 2048, 4
"""Of a lane's step, and of a call. A call of more rows is several steps, one of which is computed while the
rows of the next are copied; of fewer rows each would read as many experts.
"""

ATTACH_SECONDS = 10.0
"""For a rank to attach a lane."""

log = logging.getLogger(__name__)

Batch = tuple[int, "Array | SharedTensor", Choice | Logits]
"""A call's layer, hidden states and route."""

_NUMBERS = itertools.count()


class LaneClient(MoeClient):
    """Calls as MoeClient does, over device lanes where it can. Safe to use from any thread.

    After a fork the child makes a client of its own: calls of its parent's go over no lane there, and raise
    RuntimeError where they need gRPC.

    lanes: of this host's ranks, attached by the first calls; each takes one call at a time, and a rank has
    `passes.lanes` of them for all callers. The other arguments, and what calls raise, are MoeClient's. Calls
    over lanes have up to 8192 rows, with weights or logits of float32, and are a step for every 2048, where
    a rank launches steps ahead; to others up to 2048. The answer is copied to `output`. Without one a large
    answer is handed out in the lane's memory while there is room for the next two, and copied else, to memory
    that is used again when nobody holds an answer in it.
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
        if not is_whole(lanes):
            raise TypeError(f"lanes={lanes!r} must be a whole number")
        if lanes < 1:
            raise ValueError(f"lanes={lanes} must be 1 or more; without lanes use MoeClient")
        super().__init__(
            address, model=model, timeout=timeout, lane=lane, transport=transport, credentials=credentials
        )
        self._credentials, self._process, self._most = credentials, os.getpid(), lanes
        self._idle: list[CalledLane] = []
        self._lines = weakref.WeakSet[CalledLane]()  # that calls share: one whose call was interrupted goes
        self._coming = 0  # that are about to be attached
        self._placed: dict[int, CalledLane] = {}  # by the region of rows that were handed out
        self._refusals = Refusals()
        self._answers = Answers(4 * lanes)  # of several sizes, and callers hold the last ones
        self._closed = False
        self._lock = threading.Lock()

    def call(
        self, layer: int, hidden: Array | SharedTensor, route: Choice | Logits, **options: Unpack[CallOptions]
    ) -> Reply:
        """The answer with the epoch and the version of the weights that made it."""
        check_options(options)
        clock = self._core.clock(options.get("timeout"))
        try:
            if (reply := self._over_a_lane(layer, hidden, route, options, clock)) is not None:
                return reply
        except TensorError:  # said by the call itself, in its words
            pass
        left = replace(clock.patience, timeout=max(clock.remaining, SHORTEST_SECONDS))
        try:
            return super().call(layer, hidden, route, **(options | {"timeout": left}))
        except DeadlineExceeded as late:
            if clock.remaining > SHORTEST_SECONDS:
                raise
            raise no_answer(layer, clock) from late  # which had no more than what was left

    def place(self, lane: int, rows: int, dtype: str = "bf16") -> tuple[SharedTensor, SharedTensor]:
        """Hidden states [rows, H] to fill, and memory for their answer, in a lane of rank `lane` that is for
        these alone: a call with both, the second as `output`, copies neither.

        The lane is no one of `lanes`; it is detached by `close` of the tensors or of this client. Raises
        MoeError where the rank attaches none, or is not on this host; InvalidArgument for more rows than it
        takes.
        """
        check_process(self._process)
        with self._lock:
            closed = self._closed
        if closed:
            raise client_closed(self.address)
        for gone in self._swept():
            gone.close(DETACH_SECONDS)
        wanted = self._wanted((rows, 1), dtype, lane, min(ATTACH_SECONDS, self._core.seconds))
        line = CalledLane(AttachedLane.attach(self.address, wanted), placed=True)
        hidden, output = line.lane.memory.placed(0, rows, lane)
        with self._lock:
            closed = self._closed
            self._placed[id(hidden.region)] = line
        if closed:
            line.close(DETACH_SECONDS)
            raise client_closed(self.address)
        return hidden, output

    def close(self) -> None:
        """Detaches all lanes, closes all connections and gives all regions back; calls under way, and later
        ones, raise MoeError (`client_closed`).
        """
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            placed, self._placed = [*self._placed.values()], {}
            used = set(self._lines) - {*idle, *placed}
        mine = os.getpid() == self._process
        try:
            super().close()  # first: what a lane gives up is not tried again
        finally:
            for line in (*used, *placed) if mine else ():
                line.end()
            self._answers.close()
            until = time.monotonic() + DETACH_SECONDS
            for line in (*idle, *placed) if mine else ():
                line.close(max(0.0, until - time.monotonic()))

    def _swept(self) -> list[CalledLane]:
        """Lanes whose tensors were closed; they are no more the client's."""
        with self._lock:
            gone = {region: line for region, line in self._placed.items() if not line.alive}
            for region in gone:
                del self._placed[region]
        return list(gone.values())

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
        if not self._may_take(layer, hidden, options):
            return None
        dtype, output = options.get("dtype", ""), options.get("output")
        rows = hidden.plain if isinstance(hidden, SharedTensor) else plain(hidden, "hidden", dtype=dtype)
        overlaps = output is not None and isinstance(hidden, SharedTensor) and hidden.overlaps(output)
        if overlaps or (output is not None and output.spec != rows.spec):
            return None  # the rank says so
        batch = layer, hidden, route
        if isinstance(hidden, SharedTensor) and (line := self._placed_line(hidden)) is not None:
            with line.taken(clock):
                if line.alive:
                    return self._tried_placed(line, batch, rows, options, clock)
            for gone in self._swept():
                gone.close(0.0)
            return None
        count = len(rows.storage) if rows.storage.ndim == 2 else 0
        most = MOST_ROWS if isinstance(hidden, SharedTensor) else MOST_STEPS * MOST_ROWS
        if not 0 < count <= most:  # more rows of the first kind are not copied by the other way
            return None
        if (found := self._line(rows, self._rank(options), clock)) is None:
            return None
        try:
            return self._tried(found, batch, rows, options, clock)
        finally:
            self._give(found, clock)

    def _placed_line(self, hidden: SharedTensor) -> CalledLane | None:
        """The lane where these rows are the first of a step; None where they lie elsewhere."""
        line = self._placed.get(id(hidden.region))
        return line if line and line.lane.layout.columns(0)[0] == hidden.offset else None

    def _rank(self, options: CallOptions) -> int | None:
        """Whose lane the call is to go to."""
        asked = options.get("lane")
        return self._core.settings.lane if asked is None else asked

    def _may_take(self, layer: int, hidden: Array | SharedTensor, options: CallOptions) -> bool:
        """Whether a lane may take the call at all; what is wrong with another one is said elsewhere."""
        if self._core.settings.transport == "inline" or os.getpid() != self._process:
            return False
        if not is_whole(layer) or not 0 <= options.get("weights_version", 0) < 1 << 64:
            return False
        placed = [one for one in (hidden, options.get("output")) if isinstance(one, SharedTensor)]
        ranks = {one.rank for one in placed} | {self._rank(options)} - {None}
        return len(ranks) <= 1

    def _tried_placed(
        self, line: CalledLane, batch: Batch, rows: Plain, options: CallOptions, clock: Clock
    ) -> Reply | None:
        """Does as `_tried`. Where there is no answer, none is written later over that of the other way."""
        ended = False
        try:
            reply = self._tried(line, batch, rows, options, clock)
            ended = reply is not None
            return reply
        except DeadlineExceeded:
            ended = True  # and no other way is tried
            raise
        finally:
            if not ended:
                line.rest(batch[0], clock)

    def _tried(
        self, line: CalledLane, batch: Batch, rows: Plain, options: CallOptions, clock: Clock
    ) -> Reply | None:
        """The answer of a lane; None where it gives none, and its pass has ended then. Raises TensorError,
        and DeadlineExceeded.
        """
        if batch[0] not in line.lane.layers:
            return None
        good = False
        try:
            reply = self._asked(line, batch, rows, options, clock)
            good = reply is not None
            return reply
        except TensorError:
            good = True
            raise
        finally:
            if not good:
                line.drop()

    def _asked(
        self, line: CalledLane, batch: Batch, rows: Plain, options: CallOptions, clock: Clock
    ) -> Reply | None:
        (layer, hidden, route), output = batch, options.get("output")
        columns = columns_of(rows, route, line.lane.memory.specs(len(rows.storage)))

        def take(run: Pass) -> Plain:
            return line.take(run, rows, lambda: self._place_for(rows, output), clock)

        version = options.get("weights_version", 0)
        found = line.asked(layer, columns, version, clock, take, stays=output is None)
        if found is None:
            return None
        run, into = found
        if run.stages > 1 and len({run.version(stage) for stage in range(run.stages)}) > 1:
            return None  # a reload came in between
        like = hidden.array if isinstance(hidden, SharedTensor) else hidden
        return Reply(
            output.array if output is not None else restore(into, like), run.epoch(0), run.version(0)
        )

    def _place_for(self, rows: Plain, output: SharedTensor | None) -> Plain:
        """Where the answer is to lie."""
        if output is not None:
            return output.plain
        return Plain(rows.dtype, self._answers.empty_like(rows.storage))

    def _line(self, rows: Plain, rank: int | None, clock: Clock) -> CalledLane | None:
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
            several = len(rows.storage) > MOST_ROWS
            asks = self._refusals.asks((rows.dtype.name, rank), len(rows.storage), several=several)
            if self._closed or not asks:
                return None
            if len(self._lines) + self._coming >= self._most:
                small = self._replaced(rows, rank)
                if small is None:
                    return None
                self._lines.discard(small)
            self._coming += 1
        made: CalledLane | None = None
        try:
            if small is not None and not several:  # a rank may have no room for both
                small.close(min(DETACH_SECONDS, clock.remaining))
            made = self._attached(rows, rank, clock)
            return made
        finally:
            with self._lock:
                self._coming -= 1
            if small is not None and several:
                self._settled(small, made, clock)

    def _settled(self, small: CalledLane, made: CalledLane | None, clock: Clock) -> None:
        """The lane that was to go for another one goes, or stays, where there is no other."""
        with self._lock:
            stays = made is None and not self._closed
            if stays:
                self._lines.add(small)
                self._idle.append(small)
        if not stays:
            small.close(min(DETACH_SECONDS, clock.remaining))

    def _replaced(self, rows: Plain, rank: int | None) -> CalledLane | None:
        """An idle lane that goes for another one: it is too small, or was not called for long."""
        since = time.monotonic() - REFUSED_SECONDS
        for line in self._idle:
            wanted = line.lane.wanted
            if (wanted.dtype, wanted.rank) == (rows.dtype.name, rank) or line.used_at < since:
                self._idle.remove(line)
                return line
        return None

    def _wanted(self, sizes: tuple[int, int], dtype: str, rank: int | None, seconds: float) -> Wanted:
        """A lane of so many rows and stages, by a name that nobody else has."""
        return Wanted(
            f"calls-{uuid.uuid4().hex[:12]}-{os.getpid()}-{next(_NUMBERS)}",
            rows=sizes[0],
            stages=sizes[1],
            dtype=dtype,
            model=self._core.settings.model,
            rank=rank,
            any_rank=True,
            timeout=max(SHORTEST_SECONDS, seconds),
            spin=self._core.settings.patience.spin or None,  # None: as cores are to spare
            credentials=self._credentials,
        )

    def _attached(self, rows: Plain, rank: int | None, clock: Clock) -> CalledLane | None:
        """A new lane; None where no rank gives one now."""
        count = len(rows.storage)
        steps = divided(count, MOST_ROWS)
        kind = rows.dtype.name, rank
        room = self._refusals.limit(kind, room_for(steps[0][1], MOST_ROWS))
        seconds = min(ATTACH_SECONDS, clock.remaining)
        wanted = self._wanted((room, power_of_two(len(steps))), rows.dtype.name, rank, seconds)
        less = [wanted, replace(wanted, rows=steps[0][1], stages=len(steps))]
        if rows.spec.nbytes // count * room >= SMALLEST_BYTES:
            less.insert(0, replace(wanted, buffers=BUFFERS))
        try:
            line = CalledLane.attach(self.address, less)
            if len(steps) > 1 and not line.lane.goes_ahead:  # a CPU computes one step sooner than several
                self._refusals.limited(kind, MOST_ROWS)
                line.close(min(DETACH_SECONDS, clock.remaining))
                return None
            with self._lock:
                self._lines.add(line)
                closed = self._closed
            if closed:  # meanwhile
                line.end()
            return line
        except MoeError as refused:
            if isinstance(refused, InvalidArgument) and refused.message.startswith("rows:"):
                self._refusals.limited(kind, (len(steps) - 1) * MOST_ROWS or count - 1)
            else:
                self._refusals.refused(several=len(steps) > 1)
            log.info("calls of %d rows to %s have no device lane now: %s", count, self.address, refused)
            return None

    def _give(self, line: CalledLane, clock: Clock) -> None:
        """Keeps a lane for the next call, unless it is gone."""
        keeps = line.alive
        with self._lock:
            keeps = keeps and not self._closed
            if keeps:
                self._idle.append(line)
            else:
                self._lines.discard(line)
        if not keeps:
            line.close(min(DETACH_SECONDS, clock.remaining) if line.alive else 0.0)
