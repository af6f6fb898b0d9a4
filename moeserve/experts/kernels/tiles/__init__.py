"""Tile sizes of our GPU kernels, measured once a device and shipped as data: `tile_for`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from math import inf

MEASURED = "NVIDIA H200"
"""The device whose tiles a Hopper that was never measured gets; they fit every one."""


@dataclass(frozen=True)
class Tile:
    """How a GEMM of one kind of weights is cut, and laid over a multiprocessor."""

    rows: int  # of one slot, at most, in a tile
    depth: int  # elements of K a stage of the ring holds
    stages: int
    consumers: int  # warp groups that multiply: 1, 2 or 4
    blocks: int  # blocks of 64 rows of weights each of them owns: 1 or 2
    registers: int  # of a consumer's thread
    programs: int = 1  # a multiprocessor


def tile_for(device: str, kind: str, rows_per_slot: float) -> Tile:
    """The tile for weights of `kind` in steps of at most `rows_per_slot` rows a slot, on `device`."""
    tables = _tables()
    table = tables.get(device, tables[MEASURED])[kind]
    return next(tile for most, tile in table if rows_per_slot <= most)


@cache
def _tables() -> dict[str, dict[str, list[tuple[float, Tile]]]]:
    """By device and kind of weights: (most rows a slot, tile), ascending."""
    tables = {}
    for file in files(__package__).iterdir():
        if file.name.endswith(".json"):
            read = json.loads(file.read_text())
            tables[read["device"]] = {
                kind: [(inf if most is None else most, Tile(*numbers)) for most, numbers in rows]
                for kind, rows in read["tiles"].items()
            }
    return tables
