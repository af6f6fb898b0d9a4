"""The rooms are what the tour says, and small enough to read: folders, files and texts of GPU kernels."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "moeserve"
MOST_FILES = 15
MOST_CUDA_LINES = 600
TABLES = {
    "moeserve/cli",
    "moeserve/quant/formats",
    "moeserve/quant/layouts",
    "moeserve/checkpoints/dialects",
    "moeserve/dispatch/backends",
    "moeserve/experts/kernels",
    "bench/results",
}
"""Folders that hold a file an entry of a table, however many there are."""


def folders(top: Path) -> Iterator[Path]:
    """`top` and the folders below it that hold files of the project."""
    for folder in (top, *sorted(path for path in top.rglob("*") if path.is_dir())):
        if "__pycache__" not in folder.parts and any(path.is_file() for path in folder.iterdir()):
            yield folder


@pytest.mark.parametrize("top", ["moeserve", "bench"])
def test_no_folder_holds_more_than_a_reader_takes_in(top: str) -> None:
    counts = {
        str(folder.relative_to(ROOT)): sum(path.is_file() for path in folder.iterdir())
        for folder in folders(ROOT / top)
    }
    crowded = {name: count for name, count in counts.items() if count > MOST_FILES and name not in TABLES}
    assert not crowded
    assert counts.keys() >= {name for name in TABLES if name.startswith(top)}, "a table that is not there"


def test_the_tour_names_every_room() -> None:
    tour = (ROOT / "docs" / "tour.md").read_text()
    table = tour[tour.index("| room | holds |") : tour.index("Beside the package")]
    named = set(re.findall(r"`([a-z0-9_/]+)`", table))
    packages = [path.parent for path in PACKAGE.rglob("__init__.py")]
    rooms = {str(path.relative_to(PACKAGE)) for path in packages if path != PACKAGE}
    inner = {room for room in rooms if any(room.startswith(f"experts/kernels/{sub}/") for sub in ("cuda",))}
    missing = {room for room in rooms - inner if room not in named and room.rpartition("/")[2] not in named}
    assert not missing


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.cu")), ids=lambda path: path.name)
def test_a_cuda_text_holds_one_thing(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MOST_CUDA_LINES
