# mypy: ignore-errors
"""What a Triton kernel begins with, and is launched with, so that its launch overlaps the one before."""

import triton
import triton.language as tl

from moeserve.device.overlap import overlaps


@triton.jit
def begin(OVERLAPS: tl.constexpr):
    """Waits for what was launched before, and lets the next launch begin, which waits likewise."""
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


def behind(device):
    """The keywords of a launch on `device`, of a kernel that calls `begin(OVERLAPS)` first."""
    return {"OVERLAPS": True, "launch_pdl": True} if overlaps(device) else {"OVERLAPS": False}
