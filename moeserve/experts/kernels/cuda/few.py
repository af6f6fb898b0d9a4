"""A step of few rows a slot in one launch: gate and up, the activation, down. Its text is in `text/few`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moeserve.device.arguments import Argument, Arguments, TensorMap
from moeserve.device.nvrtc import Function, Program, tensor_map
from moeserve.device.residency import resident_blocks
from moeserve.device.source import Part
from moeserve.device.streams import SPARED, TRACKS, at_once, spared, track
from moeserve.device.waits import FIELDS, grid_wait
from moeserve.experts.batch import ExpertBatch, ExpertShape
from moeserve.experts.kernels.cuda.panels import map_by_eights, map_of
from moeserve.experts.kernels.cuda.steps import NUMBERS, OUTS, defined, numbers, source
from moeserve.experts.kernels.tiles import FewTile

PARTS = ("task", "work", "stream", "rows", "products", "sums", "step")

ROWS_FIELDS = {
    "x": "TensorMap",  # rows: bf16, or E4M3 codes
    "inner": "TensorMap",  # inner rows: bf16, or E4M3 codes
}
SIDES_FIELDS = {
    "gate_up_scale": "const float*?",  # four-bit: one a row, [e, n]; FP8: [e, n / 128, k / 128]
    "gate_up_bias": "const float*?",  # [e, n]
    "down_scale": "const float*?",
    "down_bias": "const float*?",
    "x_scale": "const void*?",  # FP8: float32 [R, H / 128], or bf16 rows [R, H] if these are rounded here
    "counts": "const int*",
    "offsets": "const int*",
    "inner_rows": "void*",  # bf16 [R, I]; FP8: float32, or E4M3 codes and then their scales [R, I / 128]
    "out": "void*",  # [R, H]
    "turns": "u64*",  # of blocks, never reset
    **FIELDS,
    "rows": "int",  # R
    "slots": "int",
    "hidden": "int",  # H
    "inner_size": "int",  # I
    **NUMBERS,
}

CODES = Arguments(
    "FewArguments",
    **ROWS_FIELDS,
    gate_up="TensorMap",  # as down, in rows of 2048 bytes
    gate_up_scales="TensorMap",  # as down_scales, in rows of 512 bytes
    down="const u8*",  # [e, blocks of 64 rows, pieces of 256, 8192]
    down_scales="const u8*",  # [e, blocks, pieces, 1024]
    **SIDES_FIELDS,
)
"""What the kernel of four-bit weights takes."""

PANELS = Arguments("FewArguments", **ROWS_FIELDS, gate_up="TensorMap", down="TensorMap", **SIDES_FIELDS)
"""What the kernels of FP8 and bf16 weights take: panels, of gate and up by eights."""

ARGUMENTS = {"fp4": CODES, "fp8": PANELS, "bf16": PANELS}


def sources(kind: str) -> tuple[Part, ...]:
    """The parts of the text for weights of `kind`."""
    return ("codes.cu", "waits.cu", ARGUMENTS[kind], *(f"few/{part}.cu" for part in PARTS))


MOST_SLOTS = 512
"""The most slots that the list in shared memory has room for."""

INNER_MULTIPLE = 32
"""What the inner size must be a multiple of: half a block of 64 rows of weights."""

if TYPE_CHECKING:
    from moeserve.experts.kernels.triton.grouped import GroupedWeights

KINDS = {"fp4": 0, "fp8": 1, "bf16": 2}
STAGE_BYTES = {"fp4": 9216, "fp8": 8192, "bf16": 8192}
HELPER_WARPS = 4
"""Warps beside those that multiply."""

ROW_BYTES = {"fp4": 512, "fp8": 128, "bf16": 128}
"""Bytes of a row in a piece."""


@dataclass(frozen=True)
class FewForm:
    """One compiled form of the kernel."""

    kind: str
    tile: FewTile
    bias: bool = False
    limited: bool = False
    out: torch.dtype = torch.bfloat16
    rounds: bool = False  # fp8: rows come in bf16, and are rounded in the kernel

    @property
    def shared(self) -> int:
        """How many bytes of shared memory a block needs."""
        tile, rows = self.tile, self.tile.rows
        rings = tile.workers * tile.stages
        scales = 4 * tile.pieces * rows + 8 * rings if self.kind == "fp8" else 0
        rows_bytes = tile.pieces * rows * ROW_BYTES[self.kind] + scales
        barriers = 8 * (2 * rings + 2 * tile.pieces)
        sums = tile.workers // 2 * 64 * rows * 4
        return rows_bytes + rings * STAGE_BYTES[self.kind] + sums + MOST_SLOTS * 4 + barriers + 16


def step(
    form: FewForm,
    x: tuple[Tensor, Tensor | None],
    batch: ExpertBatch,
    sides: Sequence[GroupedWeights],
    shape: ExpertShape,
) -> Tensor:
    """`[R, H]` of `form.out`: rows `x` through gate and up `sides[0]`, and down `sides[1]`.

    `x` is bf16 `[R, H]`, or E4M3 codes with scales `[R, H / 128]`. Codes of FP8 and bf16 sides are panels.
    Rows outside the slots' segments are not written. Nothing is read on the host. RuntimeError: blocks of an
    earlier launch waited in vain for others.
    """
    codes, scale = x
    rows, device = codes.shape[0], codes.device
    wait = grid_wait("few", device)
    wait.check()
    between = torch.float32 if form.kind == "fp8" else torch.bfloat16
    inner = torch.empty((rows, shape.inner), dtype=between, device=device)
    out = torch.empty((rows, shape.hidden), dtype=form.out, device=device)
    gate_up, down = sides
    given: dict[str, Argument] = {
        "x": tensor_map(_plain(codes), (8, 128 // codes.itemsize)),
        "inner": tensor_map(inner.view(torch.uint8).view(-1, shape.inner), (8, 128))
        if form.kind == "fp8"
        else tensor_map(inner, (8, 64)),
        "gate_up_scale": gate_up.scale,
        "gate_up_bias": gate_up.bias,
        "down_scale": down.scale,
        "down_bias": down.bias,
        "x_scale": codes if form.rounds else scale,
        "counts": batch.counts,
        "offsets": batch.offsets,
        "inner_rows": inner,
        "out": out,
        "turns": _turns(device)[track(), spared()],
        **wait.arguments(),
        "rows": rows,
        "slots": batch.slots,
        "hidden": shape.hidden,
        "inner_size": shape.inner,
        **numbers(shape.activation),
        **_weights(gate_up, down),
    }
    threads = form.tile.workers * 128 + HELPER_WARPS * 32
    blocks = resident_blocks(device) - spared()
    _function(form).launch(blocks, threads, given, shared=form.shared, cooperative=at_once())
    return out


def _weights(gate_up: GroupedWeights, down: GroupedWeights) -> dict[str, Argument]:
    """The arguments that hold the codes of both sides."""
    if gate_up.scale_words is None or down.scale_words is None:
        return {"gate_up": map_by_eights(gate_up.codes, 4), "down": map_of(down.codes)}
    return {
        "gate_up": _halves(gate_up.codes, 4),
        "gate_up_scales": _halves(gate_up.scale_words, 2),
        "down": down.codes,
        "down_scales": down.scale_words,
    }


def _plain(codes: Tensor) -> Tensor:
    """`codes` as bytes, where a code has one byte."""
    return codes.view(torch.uint8) if codes.itemsize == 1 else codes


def _halves(packed: Tensor, parts: int) -> TensorMap:
    """Blocks of 64 rows of four-bit weights, 256 of K deep, in boxes of 32 rows.

    `packed [e, N / 64, K / 256, ..]` int32 holds a block in `parts`, each with 32 rows before the others.
    """
    words = packed.shape[-1] * packed.shape[-2] // parts
    return tensor_map(packed.view(-1, words), (parts, words // 2), swizzle=0)


def options(form: FewForm) -> tuple[str, ...]:
    """The compiler's options for `form`."""
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
def _function(form: FewForm) -> Function:
    return Program(source(*sources(form.kind)), options(form)).function("few", ARGUMENTS[form.kind])


@cache
def _turns(device: torch.device) -> dict[tuple[int, int], Tensor]:
    """Blocks that came to the grid's barrier since the process began, by track, and by how many are spared.

    One word serves all launches of these on a device, which never run at once, and have as many blocks.
    """
    return {
        (at, spared): torch.zeros(1, dtype=torch.int64, device=device)
        for at in TRACKS
        for spared in (0, SPARED)
    }
