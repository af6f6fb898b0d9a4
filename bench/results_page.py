"""Makes docs/results.md and the pages beside it of bench/results/*.jsonl: first what missed its aim, then
a table a bench. The second page has the benches of a running service, the first all others.

python -m bench.results_page            # writes the pages
python -m bench.results_page --check    # exit status 1 when a page is not what the results say
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.lib.record import RESULTS, ROOT
from bench.lib.table import Record, View, judged, missed, ran, read, table, unique

HEAD = """# {title}

{also}

`python -m bench.results_page` makes this page of the files in [bench/results](../bench/results), which the
benches write; do not edit it. Square brackets hold the aim that a number was given; a number that misses its
aim is bold. Behind a peer's number stands ours over it, the best of ours where there are several. Peers with
a * were measured in another run. The note of a table has the commands, machines, versions and dates. Read
the CPU layer's ratios, not its times: the two cores were shared while it ran."""


@dataclass(frozen=True)
class Page:
    """A page of results, and its benches; None: those that no other page has."""

    path: Path
    title: str
    also: str
    benches: frozenset[str] | None = None

    def holds(self, bench: str) -> bool:
        """Whether the page shows a bench."""
        return bench not in OF_A_SERVICE | ON_GPUS if self.benches is None else bench in self.benches


OF_A_SERVICE = frozenset(
    {
        "chaos",
        "control_streams",
        "demo",
        "first_calls",
        "fuzz",
        "hop",
        "hop_soak",
        "moves",
        "overload",
        "pass_soak",
        "quantized",
        "serve_on",
        "tls_cost",
        "vllm_throughput",
    }
)
"""Benches that start a whole service."""

ON_GPUS = frozenset(
    {"gpu_colocated", "gpu_hop", "gpu_pass", "gpu_pass_soak", "gpu_serve_on", "gpu_service"},
)
"""Benches that start one on GPUs."""

PAGES = (
    Page(
        ROOT / "docs" / "results.md",
        "Results",
        "Of kernels, dispatchers, layers, placement and numbers; those of a running service are in\n"
        "[results-service.md](results-service.md), and of one on GPUs in [results-gpus.md](results-gpus.md).",
    ),
    Page(
        ROOT / "docs" / "results-service.md",
        "Results of a running service",
        "Its calls, moves and models, and what becomes of it when ranks or callers misbehave; kernels,\n"
        "dispatchers, layers, placement and numbers are in [results.md](results.md).",
        OF_A_SERVICE,
    ),
    Page(
        ROOT / "docs" / "results-gpus.md",
        "Results of a service on GPUs",
        "Calls, rows of callers' GPUs, and lost ranks; what a service does without GPUs is in\n"
        "[results-service.md](results-service.md).",
        ON_GPUS,
    ),
)

DOORS = ("front door", "lane 0", "lane 1")
"""Where bench/service/faults/fuzz.py sends calls."""

TURNS = ("alone", "killed", "half way", "stopped", "detached", "garbage", "asked")
"""What others do beside the callers of bench/service/passes/gpu_soak.py."""

