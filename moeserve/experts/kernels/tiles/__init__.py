"""Tile sizes of our GPU kernels, measured once a device and shipped as data: `tile_for`, `few_tile_for`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from math import inf
from typing import Any

MEASURED = "NVIDIA H200"
"""The device whose tiles a Hopper that was never measured gets; they fit every one."""

FEW_A_SLOT = 6
"""Most rows a slot that the kernel for few rows was measured to be faster with."""


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


@dataclass(frozen=True)
class FewTile:
    """How the kernel for few rows a slot lies over a multiprocessor."""

    rows: int  # of a slot that one pass over its weights serves: 8, 16, 24 or 32
    workers: int  # warp groups that multiply: 2 or 4
    stages: int  # of each worker's ring of weights
    pieces: int  # places of the ring of rows, a multiple of the workers


def tile_for(device: str, kind: str, rows_per_slot: float) -> Tile:
    """The tile for weights of `kind` in steps of at most `rows_per_slot` rows a slot, on `device`."""
    tables = _tables()
    table = tables.get(device, tables[MEASURED])[kind]
    return next(tile for most, tile in table if rows_per_slot <= most)


def few_tile_for(device: str, kind: str, rows: float, slots: int) -> FewTile | None:
    """The tile of the kernel for few rows; None where it was not measured to be faster than the other."""
    tables = _few_tables()
    table = tables.get(device, tables[MEASURED])[kind]
    if rows > FEW_A_SLOT * slots:
        return None
    return next((tile for most, tile in table if rows <= most), None)


@cache
def _tables() -> dict[str, dict[str, list[tuple[float, Tile]]]]:
    """By device and kind of weights: (most rows a slot, tile), ascending."""
    return {
        read["device"]: {
            kind: [(inf if most is None else most, Tile(*numbers)) for most, numbers in rows]
            for kind, rows in read["tiles"].items()
        }
        for read in _read("tiles")
    }


@cache
def _few_tables() -> dict[str, dict[str, list[tuple[float, FewTile | None]]]]:
    """By device and kind: (most rows of a step, tile), ascending; a range may have none."""
    return {
        read["device"]: {
            kind: [(most, None if numbers is None else FewTile(*numbers)) for most, numbers in rows]
            for kind, rows in read["few"].items()
        }
        for read in _read("few")
    }


def _read(what: str) -> list[dict[str, Any]]:
    """The files that hold tables of `what`."""
    found = [
        json.loads(file.read_text()) for file in files(__package__).iterdir() if file.name.endswith(".json")
    ]
    return [read for read in found if what in read]
