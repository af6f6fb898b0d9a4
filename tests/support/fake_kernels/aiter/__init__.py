"""A stand-in for the package aiter: its enums."""

from enum import Enum


class QuantType(Enum):
    No = 0
    per_Tensor = 1
    per_Token = 2
    per_1x32 = 3
    per_1x128 = 4
    per_128x128 = 5


class ActivationType(Enum):
    Silu = 0
    Gelu = 1
    Swiglu = 2
