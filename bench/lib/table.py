"""Renders `bench/results/*.jsonl` as the tables of docs/results.md: our numbers, the peers', ratios and aims.

    python -m bench.lib.table            # rewrites the section of docs/results.md between the two markers
    python -m bench.lib.table --check    # exit status 1 when that section is not what the results say

It computes nothing but ratios; every number comes from a file that a bench wrote, with its command.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "results.md"
RESULTS = ROOT / "bench" / "results"
BEGIN = "<!-- results: begin (made by `python -m bench.lib.table`; do not edit) -->"
END = "<!-- results: end -->"

TITLES = {
    "demo": "A model with its experts behind the service, beside the whole model",
    "quantized": "Quantized models with their experts behind the service, beside one process",
    "hop": "What a call costs beyond its step",
    "control_streams": "The coordinator's stream, beside one of gRPC",
    "gpu_service": "The whole service on GPUs, and a killed rank",
    "cpu_layer": "One layer on the CPU, beside transformers' experts",
    "gpu_experts": "The experts of one DeepSeek-V3 rank on an H200",
    "gpu_models": "The experts of other models, one rank of four, on an H200; aim: 1.05 of the fastest peer",
    "gpu_libraries": "GEMMs and activation of rows for libraries, beside our own rows",
    "gpu_a2a": "Dispatch and combine beside other dispatchers, bf16 hidden states of 7168, top-8 of 256",
    "gpu_soak": "Ten thousand steps of random sizes, and a rank that comes too late",
    "gpu_layer": "A whole DeepSeek-V3 layer on two GPUs and on four, phase by phase",
    "gpu_sanitize": "What compute-sanitizer says of the kernels",
    "gpu_dequant": "The portable kernel on an H200, beside the reference",
    "balance": "Placement of real expert loads",
    "cross_checks": "Stored numbers, beside others' decoders: values that differ",
    "replicas": "Balance of single steps by the choice of replicas",
    "gpu_replicas": "Time of the choice of replicas on a GPU",
    "gpu_balanced_steps": "What choosing replicas anew does to a step",
    "moves": "A service under load while experts move",
    "gpu_killed_peer": "A process whose peer is killed while it stores into the peer's GPU",
    "laws": "Laws of formats, layouts and dialects",
}
"""Of benches that have one, in the order they are shown; others follow under their own names."""

Record = Mapping[str, Any]
"""One line of a results file, as `bench/lib/record.py` writes it."""

MORE = ("higher", "more")
"""Values of `better` under which a larger number is the better one."""

_WORDS = re.compile(r"(?:\w+ )?(?:<=|at most) ([\d.e+-]+)(?: ?x ([^,]+)| [^\W\d]+)?")


def read(folder: Path) -> dict[str, list[Record]]:
    """Results by bench. Raises ValueError naming the file and line that is not a result."""
    found: dict[str, list[Record]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            try:
                record = json.loads(line)
                found.setdefault(record["bench"], []).append(record)
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path.name}:{number} is not a result: {error}") from error
    order = list(TITLES)
    return dict(
        sorted(found.items(), key=lambda item: (order.index(item[0]) if item[0] in order else 99, item[0]))
    )


def render(results: Mapping[str, Sequence[Record]]) -> str:
    """All benches as Markdown, one table each."""
    return "\n\n".join(section(bench, records) for bench, records in results.items())


def section(bench: str, records: Sequence[Record]) -> str:
    """One bench: what ran where and how, and a row a case."""
    runs = unique(
        f"`{r['command']}` on {r['hardware']}, torch {r['versions'].get('torch', '?')}, {r['date']}"
        for r in records
    )
    head, rows = ["case", "ours"], [[record["case"], quantity(record)] for record in records]
    peers = unique(peer for record in records for peer in record["peers"])
    if all(set(record["peers"]) == set(peers) for record in records):
        head += peers
        rows = [
            row + [beside(record, peer) for peer in peers] for row, record in zip(rows, records, strict=True)
        ]
    elif peers:
        head.append("beside it")
        named = (", ".join(f"{p} {beside(record, p)}" for p in record["peers"]) for record in records)
        rows = [[*row, cell] for row, cell in zip(rows, named, strict=True)]
    if any(record["aim"] is not None for record in records):
        head += ["aim", "held"]
        rows = [[*row, *judged(record)] for row, record in zip(rows, records, strict=True)]
    table = "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *rows])
    ratio = " In brackets, ours over the peer's." if peers else ""
    return f"### {TITLES.get(bench, bench)}\n\n{'; '.join(runs)}.{ratio}\n\n{table}"


def quantity(record: Record) -> str:
    """Our number with its unit."""
    return f"{number(record['ours'])} {record['unit']}"


def beside(record: Record, peer: str) -> str:
    """A peer's number and our ratio to it."""
    value = record["peers"][peer]
    return f"{number(value)} ({record['ours'] / value:.2f}x)" if value else number(value)


def judged(record: Record) -> tuple[str, str]:
    """The aim, and whether the number holds it; empty without an aim.

    An aim is a bound in the result's own unit, or in words; words are judged where they say `<= 1.3 x <peer>`
    or `at most 1 ms` and nothing more, else only shown.
    """
    aim = record["aim"]
    if aim is None:
        return "", ""
    more = record["better"] in MORE
    if isinstance(aim, str):
        words, bound = aim, limit(record)
    else:
        words, bound = f"{'>=' if more else '<='} {number(aim)} {record['unit']}", float(aim)
    if bound is None:
        return words, ""
    held = record["ours"] >= bound if more else record["ours"] <= bound
    return words, "yes" if held else "**no**"


def limit(record: Record) -> float | None:
    """The bound that an aim's words set, in the result's unit."""
    if not (found := _WORDS.fullmatch(record["aim"])):
        return None
    factor, peer = float(found[1]), found[2]
    if not peer:
        return factor
    named = [value for name, value in record["peers"].items() if peer in name]
    return factor * named[0] if named else None


def number(value: float) -> str:
    """Three significant digits; in scientific notation below 0.01."""
    if value and abs(value) < 0.01:
        return f"{value:.1e}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def unique(words: Iterable[str]) -> list[str]:
    """Each once, in order."""
    return list(dict.fromkeys(words))


def placed(text: str, tables: str) -> str:
    """`text` with the section between the markers replaced. Raises ValueError when a marker is missing."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE.name} must hold the lines {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n\n{tables}\n\n{END}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Puts the results of bench/results into docs/results.md.")
    parser.add_argument(
        "--check", action="store_true", help="change nothing; 1 when docs/results.md is behind"
    )
    args = parser.parse_args()
    text = PAGE.read_text()
    fresh = placed(text, render(read(RESULTS)))
    if args.check:
        if fresh != text:
            print("docs/results.md is behind bench/results; run python -m bench.lib.table", file=sys.stderr)
        return int(fresh != text)
    PAGE.write_text(fresh)
    return 0


if __name__ == "__main__":
    sys.exit(main())
