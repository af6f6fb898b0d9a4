"""A stand-in for the package flashinfer: its names of the layouts of scales, by number."""

from enum import Enum


class SfLayout(Enum):
    layout_128x4 = 0
    layout_8x4 = 1
    layout_linear = 2
