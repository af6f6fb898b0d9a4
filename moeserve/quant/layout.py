"""`Layout`: an invertible re-packing of a stored matrix into the tensors one kernel family wants."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from moeserve.quant.format import Packed


class Layout(Protocol):
    """A bijection between a `Packed` and a kernel's own tensors; no value is rounded on the way.

    Law: `unpack(pack(p), p)` has the parts of `p` bit for bit, also where a dimension is zero, and matrices
    of a stack are packed one by one: `pack(p.rows(i))` is row i of `pack(p)`.
    """

    def pack(self, packed: Packed) -> Mapping[str, Tensor]:
        """The kernel's tensors by name, copies or views. ValueError: a format or size it does not take."""

    def unpack(self, tensors: Mapping[str, Tensor], like: Packed) -> Packed:
        """The inverse of `pack`, in the format and shape of `like`; the values of `like` are not read."""
