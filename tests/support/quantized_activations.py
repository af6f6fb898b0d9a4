"""What a scheme rounds activations to, from the formats' definitions: `ROUNDINGS`.

Written apart from the package: numbers are rounded to their elements by ml_dtypes, or by numpy's own casts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

Rounding = Callable[[Tensor, float], Tensor]
"""(rows `[R, K]` float32, the checkpoint's static scale or NaN) -> rows that the next GEMM is given."""

Array = np.ndarray[Any, np.dtype[np.float32]]


def to(element: Any, values: Array, largest: float) -> Array:
    """The nearest values of a small float, ties to even; what is beyond the largest becomes it."""
    answer: Array = values.clip(-largest, largest).astype(element).astype(np.float32)
    return answer


def e4m3(values: Array) -> Array:
    return to(ml_dtypes.float8_e4m3fn, values, 448)


def e2m1(values: Array) -> Array:
    return to(ml_dtypes.float4_e2m1fn, values, 6)


def largest_of(values: Array) -> Array:
    answer: Array = np.abs(values).max(axis=-1, keepdims=True)
    return answer


def blocks(size: int, round_block: Callable[[Array], Array]) -> Rounding:
    """Rounds each run of `size` columns by itself; zeros after a last one that is shorter do not move it."""

    def rounded(rows: Tensor, _: float) -> Tensor:
        whole_runs = np.pad(rows.numpy(), ((0, 0), (0, -rows.shape[1] % size)))
        found = round_block(whole_runs.reshape(rows.shape[0], -1, size))
        return torch.from_numpy(found).reshape(whole_runs.shape)[:, : rows.shape[1]].contiguous()

    return rounded


def whole(round_row: Callable[[Array, np.float32], Array]) -> Rounding:
    """Rounds rows as they are, with the static scale if that is used."""
    return lambda rows, scale: torch.from_numpy(round_row(rows.numpy(), np.float32(scale)))


def fp8_token(rows: Array, _: np.float32) -> Array:
    scale = np.maximum(largest_of(rows) / np.float32(448), np.float32(1 / (448 * 512)))
    return e4m3(rows / scale) * scale


def fp8_group(runs: Array) -> Array:
    scale = np.maximum(largest_of(runs), np.float32(1e-10)) / np.float32(448)
    return e4m3(runs / scale) * scale


def fp8_static(rows: Array, scale: np.float32) -> Array:
    return e4m3(rows * (np.float32(1) / scale)) * scale


def int8_token(rows: Array, _: np.float32) -> Array:
    scale = np.maximum(largest_of(rows), np.float32(1e-10)) / np.float32(127)
    away = rows / scale + np.copysign(np.float32(0.5), rows)  # halves go away from zero
    return np.trunc(away).clip(-128, 127).astype(np.float32) * scale


def int8_static(rows: Array, scale: np.float32) -> Array:
    return np.rint(rows / scale).clip(-128, 127).astype(np.float32) * scale


def int8_token_asym(rows: Array, _: np.float32) -> Array:
    """A zero point for each row, whose range is that of its values."""
    low, high = rows.min(axis=-1, keepdims=True), rows.max(axis=-1, keepdims=True)
    narrow = np.maximum(largest_of(rows), np.float32(1e-10)) * np.float32(2**-22)
    scale = np.maximum((high - low) / np.float32(255), narrow)
    zero = np.rint(np.float32(-128) - low / scale)
    codes = (np.rint(rows / scale) + zero).clip(-128, 127)
    return ((codes - zero) * scale).astype(np.float32)


def mx_even(element: Any, mantissa: int, largest: float) -> Callable[[Array], Array]:
    """The power of two under the largest magnitude, which is rounded to the element's mantissa before."""
    top = np.frexp(np.float32(largest))[1]

    def rounded(runs: Array) -> Array:
        fraction, exponent = np.frexp(largest_of(runs))
        carried = exponent + (fraction >= 1 - 2.0 ** -(mantissa + 2))
        return scaled(element, runs, carried - top, largest)

    return rounded


def mxfp8(runs: Array) -> Array:
    """The smallest power of two that brings the largest magnitude to 448 or less."""
    fraction, exponent = np.frexp(largest_of(runs) / np.float32(448))
    return scaled(ml_dtypes.float8_e4m3fn, runs, exponent - (fraction == 0.5), 448)


def scaled(element: Any, runs: Array, exponent: Any, largest: float) -> Array:
    power = np.ldexp(np.float32(1), np.clip(exponent, -127, 127)).astype(np.float32)
    return to(element, runs / power, largest) * power


def nvfp4_static(rows: Array, scale: np.float32) -> Array:
    """An E4M3 scale for each 16 columns, relative to the checkpoint's scale of everything."""
    runs, factor = rows.reshape(rows.shape[0], -1, 16), np.float32(1) / scale
    block = e4m3(factor * largest_of(runs) / np.float32(6))
    codes = e2m1(runs * np.divide(factor, block, out=np.zeros_like(block), where=block != 0))
    return (codes * block / factor).reshape(rows.shape)


ROUNDINGS: dict[str, Rounding] = {
    "fp32": lambda rows, _: rows,
    "fp8_token": whole(fp8_token),
    "fp8_group128": blocks(128, fp8_group),
    "fp8_static": whole(fp8_static),
    "int8_token": whole(int8_token),
    "int8_token_asym": whole(int8_token_asym),
    "int8_static": whole(int8_static),
    "mxfp4": blocks(32, mx_even(ml_dtypes.float4_e2m1fn, 1, 6)),
    "mxfp6_e3m2": blocks(32, mx_even(ml_dtypes.float6_e3m2fn, 2, 28)),
    "mxfp6_e2m3": blocks(32, mx_even(ml_dtypes.float6_e2m3fn, 3, 7.5)),
    "mxfp8": blocks(32, mxfp8),
    "nvfp4_static": whole(nvfp4_static),
}
"""By the name of the activations' format; float32 activations stay as they are."""
