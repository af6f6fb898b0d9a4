"""Tables in the documents are those of the code, row by row."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest

from moeserve.cli.shown.tables import MACHINES, TABLES, table
from moeserve.cli.vllm.backends import MEMBERS, MOE_BACKENDS
from moeserve.cli.vllm.switches import BACKEND_NAMES, SWITCHES
from moeserve.dispatch.backends import DISPATCHERS
from moeserve.quant.schemes import SCHEMES

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """docs/tables.py, as a script sees it."""
    monkeypatch.syspath_prepend(str(DOCS))
    return importlib.import_module("tables")


@pytest.mark.parametrize("page", ["backends.md", "coming-from-vllm.md"])
def test_pages_are_not_behind_the_code(page: str, tables: ModuleType) -> None:
    assert (DOCS / page).read_text() == tables.fresh(page), "run python docs/tables.py"


def test_every_table_has_its_place(tables: ModuleType) -> None:
    assert sorted(name for names in tables.PAGES.values() for name in names) == sorted(TABLES)
    with pytest.raises(ValueError, match="the page must hold the lines"):
        tables.placed("nothing", "machines")


@pytest.mark.parametrize(
    ("name", "column", "rows"),
    [
        ("machines", 0, [scheme.name for scheme in SCHEMES.values()]),
        (
            "kernels-by-rows",
            0,
            [
                "bf16",
                "mxfp4 x bf16",
                "nvfp4 x bf16",
                "fp8_block128 x fp8_group128",
            ],
        ),
        ("vllm-members", 1, [name for _, name in MEMBERS]),
        ("vllm-switches", 0, list(SWITCHES)),
        ("vllm-backends", 0, list(MOE_BACKENDS)),
        ("vllm-dispatchers", 0, list(BACKEND_NAMES)),
    ],
)
def test_a_table_has_a_row_for_each_and_no_empty_end(name: str, column: int, rows: list[str]) -> None:
    head, _, *body = [re.split(r" ?\| ?", line)[1:-1] for line in table(name).splitlines()]
    assert [cells[column].strip("`") for cells in body] == rows
    assert all(len(cells) == len(head) and cells[-1] for cells in body)


@pytest.mark.parametrize("name", [name for name, entry in DISPATCHERS.items() if entry.modules])
def test_an_adapter_says_what_it_ran_on(name: str) -> None:
    _, _, section = (DOCS / "backends.md").read_text().partition("### All2all backends of libraries\n")
    first = [
        line.split(" | ")[0] for line in section.partition("\n## ")[0].splitlines() if line.startswith("|")
    ]
    assert any(f"`{name}`" in cell for cell in first), "add a row to docs/backends.md"


def test_machines_are_planned_as_they_are_named() -> None:
    head = table("machines").splitlines()[0]
    assert re.findall(r"\| (\w+) \(\w+\)", head) == list(MACHINES)
    (row,) = [line for line in table("machines").splitlines() if line.startswith("| `mxfp4 x bf16` |")]
    assert row.split(" | ")[2:4] == ["cuda_fp4"] * 2  # on Hopper
