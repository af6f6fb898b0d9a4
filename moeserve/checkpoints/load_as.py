"""Loads experts in another scheme than the file's: quantizes, or re-quantizes, while reading.

An expert is read whole, decoded, encoded in the wanted format and then cut, so that every slice has the
scales of the whole weights. Experts are read one at a time, so that no more than one is held in float32.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from moeserve.checkpoints.store import CheckpointError
from moeserve.quant.format import WHOLE, Format, Packed, Scheme
from moeserve.quant.formats import FORMATS
from moeserve.quant.formats.nvfp4 import NVFP4, NVFP4_E4M3
from moeserve.quant.schemes import OCP_MX, SCHEMES

ALIASES: Mapping[str, str] = {
    "fp8": "fp8_tensor x fp8_token",
    "fp8_per_tensor": "fp8_tensor x fp8_token",
    "fp8_per_block": "fp8_block128 x fp8_group128",
    "fp8_per_channel": "fp8_channel x fp8_token",
    "int8_per_channel_weight_only": "int8_channel",
}
"""Other systems' names for quantizing while loading. A format alone leaves activations as they
are, where no scheme has its name."""


def scheme_to_load_as(name: str, plain: Format) -> Scheme:
    """Returns the scheme called `name`: one of `SCHEMES` or `OCP_MX`, an alias, or a format of weights alone.

    `plain` is the model's format. Raises ValueError, with the known names, for an unknown name and for a
    scheme that weights alone do not determine: static activation scales, or an activation order.
    """
    wanted = ALIASES.get(name, name)
    found = (SCHEMES | OCP_MX).get(wanted)
    if found is None and wanted in FORMATS:
        found = Scheme(FORMATS[wanted], plain)
    if found is None or found.activations.given is not None or "order" in _parts(found.weights):
        known = ", ".join((*ALIASES, *(key for key, s in SCHEMES.items() if _possible(s))))
        raise ValueError(
            f"experts cannot be loaded as {name!r}; known: {known}, or a format of weights alone"
        )
    return found


def _possible(scheme: Scheme) -> bool:
    return scheme.activations.given is None and "order" not in _parts(scheme.weights)


def _parts(form: Format) -> tuple[str, ...]:
    return tuple(part.name for part in form.parts)


KEPT: Mapping[Format, Format] = {NVFP4_E4M3: NVFP4}
"""Formats that decode another format's parts in their own way; weights stay as they are stored."""


def keeps(stored: Format, form: Format) -> bool:
    """Whether weights stored in one format need no encoding to be held in the other."""
    return stored in (form, KEPT.get(form))


def check_groups(letter: str, size: int, form: Format) -> None:
    """Raises CheckpointError where so many columns are no multiple of a group that `form` is encoded in."""
    for part in form.parts:
        if part.rows == 1 and part.columns != WHOLE and size % part.columns:
            raise CheckpointError(
                f"{letter}={size} must be a multiple of {part.columns}, a group of {form}, for experts to be "
                "loaded so; leave model.load_as out, or give another scheme"
            )


def requantized(gate_up: list[Packed], down: Packed, form: Format) -> tuple[Packed, Packed]:
    """Encodes a whole expert in `form`: `[2I, H]` with gate rows first, and `[H, I]`.

    Raises CheckpointError for a size that is no multiple of a group of columns.
    """
    for packed in (*gate_up, down):
        check_groups("K", int(packed.shape[-1]), form)
    both = torch.cat([half.dequantize() for half in gate_up])
    return form.quantize(both), form.quantize(down.dequantize())


def cut(packed: Packed, rows: slice, columns: slice) -> Packed:
    """Cuts a block out of a matrix, at edges of the format's blocks; parts that cover all of it are kept."""
    parts = []
    for part, tensor in zip(packed.format.parts, packed.parts, strict=True):
        own = [
            slice(None) if span == WHOLE else slice(int(cut.start // span), int(-(-cut.stop // span)))
            for span, cut in ((part.rows, rows), (part.columns, columns))
        ]
        parts.append(tensor[own[0], own[1]])
    shape = torch.Size((rows.stop - rows.start, columns.stop - columns.start))
    return Packed(packed.format, shape, tuple(parts))
