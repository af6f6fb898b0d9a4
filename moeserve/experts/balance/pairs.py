"""Which expert of a hot rank to swap for which of a light one, for all layers at once."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Masks = NDArray[np.bool_]


class Pair(NamedTuple):
    """A chosen swap of each layer."""

    rank: Ints  # [n] which of the light ranks
    mine: Ints  # [n] place on the hot rank
    theirs: Ints  # [n] place on the light rank
    allowed: Masks  # [n] whether there is one at all


def nearest_pair(hot: Floats, cool: Floats, goal: Floats, banned: tuple[Masks, Masks]) -> Pair:
    """The pair whose difference in load is nearest to `goal [n]`, for `hot [n, e]` and one light rank `cool
    [n, e]`.

    By bisection, since e * e differences are many where ranks hold many experts. `banned` marks the experts
    of both that must stay, `[n, e]` each.
    """
    rows, width = hot.shape
    top = max(float(hot.max(initial=0)), float(cool.max(initial=0))) or 1.0
    apart = np.arange(rows)[:, None] * 16.0  # loads are at most 1 and wanted ones in [-2, 2]: rows do not mix
    scaled = np.where(banned[1], 8.0, cool / top)
    order = scaled.argsort(axis=1)
    ladder = (np.take_along_axis(scaled, order, axis=1) + apart).ravel()
    wanted = np.clip((hot - goal[:, None]) / top, -2.0, 2.0)
    above = np.searchsorted(ladder, (wanted + apart).ravel()).reshape(rows, width)
    first = np.arange(rows)[:, None] * width
    near = np.stack([np.maximum(above - 1, first), np.minimum(above, first + width - 1)])
    short = np.abs(ladder[near] - apart - wanted)
    short[:, banned[0]] = np.inf
    side = short[1] < short[0]
    short = np.where(side, short[1], short[0])
    mine = short.argmin(axis=1)
    row = np.arange(rows)
    theirs = order[row, np.where(side[row, mine], near[1][row, mine], near[0][row, mine]) - first[:, 0]]
    allowed = ~banned[0][row, mine] & ~banned[1][row, theirs]
    return Pair(np.zeros(rows, dtype=np.int64), mine, theirs, allowed)


def steepest_pair(hot: Floats, cool: Floats, apart: Floats, banned: Masks) -> Pair:
    """The pair that lowers the sum of squared rank loads most, for `hot [n, e]` and light ranks `cool [n, q,
    e]`.

    `apart [n, q]` is how much more load the hot rank has than each light one. `banned [n, q, e, e]` marks
    pairs that must not be (it may be broadcast).
    """
    shift = hot[:, None, :, None] - cool[:, :, None, :]
    rise = shift * (shift - apart[:, :, None, None])
    rise = np.where(banned, np.inf, rise)
    flat = rise.reshape(len(hot), -1)
    best = flat.argmin(axis=1)
    rank, mine, theirs = np.unravel_index(best, rise.shape[1:])
    return Pair(rank, mine, theirs, np.isfinite(flat[np.arange(len(hot)), best]))
