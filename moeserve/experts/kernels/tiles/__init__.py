"""Tile sizes of our GPU kernels, measured once a device and shipped as data: `tile_for`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files


@dataclass(frozen=True)
class Tile:
    """Rows of a group, and for each kind of weights how deep (elements of K) and how many the stages are."""

    rows: int
    kinds: Mapping[str, tuple[int, int]]

    def depth(self, kind: str) -> int:
        """Elements of K a stage holds."""
        return self.kinds[kind][0]

    def stages(self, kind: str) -> int:
        """Stages of the ring."""
        return self.kinds[kind][1]


def tile_for(device: str, rows_per_slot: float) -> Tile:
    """The tile for steps of at most `rows_per_slot` rows a slot on the device called `device`.

    A device that was never measured gets the tiles of the H200, which fit every Hopper.
    """
    table = _tables().get(device, _tables()["NVIDIA H200"])
    return next(tile for most, tile in table if rows_per_slot <= most)


@cache
def _tables() -> dict[str, list[tuple[float, Tile]]]:
    """Every table shipped, by device name: (most rows a slot, tile) in ascending order."""
    tables = {}
    for file in files(__package__).iterdir():
        if file.name.endswith(".json"):
            table = json.loads(file.read_text())
            tables[table["device"]] = [_row(row) for row in table["tiles"]]
    return tables


def _row(row: Mapping[str, object]) -> tuple[float, Tile]:
    most = row["rows_per_slot"]
    kinds = row["depth_and_stages"]
    assert isinstance(kinds, dict)
    tile = Tile(int(str(row["rows"])), {kind: (depth, stages) for kind, (depth, stages) in kinds.items()})
    return float("inf") if most is None else float(str(most)), tile
