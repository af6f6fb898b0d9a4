"""Sorts the columns of a matrix with activation order, so that its groups are runs of columns."""

from __future__ import annotations

import torch
from torch import Tensor

from moeserve.quant.bits import pack_nibbles, unpack_nibbles
from moeserve.quant.format import Format, Packed
from moeserve.quant.formats.int4 import int4
from moeserve.quant.formats.int8 import int8_group
from moeserve.quant.formats.int8_grouped import int8_asymmetric


def _plain(form: Format) -> Format:
    """What a format with activation order is when its columns are sorted."""
    group = int(form.parts[1].columns)
    asymmetric = any(part.name == "zero" for part in form.parts)
    if form.bits == 4:
        return int4(group, asymmetric=asymmetric)
    return int8_asymmetric(group) if asymmetric else int8_group(group)


def in_order(packed: Packed) -> tuple[Packed, Tensor]:
    """A matrix with activation order, its columns sorted by group, and the columns' old places `[..., K]`.

    The result has the plain format: column j of it is column `places[j]` of `packed`. ValueError: groups that
    are not all of the format's size, which no plain format holds.
    """
    codes, *scales, order = packed.parts
    columns, plain = packed.shape[-1], _plain(packed.format)
    group = int(plain.parts[1].columns)
    places = order[..., 0, :].long().argsort(dim=-1, stable=True)
    runs = torch.arange(columns, device=codes.device, dtype=order.dtype) // group
    if not torch.equal(order[..., 0, :].gather(-1, places), runs.expand(places.shape)):
        raise ValueError(f"groups of {packed.format} are not {group} columns each; they cannot be sorted")
    index = places[..., None, :].expand(packed.shape)
    nibbles = plain.bits == 4
    moved = (unpack_nibbles(codes, columns) if nibbles else codes).gather(-1, index)
    return Packed(plain, packed.shape, (pack_nibbles(moved) if nibbles else moved, *scales)), places