VIEWS = (
    View(
        "demo",
        "A model with its experts behind the service, beside the whole model",
        r"(?P<model>.+) (?P<mesh>\S+)",
        "{model}",
        "{mesh}",
    ),
    View(
        "quantized",
        "Quantized models behind the service, beside one process; aim: 0.1 of what not rounding changes",
        r"(?P<model>\S+) (?P<scheme>.+)",
        "{scheme}",
        "{model}",
        hidden=("activations left unrounded",),
    ),
    View(
        "hop",
        "What a call costs beyond its step",
        r"(?P<line>.+), (?P<column>p\d+)",
        "{line}",
        "hop {column}",
        facts=(
            *(f"call p{p}" for p in (50, 99)),
            *(f"copy in and out p{p}" for p in (50, 99)),
            "step p50",
            "spaced step p50",
            "step mean while serving",
        ),
    ),
    View(
        "gpu_hop",
        "The same on two H200: 128 FP8 experts of 7168 x 2048, top-8; many callers; four layers in a loop",
        r"(?P<line>.+)",
        "{line}",
        "ours",
        facts=(
            *("p50", "p99", "hop", "calls", "wrong", "step", "dma", "echo", "copy"),
            *("in_process", "share", "rows_a_step", "rows_per_s"),
        ),
    ),
    View(
        "gpu_pass",
        "A layer from a caller's GPU, beyond its step; 56 FP8 layers of 7168 x 2048, top-8",
        r"(?P<line>hop, .+)",
        "{line}",
        "ours",
        facts=(
            "p99",
            "layer",
            "layer, rows as they are",
            "step",
            "step p99",
            "prototype",
            "host us a pass",
            "SM MHz",
            "lowest SM MHz",
            "W",
        ),
    ),
    View(
        "gpu_pass",
        "A decode loop of 58 layers: a layer, with attention on the caller's GPU",
        r"(?P<line>decode, .+)",
        "{line}",
        "ours",
        facts=(
            "attention",
            "experts",
            "bound",
            "announced each",
            "passes",
            "middle pass",
            "longest pass",
            "which",
            "long passes",
            "streams of the caller",
        ),
    ),
    View(
        "gpu_pass",
        "A small caller beside a big one",
        r"(?P<line>a caller of .+)",
        "{line}",
        "ours",
        facts=("alone p50", "beside p50", "p99, no rebalances", "longest", "big step", "small step"),
        hidden=("passes",),
    ),
    View(
        "gpu_colocated",
        "Two GPUs: attention on one and experts on the other, or half of both on each; tokens/s a GPU",
        r"(?P<line>.+), two GPUs, .+",
        "{line}",
        "ours",
        facts=(
            "colocated",
            "1 stage",
            "2 stages",
            "3 stages",
            "us a layer, colocated",
            "us a layer, 1 stage",
        ),
        hidden=("attention", "us a layer, 2 stages", "us a layer, 3 stages"),
    ),
    View(
        "gpu_pass_soak",
        "Callers' GPUs for a minute, every answer compared, while others are killed, stopped and detached",
        r"(?P<line>.+)",
        "{line}",
        "bad",
        facts=(
            *(
                "answers",
                "wrong",
                "other bits",
                "failed",
                "others failed",
                "longest gap ms",
                "passes a second",
            ),
            *("rank MiB at first", "rank MiB", "GPU 0 MiB at first", "GPU 0 MiB"),
        ),
        hidden=(
            *(
                f"{who} MiB{when}"
                for who in ("head", "steady callers", "GPU 1")
                for when in (" at first", "")
            ),
            *(f"{what}, {turn}" for what in ("gap ms", "turns") for turn in TURNS),
        ),
    ),
    View(
        "gpu_serve_on",
        "Owners on GPUs are killed or stopped: the longest gap between right answers, less a call",
        r"(?P<line>.+): longest interruption",
        "{line}",
        "ours",
        facts=("losing", "returning", "whole", "call_ms", "right", "events"),
        hidden=("p50", "all_layers", "other_bits"),
    ),
    View(
        "gpu_serve_on",
        "And what went wrong in all of these events",
        r"(?P<line>.+): wrong, .+",
        "{line}",
        "ours",
        facts=("wrong", "failed", "raw", "missing", "processes", "events"),
    ),
    View(
        "gpu_serve_on",
        "What being ready for it costs while nothing happens: a call with all of it on, over one with it off",
        r"(?P<line>.+): steady call, .+",
        "{line}",
        "ours",
        facts=("low", "high", "on_ms", "off_ms", "pairs"),
    ),
    View(
        "gpu_serve_on",
        "How late a killed process closes a connection that it opened before it used its GPU, and after",
        r"(?P<line>a killed process .+): its last socket closes",
        "{line}",
        "ours",
        facts=("younger, ms", "older, ms", "ended, ms"),
    ),
    View(
        "serve_on",
        "Members are killed or stopped: the longest gap between right answers, less a call",
        r"(?P<line>.+): (?P<column>interruption, p95)",
        "{line}",
        "{column}",
        facts=("p50", "max", "p95 of the members' return", "all back after, p50", "events"),
    ),
    View(
        "serve_on",
        "And what went wrong in all of these events",
        r"(?P<line>\d+ events on .+): (?P<column>\w+)",
        "{line}",
        "{column}",
    ),
    View(
        "serve_on",
        "The head is killed",
        r"(?P<line>.+ kills of the head): (?P<column>.+)",
        "{line}",
        "{column}",
        facts=("p50", "p95", "right answers"),
    ),
    View(
        "serve_on",
        "Ranks come and go, from three to four and back",
        r"(?P<line>.+ changes of the ranks): (?P<column>.+)",
        "{line}",
        "{column}",
        facts=("p50 while they change, ms", "p50 else, ms", "to more, s", "to fewer, s"),
    ),
    View(
        "serve_on",
        "What all of it costs while nothing happens",
        r"(?P<line>.+): steady call, (?P<column>on over off) \(.+",
        "{line}",
        "{column}",
        facts=("low, 95 %", "high, 95 %", "on, ms"),
    ),
    View(
        "control_streams",
        "The coordinator's stream, beside one of gRPC",
        r"(?P<line>.+), (?P<column>p\d+)",
        "{line}",
        "{column}",
    ),
    View(
        "tls_cost",
        "What keys cost a call, beside encrypting its bytes",
        r"(?P<line>.+), (?P<column>\d+ rows): processor time beside the bytes",
        "{line}",
        "{column}",
        facts=(
            "with its bytes",
            "at least",
            "at most",
            "on the wall",
            "a call without keys",
            "a round trip to a head elsewhere",
            "its bytes",
            "TLS for an echo",
        ),
    ),
    View(
        "gpu_service",
        "The whole service on GPUs: a call, and a killed rank",
        r"(?P<column>\d+ rows|killed rank, right again)(?: x 2048)?, (?P<line>.+)",
        "{line}",
        "{column}",
    ),
    View(
        "fuzz",
        "Malformed messages and bytes on every port of a service, between good calls",
        r"(?P<column>.+)",
        "a run",
        "{column}",
        facts=(
            *("good calls", "slowest, s", "exporters", "Unix sockets"),
            *(f"other ports of {owner}" for owner in ("head", "rank")),
            *(f"{door}, {what}" for door in DOORS for what in ("bytes", "calls", "streams")),
        ),
    ),
    View(
        "moves",
        "A service under load while experts move",
        r"(?P<column>.+?), (?P<line>c\w+, .+)",
        "{line}",
        "{column}",
        facts=("moving, ms", "still, ms"),
    ),
    View(
        "cpu_layer",
        "One layer on the CPU, beside transformers' experts",
        r"(?P<line>.+), (?P<column>in process|\d+ ranks)",
        "{line}",
        "{column}",
    ),
    View(
        "gpu_experts",
        "The experts of one DeepSeek-V3 rank on an H200, two of 64 experts a token",
        r"(?P<kind>\w+), (?P<tokens>\d+) tokens x 2, (?P<active>\d+) of 64 experts active, (?P<part>\w+)",
        "{kind}",
        "{tokens} tokens, {active} active",
        "the whole / the kernel alone",
        second="kernel",
        below=True,
        in_order=False,
    ),
    View(
        "gpu_models",
        "The experts of other models, one rank of four, on an H200; aim: 1.05 of the fastest whole peer",
        r"(?P<model>\S+): (?P<kind>\w+), (?P<tokens>\d+) tokens x (?P<k>\d+), .*",
        "{model} {kind}",
        "{tokens} tokens",
        below=True,
        in_order=False,
    ),
    View(
        "gpu_check",
        "Whole steps on two H200, beside the tree before the rooms were made; run in turns",
        r"gpu_(?P<what>\w+): (?P<kind>\w+),(?: .*,)? (?P<tokens>\d+) tokens.*",
        "{what} {kind}",
        "{tokens} tokens",
        in_order=False,
    ),
    View(
        "gpu_law_samples",
        "Small random cases of the kernels' laws on a Hopper GPU, beside what one constant for all would say",
        r"(?P<line>.+)",
        "{line}",
        "samples over the bound",
        facts=("over the constant before", "nearest to its bound", "largest error"),
    ),
    View("gpu_libraries", "GEMMs and activation of rows for libraries, beside our own kernels"),
    View(
        "gpu_layer",
        "A whole DeepSeek-V3 layer on two GPUs and on four, phase by phase",
        r"(?P<scheme>\w+), (?P<tokens>\d+) tokens a rank, (?P<spread>[^,]+), (?P<rest>[^:]+): (?P<phase>.+)",
        "{spread}, {scheme}, {tokens} tokens a rank, {rest}",
        "{phase}",
    ),
    View(
        "gpu_dequant",
        "The portable kernel on an H200: 64 experts of 7168 x 2048, 16 rows each",
        r"(?P<weights>\w+)(?: x (?P<activations>\w+))?, 64 experts of 7168 x 2048, 16 rows each, whole step",
        "{weights}",
        "{activations}",
        "weights, by activations",
        absent="as weights",
    ),
    View(
        "gpu_sanitize",
        "What compute-sanitizer says of the kernels",
        r"(?P<tool>\w+), (?P<name>\w+)(?P<rest>.*)",
        "{name}",
        "{tool}{rest}",
    ),
    View(
        "gpu_a2a",
        "Dispatch and combine beside other dispatchers, bf16 hidden states of 7168, top-8 of 256",
        r"(?P<name>\w+), (?P<wire>\w+), (?P<routing>\w+), (?P<tokens>\d+) tokens a rank, (?P<ranks>EP\d+), "
        r"dispatch \+ combine",
        "{ranks}, {wire}, {routing}, {tokens} tokens a rank",
        "{name}",
        "dispatch and combine / dispatch alone",
        second="dispatch",
        in_order=False,
    ),
    View(
        "gpu_a2a",
        "The ceiling of dispatch and combine",
        r"(?P<line>all peers at once), (?P<ranks>EP\d+)",
        "{line}",
        "{ranks}",
    ),
    View(
        "gpu_soak",
        "Ten thousand steps of random sizes, and a rank that comes too late",
        r"(?P<line>.+), (?P<column>wrong rows|(?:host )?memory growth|more open files and threads"
        r"|step with a late rank)",
        "{line}",
        "{column}",
    ),
    View(
        "gpu_seats",
        "A seat of peer memory taken and left under load",
        r"(?P<line>.+), (?P<column>wrong rows|programs compiled|memory growth|longest step)",
        "{line}",
        "{column}",
    ),
    View(
        "gpu_killed_peer",
        "A process whose peer is killed while it stores into the peer's GPU",
        r"(?P<what>.+?)(?P<how> \(1: well, 0: failed\))?",
        "after the kill{how}",
        each="{what}",
    ),
    View(
        "placement",
        "Placement of real expert loads: a first plan, and milliseconds to plan a layer",
        r"(?P<line>EP\d+ \+\d+),(?: first plan,)?(?: \d+ slots, planning,)? (?P<column>(?!shift).+)",
        "{line}",
        "{column}",
        digits=4,
    ),
    View(
        "placement",
        "Placement of real expert loads: after a shift of the load",
        r"(?P<line>EP\d+ \+\d+), shift, (?P<column>.+)",
        "{line}",
        "{column}",
        digits=4,
    ),
    View(
        "replicas",
        "Balance of single steps by the choice of replicas",
        r"(?P<line>.+), (?P<column>mean|worst)(?: of)? \w+",
        "{line}",
        "{column}",
        digits=4,
    ),
    View(
        "gpu_replicas",
        "Time of the choice of replicas on a GPU",
        r"(?P<line>EP\d+ \+\d+), (?P<column>.+)",
        "{line}",
        "{column}",
    ),
    View(
        "gpu_balanced_steps",
        "What choosing replicas anew does to a step",
        r"(?P<line>.+), (?P<column>lp|auto)",
        "{line}",
        "{column}",
        facts=("evenness", "evenness of hash"),
    ),
    View(
        "cross_checks",
        "Stored numbers, beside others' decoders",
        r"(?P<form>[^:]+): (?P<package>[^;]+)(?P<note>.*)",
        "{package}{note}",
        "differ",
        unit="of a million values each",
        each="{form}",
        facts=("mismatches before that is followed",),
    ),
    View(
        "laws",
        "Laws of formats, layouts and dialects",
        r"(?P<line>cells of the table) of (?P<column>\w+)",
        "{line}",
        "{column}",
    ),
    View(
        "chaos",
        "Longest time until a service answers again whose rank was stopped or killed",
        r"(?P<launcher>\w+), states: (?P<column>.+), (?P<line>stop|kill|hang|hold): longest time back",
        "{launcher}: {line}",
        "{column}",
    ),
    View(
        "chaos",
        "A service whose ranks are stopped, killed, cannot start, or are held up",
        r"(?P<line>\w+), (?P<column>.+(?<!: longest time back))",
        "{line}",
        "{column}",
    ),
)
"""Every bench, room by room, in the order of the page."""

