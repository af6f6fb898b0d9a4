"""How DeepEP's low-latency kernel rounds rows to FP8, in torch: what its carriers are judged by."""

import torch
from torch import Tensor

GROUP = 128
LARGEST = 448.0
FLOOR = 1e-4
"""Of a group's largest magnitude."""


def rounded_by_deepep(rows: Tensor, power_of_two: bool) -> tuple[Tensor, Tensor]:
    """E4M3 codes `[T, H]` and float32 scales `[T, ceil(H / 128)]` of float32 `rows`.

    The kernel multiplies by 448 / amax, where our formats divide by amax / 448.
    """
    groups = -(-rows.shape[1] // GROUP)
    padded = torch.nn.functional.pad(rows, (0, groups * GROUP - rows.shape[1]))
    blocks = padded.view(rows.shape[0], groups, GROUP)
    amax = blocks.abs().amax(dim=2, keepdim=True).clamp_min(FLOOR)
    if power_of_two:
        exponent = torch.ceil(torch.log2(amax / LARGEST))
        inverse, scale = torch.exp2(-exponent), torch.exp2(exponent)
    else:
        inverse, scale = LARGEST / amax, amax / LARGEST
    codes = (blocks * inverse).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return codes.flatten(1)[:, : rows.shape[1]].contiguous(), scale[..., 0]
