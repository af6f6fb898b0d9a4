"""Runs the row kernels of the Hopper backends under Triton's interpreter, in a process of its own."""

import os

os.environ["TRITON_INTERPRET"] = "1"

import sys

import language_once  # noqa: F401
import torch
from made_experts import activation_named, fresh_seed

from moeserve.experts.activation import Activation
from moeserve.experts.kernels.torch_reference import COMPUTED
from moeserve.experts.kernels.triton import rows
from moeserve.quant.formats.fp8 import FP8_GROUP

COUNTS = (3, 0, 17, 1, 0, 16)


def work_list(tile_rows: int, row_align: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    starts = [0]
    for count in COUNTS:
        starts.append(starts[-1] + -(-count // row_align) * row_align)
    counts, offsets = (torch.tensor(v, dtype=torch.int32) for v in (COUNTS, starts))
    limit = min(len(COUNTS), starts[-1]) + starts[-1] // tile_rows
    tiles = torch.full((4 + 4 * limit,), -7, dtype=torch.int32)
    rows.list_tiles[(-(-limit // 4),)](counts, offsets, tiles, len(COUNTS), limit, tile_rows, 8, 4)
    return tiles, offsets, starts[-1]


def check_work_list() -> None:
    for tile_rows, row_align in ((16, 1), (16, 8), (2, 1), (64, 4)):
        tiles, offsets, _ = work_list(tile_rows, row_align)
        wanted = [
            (slot, int(offsets[slot]) + at, min(tile_rows, count - at))
            for slot, count in enumerate(COUNTS)
            for at in range(0, count, tile_rows)
        ]
        found = [tuple(tiles[4 + 4 * g : 7 + 4 * g].tolist()) for g in range(int(tiles[0]))]
        assert found == wanted, (tile_rows, row_align, found, wanted)


def parameters(activation: Activation) -> list[float]:
    values = (activation.limit, activation.alpha, activation.beta, activation.linear_beta)
    return [0.0 if value is None else value for value in values]


def check_activation(activation: Activation, fp8: bool) -> None:
    inner, align = 144, 4
    tiles, offsets, capacity = work_list(16, align)
    width = inner * (2 if activation.gated else 1)
    between = torch.full((capacity, width), torch.nan)
    valid = [
        r for slot, count in enumerate(COUNTS) for r in range(int(offsets[slot]), int(offsets[slot]) + count)
    ]
    between[valid] = torch.randn(len(valid), width) * 3
    out = torch.full((capacity, inner), -5.0).to(torch.float8_e4m3fn if fp8 else torch.float32)
    scale = torch.full((2, capacity), -5.0)
    grid = ((tiles.numel() - 4) // 4, 2)
    rows.activate[grid](
        between, out, scale, tiles, inner, scale.shape[1], *parameters(activation),
        BM=16, ACT=activation.name, GATED=activation.gated, FP8=fp8,
        LIMITED=activation.limit is not None, BOUNDED=activation.linear_beta is not None,
    )  # fmt: skip
    wanted = activation.apply(between[valid])
    found = out[valid].float()
    if fp8:
        codes, wanted_scale = FP8_GROUP.quantize(wanted).parts
        assert torch.allclose(scale[:, valid].T, wanted_scale, rtol=1e-5), activation
        # Triton 3.6's interpreter loses the carry into the next power of two, and truncates subnormals
        close = (found - codes.float()).abs() <= 2.0**-9
        right = (found == codes.float()) | (found * 2 == codes.float()) | close
        assert right.float().mean() >= 0.99, activation
    else:
        assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-5), (activation, (found - wanted).abs().max())
    untouched = [r for r in range(capacity) if r not in valid]
    assert bool(
        (out[untouched].float() == out.new_tensor(-5.0, dtype=torch.float32).to(out.dtype).float()).all()
    )


def main() -> None:
    torch.manual_seed(fresh_seed())
    check_work_list()
    limited = [Activation("silu", limit=2.0), Activation("situ", beta=2.0, linear_beta=1.5)]
    for activation in [*map(activation_named, sorted(COMPUTED)), *limited]:
        for fp8 in (False, True):
            check_activation(activation, fp8)
    print("checked", file=sys.stderr)


if __name__ == "__main__":
    main()
