"""Static formats: their scale is a constant of the checkpoint, which does not travel with the rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from torch import Tensor

from moeserve.quant.format import Format, Part


def static_format(name: str, bits: int, parts: tuple[Part, ...], given: Callable[[Tensor], Format]) -> Format:
    """The unbound static format `name`, for schemes; `given` makes the one that encodes and decodes."""
    unbound = partial(_unbound, name)
    return Format(name, bits, parts, unbound, unbound, given)


def _unbound(name: str, *_: Any) -> NoReturn:
    raise ValueError(f"{name} has no scale of its own; bind the checkpoint's with {name}.given(input_scale)")
