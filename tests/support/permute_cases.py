"""The kernels that group and weigh rows beside torch: on a GPU, or under Triton's interpreter."""

import torch

from moeserve.dispatch import permute
from moeserve.dispatch.permute import group_rows, weigh_rows
from moeserve.quant.formats import FORMATS
from moeserve.quant.formats.floats import BF16

CASES = [  # rows, top_k, slots, row_align, hidden
    (1, 1, 1, 1, 32),
    (7, 3, 5, 1, 40),
    (13, 8, 6, 4, 128),
    (40, 2, 64, 16, 96),
    (5, 2, 9, 128, 2080),
]


def check(case: tuple[int, int, int, int, int], wire: str, device: str) -> None:
    rows, top_k, slots, row_align, hidden = case
    draw = torch.Generator().manual_seed(sum(case))
    packed = FORMATS[wire].quantize(torch.randn(rows, hidden, generator=draw))
    chosen = torch.rand(rows, max(slots, top_k) + 3, generator=draw).argsort(dim=1)[:, :top_k].int()
    chosen = torch.where(chosen < slots, chosen, -1)
    weights = torch.where(chosen < 0, float("nan"), torch.rand(rows, top_k, generator=draw))
    wanted, wanted_homes = group_rows(packed, chosen, weights, (slots, row_align))
    permute.kernels_serve = lambda device: True
    try:
        there = packed.with_parts([part.to(device) for part in packed.parts])
        found, homes = group_rows(there, chosen.to(device), weights.to(device), (slots, row_align))
        assert found.counts.dtype == found.offsets.dtype == torch.int32
        assert torch.equal(found.counts.cpu(), wanted.counts), (case, found.counts, wanted.counts)
        assert torch.equal(found.offsets.cpu(), wanted.offsets), (case, found.offsets, wanted.offsets)
        for slot in range(slots):
            own = slice(int(wanted.offsets[slot]), int(wanted.offsets[slot] + wanted.counts[slot]))
            for got, want in zip(found.tokens.parts, wanted.tokens.parts, strict=True):
                assert torch.equal(got[own].cpu().view(torch.uint8), want[own].view(torch.uint8)), (
                    case,
                    wire,
                    slot,
                )
        outputs = torch.full((homes.capacity, hidden), float("nan"), dtype=torch.bfloat16)
        for slot in range(slots):
            first = int(wanted.offsets[slot])
            outputs[first : first + int(wanted.counts[slot])] = torch.randn(
                int(wanted.counts[slot]), hidden, generator=draw
            ).bfloat16()
        on = outputs.to(device)
        exact, summed = (weigh_rows(on, homes, dtype).cpu() for dtype in (torch.float32, torch.bfloat16))
    finally:
        permute.kernels_serve = lambda device: False
    reference = weigh_rows(outputs[: wanted_homes.capacity], wanted_homes)
    assert summed.dtype == torch.bfloat16 and not summed.isnan().any(), case
    assert torch.allclose(exact, reference, rtol=1e-5, atol=1e-6), case
    assert torch.allclose(summed.float(), reference, rtol=2**-7, atol=1e-6), (
        case
    )  # the interpreter cuts bits off


def check_all(device: str) -> None:
    """Every case, on tensors of `device`."""
    for case in CASES:
        for wire in ("fp8_group128", "mxfp4", BF16.name):
            if case[4] % 32 == 0 or wire == BF16.name:
                check(case, wire, device)
