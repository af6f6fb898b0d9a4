"""Two layouts that only their own `unswizzle_data` undoes, of the package's kind: K next to the last axis."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class ValueLayout:
    name = "FAKE_VALUE"

    def __init__(self, shape: list[int], mx_axis: int) -> None:
        assert mx_axis == 1
        self.shape = shape

    def swizzle_data(self, data: Tensor) -> Tensor:
        assert list(data.shape) == self.shape
        return data.flip(-1).roll(1, -2).mT.contiguous().mT

    def unswizzle_data(self, data: Tensor) -> Tensor:
        assert data.stride(-2) == 1, "codes are K-major"
        return data.roll(-1, -2).flip(-1)


class ScaleLayout:
    """Tiles of all slots in one axis, as the package stores them for Blackwell."""

    name = "FAKE_SCALE"

    def __init__(self, shape: list[int], mx_axis: int, num_warps: int) -> None:
        assert mx_axis == 1 and num_warps == 8
        self.shape = shape

    def swizzle_data(self, data: Tensor) -> Tensor:
        assert list(data.shape) == self.shape
        e, groups, n = self.shape
        return data.mT.reshape(1, e * n // 32, groups, 2, 16) if n % 32 == 0 else data

    def unswizzle_data(self, data: Tensor) -> Tensor:
        e, groups, n = self.shape
        return data.reshape(e, n, groups).mT


def make_default_matmul_mxfp4_w_layout(mx_axis: int) -> tuple[Any, dict[str, int]]:
    return ValueLayout, {"mx_axis": mx_axis}


def make_default_matmul_mxfp4_w_scale_layout(mx_axis: int, num_warps: int = 8) -> tuple[Any, dict[str, int]]:
    return ScaleLayout, {"mx_axis": mx_axis, "num_warps": num_warps}
