"""What the laws of formats must be told of each: a worked example from its definition, and its loss."""

from __future__ import annotations

from dataclasses import dataclass, field

from moeserve.quant.format import Format


@dataclass(frozen=True)
class Worked:
    """What a row becomes: codes in hexadecimal, then the other parts' values; `given` is a static scale.

    `loss` bounds the RMS error over the RMS value of normally distributed weights, with some room: what the
    codes cost. `settles_late`: codes settle at the second rounding, their values at the first. FP4 and FP6
    keep the sign of what rounds to zero, and give an exact zero of either sign code 0. A power of two that
    was rounded up to hold the largest value is halved when that value was rounded down to the next power.
    """

    row: list[float]
    codes: str
    scales: tuple[list[float], ...] = ()
    given: float | None = None
    loss: float = field(kw_only=True)
    settles_late: bool = False


FLOATS = [1.0, -0.5, 3.0]
MX = [0.1, 0.2, 0.3, 0.4, -0.5, 0.75, 1, 3] + [0.0] * 24
NVFP4 = [*MX[:16], 6.0] + [0.0] * 15
SYMMETRIC = [-0.7, -0.6, -0.1, 0, 0.1, 0.2, 0.6, 0.7]  # codes 1 2 7 8 9 A E F
ASYMMETRIC = [-0.3, 0, 0.45, 0.9, 0.15, 0.6, 0.75, 1.2]  # codes 0 3 7 C 5 9 B F

BY_PREFIX: dict[str, Worked] = {
    "fp32": Worked(FLOATS, "0000803f000000bf00004040", loss=0),
    "bf16": Worked(FLOATS, "803f00bf4040", loss=0.002),
    "fp16": Worked(FLOATS, "003c00b80042", loss=0.0003),
    "fp8": Worked([0.1, -0.5, 1, 3], "57e9717e", ([3 / 448],), loss=0.03),
    "fp8_group128_ue8m0": Worked([2.0, 0.3], "7862", ([2**-7],), loss=0.03, settles_late=True),
    "fp8_block128_ue8m0": Worked([2.0, 0.3], "7862", ([2**-7],), loss=0.03, settles_late=True),
    "fp8_e5m2": Worked([57344.0, 1.0, -0.5], "7b3cb8", ([1.0],), loss=0.06),
    "fp8_e4m3fnuz": Worked([224.0, 0.5, -0.5], "7e38b8", ([1.0],), loss=0.03),
    "fp8_static": Worked([0.1, -0.5, 1, 6], "52e46c7e", given=0.01, loss=0.03),
    "int8": Worked([0.5, -1, 0.25, 1.27], "329c197f", ([0.01],), loss=0.02),
    "int8_asym": Worked([0.0, 2.55, 1.0], "807fe4", ([0.01], [-128]), loss=0.02),
    "int8_token_asym": Worked([0.0, 2.55, 1.0], "807fe4", ([0.01], [-128]), loss=0.02),
    "int8_static": Worked([0.025, -9.0, 9.0], "02807f", given=0.01, loss=0.02),
    "int4": Worked(SYMMETRIC, "2187a9fe", ([0.1],), loss=0.2),
    "int4_asym": Worked(ASYMMETRIC, "30c795fb", ([0.1], [3]), loss=0.2),
    "int4_fp8": Worked(SYMMETRIC, "a90f2176", ([56.0], [8 * 0.1 / 448]), loss=0.2),
    "mxfp4": Worked(MX, "10213a74", ([0x7E],), loss=0.125, settles_late=True),
    "mxfp6_e3m2": Worked(MX, "8a1349b48579", ([0x7C],), loss=0.06, settles_late=True),
    "mxfp6_e2m3": Worked(MX, "c25018280371", ([0x7E],), loss=0.04, settles_late=True),
    "mxfp8": Worked(MX, "555d6265e86c707c", ([0x78],), loss=0.03, settles_late=True),
    # 3 is 1.5 x 2^15 in steps of 2^-14
    "mxfp8_e5m2": Worked(MX, "666a6d6ef072747a", ([0x71],), loss=0.06, settles_late=True),
    "mxint8": Worked(MX, "03060a0df0182060", ([0x80],), loss=0.02, settles_late=True),  # 64ths of 2
    "nvfp4": Worked(NVFP4, "10213a740000000007", ([224.0, 448.0], [6 / 2688]), loss=0.1, settles_late=True),
    "nvfp4_static": Worked([1.7, 0.3, -0.6], "270c", ([144.0],), given=1 / 500, loss=0.1, settles_late=True),
}
"""By the longest beginning of a format's name: formats that differ in the size of groups share a row."""


def worked(form: Format) -> Worked:
    """The example of `form`. KeyError, with the way out, where there is none."""
    names = [name for name in BY_PREFIX if form.name.startswith(name)]
    if not names:
        raise KeyError(f"{form} has no worked example; add one to BY_PREFIX in worked_formats.py")
    return BY_PREFIX[max(names, key=len)]
