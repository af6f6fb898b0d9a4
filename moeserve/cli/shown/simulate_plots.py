"""Draws a forecast as SVG: experts by ranks before and after, and balance over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import numpy as np
from numpy.typing import NDArray

from moeserve.experts.balance.forecast import Forecast
from moeserve.experts.load import Load
from moeserve.experts.placement import EMPTY, Placement

WIDTH, MARGIN = 960, 50


def write_plots(
    folder: Path, row: dict[str, Any], found: Forecast, loads: Sequence[Load], layers: Sequence[int]
) -> list[str]:
    """Writes the pictures of a forecast and returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{row['policy']}_{row['ranks']}_{row['redundant']}"
    last, load = found.changes[-1], loads[-1]
    worst = int(last.before.imbalance(load.tokens).argmax())
    pictures = {
        f"{name}_placement.svg": placement_picture(last.before, last.after, load, worst, layers[worst])
    }
    if len(found.balances) > 1:
        pictures[f"{name}_balance.svg"] = balance_picture([each.layers for each in found.balances])
    for file, text in pictures.items():
        (folder / file).write_text(text)
    return [str(folder / file) for file in pictures]


def placement_picture(before: Placement, after: Placement, load: Load, row: int, layer: int) -> str:
    """Draws two heatmaps of one layer: experts across (hottest first), ranks down, dark where tokens go.

    The bar at the right of a rank is its load; the line marks the mean.
    """
    order = np.argsort(-load.tokens[row], kind="stable")
    high = min(12.0, 400 / before.owners)
    parts, top = [], MARGIN
    for title, placement in (("before", before), ("after", after)):
        balance = 1 / placement.imbalance(load.tokens)[row]
        parts.append(_text(MARGIN, top - 8, f"layer {layer}, {title}: balance {balance:.4f}"))
        parts += _heatmap(placement, load.tokens[row], row, order, (top, high))
        top += int(high * before.owners) + MARGIN
    parts.append(_text(MARGIN, top - 20, f"{before.experts} experts, hottest first; {before.owners} ranks"))
    return _svg(top, parts)


def _heatmap(
    placement: Placement,
    tokens: NDArray[np.float64],
    row: int,
    order: NDArray[np.int64],
    at: tuple[int, float],
) -> list[str]:
    top, high = at
    held = placement.slots[row].reshape(placement.owners, -1)
    copies = np.bincount(placement.slots[row][placement.slots[row] != EMPTY], minlength=placement.experts)
    share = tokens / np.maximum(copies, 1)
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    wide = (WIDTH - 2 * MARGIN - 140) / placement.experts
    hottest = float(share.max()) or 1.0
    loads = np.where(held == EMPTY, 0.0, share[np.maximum(held, 0)]).sum(axis=1)
    scale = 120 / (float(loads.max()) or 1.0)
    parts, right = [], WIDTH - MARGIN - 130
    for rank, experts in enumerate(held):
        y = top + rank * high
        for expert in experts[experts != EMPTY]:
            dark = 0.08 + 0.92 * (float(share[expert]) / hottest) ** 0.5
            x = MARGIN + float(place[expert]) * wide
            parts.append(_bar(x, y, max(wide, 0.6), high, f'fill="#08306b" fill-opacity="{dark:.2f}"'))
        parts.append(_bar(right, y, float(loads[rank]) * scale, high * 0.9, 'fill="#d94801"'))
    mean = right + float(loads.mean()) * scale
    bottom = top + high * placement.owners
    parts.append(f'<line x1="{mean:.1f}" y1="{top}" x2="{mean:.1f}" y2="{bottom:.1f}" stroke="#000"/>')
    return parts


def balance_picture(balances: Sequence[NDArray[np.float64]]) -> str:
    """Draws the balancedness after each workload: the mean over layers, and the worst layer."""
    high, step = 240, (WIDTH - 2 * MARGIN) / (len(balances) - 1)
    parts = []
    for mark in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = MARGIN + (1 - mark) * high
        parts.append(f'<line x1="{MARGIN}" y1="{y}" x2="{WIDTH - MARGIN}" y2="{y}" stroke="#ddd"/>')
        parts.append(_text(8, y + 4, f"{mark:.2f}"))
    for colour, values in (
        ("#08306b", [float(each.mean()) for each in balances]),
        ("#d94801", [float(each.min()) for each in balances]),
    ):
        points = " ".join(
            f"{MARGIN + n * step:.1f},{MARGIN + (1 - value) * high:.1f}" for n, value in enumerate(values)
        )
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
    parts.append(
        _text(MARGIN, MARGIN - 20, "balancedness by workload: mean over layers (blue), worst (orange)")
    )
    return _svg(high + 2 * MARGIN, parts)


def _svg(height: int, parts: list[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif">'
    )
    return (
        "\n".join([head, f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>', *parts, "</svg>"]) + "\n"
    )


def _text(x: float, y: float, text: str) -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" font-size="13">{escape(text)}</text>'


def _bar(x: float, y: float, wide: float, high: float, fill: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.2f}" height="{high:.2f}" {fill}/>'
