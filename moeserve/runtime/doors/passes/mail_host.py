"""`MailHost`: makes the lanes whose steps are launched ahead, at a rank that computes on a GPU."""

from __future__ import annotations

import logging
import re

import torch

from moeserve.device.sharing import GpuProcesses
from moeserve.dispatch.mail.host_layout import HostMailLayout
from moeserve.dispatch.mail.layout import MailLayout
from moeserve.proto import moe_pb2
from moeserve.proto.passes.attached import ANY_WIRE
from moeserve.proto.tensors import TensorError
from moeserve.proto.texts import quoted
from moeserve.runtime.doors.device_errors import DeviceRefused
from moeserve.runtime.doors.passes.announced import LaneMemory, LaneModel, LaneTerms
from moeserve.runtime.doors.passes.device_lane import DeviceLane
from moeserve.runtime.doors.passes.host_lane import HostLane
from moeserve.runtime.doors.passes.mail_lane import MailLane
from moeserve.runtime.doors.passes.turns import Turns
from moeserve.runtime.rank.runs.host_memory import HostMemory
from moeserve.runtime.rank.runs.member_runs import CannotRun, MemberRuns

log = logging.getLogger(__name__)

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

GPU = re.compile(r"cuda:[0-9a-fA-F-]{36}")


class MailHost:
    """Checks what callers with a GPU ask for, and makes their lanes, and those of callers of the host.

    lane_bytes: of device memory, of one lane at most. share_gpu: callers may share the rank's GPU, and both
    then take turns of milliseconds. host_ahead: whether steps of rows in host memory are launched ahead, too:
    auto (while no other process computes on the GPU), always, or never.
    """

    def __init__(
        self,
        runs: MemberRuns,
        model: LaneModel,
        lane_bytes: int,
        *,
        share_gpu: bool = False,
        host_ahead: str = "never",
    ) -> None:
        self._host_ahead = host_ahead
        self._processes = GpuProcesses(runs.device_uuid) if host_ahead == "auto" else None
        if self._processes is not None:
            self._processes.look()
        self._runs, self._model, self._lane_bytes, self._share_gpu = runs, model, lane_bytes, share_gpu
        self._turns = Turns()

    @property
    def retired(self) -> int:
        """Lanes that were detached, and whose memory is not free yet."""
        return self._runs.retired

    def await_launches(self, seconds: float) -> None:
        """Returns once all runs that lanes have begun are launched, or after so many seconds."""
        self._runs.await_launches(seconds)

    def looks(self, *, launches: bool) -> None:
        """A look begins. launches: by the thread that launches steps, so that what lanes begin is launched at
        once.
        """
        self._runs.looked_here = launches

    def waits_for(self, lane: MailLane) -> bool:
        """Whether others wait for what lies on the device, so that nothing of this lane may wait there for
        rows.
        """
        return self._runs.waits_for(lane)

    def flow(self, lanes: list[MailLane]) -> None:
        """These are the lanes of callers' GPUs whose callers have wanted steps lately."""
        self._turns.flows = [any(lane.short is short for lane in lanes) for short in (False, True)]

    @property
    def own_gpu(self) -> bool:
        """Whether steps of callers of the host may wait on the GPU: no other process computes there, which
        would get turns of milliseconds meanwhile, or the key says that it does not matter.
        """
        return self._processes is None or self._processes.alone

    def check(self, device: str) -> None:
        """Raises DeviceRefused where rows of this GPU cannot be taken here."""
        if not GPU.fullmatch(device):
            raise DeviceRefused(f"device: {quoted(device)} is neither cpu nor cuda: and the UUID of a GPU")
        if self._runs.by_service and not self._share_gpu:
            raise DeviceRefused(
                "device: this rank computes by NVIDIA's multi-process service (MPS), where a caller that is "
                "killed ends the rank and all others, too: start it with CUDA_MPS_PIPE_DIRECTORY naming a "
                "directory in which no such service listens"
            )
        if self._runs.device_uuid == device.removeprefix("cuda:") and not self._share_gpu:
            raise DeviceRefused(
                f"device: {quoted(device)} computes this rank's experts, and two processes on one GPU take "
                "turns of milliseconds; call from another GPU, or run in process (mode 'in_process')"
            )

    def lane(
        self, request: moe_pb2.AttachLaneRequest, memory: LaneMemory, terms: LaneTerms
    ) -> tuple[MailLane, bytes]:
        """A lane, and the handle of its mailbox, which the caller maps. Raises DeviceRefused, TensorError."""
        model, runs, name = self._model, self._runs, memory.layout.dtype.name
        if DTYPES.get(name) != runs.dtype:
            raise DeviceRefused(f"dtype: {name} is not {runs.dtype}, in which this rank computes")
        sizes = (request.rows, request.stages, model.hidden, model.experts, model.top_k)
        try:
            runs.check(request.rows, terms.patience)
            layout = MailLayout(*sizes, runs.dtype, self._wire(request))
            if (needed := layout.mailbox_bytes + layout.answers_bytes) > self._lane_bytes:
                raise TensorError(
                    "rows",
                    f"{request.rows} rows at {request.stages} stages take {needed} bytes of device memory, "
                    f"and passes.lane_bytes is {self._lane_bytes}",
                )
            mail = runs.attach(layout, request.answers_handle, terms.patience)
        except CannotRun as error:
            raise DeviceRefused(f"device: {error}") from error
        lane = MailLane(memory, terms, (layout, mail), runs)
        lane.turns = self._turns
        return lane, mail.handle

    def host_lane(self, memory: LaneMemory, terms: LaneTerms, calls: DeviceLane) -> HostLane | None:
        """A lane of rows in host memory whose steps are launched ahead, too; None where they cannot be.
        `calls`: the lane on the same memory whose steps are calls.
        """
        layout, runs, box = memory.layout, self._runs, memory.held
        dtype = DTYPES.get(layout.dtype.name)
        if self._host_ahead == "never":
            return None
        if dtype is None or dtype != runs.dtype or layout.rows > runs.most_rows:
            return None  # to convert rows, or to divide them among steps, is for calls
        if not all(one.reached for one in box):
            return None  # why it is not registered was logged

        def let_go() -> None:
            for one in box:
                one.close()

        sizes = layout.rows, layout.stages, layout.hidden, layout.experts, layout.top_k
        try:
            runs.check(layout.rows, terms.patience)
            made = HostMailLayout(*sizes, dtype, buffers=layout.buffers)
            there = HostMemory.of(box[0].memory, box[1].memory, let_go)
            mail = runs.attach_host(made, there, terms.patience)
        except (CannotRun, ValueError) as error:
            log.info("steps of a caller's rows in host memory are not launched ahead: %s", error)
            return None
        except RuntimeError as error:  # the device has no room: the caller is served all the same
            log.warning("steps of a caller's rows in host memory are not launched ahead: %s", error)
            return None

        def may_run() -> bool:
            try:
                runs.check(layout.rows, terms.patience)
            except CannotRun:
                return False
            return runs.open and layout.rows <= runs.most_rows

        both = calls, MailLane(memory, terms, (made, mail), runs)
        return HostLane(memory, terms, both, may_run)

    def _wire(self, request: moe_pb2.AttachLaneRequest) -> str:
        """In which the rows are to come."""
        if not request.rows_wire:
            return ""
        taken = self._runs.wire(request.rows)
        if request.rows_wire not in (ANY_WIRE, taken):
            how = f"{taken} or as they are" if taken else "as they are"
            raise DeviceRefused(
                f"rows_wire: {quoted(request.rows_wire)}; this rank's layers take rows {how} (plan.wire)"
            )
        return taken
