"""What a caller asks for who wants to be attached, and what a rank allows."""

from __future__ import annotations

import re
from dataclasses import dataclass

from moeserve.proto import moe_pb2
from moeserve.proto.passes.attached import ANY_WIRE
from moeserve.proto.passes.mailbox import MOST_BUFFERS, MOST_STAGES, MailboxLayout
from moeserve.proto.tensors import FLOATS, TensorError
from moeserve.proto.texts import quoted
from moeserve.runtime.doors.device_errors import DeviceRefused
from moeserve.runtime.doors.passes.announced import LaneModel
from moeserve.runtime.doors.passes.mail_host import MailHost

NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")


@dataclass(frozen=True)
class DeviceLaneLimits:
    """What attached callers may take of a rank."""

    lanes: int = 8  # attached at once; 0: none
    bytes: int = 256 << 20  # of shared memory, of one lane
    rows: int = 4096  # of one step
    patience: float = 2.0  # seconds for the rows of a step that is next
    answer: float = 30.0  # seconds for an answer
    ahead: float = 0.02  # seconds that a forward pass launched before its rows may wait for them; 0: none is


def checked(
    request: moe_pb2.AttachLaneRequest,
    model: LaneModel,
    limits: DeviceLaneLimits,
    mail: MailHost | None,
    why_no_mail: str,
) -> MailboxLayout:
    """The lane that a caller asks for. Raises TensorError naming a wrong field, and DeviceRefused.

    mail: makes lanes of callers' GPUs; None: none are, and why.
    """
    if request.model not in ("", model.name):
        raise TensorError("model", f"{quoted(request.model)} is not served here; {model.name!r} is")
    if not NAME.fullmatch(request.name):
        raise TensorError("name", f"{quoted(request.name)} must be 1 to 64 letters, digits, '_', '.' or '-'")
    if request.device != "cpu" and mail is None:
        raise DeviceRefused(
            f"device: rows of {quoted(request.device)} cannot be brought by a device lane, only those in "
            f"host memory (cpu): {why_no_mail}"
        )
    if request.device != "cpu" and mail is not None:
        mail.check(request.device)
    if not 0 < request.rows <= limits.rows:
        raise TensorError("rows", f"{request.rows} is not one of 1 to {limits.rows} (step.lane_rows)")
    if not 0 < request.stages <= MOST_STAGES:
        raise TensorError("stages", f"{request.stages} is not one of 1 to {MOST_STAGES}")
    most = MOST_BUFFERS if request.device == "cpu" else 1  # a GPU's answers lie in its caller's memory
    if request.answer_buffers > most:
        raise TensorError("answer_buffers", f"{request.answer_buffers} is not one of 0 to {most}")
    dtype = moe_pb2.DType.Name(request.dtype) if request.dtype in moe_pb2.DType.values() else ""
    if (named := dtype.removeprefix("DTYPE_").lower()) not in FLOATS:
        raise TensorError("dtype", f"number {request.dtype} is not one of {', '.join(FLOATS)}")
    if request.device == "cpu" and request.rows_wire not in ("", ANY_WIRE):
        raise TensorError("rows_wire", f"{quoted(request.rows_wire)} is of a GPU's rows, not of the host's")
    if request.device == "cpu" and request.answers_handle:
        raise TensorError("answers_handle", "it is of a GPU's memory; answers to the host lie in a region")
    sizes = (model.hidden, model.experts, model.top_k)
    if request.device != "cpu":
        return MailboxLayout.of((1, request.stages), sizes, named)  # words alone
    buffers = request.answer_buffers or 1
    layout = MailboxLayout.of((request.rows, request.stages), sizes, named, buffers)
    if (needed := layout.mailbox_bytes + layout.answers_bytes) > limits.bytes:
        raise TensorError(
            "rows",
            f"{request.rows} rows at {request.stages} stages with {buffers} answer buffers take {needed} "
            f"bytes of shared memory, and passes.lane_bytes is {limits.bytes}",
        )
    return layout
