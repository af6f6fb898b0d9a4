"""A step of few rows a slot in one launch of `few.cu`: gate and up, the activation, down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moeserve.device.nvrtc import Argument, Function, Program, TensorMap, tensor_map
from moeserve.experts.batch import ExpertBatch, ExpertShape
from moeserve.experts.kernels.cuda.panels import map_by_eights, map_of
from moeserve.experts.kernels.cuda.steps import OUTS, defined, numbers, source
from moeserve.experts.kernels.tiles import FewTile

SOURCES = ("codes.cu", "few.cu")

MOST_SLOTS = 512
"""Slots that the list in shared memory has room for."""

INNER_MULTIPLE = 32
"""What the inner size must be a multiple of: half a block of 64 rows of weights."""

if TYPE_CHECKING:
    from moeserve.experts.kernels.triton.grouped import Weights

KINDS = {"fp4": 0, "fp8": 1, "bf16": 2}
STAGE_BYTES = {"fp4": 9216, "fp8": 8192, "bf16": 8192}
HELPER_WARPS = 4
"""Warps beside those that multiply."""

ROW_BYTES = {"fp4": 512, "fp8": 128, "bf16": 128}
"""Of a row in a piece."""


@dataclass(frozen=True)
class Form:
    """One compiled form of `few.cu`."""

    kind: str
    tile: FewTile
    bias: bool = False
    limited: bool = False
    out: torch.dtype = torch.bfloat16
    rounds: bool = False  # fp8: rows come in bf16, and are rounded in the kernel

    @property
    def shared(self) -> int:
        """Bytes of shared memory."""
        tile, rows = self.tile, self.tile.rows
        rings = tile.workers * tile.stages
        scales = 4 * tile.pieces * rows + 8 * rings if self.kind == "fp8" else 0
        rows_bytes = tile.pieces * rows * ROW_BYTES[self.kind] + scales
        barriers = 8 * (2 * rings + 2 * tile.pieces)
        sums = tile.workers // 2 * 64 * rows * 4
        return rows_bytes + rings * STAGE_BYTES[self.kind] + sums + MOST_SLOTS * 4 + barriers + 16


def step(
    form: Form,
    x: tuple[Tensor, Tensor | None],
    batch: ExpertBatch,
    sides: Sequence[Weights],
    shape: ExpertShape,
) -> Tensor:
    """`[R, H]` of `form.out`: rows `x` through gate and up `sides[0]`, and down `sides[1]`.

    `x` is bf16 `[R, H]`, or E4M3 codes with scales `[R, H / 128]`. Codes of FP8 and bf16 sides are panels.
    Rows outside the slots' segments are not written. Nothing is read on the host.
    """
    codes, scale = x
    rows, device = codes.shape[0], codes.device
    between = torch.float32 if form.kind == "fp8" else torch.bfloat16
    inner = torch.empty((rows, shape.inner), dtype=between, device=device)
    out = torch.empty((rows, shape.hidden), dtype=form.out, device=device)
    arguments: list[Argument] = [
        tensor_map(_plain(codes), (8, 128 // codes.itemsize)),
        tensor_map(inner.view(torch.uint8).view(-1, shape.inner), (8, 128))
        if form.kind == "fp8"
        else tensor_map(inner, (8, 64)),
    ]
    gate_up, down = sides
    if gate_up.scale_words is not None and down.scale_words is not None:
        arguments += [_halves(gate_up.codes, 4), _halves(gate_up.scale_words, 2)]
        arguments += [down.codes, down.scale_words]
    else:
        arguments += [map_by_eights(gate_up.codes, 4), map_of(down.codes)]
    for side in sides:
        some = inner if side.scale is None else side.scale
        arguments += [some, some if side.bias is None else side.bias]
    arguments += [codes if scale is None else scale, batch.counts, batch.offsets, inner, out, _turns(device)]
    arguments += [rows, batch.slots, shape.hidden, shape.inner, *numbers(shape.activation)]
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    threads = form.tile.workers * 128 + HELPER_WARPS * 32
    _function(form).launch(processors, threads, arguments, shared=form.shared, cooperative=True)
    return out


def _plain(codes: Tensor) -> Tensor:
    """Codes of a byte as bytes."""
    return codes.view(torch.uint8) if codes.itemsize == 1 else codes


def _halves(packed: Tensor, parts: int) -> TensorMap:
    """Blocks of 64 rows of four-bit weights, 256 of K deep, in boxes of 32 rows.

    `packed [e, N / 64, K / 256, ..]` int32 holds a block in `parts`, each with 32 rows before the others.
    """
    words = packed.shape[-1] * packed.shape[-2] // parts
    return tensor_map(packed.view(-1, words), (parts, words // 2), swizzle=0)


def options(form: Form) -> tuple[str, ...]:
    """What `few.cu` is told of a form."""
    flags = {
        "KIND": KINDS[form.kind],
        "ROWS": form.tile.rows,
        "WORKERS": form.tile.workers,
        "STAGES": form.tile.stages,
        "PIECES": form.tile.pieces,
        "BIAS": int(form.bias),
        "LIMITED": int(form.limited),
        "OUT": OUTS[form.out],
        "ROUND": int(form.rounds),
    }
    return defined(flags)


@cache
def _function(form: Form) -> Function:
    return Program(source(*SOURCES), options(form)).function("few")


@cache
def _turns(device: torch.device) -> Tensor:
    """Blocks that came to the grid's barrier since the process began.

    One word serves all launches of a device: a block takes a whole multiprocessor and a launch all of them,
    so that two launches never run at once.
    """
    return torch.zeros(1, dtype=torch.int64, device=device)
