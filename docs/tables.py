"""Puts the tables that the code holds into the pages of this folder.

    python docs/tables.py            # rewrites what stands between the markers
    python docs/tables.py --check    # exit status 1 when a page is behind the code

`moeserve plan --table NAME` prints one of them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from moeserve.cli.shown.tables import table

HERE = Path(__file__).resolve().parent
PAGES = {
    "backends.md": ("machines", "kernels-by-rows", "vllm-members"),
    "coming-from-vllm.md": ("vllm-switches", "vllm-backends", "vllm-dispatchers"),
}


def markers(name: str) -> tuple[str, str]:
    """The lines around a table."""
    return f"<!-- {name}: begin (made by `python docs/tables.py`; do not edit) -->", f"<!-- {name}: end -->"


def placed(text: str, name: str) -> str:
    """`text` with the table `name` as it is now. Raises ValueError when a marker is missing."""
    begin, end = markers(name)
    before, found, rest = text.partition(begin)
    _, ended, after = rest.partition(end)
    if not found or not ended:
        raise ValueError(f"the page must hold the lines {begin!r} and {end!r}")
    return f"{before}{begin}\n\n{table(name)}\n\n{end}{after}"


def fresh(page: str) -> str:
    """A page with all its tables as they are now."""
    text = (HERE / page).read_text()
    for name in PAGES[page]:
        text = placed(text, name)
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description="Puts the tables of the code into docs/.")
    parser.add_argument("--check", action="store_true", help="change nothing; 1 when a page is behind")
    args = parser.parse_args()
    behind = [page for page in PAGES if fresh(page) != (HERE / page).read_text()]
    for page in behind:
        if args.check:
            print(f"docs/{page} is behind the code; run python docs/tables.py", file=sys.stderr)
        else:
            (HERE / page).write_text(fresh(page))
    return int(args.check and bool(behind))


if __name__ == "__main__":
    sys.exit(main())
