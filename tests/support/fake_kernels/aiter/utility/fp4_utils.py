"""The package's converter of block scales; here any order that only its inverse undoes."""

import torch.nn.functional as F
from torch import Tensor


def e8m0_shuffle(scale: Tensor) -> Tensor:
    m, n = scale.shape
    return F.pad(scale, (0, -n % 8, 0, -m % 256)).flip(0, 1)


def unshuffled(scale: Tensor, m: int, n: int) -> Tensor:
    """The inverse, which the fake's GEMMs read by."""
    return scale.flip(0, 1)[:m, :n]
