"""Element encodings: the bytes of FP8, FP6, FP4 and E8M0 values, vectorised, on any device.

Encoding rounds to the nearest code, ties to the even one, keeps subnormals and saturates at the largest
finite value: it clamps before a cast, because the raw casts of larger values differ between libraries. FP8
keeps NaN; E2M1, E3M2 and E2M3 have none and take their largest value for it. A negative value that rounds
to zero keeps its sign in these three, an exact zero of either sign has code 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

FP32_BIAS = 127
FP32_MANTISSA_BITS = 23

FP8_LARGEST = {
    torch.float8_e4m3fn: 448.0,
    torch.float8_e4m3fnuz: 224.0,  # 240 is a code, but its producers quantize to 224
    torch.float8_e5m2: 57344.0,
}
"""The value that an encoder of each FP8 dtype saturates at."""


@dataclass(frozen=True)
class Minifloat:
    """A sign-exponent-mantissa float of less than a byte, without infinity or NaN.

    A code is `s << (bits - 1) | e << mantissa | m`; e = 0 is subnormal.
    """

    name: str
    exponent: int  # bits
    mantissa: int  # bits
    bias: int

    @property
    def bits(self) -> int:
        """Bits of a code, its sign included."""
        return 1 + self.exponent + self.mantissa

    @property
    def top(self) -> int:
        """Exponent of the largest value: what the MX scale rules subtract."""
        return (1 << self.exponent) - 1 - self.bias

    @property
    def largest(self) -> float:
        """The largest value; encoding saturates there."""
        return float(2.0**self.top * (2 - 2.0**-self.mantissa))

    def values(self) -> Tensor:
        """The value of every code: float32 `[2 ** bits]`."""
        code = torch.arange(1 << (self.bits - 1))
        e, m = code >> self.mantissa, code & ((1 << self.mantissa) - 1)
        significand = torch.where(e > 0, m + (1 << self.mantissa), m).float()
        magnitude = torch.ldexp(significand, e.clamp(min=1) - self.bias - self.mantissa)
        return torch.cat((magnitude, -magnitude))

    def encode(self, x: Tensor) -> Tensor:
        """Codes of `x` (float32, any shape): int32 of the same shape."""
        size = x.abs().nan_to_num_(nan=self.largest).clamp_(max=self.largest)
        lowest = 1 - self.bias + FP32_BIAS
        exponent = (size.view(torch.int32) >> FP32_MANTISSA_BITS).clamp_(min=lowest)
        # adding 2^23 steps leaves the number of steps, rounded to even, in the low bits of the sum
        shift = (exponent + (FP32_MANTISSA_BITS - self.mantissa)) << FP32_MANTISSA_BITS
        steps = size.add_(shift.view(torch.float32)).view(torch.int32).sub_(shift)
        code = steps.add_(exponent.sub_(lowest) << self.mantissa)
        return code.add_((x < 0).to(torch.int32) << (self.bits - 1))


E2M1 = Minifloat("e2m1", 2, 1, 1)
E3M2 = Minifloat("e3m2", 3, 2, 3)
E2M3 = Minifloat("e2m3", 2, 3, 1)


def encode_fp8(x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    """`x` (float32) in an FP8 dtype, saturated at `FP8_LARGEST`; NaN stays NaN."""
    largest = FP8_LARGEST[dtype]
    return x.clamp(-largest, largest).to(dtype)


def decode_fp8(codes: Tensor) -> Tensor:
    """FP8 codes of any shape as float32, infinity and NaN included."""
    if codes.device.type != "cpu":
        return codes.float()
    # torch's own cast is several times slower on a CPU than a table
    flat = codes.contiguous().flatten().view(torch.uint8)
    if flat.numel() % 2 == 0:
        return pick(_fp8_pairs(codes.dtype), flat.view(torch.int16)).view(codes.shape)
    return pick(table(("fp8", codes.dtype), codes.device), flat).view(codes.shape)


def decode_e8m0(codes: Tensor) -> Tensor:
    """E8M0 bytes as float32: `2 ** (byte - 127)`, the smallest 2^-127 and not 0, 0xFF is NaN."""
    return pick(table("e8m0", codes.device), codes)


def reciprocal_e8m0(codes: Tensor) -> Tensor:
    """`2 ** (127 - byte)`, exact; NaN for 0xFF."""
    return pick(table("reciprocal_e8m0", codes.device), codes)


def pick(entries: Tensor, index: Tensor) -> Tensor:
    """Looks up `entries [count, width]` float32 (width 1 or 2) by integers `[..., n]`: `[..., n * width]`.

    Negative indices count from the end, as two's complement has it.
    """
    width = entries.shape[1]
    words = entries.view(torch.int64 if width == 2 else torch.int32).flatten()
    flat = index.contiguous().flatten().int()
    if index.dtype == torch.int16:
        flat = flat.bitwise_and_(0xFFFF)
    found = words.index_select(0, flat).view(torch.float32)
    return found.view(*index.shape[:-1], index.shape[-1] * width) if index.dim() else found.view(())


@cache
def table(key: object, device: torch.device) -> Tensor:
    """The look-up table `key` of `TABLES` on `device`, made once."""
    return TABLES[key]().to(device).contiguous()


def _fp8(dtype: torch.dtype) -> Callable[[], Tensor]:
    return lambda: torch.arange(256, dtype=torch.uint8).view(dtype).float()[:, None]


@cache
def _fp8_pairs(dtype: torch.dtype) -> Tensor:
    words = torch.arange(1 << 16).to(torch.int32)
    ones = _fp8(dtype)()[:, 0]
    return torch.stack((ones[words & 0xFF], ones[words >> 8]), dim=1)  # little-endian


def _powers() -> Tensor:
    powers = torch.ldexp(torch.ones(256, dtype=torch.float64), torch.arange(256) - FP32_BIAS).float()
    powers[255] = float("nan")
    return powers[:, None]


def _reciprocal_powers() -> Tensor:
    return torch.cat((_powers()[:255].flip(0), _powers()[255:]))


def _pairs(values: Tensor) -> Tensor:
    """Values of two codes in one word, the first in its low bits, from the values of one."""
    codes, count = torch.arange(len(values) ** 2), len(values)
    return torch.stack((values[codes % count], values[codes // count]), dim=1)


def _minifloat_pairs(element: Minifloat) -> Tensor:
    return _pairs(element.values())


INT4_BIASED = torch.arange(-8.0, 8.0)  # by code + 8
INT4_SIGNED = torch.cat((torch.arange(8.0), torch.arange(-8.0, 0.0)))  # by two's complement


TABLES: dict[object, Callable[[], Tensor]] = {
    "e8m0": _powers,
    "reciprocal_e8m0": _reciprocal_powers,
    **{("fp8", dtype): _fp8(dtype) for dtype in FP8_LARGEST},
    **{("pairs", element.name): partial(_minifloat_pairs, element) for element in (E2M1, E3M2, E2M3)},
    "int4": partial(_pairs, INT4_BIASED),
    "signed_int4": partial(_pairs, INT4_SIGNED),
}
"""Look-up tables by key, float32 `[entries, width]`; a pair's first value stands in the low bits."""
