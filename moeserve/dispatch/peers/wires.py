"""How a row becomes a record on its way out: which formats the kernels make, and which torch makes before."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor

from moeserve.dispatch.dispatcher import DispatchSpec
from moeserve.dispatch.wire import row_bytes
from moeserve.quant.format import Format
from moeserve.quant.formats import STATIC, WIRES

RECORDS = 0
FUSED = {"fp8_group128": 1, "mxfp8": 2, "nvfp4_static": 3}
"""Formats that records.cu encodes, by the number it knows them by; other rows arrive there as records."""

SOURCES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}

ALIGN = 16


@dataclass(frozen=True)
class RowRecord:
    """Bytes of one row on the wire: the format's parts one after the other, each from a multiple of 16 on."""

    wire: Format
    hidden: int

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Bytes of each part of a row."""
        shapes = ((part, part.shape_of((1, self.hidden))[1]) for part in self.wire.parts)
        return tuple(part.dtype.itemsize * count for part, count in shapes)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The offset of each part in a row's record, in bytes."""
        ends = [0]
        for width in self.widths:
            ends.append(ends[-1] + -(-width // ALIGN) * ALIGN)
        return tuple(ends[:-1])

    @property
    def nbytes(self) -> int:
        """Bytes of a record, a multiple of 16."""
        return self.starts[-1] + -(-self.widths[-1] // ALIGN) * ALIGN

    def pack(self, hidden: Tensor) -> Tensor:
        """Quantizes `hidden [T, H]` by the format's own rule: records uint8 `[T, nbytes]`."""
        parts = self.wire.quantize(hidden).parts
        if self.widths == (self.nbytes,):
            return row_bytes(parts[0])
        records = torch.zeros((hidden.shape[0], self.nbytes), dtype=torch.uint8, device=hidden.device)
        for start, width, part in zip(self.starts, self.widths, parts, strict=True):
            records[:, start : start + width] = row_bytes(part)
        return records

    def parts(self, records: Tensor) -> tuple[Tensor, ...]:
        """Views of the parts in `records [..., nbytes]` uint8, in their own dtypes."""
        return tuple(
            records[..., start : start + width].view(part.dtype)
            for start, width, part in zip(self.starts, self.widths, self.wire.parts, strict=True)
        )


@dataclass(frozen=True)
class WireCode:
    """What the kernels need to make records of a spec's rows."""

    number: int  # of FUSED, or RECORDS
    factor: float  # the reciprocal of a constant outer scale
    options: tuple[str, ...]  # for the compiler

    @property
    def fused(self) -> bool:
        """Whether the kernel quantizes; else it takes records."""
        return self.number != RECORDS


def wire_code(spec: DispatchSpec) -> WireCode:
    """How rows of `spec` are encoded on its GPU, and the compiler's options for it.

    A format that goes by a fused one's name but writes by another rule is packed by itself, like all others.
    """
    wire = spec.wire
    number, factor = RECORDS, 1.0
    if wire.name in STATIC:
        number, factor = FUSED.get(wire.name, RECORDS), _factor(wire)
    elif wire is WIRES.get(wire.name):
        number = FUSED.get(wire.name, RECORDS)
    record = RowRecord(wire, spec.hidden)
    options = [
        f"-DHIDDEN={spec.hidden}",
        f"-DSOURCE={SOURCES[spec.dtype]}",
        f"-DWIRE={number}",
        f"-DTRUE_DIVISION={int(divides_truly(torch.device(spec.device)))}",
        f"-DRECORD_BYTES={record.nbytes}",
        f"-DPARTS={len(record.widths)}",
    ]
    for i, (start, width) in enumerate(zip(record.starts, record.widths, strict=True)):
        options += [f"-DPART{i}_AT={start}", f"-DPART{i}_BYTES={width}"]
    return WireCode(number, factor, tuple(options))


def _factor(wire: Format) -> float:
    """The reciprocal outer scale that a bound NVFP4 quantizes with; 1 for other static formats."""
    bound = getattr(wire.encode, "args", ())
    return float(bound[0]) if wire.name == "nvfp4_static" and bound else 1.0


@cache
def divides_truly(device: torch.device) -> bool:
    """Whether torch divides a tensor by a number on `device`, or multiplies by the number's reciprocal.

    The two differ in the last bit, and a kernel's scales must be those of the format's own rule.
    """
    values = torch.arange(1, 4097, dtype=torch.float32)
    return torch.equal((values.to(device) / 448.0).cpu(), values / 448.0)
