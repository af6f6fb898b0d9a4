"""What was measured of our GPU kernels once a device, shipped as data.

`kernel_ranges`: which kernel of a family is the fastest with how many rows. `tile_for`, `few_tile_for`: the
tile of one kernel.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from math import inf
from typing import Any

from moeserve.experts.kernel import KernelRange

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


def few_tile_for(device: str, kind: str, rows: float) -> FewTile:
    """The tile of the kernel for few rows in steps of at most `rows` rows, of all slots, on `device`."""
    tables = _few_tables()
    table = tables.get(device, tables[MEASURED])[kind]
    return next(tile for most, tile in table if rows <= most)


def kernel_ranges(family: str, device: str) -> tuple[KernelRange, ...]:
    """The ranges of the kernels of `family` on `device`, the first that covers a step decides."""
    tables = _range_tables()
    return tables.get(device, tables[MEASURED])[family]


@cache
def _tables() -> dict[str, dict[str, list[tuple[float, Tile]]]]:
    """Reads the tiles by device and kind of weights: (most rows a slot, tile), ascending."""
    return {
        read["device"]: {
            kind: [(_most(most), Tile(*numbers)) for most, numbers in entries]
            for kind, entries in read["tiles"].items()
        }
        for read in _read("tiles")
    }


@cache
def _few_tables() -> dict[str, dict[str, list[tuple[float, FewTile]]]]:
    """Reads the tiles by device and kind of weights: (most rows of a step, tile), ascending."""
    return {
        read["device"]: {
            kind: [(_most(most), FewTile(*numbers)) for most, numbers in entries]
            for kind, entries in read["few"].items()
        }
        for read in _read("few")
    }


@cache
def _range_tables() -> dict[str, dict[str, tuple[KernelRange, ...]]]:
    """Reads the ranges by device and family; the first of those that cover a step decides."""
    return {
        read["device"]: {
            family: tuple(KernelRange(name, least, *map(_most, most)) for name, least, *most in entries)
            for family, entries in read["kernels"].items()
        }
        for read in _read("kernels")
    }


def _most(bound: float | None) -> float:
    """A bound of a table; null is none."""
    return inf if bound is None else bound


def _read(what: str) -> list[dict[str, Any]]:
    """The files that hold tables of `what`."""
    found = [
        json.loads(file.read_text()) for file in files(__package__).iterdir() if file.name.endswith(".json")
    ]
    return [read for read in found if what in read]
