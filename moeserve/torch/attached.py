"""`Attached`: rows go to a service by memory that one of its ranks maps too, without messages.

A model's forward pass is a round of a *standing pass* over the layers of the service, which is announced
once. A call out of that order costs an announcement, and nothing else.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moeserve.proto.errors import MoeError, NotFound, Overloaded, Unavailable, WeightsChanged
from moeserve.proto.passes.attached import DETACH_SECONDS, AttachedLane
from moeserve.proto.passes.running import Pass, PassLate
from moeserve.proto.tensors import as_torch
from moeserve.torch.ways import CLOSED, Rounds, Rows, Sizes, WrongRows, check_process

log = logging.getLogger(__name__)

AGAIN_SECONDS = 0.05
"""Between two attempts, while the service does not answer."""


class Pinned:
    """Memory of a lane that is registered with this process's GPU, whose engines then copy from and to it.

    Where it cannot be, copies take a way of the driver's own, slower, and the reason is logged.
    """

    def __init__(self, addresses: list[int], *, whole: bool) -> None:
        self._addresses = addresses
        self.whole = whole  # whether all of it is registered

    @classmethod
    def of(cls, memory: tuple[memoryview, ...]) -> Pinned:
        """Registers each of `memory`."""
        registered = []
        for one in memory:
            address = torch.frombuffer(one, dtype=torch.uint8).data_ptr()
            status = int(torch.cuda.cudart().cudaHostRegister(address, one.nbytes, 0))  # type: ignore[no-untyped-call]
            if status:
                log.warning("a lane's %d bytes are not registered: CUDA error %d", one.nbytes, status)
            else:
                registered.append(address)
        return cls(registered, whole=len(registered) == len(memory))

    def end(self) -> None:
        """Waits for the GPU, and ends the registration."""
        torch.cuda.synchronize()
        for address in self._addresses:
            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


@dataclass
class _Call:
    """A call that was submitted."""

    layer: int
    rows: Rows  # the caller's, which may be wanted again
    round: int  # the forward pass that it belongs to
    stage: int  # whose step it is; -1: none, its pass ended before it could be begun, or answered
    answer: Tensor | None = None


class Attached:
    """Experts behind a service on this host, whose rank shares memory with this process.

    `attach` makes the lane within so many seconds, and makes it again where its rank has gone. A step is
    pure, so that one whose pass ended without its answer is run again, until `timeout` has passed.
    one_version: all layers of one forward pass must have the same weights: a reload between them raises
    WeightsChanged, and the caller runs its forward pass again. One begins where a layer is called that is
    not after the last one (`Rounds`).
    """

    def __init__(
        self, attach: Callable[[float], AttachedLane], timeout: float = 60.0, *, one_version: bool = False
    ) -> None:
        self.order = torch.zeros(1, dtype=torch.int64)
        self._attach, self._timeout, self._one_version = attach, timeout, one_version
        self._lane: AttachedLane | None = attach(timeout)
        layout = self._lane.layout
        self._sizes = Sizes(layout.hidden, layout.experts, layout.top_k)
        self._stages, self._most_rows = layout.stages, layout.rows
        self._pass: Pass | None = None
        self._closed = False
        self._process = os.getpid()
        self._pinned: Pinned | None = None  # once rows come from a GPU
        self._read: dict[int, torch.cuda.Event] = {}  # by stage: when a GPU has read its last answer
        self._calls: dict[int, _Call] = {}
        self._numbers = 0
        self._rounds = Rounds(self._stages)
        self._versions: dict[int, int] = {}  # of the weights, by round, once an answer told

    def mixed(self, layer: int, rows: Rows) -> Tensor:
        """As `Way.mixed`; raises WrongRows, and MoeError where no answer came within the timeout."""
        return self.wait(self.submit(layer, rows))

    def submit(self, layer: int, rows: Rows) -> int:
        """As `Way.submit`. Raises RuntimeError where all stages are busy, and after a fork."""
        check_process(self._process)
        self._sizes.check(layer, rows)
        if rows.hidden.shape[0] > self._most_rows:
            raise WrongRows(
                f"layer {layer}: {rows.hidden.shape[0]} rows, and the way was opened for {self._most_rows}; "
                "raise Settings.rows"
            )
        now = self._rounds.at(layer)
        if len(self._calls) >= self._stages:  # of earlier forward passes nobody waits any more
            self._calls = {number: one for number, one in self._calls.items() if one.round == now}
        if len(self._calls) >= self._stages:
            raise RuntimeError(
                f"{self._stages} calls are under way, as many as there are stages; wait for one, or raise "
                "Settings.stages"
            )
        rows.refuse_recording()
        self._versions = {of: version for of, version in self._versions.items() if of >= now - 1}
        call = _Call(layer, rows.detached(), now, -1)
        self._numbers += 1
        self._calls[self._numbers] = call
        try:
            self._post(call, time.monotonic() + self._timeout)
        except Unavailable:
            self._forget_pass()  # `wait` tries again
        except BaseException as failed:
            del self._calls[self._numbers]
            self._doubt(failed)
            raise
        return self._numbers

    def wait(self, number: int) -> Tensor:
        """As `Way.wait`; bounded by the timeout. Raises RuntimeError after a fork."""
        check_process(self._process)
        if number not in self._calls:
            raise KeyError(
                f"call {number} is not under way: each submitted call is waited for once, and before a later "
                "forward pass needs its stage; Settings.stages says how many there are"
            )
        call = self._calls[number]
        until = time.monotonic() + self._timeout
        try:
            while call.answer is None:
                self._try(call, until)
        except BaseException as failed:
            self._doubt(failed)
            raise
        finally:
            del self._calls[number]
        return call.answer

    def _doubt(self, failed: BaseException) -> None:
        """A pass in which something else than the service failed, as by a signal, is used no more: how far it
        is may not be known.
        """
        if not isinstance(failed, MoeError):
            self._forget_pass()

    def close(self) -> None:
        """Detaches the lane; later calls raise RuntimeError."""
        self._closed = True
        lane, self._lane = self._lane, None
        self._forget_pass()
        self._unpin()
        if lane is not None:
            lane.close()

    def _try(self, call: _Call, until: float) -> None:
        """Takes the answer of `call`, which is begun anew where its pass has ended. Raises MoeError."""
        try:
            if call.stage < 0:
                self._post(call, until)
            self._take(call, max(0.0, until - time.monotonic()))
        except (Unavailable, PassLate) as failed:
            changed = isinstance(failed, WeightsChanged) and call.round in self._versions
            self._forget_pass()
            if changed or time.monotonic() + AGAIN_SECONDS > until:
                raise
            if not isinstance(failed, (PassLate, WeightsChanged)):
                time.sleep(AGAIN_SECONDS)

    def _take(self, call: _Call, timeout: float) -> None:
        assert self._pass is not None
        stage = call.stage
        found = self._pass.arrived(stage, timeout)
        version = self._pass.version(stage)
        if self._one_version and self._versions.setdefault(call.round, version) != version:
            text = f"layer {call.layer} has weights version {version}, an earlier one of this forward pass "
            raise WeightsChanged("UNAVAILABLE", "wrong_version", f"{text}{self._versions[call.round]}")
        there = as_torch(found.storage.data, found.spec)
        hidden = call.rows.hidden
        call.answer, call.stage = torch.empty_like(hidden, memory_format=torch.contiguous_format), -1
        call.answer.copy_(there, non_blocking=self._pinned is not None)
        if self._pinned is not None and hidden.is_cuda:
            self._read[stage] = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._read[stage].record()

    def _post(self, call: _Call, until: float) -> None:
        """Brings the rows of `call` at a stage that is at its layer; in a new pass where none is."""
        lane = self._attached(until)
        if self._pass is None or self._pass.status is not None or self._free(call.layer) is None:
            self._finish_others(call, until)
            self._pass = None  # it is left, also where that takes longer than there is
            self._pass = lane.begin(
                _from(lane.layers, call.layer),
                stages=self._stages,
                standing=True,
                any_weights=not self._one_version,
                weights_version=self._versions.get(call.round, 0) if self._one_version else 0,
                timeout=max(0.0, until - time.monotonic()),
            )
        stage = self._free(call.layer)
        assert stage is not None
        self._fill(self._pass, stage, call.rows)
        call.stage = stage

    def _fill(self, run: Pass, stage: int, rows: Rows) -> None:
        """Copies the rows into the mailbox, waits for that, and says so."""
        if rows.hidden.is_cuda and self._pinned is None:
            assert self._lane is not None
            self._pinned = Pinned.of(self._lane.memory.bytes)
        if (read := self._read.pop(stage, None)) is not None:
            read.synchronize()  # the copy of the answer that is about to be written over
        count, logits = rows.hidden.shape[0], rows.weights is None
        hidden, ids, weights, scores = (
            as_torch(room.storage.data, room.spec) for room in run.room(stage, count)
        )
        route = (scores, rows.route) if logits else (ids, rows.ids(self._sizes.experts))
        for into, given in ((hidden, rows.hidden), route, (weights, rows.weights)):
            if given is not None:
                into.copy_(given, non_blocking=True)  # which converts it, too
        if rows.hidden.is_cuda:
            torch.cuda.current_stream(rows.hidden.device).synchronize()
        run.send(stage, count, logits=logits)

    def _free(self, layer: int) -> int | None:
        """A stage without a step under way whose next layer is `layer`."""
        assert self._pass is not None
        run = self._pass
        return next(
            (at for at in range(run.stages) if not run.under_way(at) and run.layer(at) == layer), None
        )

    def _finish_others(self, call: _Call, until: float) -> None:
        """Takes the answers under way before their pass is left; what has none by then is begun anew."""
        for other in self._calls.values():
            if other is not call and other.stage >= 0:
                try:
                    self._take(other, max(0.0, until - time.monotonic()))
                except MoeError:
                    other.stage = -1

    def _attached(self, until: float) -> AttachedLane:
        """The lane, attached anew where its rank has gone. Raises RuntimeError after `close`."""
        if self._closed:
            raise RuntimeError(CLOSED)
        if self._lane is not None and not self._lane.alive:
            gone, self._lane = self._lane, None
            self._forget_pass()
            self._unpin()
            gone.close(min(DETACH_SECONDS, max(0.0, until - time.monotonic())))
        if self._lane is None:
            try:
                self._lane = self._attach(max(0.0, until - time.monotonic()))
            except (NotFound, Overloaded) as away:
                # there was one: others serve its experts until it is back, or their lanes are taken
                raise Unavailable("UNAVAILABLE", away.reason, away.message) from away
        return self._lane

    def _unpin(self) -> None:
        """Ends what a GPU may do with the lane's memory, which is about to be unmapped."""
        pinned, self._pinned, self._read = self._pinned, None, {}
        if pinned is not None:
            pinned.end()

    def _forget_pass(self) -> None:
        """The pass has ended, or is of no use: what is under way of it is begun anew."""
        self._pass = None
        for call in self._calls.values():
            call.stage = -1


def _from(layers: tuple[int, ...], first: int) -> tuple[int, ...]:
    """The layers in their order, from `first` on and round. Raises WrongRows where it is none of them."""
    if first not in layers:
        raise WrongRows(f"layer {first} has no experts served there; layers {list(layers)} have")
    at = layers.index(first)
    return layers[at:] + layers[:at]
