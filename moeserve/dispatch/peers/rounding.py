"""`rounding`: how rows become those of their wire on one device, in one kernel where that is a GPU."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from moeserve.device.arguments import Argument, Arguments
from moeserve.device.machine import installed
from moeserve.device.nvrtc import NEEDED_MODULE, CompileError, LaunchError, Program
from moeserve.device.overlap import overlaps
from moeserve.device.source import Part, source
from moeserve.dispatch.dispatcher import DispatchSpec
from moeserve.dispatch.peers.wires import SOURCES, RowRecord, WireCode, wire_code
from moeserve.quant.format import Packed

log = logging.getLogger(__name__)

ROUND = Arguments("RoundArguments", rows="const u8*", records="u8*", factor="float")
SOURCES_OF_ROUNDING: tuple[Part, ...] = ("memory.cu", "numbers.cu", "records.cu", ROUND, "round.cu")
HIDDEN_MULTIPLE = 128
"""Columns of a group: a row has whole ones."""

PIECE = 16  # columns of a thread
MOST_THREADS = 512

Rounding = Callable[[Tensor], Packed]
"""Hidden states `[T, H]` in a wire format, with the bits of the format's own rule."""


def rounding(spec: DispatchSpec) -> Rounding:
    """Loads what rounds rows of `spec`: a kernel for a wire that it knows, else the format's own rule, whose
    operations take a launch each.
    """
    device = torch.device(spec.device)
    fits = spec.hidden % HIDDEN_MULTIPLE == 0 and spec.dtype in SOURCES
    if not overlaps(device) or not fits or not installed(NEEDED_MODULE):
        return spec.wire.quantize
    code = wire_code(spec)
    if not code.fused:
        return spec.wire.quantize
    try:
        return _by_kernel(spec, code)
    except (CompileError, LaunchError) as error:
        log.warning("rows are rounded to %s by torch, a launch an operation: %s", spec.wire.name, error)
        return spec.wire.quantize


def program(code: WireCode) -> Program:
    """The text of the kernel."""
    return Program(source("moeserve.dispatch.peers", *SOURCES_OF_ROUNDING), code.options)


def _by_kernel(spec: DispatchSpec, code: WireCode) -> Rounding:
    record, wire = RowRecord(spec.wire, spec.hidden), spec.wire
    with torch.cuda.device(spec.device):
        kernel = program(code).function("round_rows", ROUND)
    threads = min(MOST_THREADS, -(-spec.hidden // (32 * PIECE)) * 32)

    def rounded(hidden: Tensor) -> Packed:
        rows = hidden.to(spec.dtype).contiguous()
        if not rows.shape[0]:
            return wire.quantize(rows)
        if rows.data_ptr() % 16:
            rows = rows.clone()
        records = torch.empty((rows.shape[0], record.nbytes), dtype=torch.uint8, device=rows.device)
        given: dict[str, Argument] = {"rows": rows, "records": records, "factor": code.factor}
        kernel.launch(rows.shape[0], threads, given, overlapped=True)
        return Packed(wire, rows.shape, record.parts(records))

    return rounded
