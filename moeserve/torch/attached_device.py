"""`AttachedDevice`: rows of this process's GPU go to a service's GPU on this host, and no host is between.

A forward pass is a round of a standing pass over the layers of the service. Kernels count the steps on the
device, so that a call can be a part of the caller's CUDA graph.
"""

from __future__ import annotations

import logging
import threading

import torch
from torch import Tensor

from moeserve.dispatch.mail.kernels import CallerKernels, Given, words
from moeserve.dispatch.mail.layout import VERSION_AT, WORDS, MailLayout, Word
from moeserve.proto.errors import MoeError, NotFound, Overloaded, Unavailable
from moeserve.proto.passes.mailbox import WORD, Status
from moeserve.proto.passes.running import LOST, Pass
from moeserve.torch.caller_lane import Attach, CallerLane
from moeserve.torch.stages import Stages
from moeserve.torch.ways import CLOSED, Rounds, Rows, Sizes, WrongRows

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.02
"""Between looks whether the rank of the lane is there, and the pass goes on; else nothing waits for it."""


class AttachedDevice:
    """Experts behind a service on this host, reached from GPU `device` by a device lane.

    Every forward pass calls all of the service's layers in their order, each with the rows of all stages; a
    call out of that order begins another pass. A call waits for nothing on the host: `check` says whether the
    answers since the last time are right; those of a pass that has ended are zeros.
    """

    def __init__(
        self,
        attach: Attach,
        layout: MailLayout,
        device: torch.device,
        timeout: float = 60.0,
        layers: tuple[int, ...] = (),
        *,
        one_version: bool = False,
        rows_wire: str = "",
    ) -> None:
        """layout: of the lane, without a wire. timeout: seconds for an answer, and for a service that does
        not answer. layers: those of a forward pass, in their order; (): the service's. one_version: all steps
        of a pass must have the same weights; after a reload `check` raises WeightsChanged. rows_wire: in
        which rows travel, as in AttachLaneRequest: answers have the same bits.
        """
        self.order = torch.zeros(1, dtype=torch.int64, device=device)
        self._attach, self._device, self._asked_wire = attach, device, rows_wire
        self._in_graphs = False  # a graph was recorded, whose kernels bring rows in this layout's wire
        self._timeout, self._layers = timeout, layers
        self._one_version, self._demanded = one_version, 0
        self._sizes = Sizes(layout.hidden, layout.experts, layout.top_k)
        with torch.cuda.device(device):
            self._table = words(device)
            self._abort, self._words = _pinned(1, torch.int32), _pinned(WORDS, torch.int64)
        self._gone: list[CallerLane] = []  # whose ranks are, and that are yet to be closed
        self._lane: CallerLane | None
        self._lane, self._kernels = self._made(layout, rows_wire)
        self._layout = layout = self._lane.layout
        self._pass: Pass | None = None
        self._stages = Stages(layout.stages, lambda: torch.cuda.current_stream(device))
        self._calls: dict[int, tuple[int, Tensor, int]] = {}  # stage, rows, and forward pass, by number
        self._numbers = 0
        self._rounds = Rounds(layout.stages)
        self._failed: MoeError | None = None  # what a pass ended with that was left since the last `check`
        self._lock = threading.Lock()  # for which pass runs, and whether its kernels wait
        self._closing = threading.Event()
        threading.Thread(target=self._watch, name="device-lane", daemon=True).start()

    def mixed(self, layer: int, rows: Rows) -> Tensor:
        """As `Way.mixed`. Raises WrongRows, and MoeError where no pass can be begun."""
        return self.wait(self.submit(layer, rows))

    def submit(self, layer: int, rows: Rows) -> int:
        """As `Way.submit`. Raises RuntimeError where all stages are busy."""
        with torch.cuda.device(self._device):
            number, stage, given = self._begun(layer, rows)
            self._kernels.bring(stage, layer, given, self._header_at(stage))
        return number

    def wait(self, number: int) -> Tensor:
        """As `Way.wait`; only the current stream waits."""
        with torch.cuda.device(self._device):
            stage, out, dtype = self._answered(number)
            self._kernels.fetch(stage, out)
        return out.to(dtype)

    def exchange(self, layer: int, rows: Rows, number: int) -> tuple[int, Tensor]:
        """As `ways.exchange`, by one kernel where the rows are few."""
        with torch.cuda.device(self._device):
            begun, stage, given = self._begun(layer, rows)
            if number not in self._calls:  # its pass was left just now: the rows come, and `number` fails
                self._kernels.bring(stage, layer, given, self._header_at(stage))
            fetched, out, dtype = self._answered(number)
            self._kernels.exchange(stage, layer, given, self._header_at(stage), (fetched, out))
        return begun, out.to(dtype)

    def _begun(self, layer: int, rows: Rows) -> tuple[int, int, Given]:
        """The number of a call that is under way now, its stage, and what is brought."""
        self._check(layer, rows)
        now = self._rounds.at(layer)
        given = self._given(rows)
        stage = self._stage_at(layer, self._free(now))
        self._stages.follow(stage, capturing=torch.cuda.is_current_stream_capturing())
        self._numbers += 1
        self._calls[self._numbers] = stage, rows.hidden, now
        return self._numbers, stage, given

    def _answered(self, number: int) -> tuple[int, Tensor, torch.dtype]:
        """The stage of a call that is under way no more, memory for its answer, and what that becomes."""
        if number not in self._calls:
            raise KeyError(f"call {number} is not under way: each submitted call is waited for once")
        stage, hidden, _ = self._calls.pop(number)
        self._stages.follow(stage, capturing=torch.cuda.is_current_stream_capturing())
        return stage, torch.empty(hidden.shape, dtype=self._layout.dtype, device=self._device), hidden.dtype

    def _free(self, now: int) -> list[int]:
        """Stages without a call under way; where calls of earlier forward passes have all, these are left."""
        stale = any(of < now for _, _, of in self._calls.values())
        if len(self._calls) >= self._layout.stages and stale and not torch.cuda.is_current_stream_capturing():
            self._leave()  # nobody waits for them any more, and the device has not counted them
        busy = {stage for stage, _, _ in self._calls.values()}
        free = [stage for stage in range(self._layout.stages) if stage not in busy]
        if not free:
            raise RuntimeError(
                f"{self._layout.stages} calls are under way, as many as there are stages; wait for one, or "
                "raise Settings.stages"
            )
        return free

    def check(self) -> None:
        """Waits for the device. Raises what a pass has ended with since the last time: PassLate, Unavailable
        where the service could not answer or its rank is gone, WeightsChanged, InvalidArgument; some answers
        since then are zeros. A graph that was recorded stays true: `renew` and replay it.
        """
        torch.cuda.synchronize(self._device)
        self._close_gone()
        failed, self._failed = self._failed or self._ended(), None
        if failed is not None:
            self._forget()
            raise failed

    def renew(self) -> None:
        """Makes the lane again where its rank has gone, and begins another pass where none runs. Calls do so
        by themselves; a graph that is replayed cannot.
        """
        with torch.cuda.device(self._device):
            lane = self._attached()
            if self._pass is None or self._pass.status is not None:
                self._begin(lane, (self._layers or lane.lane.layers)[0])

    def demand(self, version: int) -> None:
        """Says between two forward passes that from now on layers must have this version of the weights;
        where they do not, their answers are zeros and `check` raises WeightsChanged. 0: they need not. It
        begins another pass; before a recorded graph is replayed, call `renew`.
        """
        if version != self._demanded:
            self._demanded = version
            if self._pass is not None:
                self._leave()

    def version(self, stage: int = 0) -> int:
        """Waits for the device. The version of the weights that made the last answer of a stage; 0: there is
        none, or its lane is gone.
        """
        torch.cuda.synchronize(self._device)
        if self._lane is None:
            return 0
        at = self._layout.answer(stage)[0] + VERSION_AT
        return int(self._lane.answers.mine[at : at + 4].view(torch.int32).item())

    def close(self) -> None:
        """Waits for calls under way, and detaches the lane. What is replayed later answers zeros."""
        torch.cuda.synchronize(self._device)
        self._closing.set()
        with torch.cuda.device(self._device):
            self._end_on_device()
        with self._lock:
            lane, self._lane = self._lane, None
        self._close_gone(wait=True)
        if lane is not None:
            lane.close()

    def _ended(self) -> MoeError | None:
        """What the pass has ended with, for the device or for the rank; None while it runs. Nothing of it is
        under way on the device.
        """
        run, lane = self._pass, self._lane
        if run is None:
            return None
        try:
            if run.status not in (None, Status.OK):
                run.wait(0.0)
        except MoeError as failed:
            return failed
        if lane is None or not lane.lane.alive:
            return Unavailable("UNAVAILABLE", "lane_lost", LOST)
        if int(self._table[Word.ENDED].item()):
            text = f"an answer did not come within {self._timeout:g} s, or its pass has ended"
            return Unavailable("UNAVAILABLE", "lost", text)
        return None

    def _leave(self) -> None:
        """Leaves the pass that runs, once what is under way has ended; `check` tells what it ended with."""
        torch.cuda.synchronize(self._device)
        self._close_gone()
        self._failed = self._failed or self._ended()
        self._forget()

    def _forget(self) -> None:
        with self._lock:
            self._pass = None
        self._calls = {}
        self._stages.begin()

    def _end_on_device(self) -> None:
        """From now on no kernel of this way touches the lane's memory, also of graphs that are replayed."""
        self._table[Word.ENDED].fill_(int(Status.LOST))
        torch.cuda.synchronize(self._device)

    def _check(self, layer: int, rows: Rows) -> None:
        self._sizes.check(layer, rows)
        if rows.hidden.shape[0] > self._layout.rows:
            raise WrongRows(
                f"layer {layer}: {rows.hidden.shape[0]} rows, and the way was opened for "
                f"{self._layout.rows}; raise Settings.rows"
            )
        for name, given in zip(("hidden", "the route", "weights"), rows, strict=True):
            if given is not None and given.device != self._device:
                raise WrongRows(f"layer {layer}: {name} is on {given.device}; this way is of {self._device}")

    def _given(self, rows: Rows) -> Given:
        hidden = rows.hidden.detach().to(self._layout.dtype).contiguous()
        if hidden.data_ptr() % 16:
            hidden = hidden.clone()
        if rows.weights is None:
            return Given(hidden, rows.route.detach().float().contiguous(), None)
        ids = rows.ids(self._sizes.experts).contiguous()
        return Given(hidden, ids, rows.weights.detach().float().contiguous())

    def _header_at(self, stage: int) -> int:
        assert self._lane is not None
        return self._lane.lane.layout.header(stage) * WORD

    def _stage_at(self, layer: int, free: list[int]) -> int:
        """A free stage whose next layer this is; in another pass where there is none."""
        if torch.cuda.is_current_stream_capturing():
            return self._recorded_at(layer, free)
        recorded = self._stages.recorded()
        if any(steps % self._round for steps in recorded):
            raise RuntimeError(
                f"a graph was recorded with {recorded} steps of each stage, or its recording failed; whole "
                f"forward passes have multiples of {self._round}. Do not replay it; calls go on from here"
            )
        lane, run = self._attached(), self._pass
        first = (self._layers or lane.lane.layers)[0]
        fits = run is not None and run.status is None and self._stages.fits(layer, free, run.layers)
        if not fits or (run is not None and layer == first != run.layers[0]):
            self._begin(lane, layer)
            free = list(range(self._layout.stages))
        assert self._pass is not None
        stage = self._stages.take(layer, free, self._pass.layers)
        assert stage is not None
        return stage

    def _recorded_at(self, layer: int, free: list[int]) -> int:
        run = self._pass
        if run is None or not self._stages.whole(self._round):
            raise RuntimeError(
                "a CUDA graph is recorded in the middle of a forward pass, or before the first one: run one "
                "before, and record a whole one"
            )
        self._in_graphs = True
        stage = self._stages.take_recorded(layer, free, run.layers)
        if stage is None:
            raise WrongRows(f"layer {layer} is not the next one; a recorded forward pass calls {run.layers}")
        return stage

    @property
    def _round(self) -> int:
        return 1 if self._pass is None else len(self._pass.layers)

    def _begin(self, lane: CallerLane, layer: int) -> None:
        """Announces a standing pass over all layers, from `layer` on, and has kernels count from there."""
        layers = self._layers or lane.lane.layers
        if layer not in layers:
            raise WrongRows(f"layer {layer} has no experts served there; layers {list(layers)} have")
        at = layers.index(layer)
        stages = self._layout.stages
        if self._pass is not None:
            self._leave()
        ordered = layers[at:] + layers[:at]
        run = lane.lane.begin(
            ordered,
            stages=stages,
            standing=True,
            any_weights=not self._one_version,
            weights_version=self._demanded,
        )
        with self._lock:
            self._pass, self._abort[0] = run, 0
        told = self._words
        told.zero_()
        told[Word.MAILBOX], told[Word.ANSWERS], told[Word.MIRROR] = lane.addresses
        told[Word.NUMBER], told[Word.PATIENCE] = run.number, int(self._timeout * 1e9)
        told[Word.ABORT] = self._abort.data_ptr()
        self._table.copy_(told, non_blocking=True)
        torch.cuda.current_stream(self._device).synchronize()  # `told` is written again some time

    def _attached(self) -> CallerLane:
        """The lane, made anew where its rank has gone."""
        if self._closing.is_set():
            raise RuntimeError(CLOSED)
        if self._lane is not None and not self._lane.lane.alive:
            with self._lock:
                self._abort[0] = 1
            self._leave()
            self._end_on_device()
            with self._lock:
                gone, self._lane = self._lane, None
            gone.leave()
            self._gone.append(gone)
        if self._lane is None:
            self._close_gone()
            wire = self._layout.wire if self._in_graphs else self._asked_wire
            try:
                lane, self._kernels = self._made_anew(wire)
            except (NotFound, Overloaded) as away:  # others serve its experts until it is back
                raise Unavailable("UNAVAILABLE", away.reason, away.message) from away
            self._lane, self._layout = lane, lane.layout
        return self._lane

    def _made_anew(self, wire: str) -> tuple[CallerLane, CallerKernels]:
        """A lane in place of one whose rank is gone, which is freed before where memory is short."""
        try:
            return self._made(self._layout, wire)
        except RuntimeError as failed:
            if not self._gone:
                raise
            log.info("a lane is made once the one before is freed: %s", failed)
            self._close_gone(wait=True)
            return self._made(self._layout, wire)

    def _close_gone(self, *, wait: bool = False) -> None:
        """Frees the memory of lanes that were left, once their ranks write to it no more: until then another
        rank answers, for which nobody waits unless `wait` says so. The device is idle now.
        """
        for lane in [lane for lane in self._gone if wait or lane.left]:
            self._gone.remove(lane)
            lane.close()

    def _made(self, layout: MailLayout, wire: str) -> tuple[CallerLane, CallerKernels]:
        """A lane, and the kernels for its layout."""
        lane = CallerLane(self._attach, layout, self._device, wire)
        try:
            with torch.cuda.device(self._device):
                return lane, CallerKernels(lane.layout, self._table)
        except BaseException:
            lane.close()
            raise

    def _watch(self) -> None:
        """Has nothing on the device wait for a pass that has ended, or for a rank that is gone."""
        while not self._closing.wait(LOOK_SECONDS):
            with self._lock:
                lane, run = self._lane, self._pass
                if run is not None and (lane is None or not lane.lane.alive or run.status is not None):
                    self._abort[0] = 1


def _pinned(count: int, dtype: torch.dtype) -> Tensor:
    """Zeros in host memory that a GPU reads."""
    return torch.zeros(count, dtype=dtype, pin_memory=torch.cuda.is_available())
