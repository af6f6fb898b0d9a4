"""Static formats: their scale is a constant of the checkpoint, which does not travel with the rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from moeserve.quant.format import Format, Part

_copies: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Constants by device, of each that was asked for elsewhere than where it is."""


def there(constant: Tensor, device: torch.device) -> Tensor:
    """A bound format's constant on `device`, copied there once: CUDA graphs record no copy from the host."""
    if constant.device == device:
        return constant
    if constant not in _copies:
        _copies[constant] = {}
    copies: dict[torch.device, Tensor] = _copies[constant]
    if device not in copies:
        copies[device] = constant.to(device)
    return copies[device]


def static_format(name: str, bits: int, parts: tuple[Part, ...], given: Callable[[Tensor], Format]) -> Format:
    """The unbound static format `name`, for schemes; `given` makes the one that encodes and decodes."""
    unbound = partial(_unbound, name)
    return Format(name, bits, parts, unbound, unbound, given)


def _unbound(name: str, *_: Any) -> NoReturn:
    raise ValueError(f"{name} has no scale of its own; bind the checkpoint's with {name}.given(input_scale)")