SEEN = frozenset(view.bench for view in VIEWS)


def page(shown: Page, records: Sequence[Record]) -> str:
    """One of the pages, made of all records; a bench without a view has a plain one.

    Raises ValueError where a case of a bench stands in none of its views or in several.
    """
    records = [record for record in records if shown.holds(record["bench"])]
    views = [
        *(view for view in VIEWS if shown.holds(view.bench)),
        *(View(bench, bench) for bench in unique(r["bench"] for r in records) if bench not in SEEN),
    ]
    for record in records:
        if (found := sum(view.place(record) is not None for view in views)) != 1:
            name = f"{record['bench']}: {record['case']!r}"
            raise ValueError(f"{name} stands in {found} tables of bench/results_page.py, which must be one")
    sections = [
        HEAD.format(title=shown.title, also=shown.also),
        misses(views, records),
        *(section(view, records) for view in views),
        notes(views, records),
    ]
    return "\n\n".join(part for part in sections if part) + "\n"


def misses(views: Sequence[View], records: Sequence[Record]) -> str:
    """What was aimed at and not reached, bench by bench."""
    rows = [f"| {view.bench} {line}" for view in views for line in missed(view, records)]
    if not rows:
        return ""
    aimed = [record for record in records if record["aim"] is not None]
    count = sum(judged(record)[1] is False for record in aimed)
    head = f"## Missed\n\n{count} of {len(aimed)} aims are missed. The last number is ours over the aim."
    return "\n".join([head, "", "| bench | case | ours [aim] |", "| --- | --- | --- |", *rows])


def section(view: View, records: Sequence[Record]) -> str:
    """A title and the table."""
    made = table(view, records)
    return f"### {view.title}\n{made}" if made else ""


def notes(views: Sequence[View], records: Sequence[Record]) -> str:
    """A footnote a bench: how its results came about."""
    by_bench = {view.bench: [r for r in records if r["bench"] == view.bench] for view in views}
    return "\n".join(f"[^{bench}]: {ran(found)}." for bench, found in by_bench.items() if found)


def main() -> int:
    """Writes the pages, or compares them."""
    parser = argparse.ArgumentParser(description="Makes the pages of results in docs of bench/results.")
    parser.add_argument(
        "--check", action="store_true", help="change nothing; 1 when a page is behind the results"
    )
    args = parser.parse_args()
    records, behind = read(RESULTS), False
    for shown in PAGES:
        fresh = page(shown, records)
        if not args.check:
            shown.path.write_text(fresh)
        elif not shown.path.exists() or fresh != shown.path.read_text():
            behind, name = True, shown.path.relative_to(ROOT)
            print(f"{name} is behind bench/results; run python -m bench.results_page", file=sys.stderr)
    return int(behind)


if __name__ == "__main__":
    sys.exit(main())
