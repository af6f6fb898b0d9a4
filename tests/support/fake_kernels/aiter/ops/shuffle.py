"""The package's converter of weights; here any order that only its inverse undoes, slot by slot."""

from torch import Tensor


def shuffle_weight(x: Tensor, layout: tuple[int, int] = (16, 16), use_int4: bool = False) -> Tensor:
    assert layout == (16, 16) and x.shape[-2] % 16 == 0 and x.shape[-1] % 32 == 0
    return x.unflatten(-1, (-1, 32)).transpose(-1, -2).flatten(-2).contiguous()


def unshuffled(x: Tensor) -> Tensor:
    """The inverse, which the fake's GEMMs read by."""
    return x.unflatten(-1, (32, -1)).transpose(-1, -2).flatten(-2).contiguous()
